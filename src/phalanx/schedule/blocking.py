"""Tests whether a schedule also runs with sends that block until their receive is posted.

Some good schedules do not. Interleaved 1F1B sends round the ranks in both directions at once, and looped BFS produces
the next rank's input only after all its micro-batches. They need asynchronous sends.
"""

from __future__ import annotations

from phalanx.schedule.check import deadlock
from phalanx.schedule.schedule import Action, Schedule


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
