"""A part of a table of cases that has every pair of their parts. `make whole` runs the whole tables."""

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


def covering(cases: Iterable[Any], parts: Callable[[Any], set[Hashable]] = parts_of) -> list[Any]:
    """Returns cases in which any two parts meet that meet in one of all, taking the one with most that is new first."""
    rest = [*cases]
    if WHOLE:
        return rest
    pairs = [{frozenset(pair) for pair in combinations(parts(case), 2)} | parts(case) for case in rest]
    missing, kept = set[Hashable]().union(*pairs), set[int]()
    while missing:
        best = max(range(len(rest)), key=lambda number: len(pairs[number] & missing))
        kept.add(best)
        missing -= pairs[best]
    return [case for number, case in enumerate(rest) if number in kept]
