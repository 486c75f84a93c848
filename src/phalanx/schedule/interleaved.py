"""Schedules with several stages per rank, placed round-robin: a smaller bubble for more messages."""

from __future__ import annotations

from phalanx.schedule.placement import round_robin
from phalanx.schedule.schedule import Action, Schedule
from phalanx.schedule.simple import take_turns


def interleaved_1f1b(ranks: int, micro_batches: int, chunks: int = 2) -> Schedule:
    """Runs 1F1B over V = `chunks` stages per rank: groups of P micro-batches pass through a rank's first stage, then
    through its second, and so on; the last group may be smaller.

    Bubble (P - 1) / (V M) if P divides M, otherwise more. Peak on rank 0: min(M V, P V + P - 1) stage activations.
    Source: Narayanan et al. 2021, section 2.2.
    """
    programs = [_interleaved(rank, ranks, micro_batches, chunks) for rank in range(ranks)]
    return Schedule("interleaved_1f1b", (round_robin(ranks, chunks),), micro_batches, tuple(programs))


def looped_bfs(ranks: int, micro_batches: int, chunks: int = 2) -> Schedule:
    """Runs breadth first: all micro-batches pass through a rank's first stage, then through its second, and so on;
    backward passes process the stages in reverse. Each stage's parameters are needed in one stretch per direction,
    which suits sharded parameters.

    Bubble (P - 1) / (V M) if M >= P. Peak: M V stage activations. Source: Lamy-Poirier 2022 (Breadth-First Pipeline
    Parallelism), section 4.
    """
    micros, passes = range(micro_batches), range(chunks)
    programs = [
        (
            *(Action("F", rank + chunk * ranks, micro) for chunk in passes for micro in micros),
            *(Action("B", rank + chunk * ranks, micro) for chunk in reversed(passes) for micro in micros),
        )
        for rank in range(ranks)
    ]
    return Schedule("looped_bfs", (round_robin(ranks, chunks),), micro_batches, tuple(programs))


def _interleaved(rank: int, ranks: int, micro_batches: int, chunks: int) -> tuple[Action, ...]:
    # A smaller last group is filled up with micro-batches that are dropped in the end: a part of an order without
    # deadlock has none.
    groups = [range(first, first + ranks) for first in range(0, micro_batches, ranks)]
    stages = range(rank, ranks * chunks, ranks)
    forward = [Action("F", stage, micro) for group in groups for stage in stages for micro in group]
    backward = [Action("B", stage, micro) for group in groups for stage in reversed(stages) for micro in group]
    # The first group goes through all stages but the last; a rank further from the end has two more passes to do for
    # each rank in between: there and back.
    before = (chunks - 1) * ranks + 2 * (ranks - 1 - rank)
    return tuple(action for action in take_turns(forward, backward, before) if action.micro < micro_batches)
