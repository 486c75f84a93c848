"""Good layouts made better: stages of uneven size, and layers that recompute differently.

The search (search.py) cuts by FLOPs and has all layers recompute the same. Here a layout's stages are cut by the
seconds that the cost model gives them, each within the memory of its rank, and the layers of every rank keep what there
is room for: the last rank of a 1F1B pipeline has one micro-batch in flight, the first one a micro-batch for each rank.
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
"""Times that the line of the memory (rank_costs.py) is put right."""
WORTH = 1.002
"""A layout is refined where it gets that much faster: below, the simpler one is as good."""
MARGIN = 1.01
"""Predicted times up to so much beyond the best are simulated."""
TRIED, MIXED = 3, 2
"""Layouts that are refined: of the best, and of those that would fit with some recomputation."""


def refined(request: PlanRequest, candidate: Candidate) -> Candidate:
    """The candidate with the best cut and the least recomputation that fit; the same one where that is no faster."""
    spec = refinement(request, candidate.spec)
    if spec is None:
        return candidate
    seconds = step_seconds(spec)
    better = seconds * WORTH < candidate.seconds or not candidate.prediction.fits
    return Candidate(spec, predict(spec), seconds) if better else candidate


def refinements(search: Search, found: Found, candidates: Sequence[Candidate]) -> list[Candidate]:
    """What comes of the best of a search, and of what would fit and be fast if only some layers recomputed: those that
    are faster than all before. `candidates` are the fastest first, or, where nothing fits, what needs least."""
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
    """The layout of a case that fits, with another cut, another recomputation of its layers or both, so that its
    slowest rank is faster; None where there is none."""
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
    """Whether stages may be cut otherwise, and whether layers may recompute otherwise."""
    fixed = request.fixed
    cuts = layout.pp > 1 and not fixed.get("pp_cut")
    return cuts, not fixed.get("recompute_cut") and "recompute" not in fixed


def _score(ranks: PipelineRanks, spec: StepSpec) -> float:
    """Seconds of a step, about: the slowest rank's micro-batches, and one of every other rank on the way in and out."""
    times = ranks.times(spec)
    return (spec.batch.accumulation - 1) * max(times) + sum(times)


def _written(
    ranks: PipelineRanks, layout: Layout, stages: Sequence[range], start: Sequence[range], mixes: bool
) -> Layout:
    """The layout with these stages, and what each rank's blocks recompute with them."""
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
    """What some layers do: those that recompute come first, since the backward pass begins with the last, which give up
    what they kept before others need room to compute again."""
    place = 0
    for mode in ("full", "selective", "none"):
        for layer in layers[place : place + numbers.get(mode, 0)]:
            every[layer] = mode
        place += numbers.get(mode, 0)
