"""A part of a table of cases that has every pair of their parts, or every part. `make whole` runs the whole tables."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Iterable
from itertools import combinations
from typing import Any

from phalanx.config.layout import Layout

WHOLE = "PHALANX_WHOLE" in os.environ


def parts_of(case: Iterable[Any]) -> set[Hashable]:
    """The parts of a case: the fields that its layout states, each as a whole, and whatever stands beside it."""
    parts = set[Hashable]()
    for value in case:
        line = value.line() if isinstance(value, Layout) else value
        parts |= {*line.split(",")} if isinstance(line, str) else {line}
    return parts


def covering(
    cases: Iterable[Any],
    parts: Callable[[Any], set[Hashable]] = parts_of,
    *,
    size: int = 2,
    elsewhere: Iterable[Any] = (),
    single: Callable[[Hashable], bool] = lambda part: False,
) -> list[Any]:
    """Returns cases in which any `size` parts meet that meet in one of all, taking the one with most that is new first,
    but for those that meet in a case of `elsewhere`. A `single` part has to be there, whatever it meets.

    One part each is enough where the cases are held in pairs at a lower level: whole runs whose steps are compared."""
    rest = [*cases]
    if WHOLE:
        return rest

    def groups_of(case: Any) -> set[Hashable]:
        groups = (group for length in range(1, size + 1) for group in combinations(parts(case), length))
        return {frozenset(group) for group in groups if len(group) == 1 or not any(map(single, group))}

    groups = [groups_of(case) for case in rest]
    missing, kept = set[Hashable]().union(*groups).difference(*map(groups_of, elsewhere)), set[int]()
    while missing:
        best = max(range(len(rest)), key=lambda number: len(groups[number] & missing))
        kept.add(best)
        missing -= groups[best]
    return [case for number, case in enumerate(rest) if number in kept]
