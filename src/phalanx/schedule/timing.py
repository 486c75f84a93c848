"""When every action of a schedule starts: each rank runs its actions in order, each as soon as its inputs have arrived.

`run` takes the times of real stages and links (phalanx.simulate), `time` one duration per kind of action and free
messages: the closed forms of the papers are exact there (tests/schedule/test_closed_forms.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter, sub

from phalanx.errors import JobError
from phalanx.schedule.schedule import Action, Schedule


def bubble_fraction(idle: float, step: float) -> float:
    """Returns the bubble of a step: bubble time over ideal time (Narayanan et al. 2021, section 2.2, t_pb / t_id).

    `idle` is the time that the busiest pipeline rank waits for other ranks, `step` the whole step with its flush, from
    the first action of any rank to the end of the last; the ideal time is the step without that idle time. 1F1B has (P
    - 1) / M.
    """
    return idle / (step - idle)


NOT_YET = math.inf
Durations = Mapping[str, Sequence[float]]
"""Durations of one rank's passes: by kind of action, the time at each stage."""


@dataclass(frozen=True)
class Events:
    """The start times of every action of a schedule."""

    schedule: Schedule
    starts: tuple[tuple[float, ...], ...]
    """Start times of the actions, by rank; a rank in a deadlock has entries only for the actions before it."""
    arrivals: Sequence[float]
    """Arrival times of results at the next stage, by stage, micro-batch and slice, first of forward and then of
    backward passes (or their I)."""

    def arrivals_of(self, rank: int, some: slice = slice(None)) -> list[float]:
        """Returns, per action of a rank or `some` of them, the time at which its result is on the rank that needs it;
        for a W, which no rank needs, that of its I."""
        micros, slices = self.schedule.micro_batches, self.schedule.slices
        backward = self.schedule.stages * micros * slices
        return [
            self.arrivals[(stage * micros + micro) * slices + part + (0 if kind == "F" else backward)]
            for kind, stage, micro, part in self.schedule.programs[rank][some]
        ]

    def growth(self, period: int) -> float | None:
        """Returns the seconds by which `period` more micro-batches prolong the step, if the full pipeline has settled:
        every action and every arrival of its last period is as much later as the same one a period before, and so all
        that follows would be. None if it has not."""
        return next((found for pick in (max, min) if (found := self._growth(period, pick))), None)

    def _growth(self, period: int, pick: Callable[[Iterable[int]], int]) -> float | None:
        """Returns the same; a rank's last period ends with the last F of one of its stages."""
        schedule, later = self.schedule, list[float]()
        shift = period // len(schedule.placements)
        for rank, (program, starts) in enumerate(zip(schedule.programs, self.starts, strict=True)):
            forward = [place for place, action in enumerate(program, 1) if action[0] == "F"]
            end = pick({program[place - 1][1]: place for place in forward}.values())
            many = len(program) * period // schedule.micro_batches
            now, before = slice(end - many, end), slice(end - 2 * many, end - many)
            inside = sum(end - many < place <= end for place in forward)
            if end < 2 * many or inside * schedule.micro_batches != len(forward) * period:
                return None
            for one, other in zip(program[now], program[before], strict=True):
                if one[:2] != other[:2] or one[2] != other[2] + shift or one[3] != other[3]:
                    return None
            later += map(sub, starts[now], starts[before])
            later += map(sub, self.arrivals_of(rank, now), self.arrivals_of(rank, before))
        least, most = min(later), max(later)
        return most if most - least <= SETTLED * most else None


SETTLED = 1e-12
"""Relative difference between equal times that were summed in different orders."""


def run(
    schedule: Schedule,
    durations: Sequence[Durations],
    p2p_seconds: Mapping[tuple[int, int], float] | None = None,
    floors: Sequence[Sequence[float]] | None = None,
    blocking: bool = False,
) -> Events:
    """Runs the schedule with the `durations` of each rank's passes.

    `p2p_seconds` is the time of a message by sender and receiver (default 0). Messages between two ranks are sent one
    after the other, during the passes or, if `blocking`, while the sender waits. `floors` are the earliest starts of
    forward passes, by rank and stage. Each action is visited once, so 10^5 of them take a fraction of a second. In a
    deadlock some ranks have fewer starts than actions.
    """
    micros, slices, last = schedule.micro_batches, schedule.slices, schedule.stages - 1
    stage_size, backward, sliced = micros * slices, schedule.stages * micros * slices, slices > 1
    ends = [NOT_YET] * (2 * backward)
    arrived = ends if not p2p_seconds else list(ends)
    waiting = [-1] * (2 * backward)
    starts: list[list[float]] = [[] for _ in range(schedule.ranks)]
    directions, channels = (
        len(schedule.placements),
        {pair: [seconds, 0.0] for pair, seconds in (p2p_seconds or {}).items() if seconds},
    )
    # Channels of results by direction and stage, each with its seconds per message and the time when it is free.
    onward, back = (
        [[channels.get((at, to)) for at, to in zip(ranks, others, strict=True)] for ranks, others in neighbours]
        for neighbours in (
            [(ranks, (*ranks[1:], ranks[-1])) for ranks in schedule.placements],
            [(ranks, (ranks[0], *ranks[:-1])) for ranks in schedule.placements],
        )
    )
    ready = list(range(schedule.ranks))

    def passes(rank: int) -> Iterator[int]:
        """Runs the program of a rank; yields the input that an action lacks, until it is there."""
        clock, started, seconds, floor = 0.0, starts[rank].append, durations[rank], floors[rank] if floors else None
        forward, whole, inputs, weights = (seconds.get(kind, ()) for kind in "FBIW")
        for kind, stage, micro, part in schedule.programs[rank]:
            place = (stage * micros + micro) * slices + part if sliced else stage * micros + micro
            if kind == "F":
                done, begins = place, clock
                if floor and floor[stage] > begins:
                    begins = floor[stage]
                if stage:
                    while (end := arrived[place - stage_size]) == NOT_YET:
                        yield place - stage_size
                    begins = end if end > begins else begins
                if part:
                    while (end := ends[place - 1]) == NOT_YET:
                        yield place - 1
                    begins = end if end > begins else begins
                started(begins)
                clock, channels_of = begins + forward[stage], onward
            elif kind == "W":
                while (end := ends[backward + place]) == NOT_YET:
                    yield backward + place
                begins = end if end > clock else clock
                started(begins)
                clock = begins + weights[stage]
                continue
            else:
                done = backward + place
                while (begins := ends[place]) == NOT_YET:
                    yield place
                begins = begins if begins > clock else clock
                if stage < last:
                    while (end := arrived[done + stage_size]) == NOT_YET:
                        yield done + stage_size
                    begins = end if end > begins else begins
                if sliced and part < slices - 1:
                    while (end := ends[done + 1]) == NOT_YET:
                        yield done + 1
                    begins = end if end > begins else begins
                started(begins)
                clock, channels_of = begins + (whole if kind == "B" else inputs)[stage], back
            ends[done] = clock
            if p2p_seconds:
                channel = channels_of[micro * directions // micros if directions > 1 else 0][stage]
                arrival = clock
                if channel:
                    each, free = channel
                    channel[1] = arrival = (clock if clock > free else free) + each
                    if blocking:
                        clock = arrival
                arrived[done] = arrival
            if (other := waiting[done]) >= 0:
                ready.append(other)

    ranks = [passes(rank) for rank in range(schedule.ranks)]
    while ready:
        rank = ready.pop()
        for missing in ranks[rank]:
            waiting[missing] = rank
            break
    return Events(schedule, tuple(map(tuple, starts)), arrived)


FULL_PERIODS = 4
"""Periods of micro-batches after which most pipelines have settled."""


def run_settled(
    build: Callable[[int], Schedule], micro_batches: int, period: int, run_one: Callable[[Schedule], Events]
) -> tuple[Events, float]:
    """Returns the events of a schedule with as few micro-batches as it needs to settle (`Events.growth`), and the
    seconds by which all `micro_batches` take longer; of all of them, and 0, if it does not settle in half of them or
    has no `period` (0)."""
    number = FULL_PERIODS * period
    while 0 < 2 * number <= micro_batches:
        fewer = number + micro_batches % period
        try:
            events = run_one(build(fewer))
        except JobError:  # it takes this number of micro-batches, but not every one of its period
            break
        if (each := events.growth(period)) is not None:
            return events, each * (micro_batches - fewer) / period * events.schedule.steps
        number *= 2
    return run_one(build(micro_batches)), 0.0


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
        """The bubble of the schedule with its flush."""
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
        return sum(map(self.costs.__getitem__, map(itemgetter(0), self.schedule.programs[rank])))

    def idle(self, rank: int) -> float:
        """Returns the idle time of a rank between the first action of any rank and the end of the last."""
        return self.duration - self.work(rank)

    def idle_inside(self, rank: int) -> float:
        """Returns the idle time of a rank between its own first action and its last."""
        return self.end(rank) - self.starts[rank][0] - self.work(rank)

    def end(self, rank: int) -> float:
        return self.starts[rank][-1] + self.costs[self.schedule.programs[rank][-1].kind]


def time(
    schedule: Schedule,
    costs: Mapping[str, float] = UNIT,
    p2p_seconds: Mapping[tuple[int, int], float] | None = None,
    blocking: bool = False,
) -> Timing:
    """Times a schedule: every rank runs its actions in order, each as soon as its inputs have arrived; messages are
    those of `run`. In a deadlock, or if an input is never produced, the result is not `complete`."""
    alike = {kind: (cost,) * schedule.stages for kind, cost in costs.items()}
    events = run(schedule, (alike,) * schedule.ranks, p2p_seconds, blocking=blocking)
    return Timing(schedule, costs, events.starts)


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
