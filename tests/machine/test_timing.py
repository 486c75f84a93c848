"""Times of an axis: which ranks a line has, and a fit to every collective."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from phalanx.config.layout import Layout
from phalanx.cost.fit import COLLECTIVES
from phalanx.data.files import silent
from phalanx.machine import links
from phalanx.parallel import mesh as meshes
from phalanx.parallel.mesh import AxisGeometry

TP, DP = AxisGeometry(2, 1), AxisGeometry(2, 2)


@given(inner=st.integers(1, 5), size=st.integers(1, 5), outer=st.integers(1, 5))
def test_lines_partition_the_world(inner, size, outer):
    world = inner * size * outer
    lines = links.lines_of(AxisGeometry(size, inner), world)
    assert sorted(rank for line in lines for rank in line) == list(range(world))
    assert all(len(line) == size for line in lines)


@pytest.mark.parametrize(
    ("geometry", "hosts", "place"),
    [
        (TP, ["a", "a", "b", "b"], "one host"),
        (DP, ["a", "a", "b", "b"], "one rank per host"),
        (AxisGeometry(4, 1), ["a", "a", "b", "b"], "several hosts"),
        (AxisGeometry(3, 1), ["a", "a", "b"], "several hosts"),
    ],
)
def test_places(geometry, hosts, place):
    assert links.place_of(geometry, hosts) == place


def test_a_line_that_takes_longer_than_the_others_is_slow():
    times = {("all_reduce", 8): [1.0, 1.0, 1.5, 1.0, 1.0, 1.0], ("all_gather", 8): [1.0, 1.0, 1.0, 1.4, 1.0, 1.0]}
    (slow,) = links._slow_lines(TP, times, 8)
    assert (slow.ranks, slow.seconds, slow.median_s) == ([2, 3], 1.5, 1.0)
    assert links._slow_lines(AxisGeometry(6, 1), times, 8) == []


def measure(ranks, layout, budget_s):
    mesh = meshes.build(layout, "cpu")
    before = links.SIZES
    links.SIZES = {True: [2**10, 2**12, 2**14, 2**18]}
    try:
        return links.time_axis(
            *(mesh.axis("tp"), "tp", mesh.lines["tp"], ["a", "a", "b", "b"][: ranks.world], torch.device("cpu")),
            quick=True,
            budget_s=budget_s,
            progress=silent,
        )
    finally:
        links.SIZES = before


def test_every_collective_is_timed_and_fitted(ranks):
    every = ranks(measure, 4, Layout(tp=2, dp_replicate=2), 60.0)
    found = every[0]
    assert all(one == found for one in every)
    assert {(time.collective, time.bytes) for time in found.times} == {
        (name, size) for name in (*COLLECTIVES, *links.UNFITTED) for size in (2**10, 2**12, 2**14, 2**18)
    }
    assert all(time.seconds > 0 for time in found.times)
    assert min(found.latency_us, found.gbs, found.barrier_s) > 0
    assert (found.ranks, found.stride, found.place, found.left_out) == (2, 1, "one host", [])
    assert {transfer.collective for transfer in found.transfers} == {*COLLECTIVES, "broadcast"}


def test_sizes_that_take_too_long_are_left_out(ranks):
    found = ranks(measure, 2, Layout(tp=2), 0.0)[0]
    assert found.left_out == [2**18]
    assert max(time.bytes for time in found.times) == 2**14
