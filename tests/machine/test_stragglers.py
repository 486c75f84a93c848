"""Stragglers: ranks whose own time is large in every window, in computing or in coming to a collective."""

import time

import pytest
import torch

from phalanx.config.layout import Layout
from phalanx.machine.training import Probe, ProbeTimes, Straggler, in_probe, slow_in_all
from phalanx.parallel import mesh as meshes

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


def probe(ranks, place):
    """Two windows while rank 1 sleeps in its products or before its collectives."""
    mesh = meshes.build(Layout(dp_replicate=ranks.world), "cpu")
    found = Probe(mesh.axis("world"), torch.device("cpu"), True)
    late = ranks.rank == 1
    if late and place == "compute":
        compute = found.compute
        found.compute = lambda: (time.sleep(0.08), compute())[1]
    if late and place == "arrival":
        all_reduce = found.world.all_reduce
        found.world.all_reduce = lambda *words: (time.sleep(0.08), all_reduce(*words))[1]
    return [found.window(), found.window()]


@pytest.mark.parametrize("place", ["compute", "arrival"])
def test_a_rank_slowed_by_sleep_is_named(ranks, place):
    every = ranks(probe, 2, place)
    windows = [dict(enumerate(window)) for window in zip(*every, strict=True)]
    (found,) = in_probe(windows, ["a", "b"])
    assert (found.rank, found.host, found.stage) == (1, "b", place)
    assert found.own_s > 0.08
    first, second = windows[0].values()
    assert first.wait_s > second.wait_s, "the other one waits for it"
