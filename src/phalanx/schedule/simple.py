"""Schedules with one stage per rank and whole backward passes.

Bubbles are idle time over ideal computation time, with P ranks, M micro-batches, and a backward pass that takes b times
as long as a forward pass; the given bubbles hold for every b.
"""

from __future__ import annotations

from phalanx.schedule.placement import round_robin
from phalanx.schedule.schedule import Action, Schedule


def naive(ranks: int, micro_batches: int) -> Schedule:
    """Runs one micro-batch at a time, forward and back: one rank works while the others wait.

    Bubble P - 1. Peak: the activations of 1 micro-batch. Source: Huang et al. 2019 (GPipe), figure 2b.
    """
    programs = [
        [Action(kind, rank, micro) for micro in range(micro_batches) for kind in ("F", "B")] for rank in range(ranks)
    ]
    return Schedule("naive", (round_robin(ranks),), micro_batches, tuple(map(tuple, programs)))


def gpipe(ranks: int, micro_batches: int) -> Schedule:
    """Runs all forward passes, then all backward passes.

    Bubble (P - 1) / M. Peak: the activations of M micro-batches. Source: Huang et al. 2019, section 2.2. The paper
    reverses the backward passes; here they are in the order of the micro-batches, with the same bubble and peak, so
    that gradients are accumulated in the same order as in the other schedules.
    """
    micros = range(micro_batches)
    programs = [[Action(kind, rank, micro) for kind in ("F", "B") for micro in micros] for rank in range(ranks)]
    return Schedule("gpipe", (round_robin(ranks),), micro_batches, tuple(map(tuple, programs)))


def one_f_one_b(ranks: int, micro_batches: int) -> Schedule:
    """Runs P - 1 - r forward passes on rank r; then forward and backward passes alternate, until only backward passes
    remain.

    Bubble (P - 1) / M. Peak on rank r: the activations of min(M, P - r) micro-batches. Source: Narayanan et al. 2021,
    section 2.2 (PipeDream-Flush).
    """
    programs = [alternating(rank, micro_batches, before=ranks - 1 - rank) for rank in range(ranks)]
    return Schedule("1f1b", (round_robin(ranks),), micro_batches, tuple(programs))


def alternating(stage: int, micro_batches: int, before: int) -> tuple[Action, ...]:
    """Returns the program of one stage: `before` forward passes, alternating forward and backward passes, the remaining
    backward passes. A stage then has at most `before` + 1 micro-batches in flight."""
    forward = [Action("F", stage, micro) for micro in range(micro_batches)]
    backward = [Action("B", stage, micro) for micro in range(micro_batches)]
    return take_turns(forward, backward, before)


def take_turns(forward: list[Action], backward: list[Action], before: int) -> tuple[Action, ...]:
    """Returns `before` forward passes, then forward and backward passes in turn, then the remaining backward passes."""
    before = min(before, len(forward))
    turns = [action for pair in zip(forward[before:], backward, strict=False) for action in pair]
    return (*forward[:before], *turns, *backward[len(forward) - before :])
