"""Layers of each stage that minimise the slowest pipeline rank, with every rank within its memory.

With one stage per rank dynamic programming finds the best cut (cut.py). With several, a rank's stages are apart and its
time is their sum: then single layers move from the slowest rank to others until that helps no more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf

import numpy as np

from phalanx.partition.cut import Floats, Places, cut_by
from phalanx.partition.stages import ranges
from phalanx.plan.search.rank_costs import Counts, PipelineRanks

LARGEST = 2
"""Largest stage as a multiple of the mean number of layers, to which as many are added: larger ones are never best."""
MOVES = 200
"""Most layers that are moved."""
BETTER = 1 - 1e-9
"""Factor that counts as an improvement: sums of floats depend on their order."""


def stages_of_ranks(ranks: PipelineRanks, start: Sequence[range]) -> tuple[range, ...]:
    """Returns the layers of each stage, starting from `start` if layers are moved; empty if nothing fits."""
    if all(len(flight.held) == 1 for flight in ranks.flights):
        return _best(ranks)
    return _moved(ranks, start)


def _best(ranks: PipelineRanks) -> tuple[range, ...]:
    layers, stages = len(ranks.of_layer), ranks.stages
    before = np.array(ranks.before)
    of_stage = {flight.held[0]: rank for rank, flight in enumerate(ranks.flights)}
    most = LARGEST * (-(-layers // stages) + 1)

    def cost(stage: int, begins: Places, ends: Places) -> Floats:
        begins, ends = np.broadcast_arrays(begins, ends)
        counts = (before[:, ends] - before[:, begins]).reshape(len(before), -1)
        known, which = np.unique(counts, axis=1, return_inverse=True)
        found = [
            ranks.seconds(of_stage[stage], (tuple(map(int, one)),)) if 0 < one.sum() <= most and one.min() >= 0 else inf
            for one in known.T
        ]
        return np.array(found)[which].reshape(begins.shape)

    return cut_by(cost, stages, layers)


def _moved(ranks: PipelineRanks, start: Sequence[range]) -> tuple[range, ...]:
    sizes = [len(stage) for stage in start]
    counts = ranks.counts(ranges(sizes))
    seconds = [ranks.seconds(rank, ranks.held(rank, counts)) for rank in range(len(ranks.flights))]
    if max(seconds) == inf:
        return ()
    for _ in range(MOVES):
        slowest, squares = max(seconds), sum(one * one for one in seconds)
        best = slowest, squares * BETTER
        moved: tuple[list[int], list[float]] | None = None
        for other in _moves(ranks, sizes, seconds.index(slowest)):
            found = _seconds(ranks, other, counts, seconds)
            value = max(found), sum(one * one for one in found)
            if value[0] <= best[0] and value < best:
                best, moved = value, (other, found)
        if moved is None:
            break
        sizes, seconds = moved
        counts = ranks.counts(ranges(sizes))
    return ranges(sizes)


def _moves(ranks: PipelineRanks, sizes: Sequence[int], slowest: int) -> Iterator[list[int]]:
    """Yields the sizes with one layer of one of a rank's stages given to another stage; stages between them shift."""
    for giver in ranks.flights[slowest].held:
        if sizes[giver] == 1:
            continue
        for taker in range(len(sizes)):
            if taker != giver:
                other = list(sizes)
                other[giver] -= 1
                other[taker] += 1
                yield other


def _seconds(
    ranks: PipelineRanks, sizes: Sequence[int], counts: Sequence[Counts], seconds: Sequence[float]
) -> list[float]:
    """Returns the seconds of every rank with new sizes; `counts` and `seconds` are those before."""
    now = ranks.counts(ranges(sizes))
    changed = {stage for stage, (one, other) in enumerate(zip(now, counts, strict=True)) if one != other}
    return [
        ranks.seconds(rank, ranks.held(rank, now)) if changed.intersection(flight.held) else before
        for rank, (flight, before) in enumerate(zip(ranks.flights, seconds, strict=True))
    ]
