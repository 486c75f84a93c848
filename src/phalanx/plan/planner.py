"""The fastest layout that fits: exhaustive over the legal space, by branch and bound (branch.py), with what was weighed
against it, and why it won."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from phalanx.errors import JobError
from phalanx.gc import gc_paused
from phalanx.plan.plan import Alternative, Candidate, Plan
from phalanx.plan.report.alternatives import alternatives
from phalanx.plan.report.devices import enough
from phalanx.plan.report.notes import notes
from phalanx.plan.report.points import points
from phalanx.plan.search.branch import Found, Progress, Search, complexity, degrees, ranked, simulated
from phalanx.plan.search.refine import refinements
from phalanx.plan.search.request import PlanRequest

SHOWN = 10
"""Layouts that are told."""


@gc_paused()
def search(request: PlanRequest, progress: Progress | None = None, sample: int = 0) -> Plan:
    """The best layouts, what was weighed against them, and why they won; `sample` is how many layouts of the space are
    predicted for a picture of it.

    Raises JobError where no layout is legal, and where something about the devices is not known."""
    began = time.perf_counter()
    searches, told = list[Search](), list[str]()
    for one in request.each():
        try:
            searches.append(Search(one, progress))
        except JobError as error:
            told += error.problems
    if not searches:
        raise JobError(told)
    found = [(one, one.best()) for one in searches]
    candidates = ranked(candidate for one, what in found for candidate in _best(one, what))
    best = distinct(candidates)
    weighed = alternatives(*_of(found, best), best[0] if best else None)
    rejected = sum((what.rejected for _, what in found), Counter[str]())
    asked = replace(searches[0].request, fixed=request.fixed)
    return Plan(
        request=asked.spec(searches[0].space.layout(searches[0].space.rows(np.array([0])), 0)),
        best=tuple(best),
        nearest=None if best else nearest(searches, weighed),
        alternatives=weighed,
        points=points(found, sample) if sample else (),
        rejected={reason: number for reason, number in rejected.most_common() if number},
        searched=sum(one.space.size for one in searches),
        seconds=time.perf_counter() - began,
        notes=notes(best, weighed) if best else enough(searches[-1].request),
    )


def _best(one: Search, found: Found) -> list[Candidate]:
    """The best of a space, and what comes of them with stages and layers that differ."""
    uniform = simulated(found)
    begun = uniform or ([one.leanest] if one.leanest else [])
    return [*refinements(one, found, begun), *uniform]


def _of(found: Sequence[tuple[Search, Found]], best: Sequence[Candidate]) -> tuple[Search, Found]:
    """The search among layouts of as many devices as the best has, or of the most, and what it saw."""
    return next((one for one in found if best and best[0].layout.world in one[0].request.devices), found[-1])


def distinct(candidates: Iterable[Candidate]) -> list[Candidate]:
    """The best of each mesh, the first few."""
    shown: dict[tuple[int, ...], Candidate] = {}
    for one in candidates:
        shown.setdefault(degrees(one.layout), one)
    return list(shown.values())[:SHOWN]


def nearest(searches: Iterable[Search], weighed: Iterable[Alternative]) -> Candidate:
    """Where nothing fits: the layout that needs the least memory."""
    found = [one for one in (*(one.leanest for one in searches), *(each.candidate for each in weighed)) if one]
    return min(found, key=lambda one: (one.prediction.fullest.needed, complexity(one.layout)))
