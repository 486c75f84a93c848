"""A loss or gradient that jumps, or is not finite, whenever the step is computed: skipped, left behind, or the end."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
import torch

from phalanx.checkpoint.inventory import check
from phalanx.checkpoint.manifest import Manifest
from phalanx.config.job import GuardOptions
from phalanx.config.layout import Layout
from phalanx.errors import NotFiniteError, SpikeError
from phalanx.train.guard import History
from train.guard.faults import Fault, train_with
from train.runs import change, rows, weights

SPIKE = Fault("own gradient", 0, 4, times=2)
LAYOUT = Layout(dp_replicate=2)


def watched(job, **guard):
    job = change(change(dataclasses.replace(job, layout=LAYOUT), "train", eval_samples=0), "checkpoint", every=1)
    job = change(job, "optimizer", schedule="constant")
    return change(job, "guard", **{"on_spike": "skip", "spike_warmup": 3, "spike_window": 8, **guard})


def saved(job, step: int) -> Manifest:
    return check(Path(job.run.dir) / job.run.name / "checkpoints" / f"step-{step:06d}")


def test_a_spike_is_skipped_and_the_samples_are_named_also_after_a_resume(ranks, job):
    job = watched(job)
    ranks(train_with, 2, job, SPIKE)
    (row,) = rows(job, "guard")
    assert (row["step"], row["found"], row["action"]) == (4, "spike", "skip")
    assert row["samples"] == [36, 47]
    assert row["grad_norm"] > 5 * rows(job, "step")[2]["grad_norm"]
    assert [saved(job, step).meta["updates"] for step in (3, 4, 5, 6)] == [3, 3, 4, 5]
    resumed = change(job, "run", name="resumed")
    ranks(train_with, 2, change(resumed, "train", steps=3))
    ranks(train_with, 2, resumed, SPIKE)
    found = weights(resumed)
    assert all(torch.equal(tensor, found[name]) for name, tensor in weights(job).items())


def test_a_rewind_continues_with_the_samples_after_the_spike(ranks, job):
    job = change(watched(job, on_spike="rewind", every=0), "checkpoint", every=2)
    ranks(train_with, 2, job, SPIKE)
    assert [row["step"] for row in rows(job, "step")] == [1, 2, 3, 3, 4, 5, 6]
    assert saved(job, 6).meta["samples"] == 48 + 4 * 12
    assert [row["action"] for row in rows(job, "guard")] == ["rewind"]


def test_a_spike_ends_the_run_by_policy(ranks, job):
    with pytest.raises(SpikeError, match=r"step 4: gradient norm .* × its median of .* \(samples 36 to 47\), computed"):
        ranks(train_with, 2, watched(job, on_spike="stop"), SPIKE)


def test_steps_that_are_not_finite_are_skipped_up_to_a_limit(ranks, job):
    job = watched(job, on_nan="skip", limit=1)
    with pytest.raises(NotFiniteError, match=r"step 5: loss .*guard.limit of 1 in 1,000 steps is reached"):
        ranks(train_with, 2, job, Fault("nan", 1, 3, times=2), Fault("nan", 0, 5, times=2))
    assert [(row["step"], row["action"]) for row in rows(job, "guard")] == [(3, "skip"), (5, "stop")]
    assert rows(job, "step")[2]["grad_norm"] is None
    assert saved(job, 4).meta["updates"] == 3


def test_a_jump_is_measured_against_the_median_after_the_warm_up():
    history = History(GuardOptions(spike_warmup=3, spike_window=4, spike_loss=1.5, spike_norm=4.0))
    for number in range(1, 4):
        assert history.spike(100.0, 100.0) == ""
        history.take(2.0, number / 2)
    assert history.spike(2.9, 3.9) == ""
    assert history.spike(3.1, 4.1) == "loss 3.1 is 1.55 × its median of 2, gradient norm 4.1 is 4.1 × its median of 1"
    restored = History(history.options)
    restored.load_state(history.state())
    assert restored == history
    assert math.isclose(restored.norms[-1], 1.5)


def test_interventions_are_limited_in_a_window_and_survive_going_back():
    history = History(GuardOptions(limit=2))
    assert [history.intervene(step) for step in (5, 5, 900, 1005, 1900)] == [True, True, False, True, True]
    history.restart()
    history.load_state(History(history.options).state())
    assert history.interventions == [1005, 1900]
