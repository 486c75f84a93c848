"""The short training of the self-test, and stragglers."""

from __future__ import annotations

import json
import time

import pytest
import torch

from phalanx.check.load import load_words
from phalanx.config import overrides
from phalanx.config.layout import Layout
from phalanx.machine import training
from phalanx.machine.training import Probe, ProbeTimes, Straggler, in_probe, slow_in_all
from phalanx.parallel import mesh as meshes

# Stragglers: ranks whose own time is large in every window, in computing or in coming to a collective.


HOSTS = ["a", "a", "b", "b"]


def test_a_rank_must_be_slow_in_every_window():
    slow = {0: 1.0, 1: 1.1, 2: 1.4, 3: 1.0}
    once = {0: 1.0, 1: 1.1, 2: 1.0, 3: 1.0}
    assert slow_in_all([slow, slow], HOSTS, "compute") == [Straggler(2, "b", "compute", 1.4, 1.0)]
    assert slow_in_all([slow, once], HOSTS, "compute") == []
    assert slow_in_all([], HOSTS, "compute") == []


def test_only_ranks_with_the_same_work_are_compared():
    own = {0: 1.0, 1: 1.0, 2: 3.0, 3: 3.1}
    assert len(slow_in_all([own], HOSTS, "training")) == 2
    assert slow_in_all([own], HOSTS, "training", {0: 0, 1: 0, 2: 1, 3: 1}) == []


def test_a_rank_is_named_once_and_by_its_cause():
    fast, computes, comes_late = ProbeTimes(1.0, 0.01, 0.1), ProbeTimes(2.0, 0.01, 0.1), ProbeTimes(1.0, 1.5, 0.1)
    found = in_probe([{0: fast, 1: computes, 2: comes_late, 3: fast}] * 2, HOSTS)
    assert [(each.rank, each.stage) for each in found] == [(1, "compute"), (2, "arrival")]
    assert found[1].line() == (
        "rank 2 (b) is slow: 2.5 s from a computation to its collective, 2.48 × the median of the others (1.01 s)"
    )


SLEEP_S = 0.2
"""More than what a busy machine takes from a rank now and then."""


def probe(ranks, place):
    """Two windows while rank 1 sleeps in its products or before its collectives."""
    mesh = meshes.build(Layout(dp_replicate=ranks.world), "cpu")
    found = Probe(mesh.axis("world"), torch.device("cpu"), True)
    late = ranks.rank == 1
    if place == "arrival":  # products take longer on one rank than on the other, now and then
        found.compute = lambda: time.sleep(SLEEP_S)
    if late and place == "compute":
        compute = found.compute
        found.compute = lambda: (time.sleep(SLEEP_S), compute())[1]
    if late and place == "arrival":
        all_reduce = found.world.all_reduce
        found.world.all_reduce = lambda *words: (time.sleep(SLEEP_S), all_reduce(*words))[1]
    return [found.window(), found.window()]


@pytest.mark.parametrize("place", ["compute", "arrival"])
def test_a_rank_slowed_by_sleep_is_named(ranks, place):
    every = ranks(probe, 2, place)
    windows = [dict(enumerate(window)) for window in zip(*every, strict=True)]
    # On a busy machine the other rank may seem slow, too.
    (found,) = (each for each in in_probe(windows, ["a", "b"]) if each.rank == 1)
    assert (found.host, found.stage) == ("b", place)
    assert found.own_s > SLEEP_S
    first, second = windows[0].values()
    assert first.wait_s > second.wait_s, "the other one waits for it"


# The short training: the same loss on all ranks, step times of each, a profile; and losses that differ are named.


WORDS = ["model=tiny", "data.corpus=random", "layout.micro_batch=2"]


def job_of(*words):
    return load_words(overrides.parse([*WORDS, *words])).job


def train(ranks, words, folder, fault=None):
    job = job_of(*words)
    mesh = meshes.build(training.trainable(job)[0].layout, "cpu")
    if fault is not None:
        fault(ranks)
    training.STEPS = {True: (3, 3)}
    hosts = [f"h{rank}" for rank in range(ranks.world)]
    return training.train_briefly(
        job, mesh, torch.device("cpu"), 31, hosts, quick=True, traces=folder, tick=lambda done, total: None
    )


def test_all_ranks_have_the_same_loss_and_a_trace(ranks, tmp_path):
    every = ranks(train, 2, ["dp_replicate=2"], tmp_path)
    found = every[0]
    assert repr(every[1]) == repr(found)
    assert found.steps == 3
    assert len(found.losses) == training.WARM_UP + 3 + training.PROFILED
    assert [len(seconds) for seconds in found.step_s] == [3, 3]
    assert found.problems == found.changed == []
    assert 3.0 < found.losses[0] < 4.0, "log 31 = 3.43"
    assert found.traces == [str(tmp_path / f"test-dist-rank_{rank}.json") for rank in range(2)]
    for path in found.traces:
        with open(path) as file:
            assert json.load(file)["traceEvents"]
    assert 0 < len(found.kernels) <= training.MOST_KERNELS
    assert all(kernel.seconds > 0 for kernel in found.kernels)


def differ(ranks):
    """Rank 1 reads another loss."""
    step = training.Stepper.step

    def other(self, *words):
        done = step(self, *words)
        return training.replace(done, loss=done.loss * 1.01) if ranks.rank == 1 else done

    training.Stepper.step = other


def test_losses_that_differ_are_named(ranks):
    before = training.Stepper.step
    try:
        found = ranks(train, 2, ["dp_replicate=2"], None, differ)[0]
    finally:
        training.Stepper.step = before
    (problem,) = found.problems
    assert problem.startswith("training step 1: rank 1 (h1) has loss 3.")
    assert problem.endswith("all should have the same")
    assert found.traces == []


def test_steps_that_do_not_stand_alone_are_replaced():
    job, changed = training.trainable(job_of("dp_replicate=2", "sync=local_sgd"))
    assert (job.layout.sync, changed) == ("bsp", ["sync=bsp instead of local_sgd"])
    job, changed = training.trainable(job_of("pp=2", "layout.schedule=pipedream", "accumulation=2"))
    assert (job.layout.schedule, changed) == ("1f1b", ["schedule=1f1b instead of pipedream"])
    assert training.trainable(job_of("dp_shard=2"))[1] == []


def test_a_loss_that_is_not_finite_is_named():
    assert training._different([[1.0, 2.0], [1.0, float("nan")]], ["a", "b"]) == [
        "training step 2: rank 1 (b) has loss nan, which is not finite"
    ]
    assert training._different([[1.0], [1.0 + 1e-9]], ["a", "b"]) == []
