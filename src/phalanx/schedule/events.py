"""The event loop of schedules: every rank runs its actions in order, each as soon as its inputs have arrived.

It serves unit costs (timing.py) and real stages on real links (phalanx.simulate).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from phalanx.schedule.schedule import Schedule

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

    def arrivals_of(self, rank: int) -> list[float]:
        """Returns, per action of a rank, the time at which its result is on the rank that needs it; for a W, which no
        rank needs, that of its I."""
        micros, slices = self.schedule.micro_batches, self.schedule.slices
        backward = self.schedule.stages * micros * slices
        return [
            self.arrivals[(stage * micros + micro) * slices + part + (0 if kind == "F" else backward)]
            for kind, stage, micro, part in self.schedule.programs[rank]
        ]


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
    stage_size, backward = micros * slices, schedule.stages * micros * slices
    ends = [NOT_YET] * (2 * backward)
    arrived = ends if not p2p_seconds else list(ends)
    waiting = [-1] * (2 * backward)
    clocks = [0.0] * schedule.ranks
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
    while ready:
        rank = ready.pop()
        program, clock, started, seconds = schedule.programs[rank], clocks[rank], starts[rank], durations[rank]
        floor = floors[rank] if floors else None
        for number in range(len(started), len(program)):
            kind, stage, micro, part = program[number]
            place = (stage * micros + micro) * slices + part
            begins, missing = clock, -1
            if kind == "F":
                if floor and floor[stage] > begins:
                    begins = floor[stage]
                if stage and (end := arrived[place - stage_size]) > begins:
                    begins, missing = end, place - stage_size
                if part and (end := ends[place - 1]) > begins:
                    begins, missing = end, place - 1
            elif kind == "W":
                if (end := ends[backward + place]) > begins:
                    begins, missing = end, backward + place
            else:
                if (end := ends[place]) > begins:
                    begins, missing = end, place
                if stage < last and (end := arrived[backward + place + stage_size]) > begins:
                    begins, missing = end, backward + place + stage_size
                if part < slices - 1 and (end := ends[backward + place + 1]) > begins:
                    begins, missing = end, backward + place + 1
            if begins == NOT_YET:
                waiting[missing] = rank
                break
            started.append(begins)
            clock = begins + seconds[kind][stage]
            if kind == "W":
                continue
            done = place if kind == "F" else backward + place
            ends[done] = clock
            if p2p_seconds:
                channel = (onward if kind == "F" else back)[micro * directions // micros if directions > 1 else 0][
                    stage
                ]
                arrival = clock
                if channel:
                    arrival = max(clock, channel[1]) + channel[0]
                    channel[1] = arrival
                    if blocking:
                        clock = arrival
                arrived[done] = arrival
            if (other := waiting[done]) >= 0:
                ready.append(other)
        clocks[rank] = clock
    return Events(schedule, tuple(map(tuple, starts)), arrived)
