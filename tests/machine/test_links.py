"""Links: groups and axes that are timed, and the matrix of links."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from phalanx.config.layout import Layout
from phalanx.cost.fit import COLLECTIVES
from phalanx.data.files import silent
from phalanx.errors import JobError
from phalanx.launch.ranks import SINGLE, Ranks
from phalanx.machine import clock, links
from phalanx.machine.clock import WINDOW
from phalanx.parallel import mesh as meshes
from phalanx.parallel.mesh import AxisGeometry

# Which ranks talk to which, and that every collective is measured among them.


@given(nodes=st.integers(1, 9), per_node=st.integers(1, 9))
def test_groups_are_on_one_node_or_have_one_rank_of_each(nodes, per_node):
    for part in links.partitions(nodes * per_node, per_node):
        flat = [rank for members in part.members for rank in members]
        assert len(set(flat)) == len(flat)
        assert 0 in part.members[0]
        for members in part.members:
            assert len(members) == part.group.ranks
            places = {rank // per_node for rank in members}
            assert len(places) == (1 if part.place == "intra" else len(members))
            assert {b - a for a, b in pairwise(members)} == {part.group.stride}


def test_group_sizes_are_powers_of_two_and_all():
    assert [part.group.ranks for part in links.partitions(6, 6)] == [2, 4, 6]
    assert [len(part.members) for part in links.partitions(6, 6)] == [3, 1, 1]
    assert [(part.place, part.group.ranks) for part in links.partitions(8, 4)] == [
        ("intra", 2),
        ("intra", 4),
        ("inter", 2),
    ]
    assert links.partitions(8, 4)[2].members == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert links.partitions(1, 1) == []


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        (SINGLE, "needs at least two ranks; there is one: --nproc-per-node 2"),
        (Ranks(0, 4, 0, None, None, "mpich"), "mpich does not say how many of the 4 ranks are on a node"),
        (Ranks(0, 5, 0, 2, 0, "torchrun"), "5 ranks with 2 on this node"),
    ],
)
def test_ranks_that_cannot_be_measured_are_refused(ranks, message):
    with pytest.raises(JobError, match=message):
        links.per_node_of(ranks)


def measure_groups(ranks, per_node):
    """On ranks that lie on nodes of so many, as far as the measurement can see."""
    before = links.SIZES
    links.SIZES = {True: [1024, 2**18]}
    budget, clock.QUICK_BUDGET_S = clock.QUICK_BUDGET_S, 0.0
    try:
        place = Ranks(ranks.rank, ranks.world, ranks.rank % per_node, per_node, ranks.rank // per_node, "test")
        return links.measure(place, torch.device("cpu"), COLLECTIVES, True, silent)
    finally:
        links.SIZES = before
        clock.QUICK_BUDGET_S = budget


@pytest.mark.parametrize(("world", "per_node"), [(3, 3), (4, 2)])
def test_every_collective_is_measured_in_every_group(ranks, world, per_node):
    found = ranks(measure_groups, world, per_node)
    assert all(one == found[0] for one in found)
    for fitted in found[0]:
        assert [(t.collective, t.payload) for t in fitted.transfers] == [
            (name, size) for name in COLLECTIVES for size in (1024, 2**18)
        ]
        assert all(t.seconds > 0 for t in fitted.transfers)
        assert fitted.link.gbs > 0
        assert fitted.quality.rounds >= WINDOW
        assert fitted.link.latency_us > 0
    sizes = {(fitted.place, fitted.group.ranks) for fitted in found[0]}
    assert sizes == ({("intra", 2), ("intra", 3)} if world == 3 else {("intra", 2), ("inter", 2)})
    widest = links.chosen(found[0], "intra")
    assert widest is not None
    assert widest.group.ranks == per_node
    assert (links.chosen(found[0], "inter") is None) == (world == per_node)


# Times of an axis: which ranks a line has, and a fit to every collective.


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


def measure_axis(ranks, layout, budget_s):
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
    every = ranks(measure_axis, 4, Layout(tp=2, dp_replicate=2), 60.0)
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
    found = ranks(measure_axis, 2, Layout(tp=2), 0.0)[0]
    assert found.left_out == [2**18]
    assert max(time.bytes for time in found.times) == 2**14


# The matrix of pairs: every two ranks meet once, in rounds of disjoint pairs, and slow pairs are found.


@given(st.integers(2, 70))
def test_every_two_ranks_meet_once_in_disjoint_pairs(ranks):
    met = []
    for partners in links.tournament(ranks):
        assert all(other is None or partners[other] == rank for rank, other in enumerate(partners))
        assert partners.count(None) == ranks % 2
        met += [(rank, other) for rank, other in enumerate(partners) if other is not None and rank < other]
    assert sorted(met) == [(a, b) for a in range(ranks) for b in range(a + 1, ranks)]


@pytest.mark.parametrize("world", [1, 2, 3, 8, 9, 64, 129, 1000, 100_000])
def test_the_schedule_is_bounded_at_any_world_size(world):
    ranks, rounds = links.schedule_of(world)
    assert len(set(ranks)) == len(ranks) <= links.MOST_RANKS
    assert max(ranks) < world
    assert len(rounds) <= links.MOST_ROUNDS
    met = [(at, other) for partners in rounds for at, other in enumerate(partners) if other is not None and at < other]
    assert len(set(met)) == len(met)
    if world <= links.MOST_ROUNDS:
        assert len(met) == world * (world - 1) // 2
    assert world > links.ALONE_RANKS or all(partners.count(None) == world - 2 for partners in rounds)


def measure_matrix(ranks, budget_s):
    mesh = meshes.build(Layout(dp_replicate=ranks.world), "cpu")
    hosts = ["a"] * ranks.world
    return links.measure_pairs(
        mesh.axis("world"), hosts, torch.device("cpu"), quick=True, budget_s=budget_s, progress=silent
    )


def test_all_pairs_are_measured_both_ways(ranks):
    every = ranks(measure_matrix, 3, 60.0)
    found = every[0]
    assert repr(every[1]) == repr(found)
    assert [(a, b) for a, b, *_ in found.directed()] == [(a, b) for a in range(3) for b in range(3) if a != b]
    assert all(us > 0 and gbs > 0 for _, _, us, gbs in found.directed())
    assert (found.at_once, found.left_out, found.wrong) == (1, 0, [])


def test_pairs_beyond_the_budget_are_counted(ranks):
    found = ranks(measure_matrix, 3, 0.0)[0]
    assert len([*found.directed()]) == 2
    assert found.left_out == 2


def matrix_of(gbs):
    return links.PairMatrix(list(range(len(gbs))), gbs, gbs, 1, 0)


def test_slow_pairs_are_compared_with_their_kind():
    hosts = ["a", "a", "b", "b"]
    gbs = [[math.nan if a == b else 10.0 if hosts[a] == hosts[b] else 1.0 for b in range(4)] for a in range(4)]
    assert matrix_of(gbs).slow(hosts) == []
    gbs[2][3], gbs[0][3] = 4.0, 0.1
    assert matrix_of(gbs).slow(hosts) == [(0, 3, 0.1, 1.0), (2, 3, 4.0, 10.0)]


def test_two_ranks_have_nothing_to_compare_with():
    assert matrix_of([[math.nan, 1.0], [9.0, math.nan]]).slow(["a", "b"]) == []


def corrupt(ranks):
    mesh = meshes.build(Layout(dp_replicate=2), "cpu")
    axis = mesh.axis("world")
    messages = links._Messages(axis, [0, 1], torch.device("cpu"), 0.001)
    if ranks.rank == 0:
        messages.large[5] = 77
    messages.round([1, 0])
    return messages.wrong


def test_other_bytes_than_were_sent_are_named(ranks):
    first, second = ranks(corrupt, 2)
    assert first == []
    assert set(second) == {"message 0 → 1: other bytes arrived than were sent"}
