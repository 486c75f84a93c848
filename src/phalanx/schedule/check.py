"""Validates a schedule: every action once, on the right rank, in an order that cannot deadlock.

Two passes over the actions with flat arrays of integers: 10^5 actions take a fraction of a second. Sends are assumed to
be asynchronous. `blocked` tests whether a schedule also runs with sends that block until their receive is posted:
interleaved 1F1B, which sends round the ranks in both directions at once, and looped BFS do not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from phalanx.errors import JobError
from phalanx.nearest import nearest_divisors
from phalanx.schedule.schedule import Action, Schedule
from phalanx.schedule.timing import time, waits_for


def blocked(schedule: Schedule) -> list[str]:
    """Returns the lines that describe the deadlock with blocking sends; empty for a schedule that runs.

    The schedule must have no problems (check.problems). Before a rank sends a result it posts the receive of its next
    action's input, and with it those of all earlier messages of the same sender. Messages from one rank to another keep
    the sender's order.
    """
    stuck = _stuck(schedule)
    return deadlock(stuck) if stuck else []


def _stuck(schedule: Schedule) -> dict[int, tuple[int, str]]:
    """Returns, for each rank that is blocked at the end, the rank that it waits for and what it cannot do."""
    at = [0] * schedule.ranks
    """By rank, its action."""
    source, awaited = [-1] * schedule.ranks, [Action("F", -1, -1)] * schedule.ranks
    """The rank whose message is posted and not there yet, and the result that it carries."""
    target, result = list(source), list(awaited)
    """The rank to which the result of the action before is not sent yet, and that result."""
    sent: set[Action] = set()

    def post(rank: int) -> None:
        """Posts the receive of the input of a rank's action."""
        program = schedule.programs[rank]
        if at[rank] < len(program):
            other, message = _message(schedule, program[at[rank]], rank, incoming=True)
            if message not in sent:
                source[rank], awaited[rank] = other, message

    for rank in range(schedule.ranks):
        post(rank)
    ready = list(range(schedule.ranks))
    while ready:
        rank = ready.pop()
        while True:
            if (other := target[rank]) >= 0:
                # A posted receive of this rank's messages is for this message or a later one.
                if source[other] != rank:
                    break
                target[rank] = -1
                sent.add(result[rank])
                if result[rank] == awaited[other]:
                    source[other] = -1
                    ready.append(other)
            if at[rank] == len(schedule.programs[rank]) or source[rank] >= 0:
                break
            action = schedule.programs[rank][at[rank]]
            at[rank] += 1
            post(rank)
            if source[rank] >= 0:
                ready.append(source[rank])
            target[rank], result[rank] = _message(schedule, action, rank, incoming=False)
    return _blocked_ranks(schedule, at, source, target)


def _message(schedule: Schedule, action: Action, rank: int, *, incoming: bool) -> tuple[int, Action]:
    """Returns the other rank of an action's incoming or outgoing message (-1 if none), and the result in it."""
    ahead = 1 if action.kind == "F" else -1
    other = action.stage + (-ahead if incoming else ahead)
    message = action._replace(kind="F" if action.kind == "F" else "B", stage=other if incoming else action.stage)
    if action.kind == "W" or not 0 <= other < schedule.stages:
        return -1, message
    at = schedule.rank_of(other, action.micro)
    return (-1 if at == rank else at), message


def _blocked_ranks(
    schedule: Schedule, at: list[int], source: list[int], target: list[int]
) -> dict[int, tuple[int, str]]:
    stuck = {}
    for rank, program in enumerate(schedule.programs):
        if (other := target[rank]) >= 0:
            words = f"cannot send the result of {program[at[rank] - 1]}: rank {other} has not posted its receive"
            stuck[rank] = other, words
        elif (other := source[rank]) >= 0:
            stuck[rank] = other, f"cannot begin {program[at[rank]]}: it waits for a message from rank {other}"
    return stuck


# Completed passes of a stage for a micro-batch as bits, and those that must precede each kind, exactly.
_BIT = {"F": 1, "B": 2, "I": 4, "W": 8}
_BEFORE = {"F": 0, "B": 1, "I": 1, "W": 1 | 4}
_WHOLE, _HALVES = 1 | 2, 1 | 4 | 8


def check(schedule: Schedule) -> None:
    """Raises JobError with every problem of a schedule."""
    if found := problems(schedule):
        raise JobError(found)


def problems(schedule: Schedule) -> list[str]:
    """Returns every problem of a schedule, with the rank, the action and the reason. Deadlocks are searched only if
    every action is present once and on its rank, because a missing action would always be waited for."""
    return _number_problems(schedule) or list(_action_problems(schedule)) or _deadlock_problems(schedule)


def in_flight(schedule: Schedule) -> tuple[int, ...]:
    """Returns the peak live activations of each rank. An activation is that of one stage for one micro-batch (one slice
    of it, if sequences are sliced), saved from its F to the end of its B, or of its W."""
    return tuple(int(schedule.peak_live_activations(rank)) for rank in range(schedule.ranks))


def homes_of(schedule: Schedule) -> list[int]:
    """Returns the rank of each (stage, micro-batch), at index stage * micro_batches + micro."""
    ways = [schedule.direction(micro) for micro in range(schedule.micro_batches)]
    return [ranks[way] for ranks in zip(*schedule.placements, strict=True) for way in ways]


def deadlock(stuck: Mapping[int, tuple[int, str]]) -> list[str]:
    """Returns the lines that describe a deadlock. `stuck` maps each blocked rank to the blocked rank it waits for, and
    the action it cannot begin."""
    path = [min(stuck)]
    while (other := stuck[path[-1]][0]) not in path:
        path.append(other)
    cycle = " -> ".join(f"rank {rank}" for rank in [*path[path.index(other) :], other])
    return [
        *(f"deadlock: rank {rank} {words}" for rank, (_, words) in sorted(stuck.items())),
        f"deadlock: the ranks wait in a cycle, {cycle}",
    ]


def _number_problems(schedule: Schedule) -> list[str]:
    """Returns the problems of the numbers and the placements."""
    found = [
        f"{name} must be at least 1, is {number}"
        for name, number in (
            ("micro_batches", schedule.micro_batches),
            ("slices", schedule.slices),
            ("steps", schedule.steps),
            ("ranks", schedule.ranks),
            ("directions", len(schedule.placements)),
        )
        if number < 1
    ]
    if found:
        return found
    if schedule.micro_batches % schedule.steps:
        near = nearest_divisors(schedule.micro_batches, schedule.steps)
        found.append(
            f"micro_batches {schedule.micro_batches} % steps {schedule.steps} = "
            f"{schedule.micro_batches % schedule.steps}: steps take equal shares; nearest: {near}"
        )
    if len({len(placement) for placement in schedule.placements}) > 1 or not schedule.stages:
        found.append(f"stages in each direction: {', '.join(str(len(p)) for p in schedule.placements)}; must be equal")
    found.extend(
        f"stage {stage} is on rank {rank}; the ranks are 0 to {schedule.ranks - 1}"
        for placement in schedule.placements
        for stage, rank in enumerate(placement)
        if not 0 <= rank < schedule.ranks
    )
    found.extend(f"rank {rank} has no actions" for rank, program in enumerate(schedule.programs) if not program)
    return found


def _action_problems(schedule: Schedule) -> Iterator[str]:
    """Yields actions that do not exist, are on the wrong rank, out of order, repeated or missing."""
    micros, slices, stages = schedule.micro_batches, schedule.slices, schedule.stages
    homes = homes_of(schedule)
    done = bytearray(len(homes) * slices)
    early: list[tuple[int, Action]] = []
    for rank, program in enumerate(schedule.programs):
        for kind, stage, micro, part in program:
            if kind not in _BIT or not (0 <= stage < stages and 0 <= micro < micros and 0 <= part < slices):
                yield f"rank {rank}: {Action(kind, stage, micro, part)} does not exist: {_existing(schedule)}"
                continue
            row = stage * micros + micro
            place = row * slices + part
            before = done[place]
            done[place] |= _BIT[kind]
            if homes[row] != rank:
                yield f"rank {rank}: {Action(kind, stage, micro, part)} is on the wrong rank: {_home(schedule, row)}"
            if before != _BEFORE[kind]:
                action = Action(kind, stage, micro, part)
                if before & _BIT[kind]:
                    yield f"rank {rank}: {action} appears more than once"
                elif _BEFORE[kind] & ~before:
                    early.append((rank, action))
    for rank, action in early:
        for other in _needed_but_later(schedule.programs[rank], action):
            yield f"rank {rank}: {action} comes before {other}, whose result it needs"
    if done.count(_WHOLE) + done.count(_HALVES) < len(done):
        for place, bits in enumerate(done):
            if bits not in (_WHOLE, _HALVES):
                row, part = divmod(place, slices)
                action = Action("F", *divmod(row, micros), part)
                yield from (f"rank {homes[row]}: {words}" for words in _unfinished(action, bits))


def _needed_but_later(program: tuple[Action, ...], action: Action) -> Iterator[Action]:
    """Yields the passes of the same stage and micro-batch that an action needs but that come after it. Absent ones are
    reported as missing instead."""
    rest = program[program.index(action) :]
    for kind in ("F", "I"):
        if _BEFORE[action.kind] & _BIT[kind] and (other := action._replace(kind=kind)) in rest:
            yield other


def _existing(schedule: Schedule) -> str:
    parts = f" and slices 0 to {schedule.slices - 1}" if schedule.slices > 1 else ""
    return (
        f"there are the kinds F, B, I and W, stages 0 to {schedule.stages - 1}, "
        f"micro-batches 0 to {schedule.micro_batches - 1}{parts}"
    )


def _home(schedule: Schedule, row: int) -> str:
    stage, micro = divmod(row, schedule.micro_batches)
    of = f" for micro-batch {micro}" if len(schedule.placements) > 1 else ""
    return f"stage {stage}{of} is on rank {schedule.rank_of(stage, micro)}"


def _unfinished(forward: Action, bits: int) -> Iterator[str]:
    """Yields what is missing or contradictory in the passes of a stage for a micro-batch."""
    whole, inputs, weights = (forward._replace(kind=kind) for kind in ("B", "I", "W"))
    if not bits & _BIT["F"]:
        yield f"{forward} is missing"
    if bits & _BIT["B"]:
        halves = [str(half) for half in (inputs, weights) if bits & _BIT[half.kind]]
        if halves:
            yield f"{whole} appears together with {' and '.join(halves)}: a backward pass is B, or its halves I and W"
    elif not bits & (_BIT["I"] | _BIT["W"]):
        yield f"{whole} is missing (or its halves, {inputs} and {weights})"
    else:
        for half, other in ((inputs, weights), (weights, inputs)):
            if not bits & _BIT[half.kind]:
                yield f"{half} is missing, the other half of {other}"


def _deadlock_problems(schedule: Schedule) -> list[str]:
    """Returns the lines that describe a deadlock; empty if every rank completes its program."""
    timing = time(schedule)
    if timing.complete:
        return []
    stuck = {}
    for rank, action, missing in waits_for(timing):
        other = schedule.rank_of(missing[0].stage, missing[0].micro)
        where = "later in its own program" if other == rank else f"on rank {other}"
        stuck[rank] = other, f"cannot begin {action}: it waits for {' or '.join(map(str, missing))} {where}"
    return deadlock(stuck)
