"""Whole runs on tiny models: the same curve on any layout, exact resuming, and clean ends."""

import dataclasses
import math
from pathlib import Path

import pytest
import torch

from phalanx.cli.train import _text as text_of
from phalanx.config.layout import Layout
from phalanx.errors import CheckpointError, JobError, NotFiniteError, StoppedError
from phalanx.launch.ranks import SINGLE
from phalanx.train import loop
from phalanx.train.requests import StopRequest
from train.runs import change, losses, moves_between, rows, train, weights

LAYOUTS = [
    Layout(accumulation=3),
    Layout(dp_replicate=2, micro_batch=2),
    Layout(dp_replicate=3),
    Layout(dp_replicate=4, accumulation=3),
    Layout(dp_replicate=2, data_parallel="threads"),
    Layout(dp_replicate=2, recompute="full", accumulation=3),
    Layout(recompute="selective", loss_chunk=7),
    Layout(dp_replicate=2, recompute="full", loss_chunk=64),
    Layout(dp_shard=2, zero=1, accumulation=3),
    Layout(dp_shard=2, zero=2, bucket_mb=0.005, accumulation=3, accumulate="sharded"),
    Layout(dp_shard=2, zero=3, accumulation=2),
    Layout(dp_shard=4, zero=3, reshard=False, accumulation=3, accumulate="sharded"),
    Layout(dp_replicate=2, dp_shard=2, zero=2, bucket_mb=0.005),
    Layout(dp_replicate=2, dp_shard=2, zero=3),
    Layout(tp=2, accumulation=2),
    Layout(tp=2, sp=True, sp_regather=True, loss_chunk=50),
    Layout(dp_shard=2, tp=2, zero=3, sp=True, accumulation=2, recompute="full"),
    Layout(dp_shard=2, tp=2, zero=1),
    Layout(pp=2, accumulation=3),
    Layout(dp_shard=2, pp=2, zero=2, schedule="zb_h1", accumulation=3),
    Layout(dp_replicate=2, tp=2, pp=2, sp=True, schedule="dualpipe", accumulation=2),
    Layout(pp=2, schedule="terapipe", pp_slices=4, accumulation=2),
    Layout(cp=2, zero=1),
    Layout(cp=4, cp_ulysses=2, accumulation=3),
    Layout(cp=2, pp=2, schedule="terapipe", pp_slices=2, accumulation=2),
]
SHARDED = [
    Layout(dp_shard=2, zero=1, bucket_mb=0.01),
    Layout(dp_shard=2, zero=2, bucket_mb=0.01),
    Layout(dp_shard=2, zero=3),
    Layout(tp=2, sp=True),
    Layout(dp_shard=2, tp=2, zero=3),
]
"""One of every kind of sharding: their runs stop, resume and fail like any other."""


def test_the_loss_curve_does_not_depend_on_the_layout(ranks, job):
    job = change(job, "model", dropout=0.2)
    ranks(train, 1, job)
    expected = [row["loss"] for row in rows(job, "step")]
    assert len(expected) == 6
    for number, layout in enumerate(LAYOUTS):
        other = change(dataclasses.replace(job, layout=layout), "run", name=f"layout{number}")
        other = change(other, "guard", every=1)
        summaries = ranks(train, layout.processes, other)
        assert not rows(other, "guard"), "replicas have the same bits"
        assert [row["loss"] for row in rows(other, "step")] == pytest.approx(expected, rel=1e-9)
        assert len({summary["val_loss"] for summary in summaries}) == 1
        assert summaries[0]["val_loss"] == pytest.approx(rows(job, "validation")[-1]["val_loss"], rel=1e-9)


@pytest.mark.parametrize(
    ("layout", "precision"),
    [
        (Layout(), "fp64"),
        (Layout(dp_replicate=2, bucket_mb=0.01), "fp32"),
        (Layout(dp_replicate=3, bucket_mb=0.01), "fp32"),
        *((layout, "fp32") for layout in SHARDED),
        (SHARDED[-1], "bf16"),
        (Layout(pp=2, schedule="zb_h1", accumulation=3), "fp32"),
        (Layout(dp_shard=2, pp=2, schedule="dualpipe", accumulation=2), "bf16"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.line(),
)
def test_stopping_and_resuming_gives_the_same_bits_as_an_unbroken_run(ranks, job, layout, precision):
    job = change(change(job, "train", precision=precision), "model", dropout=0.1)
    job, world = dataclasses.replace(job, layout=layout), layout.processes
    ranks(train, world, job)
    broken = change(job, "run", name="broken")
    for stop_at in (2, 3) if layout not in SHARDED else (3,):
        with pytest.raises(StoppedError, match=f"stopped by a signal at step {stop_at} of 6, with a checkpoint"):
            ranks(train, world, broken, stop_at)
    ranks(train, world, broken)
    straight, resumed = weights(job), weights(broken)
    assert straight.keys() == resumed.keys()
    for name, tensor in straight.items():
        assert torch.equal(tensor, resumed[name]), name
    assert losses(broken) == losses(job)


MOVES = [
    (Layout(), Layout(dp_replicate=2)),
    (Layout(dp_shard=2, zero=3), Layout(tp=2, sp=True), Layout()),
    (Layout(tp=2), Layout(dp_shard=3, zero=2, bucket_mb=0.01), Layout(dp_shard=2, tp=2)),
    (Layout(dp_replicate=2, dp_shard=2, zero=1), Layout(dp_shard=4), Layout(dp_replicate=2, tp=2)),
    (Layout(dp_replicate=3), Layout(dp_shard=2, tp=2, sp=True, zero=1), Layout(dp_replicate=2, dp_shard=2)),
    (Layout(pp=2, accumulation=4), Layout(tp=2), Layout(pp=2, dp_shard=2, accumulation=2)),
    (Layout(pp=2, accumulation=4), Layout(pp=4, schedule="zb_v", accumulation=4), Layout()),
    (Layout(), Layout(pp=2, dp_shard=2, zero=1, schedule="dualpipe", accumulation=2), Layout(pp=3, accumulation=3)),
]


@pytest.mark.parametrize("layouts", MOVES, ids=lambda layouts: " then ".join(each.line() for each in layouts))
def test_resuming_on_another_layout_continues_the_same_curve(ranks, job, layouts):
    """A checkpoint holds whole tensors: a run may go on under any layout, and back."""
    if any(layout.pp > 1 for layout in layouts):
        job = change(job, "model", n_layers=8)  # for two stages on each of four ranks
    moves_between(ranks, job, layouts)


def test_the_loss_falls_on_text(ranks, job, tmp_path):
    (tmp_path / "text.txt").write_text("the cat sat on the mat. " * 400)
    data = dataclasses.replace(job.data, corpus="text", path=str(tmp_path / "text.txt"))
    job = change(change(dataclasses.replace(job, data=data), "train", steps=40), "run", name="text")
    ranks(train, 1, job)
    found = losses(job)
    assert found[0] == pytest.approx(math.log(10), rel=0.1)
    assert found[-1] < 1.0


@pytest.mark.parametrize(("precision", "gradients"), [("bf16", "same"), ("bf16", "fp32"), ("fp16", "same")])
def test_half_precision_trains(ranks, job, precision, gradients):
    full = change(change(job, "train", precision="fp32"), "run", name="full")
    ranks(train, 1, full)
    half = change(change(job, "train", precision=precision, gradients=gradients), "checkpoint", every=3)
    for number, layout in enumerate([Layout(), Layout(dp_replicate=2), *SHARDED]):
        job = change(dataclasses.replace(half, layout=layout), "run", name=f"half{number}")
        ranks(train, layout.processes, job)
        assert losses(job) == pytest.approx(losses(full), rel=2e-2)
        found = weights(job)
        assert found["embed.weight"].dtype == getattr(torch, {"bf16": "bfloat16", "fp16": "float16"}[precision])
        assert found["master/embed.weight"].dtype == torch.float32


@pytest.mark.parametrize("layout", [Layout(), Layout(dp_replicate=2), SHARDED[1], SHARDED[-1]], ids=Layout.line)
def test_a_loss_that_is_not_finite_stops_before_the_optimizer_writes_it(ranks, job, layout):
    job, world = dataclasses.replace(change(job, "checkpoint", every=2), layout=layout), layout.processes
    with pytest.raises(StoppedError):
        ranks(train, world, job, 3)
    before = weights(job)
    messages = ranks(poisoned, world, job)
    assert len(set(messages)) == 1
    assert messages[0].startswith("step 4: loss nan, gradient norm nan, first in embed.weight (samples 36 to 47).")
    after = weights(job)
    assert all(torch.equal(before[name], after[name]) for name in before)


def poisoned(ranks, job):
    """The message with which a run ends, one of whose ranks meets a NaN in its first micro-batch."""
    stop = StopRequest()
    trainer = loop.Trainer(job, ranks, torch.device("cpu"), stop)
    real = trainer.stepper.replica.forward_backward

    def forward_backward(micro, factor, *, last):
        return real(micro, factor * (math.nan if ranks.rank == 0 else 1), last=last) * math.nan

    trainer.stepper.replica.forward_backward = forward_backward
    with pytest.raises(NotFiniteError) as caught:
        trainer.run()
    return str(caught.value)


@pytest.mark.parametrize("layout", [Layout(), SHARDED[0], *SHARDED[2:4]], ids=Layout.line)
def test_fp16_overflow_skips_the_step_and_goes_on(ranks, job, layout):
    job = change(change(job, "train", precision="fp16", steps=3), "optimizer", lr=1e-3)
    job = dataclasses.replace(job, layout=layout)
    assert ranks(overflowing, layout.processes, job) == [2.0**15] * layout.processes


def overflowing(ranks, job):
    trainer = loop.Trainer(job, ranks, torch.device("cpu"), StopRequest())
    real = trainer.stepper.replica.forward_backward

    def forward_backward(micro, factor, *, last):
        overflows = trainer.state.step == 1 and ranks.rank == 0
        return real(micro, factor * (math.inf if overflows else 1), last=last)

    trainer.stepper.replica.forward_backward = forward_backward
    trainer.run()
    assert trainer.stepper.optimizer.updates == 2
    return trainer.stepper.loss_scale.value


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
    with (root / "step-000004" / "rank-00001.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x01")
    ranks(train, 2, two)
    assert [row["step"] for row in rows(job, "step")] == [1, 2, 3, 4, 3, 4, 5, 6]
    for path in root.glob("*/rank-*.safetensors"):
        path.write_bytes(b"")
    with pytest.raises(CheckpointError, match="no checkpoint in .* is whole"):
        ranks(train, 2, two)


def test_a_rank_that_is_restarted_after_the_last_checkpoint_takes_no_step(ranks, job):
    first = ranks(train, 1, job)[0]
    again = ranks(train, 1, job)[0]
    assert (again["step"], again["loss"], again["val_loss"]) == (first["step"], None, first["val_loss"])
    assert len(losses(job)) == first["step"]
    assert f"in {first['step']} steps\n" in text_of({**again, "sample": ""})


def test_a_job_for_more_processes_than_there_are_is_refused(job):
    with pytest.raises(JobError, match="needs 2 processes, but 1 were started"):
        train(SINGLE, dataclasses.replace(job, layout=Layout(dp_replicate=2)))
