"""The order of passes that DualPipe and its V-shaped form share."""

from __future__ import annotations

from collections.abc import Iterator

from phalanx.schedule.order import Pass, times


def passes(rank: int, ranks: int, micro_batches: int) -> Iterator[Pass]:
    """Yields the passes of one of `ranks` ranks that lead to a fold and back: lane 0 has micro-batches on their way to
    the fold at the last rank, lane 1 on their way back. Each lane has at least `micro_batches` passes. Backward passes
    are split where the ranks wait for them (at the start) or where their W can fill a bubble (at the end); in between
    they stay whole, each next to a forward pass of the other lane."""
    to_fold = ranks - 1 - rank
    yield from times(2 * to_fold, ("F", 0))
    yield from times(rank + 1, ("F", 0), ("F", 1))
    yield from times(to_fold, ("I", 1), ("W", 1), ("F", 1))
    yield from times(max(micro_batches, 2 * ranks) - 2 * ranks + rank + 1, ("F", 0), ("B", 1), ("F", 1), ("B", 0))
    yield from times(to_fold, ("B", 1), ("F", 1), ("B", 0))
    yield from times(rank + 1, ("B", 1), ("B", 0))[: rank + 1]
    split = ([1, 0] * (rank + 1))[rank + 1 :]
    late = split + [0] * to_fold
    for lane in split:
        yield "I", lane
    for lane in late[:to_fold]:
        yield "W", lane
        yield "I", 0
    for lane in late[to_fold:]:
        yield "W", lane
