"""Packing: which conversations share a sample, so that less of it is padding.

Best-fit decreasing (D. S. Johnson, "Fast Algorithms for Bin Packing", JCSS 8, 1974): the longest first, each into the
fullest sample that still has room. It needs at most 11/9 of the fewest possible samples, and 6/9 more.
"""

from __future__ import annotations

from bisect import bisect_left, insort

import numpy as np


def pack(lengths: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """Packs items of `lengths` (items,), each from 1 to `capacity`, into bins of `capacity`.

    Returns the items in the order of their bins, (items,) int64, and where each bin begins, (bins + 1,) int64: bin b
    holds items[starts[b] : starts[b + 1]]. The result depends on the lengths alone."""
    free: list[int] = []
    """Room that some bin has left, in ascending order, each once."""
    bins_with: dict[int, list[int]] = {}
    bins = 0
    bin_of = np.empty(len(lengths), dtype=np.int64)
    order = np.argsort(-lengths, kind="stable")
    for item, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        place = bisect_left(free, length)
        if place == len(free):
            chosen, room = bins, capacity
            bins += 1
        else:
            room = free[place]
            chosen = bins_with[room].pop()
            if not bins_with[room]:
                del bins_with[room], free[place]
        bin_of[item] = chosen
        if left := room - length:
            if left not in bins_with:
                bins_with[left] = []
                insort(free, left)
            bins_with[left].append(chosen)
    items = np.argsort(bin_of, kind="stable")
    return items, np.searchsorted(bin_of[items], np.arange(bins + 1))


def one_each(items: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the result of `pack` with a bin for each item."""
    return np.arange(items), np.arange(items + 1)
