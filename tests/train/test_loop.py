"""Whole runs on tiny models: the same curve at any data-parallel size, exact resuming, and clean ends."""

import dataclasses
import json
import math
import signal
from pathlib import Path

import pytest
import torch

from phalanx.errors import CheckpointError, JobError, NotFiniteError, StoppedError
from phalanx.job.checkpoint import Checkpoint
from phalanx.job.cluster import Cluster
from phalanx.job.data import Data
from phalanx.job.job import Job
from phalanx.job.layout import Layout
from phalanx.job.model import Model
from phalanx.job.optimizer import Optimizer
from phalanx.job.run import Run
from phalanx.job.train import Train
from phalanx.launch.ranks import SINGLE
from phalanx.train import checkpoint, loop
from phalanx.train.stop import StopRequest
from phalanx.train.terminal import Terminal

SHAPE = Model(n_layers=2, d_model=16, n_heads=2, seq_len=16)


@pytest.fixture
def job(tmp_path):
    """Twelve samples a step of a random corpus, in float64."""
    return Job(
        model=SHAPE,
        cluster=Cluster(peak_tflops=1.0),
        data=Data(corpus="random", random_tokens=5000, random_vocab=13, dir=str(tmp_path / "data")),
        optimizer=Optimizer(lr=1e-2, warmup_steps=2),
        train=Train(steps=6, global_batch=12, precision="fp64", eval_samples=10),
        checkpoint=Checkpoint(keep=0),
        run=Run(name="run", dir=str(tmp_path / "runs"), sample_tokens=0),
    )


def change(job: Job, section: str, **values) -> Job:
    return dataclasses.replace(job, **{section: dataclasses.replace(getattr(job, section), **values)})


def train(ranks, job: Job, stop_at: int = 0):
    """Train as one of the ranks of a test's process group. `stop_at` acts as if a signal came in that step."""
    stop = StopRequest()
    device = torch.device("cpu")
    trainer = loop.Trainer(job, ranks, device, stop, Terminal(job.train.steps, visible=False))
    real = trainer._step

    def step(*args):
        if stop_at == trainer.state.step + 1:
            stop.signal = signal.SIGTERM
        return real(*args)

    trainer._step = step
    return trainer.run()


def weights(job: Job) -> dict[str, torch.Tensor]:
    manifest = checkpoint.newest_valid(Path(job.run.dir) / job.run.name / "checkpoints")
    assert manifest is not None
    _, groups = checkpoint.load(manifest.path)
    return {**groups["model"], **groups["optimizer"]}


def rows(job: Job, event: str) -> list[dict]:
    text = (Path(job.run.dir) / job.run.name / "metrics.jsonl").read_text()
    return [row for row in map(json.loads, text.splitlines()) if row["event"] == event]


LAYOUTS = [
    Layout(accumulation=3),
    Layout(dp_replicate=2, micro_batch=2),
    Layout(dp_replicate=3),
    Layout(dp_replicate=4, accumulation=3),
    Layout(dp_replicate=2, data_parallel="threads"),
    Layout(dp_replicate=2, recompute="full", accumulation=3),
    Layout(recompute="selective", loss_chunk=7),
    Layout(dp_replicate=2, recompute="full", loss_chunk=64),
]


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_the_loss_curve_does_not_depend_on_the_layout(ranks, job, dropout):
    job = change(job, "model", dropout=dropout)
    ranks(train, 1, job)
    expected = [row["loss"] for row in rows(job, "step")]
    assert len(expected) == 6
    for number, layout in enumerate(LAYOUTS):
        other = change(dataclasses.replace(job, layout=layout), "run", name=f"layout{number}")
        summaries = ranks(train, layout.processes, other)
        assert [row["loss"] for row in rows(other, "step")] == pytest.approx(expected, rel=1e-9)
        assert len({summary["val_loss"] for summary in summaries}) == 1
        assert summaries[0]["val_loss"] == pytest.approx(rows(job, "validation")[-1]["val_loss"], rel=1e-9)


@pytest.mark.parametrize(("world", "precision"), [(1, "fp64"), (2, "fp32"), (3, "fp32"), (4, "fp64")])
def test_stopping_and_resuming_gives_the_same_bits_as_an_unbroken_run(ranks, job, world, precision):
    job = change(change(job, "train", precision=precision), "model", dropout=0.1)
    job = dataclasses.replace(job, layout=Layout(dp_replicate=world, bucket_mb=0.01))
    ranks(train, world, job)
    broken = change(job, "run", name="broken")
    for stop_at in (2, 3):
        with pytest.raises(StoppedError, match=f"stopped by a signal at step {stop_at} of 6, with a checkpoint"):
            ranks(train, world, broken, stop_at)
    ranks(train, world, broken)
    straight, resumed = weights(job), weights(broken)
    assert straight.keys() == resumed.keys()
    for name, tensor in straight.items():
        assert torch.equal(tensor, resumed[name]), name
    losses = {row["step"]: row["loss"] for row in rows(broken, "step")}
    assert losses == {row["step"]: row["loss"] for row in rows(job, "step")}


def test_resuming_on_another_number_of_ranks_continues_the_same_curve(ranks, job):
    ranks(train, 1, job)
    moved = change(job, "run", name="moved")
    with pytest.raises(StoppedError):
        ranks(train, 1, moved, 3)
    moved = dataclasses.replace(moved, layout=Layout(dp_replicate=2))
    ranks(train, 2, moved)
    assert [row["loss"] for row in rows(moved, "step")] == pytest.approx(
        [r["loss"] for r in rows(job, "step")], rel=1e-9
    )


def test_the_loss_falls_on_text(ranks, job, tmp_path):
    (tmp_path / "text.txt").write_text("the cat sat on the mat. " * 400)
    data = dataclasses.replace(job.data, corpus="text", path=str(tmp_path / "text.txt"))
    job = change(change(dataclasses.replace(job, data=data), "train", steps=40), "run", name="text")
    ranks(train, 1, job)
    losses = [row["loss"] for row in rows(job, "step")]
    assert losses[0] == pytest.approx(math.log(10), rel=0.1)
    assert losses[-1] < 1.0


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_trains(ranks, job, precision):
    job = change(change(job, "train", precision=precision), "checkpoint", every=3)
    ranks(train, 1, job)
    full = change(change(job, "train", precision="fp32"), "run", name="full")
    ranks(train, 1, full)
    assert [r["loss"] for r in rows(job, "step")] == pytest.approx([r["loss"] for r in rows(full, "step")], rel=2e-2)
    found = weights(job)
    assert found["embed.weight"].dtype == getattr(torch, {"bf16": "bfloat16", "fp16": "float16"}[precision])
    assert found["master/embed.weight"].dtype == torch.float32


@pytest.mark.parametrize("world", [1, 2])
def test_a_loss_that_is_not_finite_stops_before_the_optimizer_writes_it(ranks, job, world):
    job = dataclasses.replace(change(job, "checkpoint", every=2), layout=Layout(dp_replicate=world))
    with pytest.raises(StoppedError):
        ranks(train, world, job, 3)
    before = weights(job)
    with pytest.raises(NotFiniteError) as caught:
        ranks(poisoned, world, job)
    assert str(caught.value).startswith(
        "step 4: loss nan, gradient norm nan, first in embed.weight (samples 36 to 47)."
    )
    after = weights(job)
    assert all(torch.equal(before[name], after[name]) for name in before)


def poisoned(ranks, job):
    """A run one of whose ranks meets a NaN in its first micro-batch."""
    stop = StopRequest()
    trainer = loop.Trainer(job, ranks, torch.device("cpu"), stop, Terminal(1, visible=False))
    real = trainer.replica.forward_backward

    def forward_backward(micro, factor, *, last):
        return real(micro, factor * (math.nan if ranks.rank == 0 else 1), last=last) * math.nan

    trainer.replica.forward_backward = forward_backward
    return trainer.run()


def test_fp16_overflow_skips_the_step_and_goes_on(ranks, job):
    job = change(change(job, "train", precision="fp16", steps=3), "optimizer", lr=1e-3)
    assert ranks(overflowing, 1, job) == [2.0**15]


def overflowing(ranks, job):
    trainer = loop.Trainer(job, ranks, torch.device("cpu"), StopRequest(), Terminal(1, visible=False))
    real = trainer.replica.forward_backward

    def forward_backward(micro, factor, *, last):
        return real(micro, factor * (math.inf if trainer.state.step == 1 else 1), last=last)

    trainer.replica.forward_backward = forward_backward
    trainer.run()
    assert trainer.state.optimizer.updates == 2
    return trainer.state.loss_scale.value


def test_a_checkpoint_of_another_model_is_refused_with_the_differences(ranks, job):
    ranks(train, 1, job)
    other = change(change(job, "model", n_layers=3), "train", seed=7, steps=9)
    with pytest.raises(JobError) as caught:
        ranks(train, 1, other)
    assert "model.n_layers: 2 there, 3 here" in str(caught.value)
    assert "train.seed: 1337 there, 7 here" in str(caught.value)
    assert "--fresh starts over" in str(caught.value)


def test_a_corrupt_newest_checkpoint_gives_way_to_the_one_before(ranks, job):
    job = change(job, "checkpoint", every=2)
    with pytest.raises(StoppedError):
        ranks(train, 2, two := dataclasses.replace(job, layout=Layout(dp_replicate=2)), 4)
    root = Path(job.run.dir) / "run" / "checkpoints"
    with (root / "step-000004" / "model.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x01")
    ranks(train, 2, two)
    assert [row["step"] for row in rows(job, "step")] == [1, 2, 3, 4, 3, 4, 5, 6]
    for path in root.glob("*/model.safetensors"):
        path.write_bytes(b"")
    with pytest.raises(CheckpointError, match="no checkpoint in .* is whole"):
        ranks(train, 2, two)


def test_a_job_for_more_processes_than_there_are_is_refused(job):
    with pytest.raises(JobError, match="needs 2 processes, but 1 were started"):
        train(SINGLE, dataclasses.replace(job, layout=Layout(dp_replicate=2)))
