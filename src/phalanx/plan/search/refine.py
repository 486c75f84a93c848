"""Refinement of good layouts: stages of uneven size, and layers with different recomputation.

The search (branch.py) cuts by FLOPs and gives all layers the same recomputation. Here a layout's stages are cut by the
seconds of the cost model, each within the memory of its rank, and the layers of every rank save as much as fits: the
last rank of a 1F1B pipeline has one micro-batch in flight, the first one per rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby, islice
from math import inf

from phalanx.config.layout import Layout
from phalanx.cost.placed import stages_of_case
from phalanx.cost.predict import predict
from phalanx.cost.spec import StepSpec
from phalanx.cost.time.step_time import step_parts
from phalanx.errors import JobError
from phalanx.partition.recompute import MODES, Mode, RecomputeRun, modes, written
from phalanx.plan.plan import Candidate
from phalanx.plan.search.branch import Found, Search, same_passes
from phalanx.plan.search.mixtures import mixtures
from phalanx.plan.search.rank_costs import PipelineRanks
from phalanx.plan.search.request import PlanRequest
from phalanx.plan.search.uneven import stages_of_ranks
from phalanx.simulate.step import step_seconds

ROUNDS = 6
"""Rounds in which the linear memory model (rank_costs.py) is recalibrated."""
WORTH = 1.002
"""Least speedup for which a layout is refined: below it, the simpler one is as good."""
MARGIN = 1.01
"""Factor on the best time up to which refined layouts are simulated."""
TRIED, MIXED = 3, 2
"""Layouts that are refined: of the best, and of those that would fit with some recomputation."""


def refined(request: PlanRequest, candidate: Candidate) -> Candidate:
    """Returns the candidate with the best cut and the least recomputation that fit, if that is faster."""
    spec = refinement(request, candidate.spec)
    if spec is None:
        return candidate
    seconds = step_seconds(spec)
    better = seconds * WORTH < candidate.seconds or not candidate.prediction.fits
    return Candidate(spec, predict(spec), seconds) if better else candidate


def refinements(search: Search, found: Found, candidates: Sequence[Candidate]) -> list[Candidate]:
    """Returns the refinements of the best layouts of a search, and of those that would fit and be fast with
    recomputation of some layers, each faster than all before. `candidates` are sorted, fastest first, or, if none fits,
    leanest first."""
    best = candidates[0].seconds if candidates[0].prediction.fits else inf
    passes = dict[Layout, StepSpec]()
    for candidate in candidates:
        passes.setdefault(same_passes(candidate.layout), candidate.spec)
    specs = list(islice(passes.values(), TRIED))
    if best < inf:
        specs += islice(mixtures(search, found, best), MIXED)
    better = list[Candidate]()
    for spec in specs:
        other = refinement(search.request, spec)
        if other is None or step_parts(other).total > MARGIN * best:
            continue
        seconds = step_seconds(other)
        if seconds * WORTH < best:
            best = seconds
            better.append(Candidate(other, predict(other), seconds))
    return better


def refinement(request: PlanRequest, spec: StepSpec) -> StepSpec | None:
    """Returns the spec of a layout that fits, with another cut, another recomputation of its layers or both, whose
    slowest rank is faster; None if there is none."""
    layout = spec.layout
    cuts, mixes = _open(request, layout)
    if not (cuts or mixes):
        return None
    every = MODES if mixes else tuple(dict.fromkeys(modes(written(layout), spec.model.n_layers)))
    ranks = PipelineRanks(spec, every)
    start = stages_of_case(spec, ranks.stages)
    fits = ranks.calibrated(spec)
    best, found = (_score(ranks, spec) / WORTH if fits else inf), None
    seen = {layout}
    for _ in range(ROUNDS):
        stages = stages_of_ranks(ranks, start) if cuts else start
        other = _written(ranks, layout, stages, start, mixes) if stages else layout
        if other in seen:
            break
        seen.add(other)
        try:
            tried = request.spec(other)
        except (JobError, ValueError):
            break
        score = _score(ranks, tried)
        if score >= best:
            break
        if ranks.calibrated(tried):
            best, found = score, tried
    return found


def _open(request: PlanRequest, layout: Layout) -> tuple[bool, bool]:
    """Returns whether stages may be cut differently, and whether layers may recompute differently."""
    fixed = request.fixed
    cuts = layout.pp > 1 and not fixed.get("pp_cut")
    return cuts, not fixed.get("recompute_cut") and "recompute" not in fixed


def _score(ranks: PipelineRanks, spec: StepSpec) -> float:
    """Returns the approximate seconds of a step: all micro-batches of the slowest rank, one of every other rank."""
    times = ranks.times(spec)
    return (spec.batch.accumulation - 1) * max(times) + sum(times)


def _written(
    ranks: PipelineRanks, layout: Layout, stages: Sequence[range], start: Sequence[range], mixes: bool
) -> Layout:
    """Returns the layout with these stages, and with the recomputation that fits each rank's blocks."""
    if tuple(stages) != tuple(start):
        layout = replace(layout, pp_cut="+".join(str(len(stage)) for stage in stages))
    if not mixes:
        return layout
    counts, every = ranks.counts(stages), ["full"] * len(ranks.of_layer)
    for rank, flight in enumerate(ranks.flights):
        filling = ranks.filling(rank, ranks.held(rank, counts))
        if filling is None:
            return layout
        numbers = iter(filling.numbers)
        for stage in flight.held:
            for kind, many in enumerate(counts[stage]):
                if many:
                    layers = [layer for layer in stages[stage] if ranks.of_layer[layer] == kind]
                    _assign(every, layers, dict(zip(ranks.modes, next(numbers), strict=True)))
    runs = [RecomputeRun(len(list(run)), mode) for mode, run in groupby(every)]  # type: ignore[arg-type]
    if len(runs) == 1:
        return replace(layout, recompute=runs[0].mode, recompute_cut="")
    return replace(layout, recompute="none", recompute_cut="+".join(map(str, runs)))


def _assign(every: list[str], layers: Sequence[int], numbers: dict[Mode, int]) -> None:
    """Sets the modes of some layers. Those that recompute come first: the backward pass begins with the last, which
    free their activations before others need room to recompute."""
    place = 0
    for mode in ("full", "selective", "products", "none"):
        for layer in layers[place : place + numbers.get(mode, 0)]:
            every[layer] = mode
        place += numbers.get(mode, 0)
