"""The matrix of pairs: every two ranks meet once, in rounds of disjoint pairs, and slow pairs are found."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from phalanx.config.layout import Layout
from phalanx.data.files import silent
from phalanx.machine import links as pairs
from phalanx.parallel import mesh as meshes


@given(st.integers(2, 70))
def test_every_two_ranks_meet_once_in_disjoint_pairs(ranks):
    met = []
    for partners in pairs.tournament(ranks):
        assert all(other is None or partners[other] == rank for rank, other in enumerate(partners))
        assert partners.count(None) == ranks % 2
        met += [(rank, other) for rank, other in enumerate(partners) if other is not None and rank < other]
    assert sorted(met) == [(a, b) for a in range(ranks) for b in range(a + 1, ranks)]


@pytest.mark.parametrize("world", [1, 2, 3, 8, 9, 64, 129, 1000, 100_000])
def test_the_schedule_is_bounded_at_any_world_size(world):
    ranks, rounds = pairs.schedule_of(world)
    assert len(set(ranks)) == len(ranks) <= pairs.MOST_RANKS
    assert max(ranks) < world
    assert len(rounds) <= pairs.MOST_ROUNDS
    met = [(at, other) for partners in rounds for at, other in enumerate(partners) if other is not None and at < other]
    assert len(set(met)) == len(met)
    if world <= pairs.MOST_ROUNDS:
        assert len(met) == world * (world - 1) // 2
    assert world > pairs.ALONE_RANKS or all(partners.count(None) == world - 2 for partners in rounds)


def measure(ranks, budget_s):
    mesh = meshes.build(Layout(dp_replicate=ranks.world), "cpu")
    hosts = ["a"] * ranks.world
    return pairs.measure_pairs(
        mesh.axis("world"), hosts, torch.device("cpu"), quick=True, budget_s=budget_s, progress=silent
    )


def test_all_pairs_are_measured_both_ways(ranks):
    every = ranks(measure, 3, 60.0)
    found = every[0]
    assert repr(every[1]) == repr(found)
    assert [(a, b) for a, b, *_ in found.directed()] == [(a, b) for a in range(3) for b in range(3) if a != b]
    assert all(us > 0 and gbs > 0 for _, _, us, gbs in found.directed())
    assert (found.at_once, found.left_out, found.wrong) == (1, 0, [])


def test_pairs_beyond_the_budget_are_counted(ranks):
    found = ranks(measure, 3, 0.0)[0]
    assert len([*found.directed()]) == 2
    assert found.left_out == 2


def matrix_of(gbs):
    return pairs.PairMatrix(list(range(len(gbs))), gbs, gbs, 1, 0)


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
    messages = pairs._Messages(axis, [0, 1], torch.device("cpu"), 0.001)
    if ranks.rank == 0:
        messages.large[5] = 77
    messages.round([1, 0])
    return messages.wrong


def test_other_bytes_than_were_sent_are_named(ranks):
    first, second = ranks(corrupt, 2)
    assert first == []
    assert set(second) == {"message 0 → 1: other bytes arrived than were sent"}
