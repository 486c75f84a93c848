"""A part of a table of cases that has every pair of their parts, or every part. `make whole` runs the whole tables."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Iterable
from itertools import combinations
from typing import Any

from phalanx.config import layout_line
from phalanx.config.layout import Layout
from phalanx.schedule.catalogue import SCHEDULES

WHOLE = "PHALANX_WHOLE" in os.environ


def also_whole(*cases: Any) -> tuple[Any, ...]:
    """Returns cases that only `make whole` tries: others have their parts, or hold what they hold at less."""
    return cases if WHOLE else ()


def unless_whole(**fixed: Any) -> dict[str, Any]:
    """Returns fields that are fixed by default: without them `make whole` searches spaces several times as large."""
    return {} if WHOLE else fixed


def parts_of(case: Iterable[Any]) -> set[Hashable]:
    """The parts of a case: the fields that its layout states, each as a whole, and whatever stands beside it."""
    parts = set[Hashable]()
    for value in case:
        line = value.line() if isinstance(value, Layout) else value
        parts |= {*line.split(",")} if isinstance(line, str) else {line}
    return parts


def techniques_of(case: Iterable[Any]) -> set[Hashable]:
    """The techniques of a case's layout, whatever their sizes are, beside `parts_of`, which are marked as single."""
    parts = parts_of(case)
    techniques = {("single", part) for part in parts}
    for field, _, value in (part.partition("=") for part in parts if isinstance(part, str) and "=" in part):
        if field == "schedule":
            entry = SCHEDULES[value]
            is_so = (entry.splits, entry.chunks[0] > 1, entry.directions > 1, entry.sliced)
            names = ("splits", "chunks", "directions", "sliced")
            techniques |= {name for name, so in zip(names, is_so, strict=True) if so}
        elif field == "recompute":
            techniques.add("recompute=full" if value == "full" else "recompute a part")
        elif field not in ("accumulation", "bucket_mb", "loss_chunk", "micro_batch", "pp_slices", "prefetch"):
            techniques.add(f"{field}={value}" if field in ("zero", "compression") else field)
    if "dp_shard" in techniques and not techniques & {"zero=1", "zero=2"}:
        techniques.add("zero=3")
    return techniques


def pairs_of_techniques(cases: Iterable[Any], elsewhere: Iterable[Any] = ()) -> list[Any]:
    """Returns cases in which any two techniques meet that meet in one of all, or of those `elsewhere`, and that have
    every value of a field, on few ranks. A case that would add fewer pairs than half its ranks is for `make whole`."""
    return covering(
        cases,
        techniques_of,
        elsewhere=elsewhere,
        single=lambda part: isinstance(part, tuple),
        cost=ranks_of,
        least=0.5,
    )


def each_technique(cases: Iterable[Any]) -> list[Any]:
    """Returns cases in which every technique is, on few ranks."""
    return covering(
        cases, lambda case: {part for part in techniques_of(case) if isinstance(part, str)}, size=1, cost=ranks_of
    )


def ranks_of(case: Iterable[Any]) -> int:
    """Returns how many ranks the layout has with which a case ends."""
    *_, layout = case
    return (layout if isinstance(layout, Layout) else layout_line.parse(layout)).processes


def covering(
    cases: Iterable[Any],
    parts: Callable[[Any], set[Hashable]] = parts_of,
    *,
    size: int = 2,
    elsewhere: Iterable[Any] = (),
    single: Callable[[Hashable], bool] = lambda part: False,
    cost: Callable[[Any], float] = lambda case: 1,
    least: float = 0.0,
) -> list[Any]:
    """Returns cases in which any `size` parts meet that meet in one of all, but for those that meet in a case of
    `elsewhere`; first the one with most that is new for its cost. A `single` part has to be there, whatever it meets.
    Cases that add less than `least` for their cost are kept only for parts that are nowhere else.

    One part each is enough where the cases are held in pairs at a lower level: whole runs whose steps are compared."""
    rest = [*cases]
    if WHOLE:
        return rest

    def groups_of(case: Any) -> set[Hashable]:
        groups = (group for length in range(1, size + 1) for group in combinations(parts(case), length))
        return {frozenset(group) for group in groups if len(group) == 1 or not any(map(single, group))}

    groups, costs = [groups_of(case) for case in rest], [cost(case) for case in rest]
    missing, kept = set[Hashable]().union(*groups).difference(*map(groups_of, elsewhere)), set[int]()
    while missing:
        best = max(range(len(rest)), key=lambda number: len(groups[number] & missing) / costs[number])
        if len(groups[best] & missing) < least * costs[best]:
            missing, least = {group for group in missing if len(group) == 1}, 0.0
            continue
        kept.add(best)
        missing -= groups[best]
    return [case for number, case in enumerate(rest) if number in kept]
