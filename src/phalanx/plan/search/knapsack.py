"""Recomputation of the blocks of a pipeline rank under a memory limit: a multiple-choice knapsack.

Each block has a few choices (it saves its activations, or recomputes some or all of them), each with its bytes and its
seconds. Blocks of a group are equal, so only numbers count; groups are few: the result is exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import inf
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

MOST = 4096
"""Most combinations of groups that are kept, of those on the Pareto front of bytes and seconds."""


class EqualBlocks(NamedTuple):
    """Equal blocks with their choices."""

    blocks: int
    bytes: tuple[float, ...]
    """Bytes per block, by choice."""
    seconds: tuple[float, ...]


class Filling(NamedTuple):
    """The fastest combination that fits."""

    seconds: float
    numbers: tuple[tuple[int, ...], ...]
    """Number of blocks of each group by choice."""


class _Frontier(NamedTuple):
    """The Pareto front of combinations, by rising bytes and falling seconds."""

    bytes: NDArray[np.float64]
    seconds: NDArray[np.float64]
    rows: NDArray[np.intp]
    """The origin of each point: a row of the group's combinations, or the rows of two frontiers."""


def fill(groups: Sequence[EqualBlocks], room: float) -> Filling | None:
    """Returns the choices of every group's blocks that take the least seconds and at most `room` bytes; None if there
    are none."""
    if sum(group.blocks * min(group.bytes) for group in groups) > room:
        return None
    # Most often the fastest choices fit.
    fastest = [min(range(len(group.seconds)), key=lambda n, group=group: group.seconds[n]) for group in groups]
    if sum(group.blocks * group.bytes[n] for group, n in zip(groups, fastest, strict=True)) <= room:
        numbers = tuple(
            tuple(group.blocks * (n == best) for n in range(len(group.bytes)))
            for group, best in zip(groups, fastest, strict=True)
        )
        return Filling(sum(group.blocks * group.seconds[n] for group, n in zip(groups, fastest, strict=True)), numbers)
    frontiers = [_frontier(group) for group in groups]
    steps = list[_Frontier]()
    whole = frontiers[0]
    for other in frontiers[1:]:
        whole = _together(whole, other)
        steps.append(whole)
    place = int(np.searchsorted(whole.bytes, room, side="right")) - 1
    if place < 0:
        return None
    seconds = float(whole.seconds[place])
    rows = list[int]()
    for step in reversed(steps):
        place, last = (int(row) for row in step.rows[place])
        rows.append(last)
    rows.append(place)
    chosen = zip(groups, frontiers, reversed(rows), strict=True)
    return Filling(seconds, tuple(_choice(group, int(frontier.rows[row])) for group, frontier, row in chosen))


def _choice(group: EqualBlocks, number: int) -> tuple[int, ...]:
    return tuple(int(n) for n in _choices(group.blocks, len(group.bytes))[number])


@lru_cache(4096)
def _choices(count: int, things: int) -> NDArray[np.intp]:
    """Returns every way in which `count` blocks make their choices, one per row."""
    if things == 1:
        return np.array([[count]])
    return np.concatenate(
        [np.insert(_choices(count - n, things - 1), 0, n, axis=1) for n in range(count + 1)]  # n make the first choice
    )


@lru_cache(4096)
def _frontier(group: EqualBlocks) -> _Frontier:
    choices = _choices(group.blocks, len(group.bytes)).astype(np.float64)
    return _unbeaten(choices @ np.array(group.bytes), choices @ np.array(group.seconds))


def _together(one: _Frontier, other: _Frontier) -> _Frontier:
    """Returns the frontier of every combination of two; its rows are pairs."""
    found = _unbeaten(
        np.add.outer(one.bytes, other.bytes).ravel(), np.add.outer(one.seconds, other.seconds).ravel(), MOST
    )
    return found._replace(rows=np.stack(np.divmod(found.rows, len(other.bytes)), 1))


def _unbeaten(sizes: NDArray[np.float64], seconds: NDArray[np.float64], most: float = inf) -> _Frontier:
    order = np.lexsort((seconds, sizes))
    sizes, seconds = sizes[order], seconds[order]
    before = np.concatenate([[inf], np.minimum.accumulate(seconds)[:-1]])
    kept = np.flatnonzero(seconds < before)
    if len(kept) > most:
        kept = kept[np.unique(np.linspace(0, len(kept) - 1, int(most)).astype(int))]
    return _Frontier(sizes[kept], seconds[kept], order[kept])
