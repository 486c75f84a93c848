"""Whole runs with replicas apart: exact resuming, clean ends, and what is reported."""

import dataclasses
import math
import signal

import pytest
import torch

from phalanx.check.job import problems_of
from phalanx.config.cluster import Cluster
from phalanx.config.job import Checkpoint, Data, Job, Optimizer, RunOptions, Train
from phalanx.config.layout import Layout
from phalanx.config.model import ModelConfig
from phalanx.errors import NotFiniteError, StoppedError
from phalanx.train import loop
from phalanx.train.requests import StopRequest
from train.runs import change, rows, weights


@pytest.fixture
def job(tmp_path):
    """Eight samples a step of a sentence said again and again."""
    (tmp_path / "text.txt").write_text("the cat sat on the mat. " * 400)
    return Job(
        model=ModelConfig(n_layers=1, d_model=16, n_heads=2, seq_len=16),
        cluster=Cluster(peak_tflops=1.0),
        data=Data(corpus="text", path=str(tmp_path / "text.txt"), dir=str(tmp_path / "data")),
        optimizer=Optimizer(lr=1e-2, warmup_steps=2),
        train=Train(steps=8, global_batch=8, precision="fp32", eval_samples=10),
        checkpoint=Checkpoint(keep=0),
        run=RunOptions(name="run", dir=str(tmp_path / "runs"), sample_tokens=0),
    )


def train(ranks, job: Job, stop_at: int = -1, poison: bool = False):
    """Train; `stop_at` acts as if a signal came to the last rank before that call for gradients."""
    stop = StopRequest()
    trainer = loop.Trainer(job, ranks, torch.device("cpu"), stop)
    stepper, calls = trainer.stepper, iter(range(1000))
    real = stepper.gradients

    def gradients(*args):
        if next(calls) == stop_at and ranks.rank == ranks.world - 1:
            stop.signal = signal.SIGTERM
        loss = real(*args)
        if poison and ranks.rank == 1 and trainer.state.step >= 4:
            stepper.replica.shards[0].gradient.mul_(math.nan)
            return loss * math.nan
        return loss

    stepper.gradients = gradients
    return trainer.run()


@pytest.mark.parametrize(
    ("sync", "precision", "optimizer"),
    [("local_sgd", "fp32", "adamw"), ("diloco", "bf16", "adamw"), ("diloco", "bf16", "adamw8bit")],
)
def test_stopping_and_resuming_gives_the_same_bits_as_an_unbroken_run(ranks, job, sync, precision, optimizer):
    job = change(
        dataclasses.replace(job, layout=Layout(dp_replicate=2, sync=sync, sync_every=3)), "train", precision=precision
    )
    job = change(change(job, "optimizer", name=optimizer), "model", d_ff=256)  # rows that adamw8bit quantises
    summary = ranks(train, 2, job)[0]
    assert summary["step"] == 8
    broken = change(job, "run", name="broken")
    with pytest.raises(StoppedError, match="stopped by a signal at step 6 of 8"):
        ranks(train, 2, broken, 3)  # asked in step 4: the replicas next meet after step 6
    ranks(train, 2, broken)
    straight, resumed = weights(job), weights(broken)
    assert straight.keys() == resumed.keys()
    assert "replica1/exp_avg/embed.weight" in straight
    assert ("outer_momentum/embed.weight" in straight) == (sync == "diloco")
    assert ("replica1/exp_avg_scale/blocks.0.mlp.down.weight" in straight) == (optimizer == "adamw8bit")
    for name, tensor in straight.items():
        assert torch.equal(tensor, resumed[name]), name


@pytest.mark.parametrize("sync", ["local_sgd", "diloco", "asp"])
def test_a_loss_that_is_not_finite_ends_all_at_the_next_meeting(ranks, job, sync):
    job = change(
        dataclasses.replace(job, layout=Layout(dp_replicate=2, sync=sync, sync_every=4)), "checkpoint", every=4
    )
    with pytest.raises(
        NotFiniteError, match=r"^replica 1, step \d: loss nan, gradient norm nan.*The optimizer did not apply it"
    ):
        ranks(train, 2, job, -1, True)
    assert all(tensor.isfinite().all() for tensor in weights(job).values())


def test_asynchronous_training_learns_and_measures_its_staleness(ranks, job):
    job = change(dataclasses.replace(job, layout=Layout(dp_replicate=2, sync="asp")), "train", steps=40, eval_every=15)
    first, second = ranks(train, 2, job)
    assert first["loss"] < 1.0
    assert first["val_loss"] == second["val_loss"] < 1.0
    assert [row["step"] for row in rows(job, "step")] == list(range(1, 41))
    assert [row["step"] for row in rows(job, "validation")] == [15, 30, 40]
    found = first["staleness"]
    assert found["updates"] == 80 == sum(found["histogram"].values())
    assert found["max"] >= found["mean"] > 0
    assert rows(job, "staleness")[0]["mean"] == found["mean"]


def test_asynchronous_training_stops_and_goes_on(ranks, job):
    job = change(dataclasses.replace(job, layout=Layout(dp_replicate=2, sync="asp")), "train", steps=60)
    with pytest.raises(StoppedError, match=r"stopped by a signal at step \d+ of 60"):
        ranks(train, 2, job, 2)
    held = weights(job)
    assert "exp_avg/embed.weight" in held
    assert not any(name.startswith("replica1") for name in held), "the moments are the server's"
    assert ranks(train, 2, job)[0]["step"] == 60
    assert [row["step"] for row in rows(job, "step")] == list(range(1, 61))


def test_a_run_may_change_how_its_replicas_agree(ranks, job):
    for steps, sync in ((2, "local_sgd"), (4, "diloco"), (6, "asp"), (8, "bsp")):
        layout = Layout(dp_replicate=2, sync=sync, sync_every=2)
        assert (
            ranks(train, 2, change(dataclasses.replace(job, layout=layout), "train", steps=steps))[0]["step"] == steps
        )


@pytest.mark.parametrize(
    ("section", "values", "said"),
    [
        ("layout", {"dp_replicate": 1}, "nearest legal: dp_replicate=2, or sync=bsp"),
        ("layout", {"data_parallel": "threads"}, "data_parallel=ddp, or sync=bsp"),
        ("train", {"precision": "fp16"}, "precision=bf16, or sync=bsp"),
        ("train", {"eval_every": 25}, "25 is not a multiple of it, nearest: 20 or 30"),
        ("checkpoint", {"every": 4}, "4 is not a multiple of it, nearest: 10"),
        ("optimizer", {"outer_momentum": 1.0}, "must lie in [0, 1), is 1.0"),
        ("layout", {"sync_every": 0}, "must be at least 1, is 0"),
    ],
)
def test_what_does_not_go_together_is_refused_with_the_nearest_legal_choice(job, section, values, said):
    job = dataclasses.replace(job, layout=Layout(dp_replicate=2, sync="diloco"))
    assert not problems_of(job)
    assert any(said in message for _, message in problems_of(change(job, section, **values)))


def test_the_layout_says_how_replicas_agree():
    assert Layout(dp_replicate=2, sync="diloco", sync_every=5).line() == "dp_replicate=2,sync=diloco,sync_every=5"
