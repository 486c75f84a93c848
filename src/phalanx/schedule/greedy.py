"""Weight gradients where a rank would wait."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from phalanx.schedule.schedule import Action

_HOLDS = {"F": 1, "I": 0, "W": -1}


def with_weight_passes(orders: Sequence[Sequence[Action]], stages: int, most: int) -> tuple[tuple[Action, ...], ...]:
    """Programs from each rank's order of F and I passes, with a W pass wherever the rank would otherwise wait, for
    another rank or because it holds `most` activations: an F adds one, a W frees one. All passes take the same time."""
    programs = [list[Action]() for _ in orders]
    ahead = [deque(order) for order in orders]
    late = [deque[Action]() for _ in orders]
    held = [0] * len(orders)
    done = set[Action]()
    while any(ahead) or any(late):
        now = list[Action]()
        for rank, program in enumerate(programs):
            if ahead[rank] and _can(ahead[rank][0], stages, done) and held[rank] + _HOLDS[ahead[rank][0].kind] <= most:
                action = ahead[rank].popleft()
            elif late[rank]:
                action = late[rank].popleft()
            else:
                continue
            held[rank] += _HOLDS[action.kind]
            if action.kind == "I":
                late[rank].append(action._replace(kind="W"))
            program.append(action)
            now.append(action)
        assert now, f"the orders need more than {most} activations"
        done.update(now)
    return tuple(map(tuple, programs))


def _can(action: Action, stages: int, done: set[Action]) -> bool:
    """Whether what an F or I pass needs from the stage before or after is there."""
    kind, stage, micro, _ = action
    other = stage - 1 if kind == "F" else stage + 1
    return not 0 <= other < stages or Action(kind, other, micro) in done
