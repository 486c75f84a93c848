"""The start of every action of a schedule, for one duration per kind of action and free messages.

The closed forms of the papers are exact here (tests/schedule/test_closed_forms.py). `phalanx simulate` uses the times
of real stages and links.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from phalanx.schedule.bubble import bubble_fraction
from phalanx.schedule.events import run
from phalanx.schedule.schedule import Action, Schedule

UNIT = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}
"""Equal times for all matrix products: a backward pass has two for each one of the forward pass."""


@dataclass(frozen=True)
class Timing:
    """A timed schedule."""

    schedule: Schedule
    costs: Mapping[str, float]
    starts: tuple[tuple[float, ...], ...]
    """Start times of the actions, by rank; a rank in a deadlock has entries only for the actions before it."""

    @property
    def complete(self) -> bool:
        """Whether every rank reached the end of its program."""
        return all(len(s) == len(p) for s, p in zip(self.starts, self.schedule.programs, strict=True))

    @cached_property
    def duration(self) -> float:
        """Time from the first action of any rank to the end of the last."""
        return max(self.end(rank) for rank in range(self.schedule.ranks))

    @property
    def bubble(self) -> float:
        """The bubble of the schedule with its flush (bubble.py)."""
        return bubble_fraction(self.bubble_time, self.duration)

    @property
    def bubble_time(self) -> float:
        """Idle time of the busiest rank."""
        return self.duration - max(map(self.work, range(self.schedule.ranks)))

    @property
    def bubble_without_flush(self) -> float:
        """Largest idle time between a rank's first and last action over the rank's work: the bubble if optimizers need
        not wait for each other, so that neighbouring steps fill warm-up and drain (Qi et al. 2023, sections 4 and 5.3).
        The zero-bubble papers report this one."""
        return max(self.idle_inside(rank) / self.work(rank) for rank in range(self.schedule.ranks))

    def work(self, rank: int) -> float:
        return sum(self.costs[action.kind] for action in self.schedule.programs[rank])

    def idle(self, rank: int) -> float:
        """Returns the idle time of a rank between the first action of any rank and the end of the last."""
        return self.duration - self.work(rank)

    def idle_inside(self, rank: int) -> float:
        """Returns the idle time of a rank between its own first action and its last."""
        return self.end(rank) - self.starts[rank][0] - self.work(rank)

    def end(self, rank: int) -> float:
        return self.starts[rank][-1] + self.costs[self.schedule.programs[rank][-1].kind]


def time(schedule: Schedule, costs: Mapping[str, float] = UNIT) -> Timing:
    """Times a schedule: every rank runs its actions in order, each as soon as its inputs have arrived (events.py). In a
    deadlock, or if an input is never produced, the result is not `complete`."""
    alike = {kind: (cost,) * schedule.stages for kind, cost in costs.items()}
    return Timing(schedule, costs, run(schedule, (alike,) * schedule.ranks).starts)


def waits_for(timing: Timing) -> list[tuple[int, Action, tuple[Action, ...]]]:
    """Returns, for a timing that is not complete, each blocked rank with the action that it cannot begin and the
    missing inputs of that action (all of several alternatives)."""
    programs = timing.schedule.programs
    done = {
        action for program, starts in zip(programs, timing.starts, strict=True) for action in program[: len(starts)]
    }
    found = []
    for rank, (program, starts) in enumerate(zip(programs, timing.starts, strict=True)):
        if len(starts) == len(program):
            continue
        action = program[len(starts)]
        missing = [need for group in timing.schedule.needs(action) if not done & set(group) for need in group]
        found.append((rank, action, tuple(missing)))
    return found
