"""The keys that the positions of a ring send each other, against every pair of a query and a key."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.blocks.attention import RingKeys, ring_hops, ring_keys, zigzag_runs
from phalanx.blocks.kinds import block, block_kinds
from phalanx.blocks.operator import place_of
from phalanx.config.layout import Layout
from phalanx.config.model import ModelConfig

SHAPES = st.tuples(st.integers(1, 3), st.integers(2, 6), st.integers(1, 3))
"""Tokens of a chunk, positions of the ring, slices."""


def by_definition(chunk: int, ring: int, slices: int, window: int) -> list[dict[tuple[int, int], int]]:
    """For each slice, the keys so far of one position that a query of another sees, by both positions."""
    tokens = 2 * chunk * ring

    def held(position: int, seen: range) -> list[int]:
        return [part * tokens + at for part in seen for run in zigzag_runs(tokens, ring, position) for at in run]

    return [
        {
            (of, to): sum(
                any(key <= query < key + window for query in held(to, range(last, last + 1)))
                for key in held(of, range(last + 1))
            )
            for of in range(ring)
            for to in range(ring)
            if of != to
        }
        for last in range(slices)
    ]


@settings(max_examples=60)
@given(SHAPES, st.data())
def test_a_position_sends_the_keys_that_others_see(shape, data):
    chunk, ring, slices = shape
    window = data.draw(st.integers(1, 2 * chunk * ring * slices))
    position = data.draw(st.integers(0, ring - 1))
    seen = by_definition(chunk, ring, slices, window)
    found = ring_keys(2 * chunk * ring * slices, ring, slices, window, position)
    for numbers, side in ((found.sent, 0), (found.received, 1)):
        expected = [many for each in seen for pair, many in each.items() if pair[side] == position and many]
        assert Counter(numbers) == Counter(expected)
    hops = {(to - of) % ring for (of, to), many in seen[-1].items() if many}
    assert set(ring_hops(2 * chunk * ring, ring, slices, window)) == hops


@given(SHAPES, st.data())
def test_the_time_counts_the_position_that_sends_most(shape, data):
    chunk, ring, _ = shape
    window = data.draw(st.integers(1, 2 * chunk * ring))
    every = [sum(ring_keys(2 * chunk * ring, ring, 1, window, position).sent) for position in range(ring)]
    assert sum(ring_keys(2 * chunk * ring, ring, 1, window).sent) == max(every)


def test_by_hand():
    """Four positions of two chunks of 4 tokens, and a window of 3: the last two keys of each chunk go to the position
    of the next chunk. The first position has no chunk after its second one; the last one's chunks are neighbours."""
    assert [ring_keys(32, 4, 1, 3, position) for position in range(4)] == [
        RingKeys((2,), (2,)),
        RingKeys((2, 2), (2, 2)),
        RingKeys((2, 2), (2, 2)),
        RingKeys((2,), (2,)),
    ]
    assert ring_hops(32, 4, 1, 3) == (1, 3)
    assert ring_hops(32, 4, 1, 1) == ()


MODEL = ModelConfig(n_layers=4, d_model=64, n_heads=8, n_kv_heads=2, seq_len=4096, window=128, full_every=4)


@pytest.mark.parametrize(("layout", "heads"), [(Layout(cp=4), 2), (Layout(cp=8, cp_ulysses=2), 1)])
def test_messages_of_layers_of_two_kinds(layout, heads):
    """Keys and values of 127 tokens to two neighbours; full layers send the whole parts around the ring."""
    kinds, each = block_kinds(MODEL), 3 * heads * 2 * 8
    assert kinds == (kinds[0],) * 3 + (kinds[0]._replace(window=0),)
    sends = [
        [one for operator in block(place_of(MODEL, layout, 3), kind) for one in operator.messages if one.axis == "ring"]
        for kind in (kinds[0], kinds[3])
    ]
    assert [(one.elements, one.number, one.forward, one.backward) for one in sends[0]] == [
        (127 * each, "activation", 2, 2),
        (127 * each, "wide", 0, 2),
    ]
    assert [(one.elements, one.number, one.forward, one.backward) for one in sends[1]] == [
        (1024 * each, "activation", 3, 3),
        (1024 * each, "wide", 0, 3),
    ]


def test_a_window_over_the_whole_sequence_is_no_kind_of_its_own():
    assert block_kinds(replace(MODEL, window=4096)) == block_kinds(replace(MODEL, window=0))
