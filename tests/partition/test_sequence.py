"""Which positions a context-parallel rank holds."""

from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.config.layout import Layout
from phalanx.partition.tensor_slices import cp_coordinates, rank_positions, ring_positions


@st.composite
def cut(draw: st.DrawFn, slices: int = 4) -> tuple[Layout, int, int]:
    """A legal layout, the length of its sequences, and how many parts travel a pipeline."""
    ring, ulysses, parts = draw(st.integers(1, 5)), draw(st.integers(1, 5)), draw(st.integers(1, slices))
    layout = Layout(cp=ring * ulysses, cp_ulysses=ulysses, cp_inner=draw(st.sampled_from(["ulysses", "ring"])))
    whole = layout.cp * (2 if ring > 1 and ulysses % 2 else 1)
    return layout, parts * whole * draw(st.integers(1, 6)), parts


def held(layout: Layout, seq_len: int, rank: int, slices: int = 1) -> list[int]:
    return list(chain.from_iterable(rank_positions(layout, seq_len, rank, slices)))


@given(cut())
def test_every_position_is_held_once_and_each_rank_holds_as_many(case):
    layout, seq_len, slices = case
    each = [held(layout, seq_len, rank, slices) for rank in range(layout.cp)]
    assert sorted(chain.from_iterable(each)) == list(range(seq_len))
    assert {len(positions) for positions in each} == {seq_len // layout.cp}


@given(cut())
def test_ranks_hold_positions_in_order_and_in_few_runs(case):
    layout, seq_len, slices = case
    for rank in range(layout.cp):
        runs = rank_positions(layout, seq_len, rank, slices)
        assert all(len(run) for run in runs)
        assert len(runs) <= (1 if layout.ring == 1 else 2) * slices
        assert held(layout, seq_len, rank, slices) == sorted(held(layout, seq_len, rank, slices))


@given(cut(slices=1))
def test_all_places_of_a_ring_see_as_many_keys(case):
    """Pairs of a query and a key that it sees: query at position p sees p + 1 keys."""
    layout, seq_len, _ = case
    pairs = [
        sum(position + 1 for run in ring_positions(layout, seq_len, place) for position in run)
        for place in range(layout.ring)
    ]
    assert pairs == [seq_len * (seq_len + 1) // 2 // layout.ring] * layout.ring


@given(cut(slices=1))
def test_ulysses_ranks_in_order_hold_their_groups_tokens_in_order(case):
    layout, seq_len, _ = case
    by_place = {cp_coordinates(layout, rank): rank for rank in range(layout.cp)}
    assert len(by_place) == layout.cp
    for ring in range(layout.ring):
        ranks = [by_place[ring, ulysses] for ulysses in range(layout.cp_ulysses)]
        together = list(chain.from_iterable(held(layout, seq_len, rank) for rank in ranks))
        assert together == list(chain.from_iterable(ring_positions(layout, seq_len, ring)))


@given(cut())
def test_a_slice_is_dealt_out_as_a_sequence_of_its_own(case):
    layout, seq_len, slices = case
    tokens = seq_len // slices
    for rank in range(layout.cp):
        alone = held(layout, tokens, rank)
        again = [part * tokens + position for part in range(slices) for position in alone]
        assert held(layout, seq_len, rank, slices) == again


@given(cut(slices=1))
def test_neighbouring_ranks_are_those_of_the_inner_kind(case):
    layout, _, _ = case
    inner = {"ulysses": (layout.cp_ulysses, 1), "ring": (layout.ring, 0)}[layout.cp_inner]
    for rank in range(layout.cp - 1):
        if rank % inner[0] != inner[0] - 1:
            here, there = cp_coordinates(layout, rank), cp_coordinates(layout, rank + 1)
            assert there[inner[1]] == here[inner[1]] + 1
            assert there[1 - inner[1]] == here[1 - inner[1]]


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        (Layout(), [[range(8)]]),
        (Layout(cp=2), [[range(2), range(6, 8)], [range(2, 4), range(4, 6)]]),
        (Layout(cp=2, cp_ulysses=2), [[range(4)], [range(4, 8)]]),
        (Layout(cp=4, cp_ulysses=2), [[range(2)], [range(6, 8)], [range(2, 4)], [range(4, 6)]]),
        (Layout(cp=4, cp_ulysses=2, cp_inner="ring"), [[range(2)], [range(2, 4)], [range(6, 8)], [range(4, 6)]]),
    ],
)
def test_eight_tokens(layout, expected):
    assert [rank_positions(layout, 8, rank) for rank in range(layout.cp)] == expected
