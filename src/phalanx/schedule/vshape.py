"""Schedules with two stages per rank in the shape of a V: rank r holds stages r and 2P - 1 - r.

Bubbles are for passes F, I and W of equal time, with P ranks and M micro-batches. Activations are those of one stage,
half of a micro-batch's on a rank: 2 P of them equal the peak of 1F1B on rank 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from phalanx.schedule import bidirectional
from phalanx.schedule.greedy import with_weight_passes
from phalanx.schedule.order import Lane, Pass, program, times
from phalanx.schedule.placement import v_shape
from phalanx.schedule.schedule import Action, Kind, Schedule

Passes = Callable[[int, int, int], Iterator[Pass]]
"""A generator of a rank's passes from the rank, the number of ranks and the number of micro-batches. Lane 0 is the
rank's first stage, on the way to the last rank; lane 1 its second, on the way back."""


def zb_v(ranks: int, micro_batches: int) -> Schedule:
    """Has no bubble, and no more activations than 1F1B.

    Bubble 0 if M >= 2 P - 1. Peak on every rank: 2 min(M, P) activations. Source: Qi et al. 2023 (Zero Bubble Pipeline
    Parallelism), section 6.
    """
    return _v_schedule("zb_v", _zb_v, ranks, micro_batches)


def v_half(ranks: int, micro_batches: int) -> Schedule:
    """Has half of the activations of 1F1B and half of its bubble.

    Bubble (P - 1) / (2 M) for an even P, (P - 4 / 3) / (2 M) for an odd one, if M >= P. Peak on every rank: 2 (floor(P
    / 2) + 1) activations. Source: Qi et al. 2024 (Pipeline Parallelism with Controllable Memory), section 3.
    """
    orders = [_v_half(rank, ranks, micro_batches) for rank in range(ranks)]
    programs = with_weight_passes(orders, stages=2 * ranks, most=_activation_limit(ranks))
    return Schedule("v_half", (v_shape(ranks),), micro_batches, programs)


def dualpipe_v(ranks: int, micro_batches: int) -> Schedule:
    """Runs one half of DualPipe's ranks as a V: the return of its own micro-batches replaces those of the other half,
    so there is no second copy of the parameters.

    With M >= 2 P: bubble (P - 1) (F + B + B - 3 W) over 2 M (F + B) if the forward and backward pass of a pair wait for
    each other; with F = I = W, (P - 1) / (6 M) if they need not. Peak on every rank: min(2 M, 2 P + 1) activations.
    Source: DeepSeek-AI 2025 (the DualPipe repository), DualPipeV; DualPipe itself is in the DeepSeek-V3 Technical
    Report, section 3.2.1.
    """
    return _v_schedule("dualpipe_v", bidirectional.passes, ranks, micro_batches)


def _v_schedule(name: str, passes: Passes, ranks: int, micro_batches: int) -> Schedule:
    micros = range(micro_batches)
    programs = [
        program(passes(rank, ranks, micro_batches), (Lane(rank, micros), Lane(2 * ranks - 1 - rank, micros)))
        for rank in range(ranks)
    ]
    return Schedule(name, (v_shape(ranks),), micro_batches, tuple(programs))


def _zb_v(rank: int, ranks: int, micro_batches: int) -> Iterator[Pass]:
    """Yields forward passes until the first micro-batch's gradient is there; then F, I and W in turn for each lane; at
    the end W passes wherever no I is left. Needs at least 2 P - 1 micro-batches."""
    to_end = ranks - rank
    yield from times(2 * to_end - 1, ("F", 0))
    yield from times(rank, ("F", 1), ("F", 0))
    yield from times(to_end, ("F", 1), ("I", 1), ("W", 1))
    turns = max(micro_batches, 2 * ranks - 1) - ranks
    yield from times(turns, ("F", 0), ("I", 0), ("W", 0), ("F", 1), ("I", 1), ("W", 1))
    yield from times(rank, ("I", 0), ("I", 1))
    yield from times(to_end, ("I", 0), ("W", 0))
    yield from times(rank, ("W", 1), ("W", 0))


def _activation_limit(ranks: int) -> int:
    """Returns the live activations that each of P ranks may have: an even number above P."""
    return 2 * (ranks // 2 + 1)


def _v_half(rank: int, ranks: int, micro_batches: int) -> list[Action]:
    """Returns the F and I passes of a rank. Every micro-batch has the same block of them, one block per 6 units of
    time: its forward passes reach the last rank by one unit per rank and return by two, and its gradients do the same a
    fixed time later. On rank r, passes on the way out thus fall on times that are r modulo 3, those on the way back on
    r + 1, and no two coincide."""
    out, back = rank, ranks + 2 * (ranks - 1 - rank)
    later = 3 * (_activation_limit(ranks) - 1)
    first, second = rank, 2 * ranks - 1 - rank
    block: list[tuple[int, Kind, int]] = [
        (out, "F", first),
        (back, "F", second),
        (out + later, "I", second),
        (back + later, "I", first),
    ]
    timed: list[tuple[int, Kind, int, int]] = sorted(
        (start + 6 * micro, kind, stage, micro) for start, kind, stage in block for micro in range(micro_batches)
    )
    return [Action(kind, stage, micro) for _, kind, stage, micro in timed]
