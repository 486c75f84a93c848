"""Programs of actions from the order of a rank's passes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from phalanx.schedule.schedule import Action, Kind


class Lane(NamedTuple):
    """The passes of some micro-batches through one stage."""

    stage: int
    micros: range


Pass = tuple[Kind, int]
"""A kind, and the index of a lane."""


def times(number: int, *passes: Pass) -> list[Pass]:
    """Repeats passes `number` times; empty if it is negative."""
    return [*passes] * number


def program(passes: Iterable[Pass], lanes: Sequence[Lane]) -> tuple[Action, ...]:
    """Returns the actions for passes given as kind and lane number.

    The first F of a lane is that of its first micro-batch, the next that of the next one; so are B and I together, and
    a W belongs to the oldest I without one. Passes after a lane's last micro-batch are dropped. Dropping passes cannot
    cause a deadlock, so a pattern for many micro-batches also serves for fewer.
    """
    forward, backward = [0] * len(lanes), [0] * len(lanes)
    halves = [deque[int]() for _ in lanes]
    actions = list[Action]()
    for kind, lane in passes:
        if kind == "W":
            number = halves[lane].popleft()
        else:
            counts = forward if kind == "F" else backward
            number = counts[lane]
            counts[lane] += 1
            if kind == "I":
                halves[lane].append(number)
        stage, micros = lanes[lane]
        if number < len(micros):
            actions.append(Action(kind, stage, micros[number]))
    return tuple(actions)
