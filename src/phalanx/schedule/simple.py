"""Schedules with one stage a rank and whole backward passes.

Bubbles are idle time over work, with P ranks, M micro-batches, and a backward pass that takes b times as long as a
forward pass; the bubbles given hold for every b.
"""

from __future__ import annotations

from phalanx.schedule.placement import round_robin
from phalanx.schedule.schedule import Action, Schedule


def naive(ranks: int, micro_batches: int) -> Schedule:
    """One micro-batch at a time, all the way forward and all the way back: one rank works and the others wait.

    Bubble P - 1. Peak: the activations of 1 micro-batch. Source: Huang et al. 2019 (GPipe), figure 2b."""
    programs = [
        [Action(kind, rank, micro) for micro in range(micro_batches) for kind in ("F", "B")] for rank in range(ranks)
    ]
    return Schedule("naive", (round_robin(ranks),), micro_batches, tuple(map(tuple, programs)))


def gpipe(ranks: int, micro_batches: int) -> Schedule:
    """All forward passes, then all backward passes.

    Bubble (P - 1) / M. Peak: the activations of M micro-batches. Source: Huang et al. 2019, section 2.2. The paper has
    the backward passes in reverse; here, for the same bubble and peak, in the order of the micro-batches, so that
    gradients are added up in the same order as in the other schedules."""
    micros = range(micro_batches)
    programs = [[Action(kind, rank, micro) for kind in ("F", "B") for micro in micros] for rank in range(ranks)]
    return Schedule("gpipe", (round_robin(ranks),), micro_batches, tuple(map(tuple, programs)))


def one_f_one_b(ranks: int, micro_batches: int) -> Schedule:
    """Rank r begins with P - 1 - r forward passes; then forward and backward passes take turns, until the rest of the
    backward passes remains.

    Bubble (P - 1) / M. Peak on rank r: the activations of min(M, P - r) micro-batches. Source: Narayanan et al. 2021,
    section 2.2 (PipeDream-Flush)."""
    programs = [alternating(rank, micro_batches, before=ranks - 1 - rank) for rank in range(ranks)]
    return Schedule("1f1b", (round_robin(ranks),), micro_batches, tuple(programs))


def alternating(stage: int, micro_batches: int, before: int) -> tuple[Action, ...]:
    """The program of one stage: `before` forward passes, forward and backward passes in turn, the backward passes left.

    A stage has thus at most `before` + 1 micro-batches in flight."""
    forward = [Action("F", stage, micro) for micro in range(micro_batches)]
    backward = [Action("B", stage, micro) for micro in range(micro_batches)]
    return take_turns(forward, backward, before)


def take_turns(forward: list[Action], backward: list[Action], before: int) -> tuple[Action, ...]:
    """`before` of the forward passes, then one forward and one backward pass in turn, then the backward passes left."""
    before = min(before, len(forward))
    turns = [action for pair in zip(forward[before:], backward, strict=False) for action in pair]
    return (*forward[:before], *turns, *backward[len(forward) - before :])
