"""One message per cause: of the problems that one number causes, only that number's is said, with the nearest values
that are legal in the whole job."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Sequence, Set
from typing import NamedTuple

from phalanx.check.job import problems_of
from phalanx.check.layout import Problem
from phalanx.config.fields import get, replace
from phalanx.config.job import Job
from phalanx.nearest import Misfit, misfit

_MOST_TRIED = 24
"""Most values of a field that are tried."""
_MOST_SAID = 3
"""Most values of a field that a message names."""
_NO_INTEGER = " is not an integer"
Check = Callable[[Job], Sequence[Problem]]


class _Pending(NamedTuple):
    """A problem that is not said yet."""

    place: int
    """Its place among all problems."""
    written: Problem
    """The problem in the user's job."""
    now: Problem
    """The problem in the job in which the causes that are said are mended."""


class _Change(NamedTuple):
    """Another value of one field."""

    path: str
    value: int
    job: Job
    problems: Sequence[Problem]
    """Those of the changed job."""
    beside: str
    """The change of another field that goes with it, in words."""


def by_cause(
    job: Job, found: Sequence[Problem], given: Set[str] = frozenset(), check: Check = problems_of
) -> list[Problem]:
    """Returns the problems `found` of a job with one message per cause.

    Numbers that do not fit each other (`Misfit`) are the cause of every problem that goes if one of them changes. Of
    these fields the one is named whose change solves most, and one that the user set (`given`: dotted paths) rather
    than another. Its values are tried by `check`, which returns the problems of a job.
    """
    pending = [_Pending(place, problem, problem) for place, problem in enumerate(found)]
    said: list[tuple[int, Problem]] = []
    while first := next((each for each in pending if isinstance(each.now[1], Misfit)), None):
        changes = _best_changes(job, first.now, [each.now for each in pending], given, check)
        if not changes:
            said.append((first.place, first.written))
            pending.remove(first)
            continue
        left = list(_still(pending, changes[0].problems))
        places = {each.place for each in left}
        solved = [each for each in pending if each.place not in places]
        said.append((first.place, (changes[0].path, _message(changes, solved, {path for path, _ in found}))))
        pending, job = left, changes[0].job
    said += [(each.place, each.written) for each in pending]
    return [problem for _, problem in sorted(said)]


def _best_changes(job: Job, problem: Problem, now: Sequence[Problem], given: Set[str], check: Check) -> list[_Change]:
    """Returns the nearest of the changes of one field that solve `problem` and as many others as possible; empty if no
    change solves it without causing more."""
    at, message = problem
    assert isinstance(message, Misfit)
    before = Counter(path for path, _ in now)
    best: list[_Change] = []
    best_cost: tuple[object, ...] = (True, len(now))
    for order, (path, values) in enumerate(message.choices.items()):
        wanted = get(job, path) if order else message.wanted
        by_cost: dict[tuple[object, ...], list[_Change]] = {}
        tried = sorted({*values} - {wanted}, key=lambda value: (abs(value - wanted), value))[:_MOST_TRIED]
        for change in (_changed(job, path, value, given, check) for value in tried):
            after = Counter(path for path, _ in change.problems)
            if after[at] < before[at] and len(change.problems) <= len(now):
                breaks_layout = "layout" in after.keys() - before.keys()
                cost = path not in given, len(change.problems), breaks_layout, order
                by_cost.setdefault(cost, []).append(change)
        if by_cost and (cost := min(by_cost)) < best_cost:
            best, best_cost = by_cost[cost][:_MOST_SAID], cost
    return best


def _changed(job: Job, path: str, value: int, given: Set[str], check: Check) -> _Change:
    """Returns the change of one field. Replicas that the user did not set become as many as the devices allow."""
    job, beside = replace(job, path, value), ""
    layout, devices = job.layout, job.cluster.devices
    if path.startswith("layout.") and devices and layout.world != devices and not layout.auto:
        others = layout.world // layout.dp_replicate
        if devices % others == 0 and "layout.dp_replicate" not in given:
            layout = dataclasses.replace(layout, dp_replicate=devices // others)
            job, beside = replace(job, "layout", layout), f" with dp_replicate={layout.dp_replicate}"
    return _Change(path, value, job, check(job), beside)


def _still(pending: Sequence[_Pending], problems: Sequence[Problem]) -> Iterator[_Pending]:
    """Yields the pending problems that a changed job has, too, as they are there."""
    waiting = list(pending)
    for problem in problems:
        same = [each for each in waiting if each.now == problem] or [
            each for each in waiting if each.now[0] == problem[0]
        ]
        if same:
            waiting.remove(same[0])
            yield same[0]._replace(now=problem)


def _message(changes: Sequence[_Change], solved: Sequence[_Pending], known: Set[str]) -> str:
    """Returns the equations that a change of a field solves, and the nearest values."""
    path = changes[0].path
    misfits = [message for each in solved if isinstance(message := each.written[1], Misfit) and path in message.choices]
    values = ", ".join(f"{each.value}{each.beside}" for each in sorted(changes, key=lambda each: each.value))
    after = misfits[0].after if len(misfits) == 1 and path == next(iter(misfits[0].choices)) else ""
    new = sorted({other for other, _ in changes[0].problems} - known)
    after += f" (with another {' and '.join(new)})" if new else ""
    return misfit(_joined([each.equation for each in misfits]), path, values) + after


def _joined(equations: Sequence[str]) -> str:
    stems = [each.removesuffix(_NO_INTEGER) for each in equations]
    if len(stems) > 1 and all(stem + _NO_INTEGER == each for stem, each in zip(stems, equations, strict=True)):
        return " and ".join(stems) + " are not integers"
    return ", and ".join(equations)
