"""Schedules with split backward passes: the gradients of inputs (I), which other ranks wait for, come at once, those of
weights (W) later, where the rank would idle.

Bubbles are for passes F, I and W of equal time. An activation is live from its F to its W.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from phalanx.schedule.order import Lane, Pass, program, times
from phalanx.schedule.placement import round_robin
from phalanx.schedule.schedule import Schedule


def zb_h1(ranks: int, micro_batches: int) -> Schedule:
    """Runs 1F1B with rank r's W passes r micro-batches behind.

    Bubble (P - 1) / (3 M) if M >= P: a third of 1F1B's. Peak on every rank: the activations of min(M, P) micro-batches,
    rank 0's in 1F1B. Source: Qi et al. 2023 (Zero Bubble Pipeline Parallelism), section 2.1.
    """
    return _one_stage_per_rank("zb_h1", micro_batches, [(ranks - rank, rank) for rank in range(ranks)])


def zb_h2(ranks: int, micro_batches: int) -> Schedule:
    """Runs forward passes until the first gradient arrives, so that no rank ever waits: rank r begins with 2 (P - r) -
    1 of them, and its W passes lag 2 r micro-batches behind.

    Bubble 0 if M >= 2 P - 1. Peak on every rank: the activations of min(M, 2 P - 1) micro-batches. Source: Qi et al.
    2023, section 2.2. The optimizer is assumed not to wait for all ranks (section 4).
    """
    return _one_stage_per_rank("zb_h2", micro_batches, [(2 * (ranks - rank) - 1, 2 * rank) for rank in range(ranks)])


def _one_stage_per_rank(name: str, micro_batches: int, shifts: Sequence[tuple[int, int]]) -> Schedule:
    """Builds a schedule from each rank's number of initial forward passes and the lag of its W passes."""
    programs = [
        program(_passes(before, behind, micro_batches), [Lane(rank, range(micro_batches))])
        for rank, (before, behind) in enumerate(shifts)
    ]
    return Schedule(name, (round_robin(len(shifts)),), micro_batches, tuple(programs))


def _passes(before: int, behind: int, micro_batches: int) -> Iterator[Pass]:
    """Yields `before` forward passes, then F, I and W in turn, each W `behind` micro-batches after its I."""
    yield from times(before, ("F", 0))
    for micro in range(micro_batches):
        yield "I", 0
        if micro >= behind:
            yield "W", 0
        yield "F", 0
    yield from times(min(behind, micro_batches), ("W", 0))
