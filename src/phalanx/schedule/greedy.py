"""Greedy placement of weight gradients into waiting times."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

from phalanx.schedule.schedule import Action

_HOLDS = {"F": 1, "I": 0, "W": -1}


def with_weight_passes(orders: Sequence[Sequence[Action]], stages: int, most: int) -> tuple[tuple[Action, ...], ...]:
    """Builds programs from each rank's order of F and I passes, with a W pass wherever the rank would otherwise wait,
    for another rank or because it has `most` live activations: an F adds one, a W frees one. All passes take the same
    time; those of a stage are in the order of their micro-batches, from 0 on."""
    programs = [list[Action]() for _ in orders]
    ahead = [deque(order) for order in orders]
    late = [deque[Action]() for _ in orders]
    live = [0] * len(orders)
    done = {kind: [0] * stages for kind in ("F", "I")}
    while any(ahead) or any(late):
        now = list[Action]()
        for rank, program in enumerate(programs):
            if ahead[rank] and live[rank] + _HOLDS[ahead[rank][0].kind] <= most and _input_ready(ahead[rank][0], done):
                action = ahead[rank].popleft()
            elif late[rank]:
                action = late[rank].popleft()
            else:
                continue
            live[rank] += _HOLDS[action.kind]
            if action.kind == "I":
                late[rank].append(Action("W", action.stage, action.micro))
            program.append(action)
            now.append(action)
        assert now, f"the orders need more than {most} activations"
        for kind, stage, _, _ in now:
            if kind != "W":
                done[kind][stage] += 1
    return tuple(map(tuple, programs))


def _input_ready(action: Action, done: Mapping[str, Sequence[int]]) -> bool:
    """Returns whether the neighbouring stage's input of an F or I pass exists; `done` counts micro-batches by stage."""
    kind, stage, micro, _ = action
    other, through = (stage - 1 if kind == "F" else stage + 1), done[kind]
    return not 0 <= other < len(through) or micro < through[other]
