"""Packing: every item once, no bin above its capacity, few bins, and the same ones every time."""

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from phalanx.data.conversations import one_each, pack

CAPACITY = 50


@given(st.lists(st.integers(1, CAPACITY), min_size=1, max_size=200))
def test_every_item_is_in_one_bin_that_has_room_for_it(lengths: list[int]) -> None:
    sizes = np.array(lengths)
    items, starts = pack(sizes, CAPACITY)
    assert sorted(items.tolist()) == list(range(len(lengths)))
    assert starts[0] == 0
    assert starts[-1] == len(lengths)
    filled = np.add.reduceat(sizes[items], starts[:-1])
    assert filled.max() <= CAPACITY
    # Johnson's bound, with the sum of the lengths in place of the fewest possible bins.
    assert len(filled) <= 11 / 9 * max(1, -(-sizes.sum() // CAPACITY)) + 6 / 9 or (2 * sizes > CAPACITY).sum() > 1
    assert (filled * 2 > CAPACITY).sum() >= len(filled) - 1  # two half empty bins would have been one


def test_the_fullest_bin_with_room_is_chosen() -> None:
    items, starts = pack(np.array([3, 6, 4, 7]), 10)
    assert [items[a:b].tolist() for a, b in itertools.pairwise(starts)] == [[0, 3], [1, 2]]


def test_without_packing_each_has_its_own() -> None:
    items, starts = one_each(3)
    assert items.tolist() == [0, 1, 2]
    assert starts.tolist() == [0, 1, 2, 3]
