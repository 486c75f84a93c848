"""The fastest layout that fits: exhaustive over the legal space, by branch and bound (branch.py), with its alternatives
and the reasons."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from phalanx.check.layout import offloads
from phalanx.config.layout import Layout
from phalanx.cost.loss_chunk import with_loss_chunk
from phalanx.errors import JobError
from phalanx.gc import gc_paused
from phalanx.partition.tiers import gathers_parameters
from phalanx.plan.plan import Alternative, Candidate, Plan
from phalanx.plan.report.alternatives import alternatives
from phalanx.plan.report.devices import enough_devices
from phalanx.plan.report.notes import notes
from phalanx.plan.report.points import points
from phalanx.plan.report.rules import TILES, on_host
from phalanx.plan.search.branch import Found, Progress, Search, complexity, degrees, ranked, simulated
from phalanx.plan.search.refine import refinements
from phalanx.plan.search.request import PlanRequest
from phalanx.plan.search.second_copy import with_second_copies

LISTED = 10
"""Most layouts that a plan lists."""


@gc_paused()
def search(request: PlanRequest, progress: Progress | None = None, sample: int = 0) -> Plan:
    """Returns the best layouts, the alternatives and the reasons; `sample` is the number of layouts that are predicted
    for a picture of the space. If nothing fits, offloads the optimizer or runs large layers in tiles, where that helps.
    Raises JobError if no layout is legal, or if a fact about the devices is unknown."""
    plain = _search(request, progress, sample)
    if plain.best:
        return plain
    seconds = plain.seconds
    for fixed, why in _last_resorts(request):
        try:
            found = _search(replace(request, fixed={**request.fixed, **fixed}), progress, sample)
        except JobError:  # nothing divides by the tiles
            continue
        seconds += found.seconds
        if found.best:
            note = why.format(f"none of {plain.searched:,} layouts fits")
            return replace(found, notes=(note, *found.notes), seconds=seconds)
    return replace(plain, seconds=seconds)


def _last_resorts(request: PlanRequest) -> Iterator[tuple[dict[str, Any], str]]:
    """Yields fields that the search leaves alone otherwise, with the reason, in which "{}" stands for how many layouts
    do not fit: parts on the host, ever more of them, layers in tiles, both."""
    offload: dict[str, Any] = {}
    plain = replace(Layout(), **request.fixed)
    if "loss_chunk" not in request.fixed:
        yield {"loss_chunk": "auto"}, "Without loss_chunk {}: the loss computes logits of some tokens at a time."
    if "offload" not in request.fixed:
        for layout in offloads(plain, request.optimizer, request.cluster):
            offload = {"offload": layout.offload}
            offload |= {"zero": layout.zero} if gathers_parameters(layout) else {}
            yield offload, f"Without offload {{}}: {on_host(layout)}."
    # Tiles of what is gathered save something; of a single device's parameters they save nothing.
    if request.fixed.keys() & {"tiles", "tile"} or request.model.lora.rank or max(request.devices) == 1:
        return
    for tiles in TILES:
        tiled: dict[str, Any] = {"tiles": tiles, "tile": "all"}
        yield tiled, f"Without tiles {{}}: {tiles} of a layer's matrices are gathered one after the other."
        if offload:
            yield {**tiled, **offload}, "Without tiles and offload {}."


def _search(request: PlanRequest, progress: Progress | None, sample: int) -> Plan:
    """Returns the plan of a request as it is."""
    began = time.perf_counter()
    searches, problems = list[Search](), list[str]()
    for part in request.each():
        try:
            searches.append(Search(part, progress))
        except JobError as error:
            problems += error.problems
    if not searches:
        raise JobError(problems)
    found = [(each, each.best()) for each in searches]
    candidates = ranked(candidate for each, results in found for candidate in _best(each, results))
    best = [_settled(candidate) for candidate in distinct(candidates)]
    weighed = alternatives(*_search_of(found, best), best[0] if best else None)
    rejected = sum((results.rejected for _, results in found), Counter[str]())
    asked = replace(searches[0].request, fixed=request.fixed)
    return Plan(
        request=asked.spec(searches[0].space.layout(searches[0].space.rows(np.array([0])), 0)),
        best=tuple(best),
        nearest=None if best else nearest(searches, weighed),
        alternatives=weighed,
        points=points(found, sample) if sample else (),
        rejected={reason: number for reason, number in rejected.most_common() if number},
        searched=sum(each.space.size for each in searches),
        seconds=time.perf_counter() - began,
        notes=notes(best, weighed) if best else enough_devices(searches[-1].request),
    )


def _settled(candidate: Candidate) -> Candidate:
    """Returns a candidate whose `loss_chunk` is a number."""
    auto = candidate.layout.loss_chunk == "auto"
    return Candidate.of(with_loss_chunk(candidate.spec)) if auto else candidate


def _best(space: Search, found: Found) -> list[Candidate]:
    """Returns the best layouts of a space, and their refinements: uneven stages and layers, second copies."""
    uniform = simulated(found)
    seeds = uniform or ([space.leanest] if space.leanest else [])
    candidates = ranked([*refinements(space, found, seeds), *uniform])
    return [*with_second_copies(space.request, candidates), *candidates]


def _search_of(found: Sequence[tuple[Search, Found]], best: Sequence[Candidate]) -> tuple[Search, Found]:
    """Returns the search, with its results, over as many devices as the best layout has, or over the most."""
    return next((each for each in found if best and best[0].layout.world in each[0].request.devices), found[-1])


def distinct(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Returns the best layout of each mesh, at most `LISTED`."""
    by_mesh: dict[tuple[int, ...], Candidate] = {}
    for candidate in candidates:
        by_mesh.setdefault(degrees(candidate.layout), candidate)
    return list(by_mesh.values())[:LISTED]


def nearest(searches: Iterable[Search], weighed: Iterable[Alternative]) -> Candidate:
    """Returns, if nothing fits, the layout that needs the least memory."""
    found = [*(each.leanest for each in searches), *(each.candidate for each in weighed)]
    return min(
        filter(None, found), key=lambda candidate: (candidate.prediction.fullest.needed, complexity(candidate.layout))
    )
