"""Pipelines of sequence slices: one micro-batch's slices fill the pipeline, because causal attention looks back."""

from __future__ import annotations

from phalanx.schedule.placement import round_robin
from phalanx.schedule.schedule import Action, Schedule
from phalanx.schedule.simple import take_turns


def terapipe(ranks: int, micro_batches: int, slices: int = 4) -> Schedule:
    """Runs 1F1B over slices: the forward passes of a micro-batch's slices in order, the backward passes in reverse,
    because later slices attend to earlier ones.

    Bubble (P - 1) / (K M) with K = `slices` of equal cost. Peak on rank r: the activations of min(K M, K + P - 1 - r)
    slices. Source: Li et al. 2021 (TeraPipe), section 3.2; the paper runs all forward passes first, like GPipe, and so
    has K M live slices.
    """
    parts, micros = range(slices), range(micro_batches)
    programs = [
        take_turns(
            [Action("F", rank, micro, part) for micro in micros for part in parts],
            [Action("B", rank, micro, part) for micro in micros for part in reversed(parts)],
            before=slices - 1 + ranks - 1 - rank,
        )
        for rank in range(ranks)
    ]
    return Schedule("terapipe", (round_robin(ranks),), micro_batches, tuple(programs), slices=slices)
