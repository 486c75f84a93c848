"""The fastest layout that fits: exhaustive over the legal space, by branch and bound (branch.py), with its alternatives
and the reasons."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from math import ceil, inf
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np

from phalanx.config.layout import Layout
from phalanx.cost.job_spec import with_loss_chunk
from phalanx.cost.prediction import predict
from phalanx.cost.spec import StepSpec
from phalanx.errors import DoesNotFitError, JobError
from phalanx.gc import gc_paused
from phalanx.partition.derived import gathers_parameters
from phalanx.plan.alternatives import AXES, TILES, alternatives, on_host
from phalanx.plan.branch import Found, Keep, Portion, Progress, Search, degrees, simulated
from phalanx.plan.notes import NO_HEADROOM, notes
from phalanx.plan.page import shortfall
from phalanx.plan.plan import Alternative, Candidate, Plan, SpacePoint
from phalanx.plan.refine import refinements, with_fp8_gathers, with_second_copies
from phalanx.plan.simplicity import ranked, simplicity
from phalanx.plan.space import PlanRequest
from phalanx.techniques.memory import offloads
from phalanx.units import gib

MOST_FAMILIES = 8
"""Most names of families in the picture; rarer ones are joined."""
OTHERS = "others"
SEVERAL_AXES = "three axes or more"
"""Name of families with three axes that cut the model; with two, the sharding of the state is omitted, because names
would outnumber the colours."""
SEED = 0
STATES = {1: "ZeRO-1", 2: "ZeRO-2", 3: "FSDP"}


def points(found: Sequence[tuple[Search, Found]], sample: int) -> tuple[SpacePoint, ...]:
    """Returns about `sample` layouts, deterministically: a third that fit, a third that do not, if there are as many,
    and random ones for the rest."""
    share = ceil(sample / len(found))
    specs = dict[Layout, StepSpec]()
    for search, results in found:
        fitting = sorted(results.predicted, key=itemgetter(1))
        chosen = [*_spread(fitting, share // 3), *_spread(results.too_large, share // 3)]
        specs |= {spec.layout: spec for spec, _ in chosen}
        specs |= {spec.layout: spec for spec in _drawn(search, share - len(chosen))}
    drawn = [(family(spec.layout), spec) for spec in specs.values()]
    names = [name for name, _ in Counter(name for name, _ in drawn).most_common()]
    listed = names if len(names) <= MOST_FAMILIES else names[: MOST_FAMILIES - 1]
    predicted = [(name if name in listed else OTHERS, predict(spec), spec.layout.line()) for name, spec in drawn]
    return tuple(SpacePoint(name, one.step_time_s, one.fullest.needed, one.fits, line) for name, one, line in predicted)


def family(layout: Layout) -> str:
    """Names the axes that a layout uses, such as "tensor + FSDP" or "tensor + pipeline"."""
    parts = [name for axis, name in AXES.items() if getattr(layout, axis) > 1]
    if len(parts) > 1:
        return " + ".join(parts) if len(parts) == 2 else SEVERAL_AXES
    if layout.shard_ranks > 1:
        parts.append(STATES[layout.zero])
    elif layout.dp_replicate > 1:
        parts.append("replicas")
    return " + ".join(parts) or "one device"


def _spread(found: Sequence[tuple[StepSpec, float]], number: int) -> list[tuple[StepSpec, float]]:
    """Returns `number` items of a list, evenly from its beginning to its end."""
    if len(found) <= number:
        return list(found)
    return [found[place * (len(found) - 1) // max(1, number - 1)] for place in range(number)]


def _drawn(search: Search, number: int) -> Iterator[StepSpec]:
    """Yields random layouts: each combination of axes is equally likely, and within it each pair."""
    space, draw = search.space, np.random.default_rng(SEED)
    kinds = sum((space.column(axis) > 1) * 2**bit for bit, axis in enumerate(AXES))
    groups = [np.flatnonzero(kinds == kind) for kind in np.unique(kinds)]
    for _ in range(number):
        pair = draw.choice(groups[draw.integers(len(groups))])
        rows = space.rows(np.array([pair]))
        try:
            yield search.request.spec(space.layout(rows, int(draw.integers(len(rows)))))
        except (JobError, ValueError):
            continue  # the schedule does not match the layers


MOST_DEVICES = 4096
"""Most devices that are tried."""
LEAST_MEMORY = {"recompute": "full", "micro_batch": 1, "schedule": Layout.schedule}
"""Values of fields that the request leaves open, chosen for little memory."""


def enough_devices(request: PlanRequest) -> tuple[str, ...]:
    """Returns a sentence about the first machine of 2, 4, 8 ... times as many nodes on which some layout fits; empty if
    there is none, for instance because the degrees are fixed."""
    for more, found in _tried(request):
        needed, limit = gib(found.prediction.fullest.needed), gib(found.prediction.memory_limit)
        line = replace(found.layout, accumulation=0, pp_cut="").line().replace(",", " ")
        return (
            f"It fits on {found.layout.world:,} of these devices, {more} times as many: {line} needs {needed} of "
            f"{limit} there.",
        )
    return ()


def _tried(request: PlanRequest) -> Iterator[tuple[int, Candidate]]:
    """Yields the multiples of the nodes on which a layout fits, with the layout that needs the least memory."""
    world, more = request.cluster.devices, 2
    while more * world <= MOST_DEVICES:
        cluster = replace(request.cluster, nodes=more * request.cluster.nodes)
        wider = replace(request, cluster=cluster, worlds=(), fixed={**LEAST_MEMORY, **request.fixed})
        try:
            search = Search(wider)
        except JobError:
            return
        everything = search.pair_bytes <= search.limit
        least = search.least(Portion(everything, None, search.space.sizes)) if everything.any() else None
        if least and least.prediction.fits:
            yield more, least
        more *= 2


LISTED = 10
"""Most layouts that a plan lists."""


@gc_paused()
def search(request: PlanRequest, progress: Progress | None = None, sample: int = 0) -> Plan:
    """Returns the best layouts, the alternatives and the reasons; `sample` is the number of layouts that are predicted
    for a picture of the space. If nothing fits, offloads the optimizer or runs large layers in tiles, where that helps.
    Raises JobError if no layout is legal, or if a fact about the devices is unknown."""
    began, searches = time.perf_counter(), _searches(request, progress)
    results, first = _results(searches, request.headroom), list[str]()
    if not results.candidates and request.headroom is not None:
        results = _results(searches, None)
    for fixed, why in () if results.candidates else _last_resorts(request):
        try:
            others = _searches(replace(request, fixed={**request.fixed, **fixed}), progress)
        except JobError:  # nothing divides by the tiles
            continue
        filling = _results(others, None)
        if filling.candidates:
            roomy = filling if request.headroom is None else _results(others, request.headroom)
            results = roomy if roomy.candidates else filling
            first = [why.format(f"none of {sum(each.space.size for each in searches):,} layouts fits")]
            break
    plan = _plan(*results, sample)
    if plan.best and results.searches[0].request.headroom != request.headroom:
        best = plan.best[0].prediction
        first.append(
            f"{NO_HEADROOM}: no layout leaves {request.headroom:.0%} of the device beyond the interval; this one is "
            f"predicted to need {gib(best.fullest.needed)}, at most {gib(best.upper_memory)}, of "
            f"{gib(best.memory_limit)}."
        )
    return replace(plan, notes=(*first, *plan.notes), seconds=time.perf_counter() - began)


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
    if request.fixed.keys() & {"tiles", "tile"} or request.model.freezes or max(request.devices) == 1:
        return
    for tiles in TILES:
        tiled: dict[str, Any] = {"tiles": tiles, "tile": "all"}
        yield tiled, f"Without tiles {{}}: {tiles} of a layer's matrices are gathered one after the other."
        if offload:
            yield {**tiled, **offload}, "Without tiles and offload {}."


class Results(NamedTuple):
    """The searches of a request with the same headroom, what each found, and the layouts to choose from."""

    searches: list[Search]
    found: list[Found]
    candidates: list[Candidate]


def _searches(request: PlanRequest, progress: Progress | None) -> list[Search]:
    """Returns a search per number of devices. Raises JobError if no layout is legal."""
    searches, problems = list[Search](), list[str]()
    for part in request.each():
        try:
            searches.append(Search(part, progress))
        except JobError as error:
            problems += error.problems
    if not searches:
        raise JobError(problems)
    return searches


def _results(searches: Sequence[Search], headroom: float | None) -> Results:
    searches = [each.leaving(headroom) for each in searches]
    found, own = zip(*map(_of_space, searches), strict=True)
    return Results(searches, [*found], [one for candidates in own for one in candidates])


def _plan(searches: list[Search], found: list[Found], candidates: list[Candidate], sample: int) -> Plan:
    """Returns the plan that follows from the results of searches."""
    request = searches[0].request
    best = [_settled(candidate) for candidate in distinct(ranked(candidates, request.band))]
    fastest = min(candidates, key=lambda one: (one.seconds, simplicity(one.spec)), default=None)
    weighed = alternatives(*_search_of(searches, found, best), best[0] if best else None, fastest)
    rejected = sum((one.rejected for one in found), Counter[str]())
    return Plan(
        request=request.spec(searches[0].space.layout(searches[0].space.rows(np.array([0])), 0)),
        best=tuple(best),
        fastest=fastest,
        nearest=None if best else nearest(searches, weighed),
        alternatives=weighed,
        points=points([*zip(searches, found, strict=True)], sample) if sample else (),
        rejected={reason: number for reason, number in rejected.most_common() if number},
        searched=sum(each.space.size for each in searches),
        seconds=0.0,
        notes=notes(best, fastest or best[0], weighed, request.band) if best else enough_devices(searches[-1].request),
    )


def _settled(candidate: Candidate) -> Candidate:
    """Returns a candidate whose `loss_chunk` is a number."""
    return Candidate.of(with_loss_chunk(candidate.spec)) if candidate.layout.loss_chunk == "auto" else candidate


def _of_space(search: Search) -> tuple[Found, list[Candidate]]:
    """Returns the results of a search and its best layouts: first of the plain part of the space, then of all of it,
    where only what is faster by more than the tie band has to be found."""
    if search.parts is None:
        found = search.best()
        return found, _best(search, found) or _leanest(search, found)
    plain, rest = search.parts
    usual = search.best(plain)
    candidates = _best(search, usual, plain.keep)
    least = min((one.seconds for one in candidates), default=inf)
    found = search.best(rest, below=least / (1 + search.request.band.kinds))
    found.merge(usual)
    more = simulated(found, search.request.band)
    # Refining them is worth the time only if one of them is chosen.
    wins = more and ranked([*candidates, *more], search.request.band)[0] in more
    candidates += _best(search, found) if wins else more
    return found, candidates or _leanest(search, found)


def _best(search: Search, found: Found, keep: Keep | None = None) -> list[Candidate]:
    """Returns the best layouts of a search, and their refinements: uneven stages and layers, second copies."""
    uniform = simulated(found, search.request.band)
    candidates = sorted([*refinements(search, found, uniform, keep), *uniform], key=lambda one: one.seconds)
    candidates = [*with_fp8_gathers(search.request, candidates), *candidates]
    candidates.sort(key=lambda one: one.seconds)
    return [*with_second_copies(search.request, candidates), *candidates]


def _leanest(search: Search, found: Found) -> list[Candidate]:
    """Returns refinements that fit of the layout that needs the least memory, where no layout of the space fits."""
    return refinements(search, found, [search.leanest]) if search.leanest else []


def _search_of(searches: Sequence[Search], found: Sequence[Found], best: Sequence[Candidate]) -> tuple[Search, Found]:
    """Returns the search over as many devices as the best layout has, or over the most, and what it found."""
    every = [*zip(searches, found, strict=True)]
    return next((one for one in every if best and best[0].layout.world in one[0].request.devices), every[-1])


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
        filter(None, found), key=lambda candidate: (candidate.prediction.fullest.needed, simplicity(candidate.spec))
    )


MOST_REASONS = 4
"""Most reasons in the message if no layout is legal."""


def choose(request: PlanRequest, progress: Progress | None = None) -> Plan:
    """Returns a plan whose best candidate exists, as `layout: auto` needs one.

    Raises JobError if no legal layout has the fixed fields, and DoesNotFitError if no legal layout fits.
    """
    plan = search(request, progress)
    if plan.best:
        return plan
    if plan.nearest is None:
        raise JobError(_nothing_legal(plan, request))
    nearest = plan.nearest.spec
    raise DoesNotFitError(
        f"layout auto: none of {plan.searched:,} layouts fits. The one that needs the least memory, "
        f"{nearest.layout.line()}, " + "\n  ".join([shortfall(nearest), *plan.notes])
    )


def _nothing_legal(plan: Plan, request: PlanRequest) -> str:
    settled = "".join(
        f",{name}={str(value).lower() if isinstance(value, bool) else value}" for name, value in request.fixed.items()
    )
    reasons = sorted(plan.rejected.items(), key=lambda item: -item[1])[:MOST_REASONS]
    return (
        f"layout auto{settled}: no such layout is legal for this model, global batch {request.global_batch} and "
        f"{' or '.join(map(str, request.devices))} devices; fix fewer fields, or change the number of devices "
        "(cluster.devices_per_node)" + "".join(f"\n  {count:,} layouts: {reason}" for reason, count in reasons)
    )
