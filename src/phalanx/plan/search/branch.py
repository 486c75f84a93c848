"""Branch and bound over one space of layouts: what is fastest, of all of it or of a part.

Layouts come in the order of a lower bound on their time (bounds.py). What cannot fit or cannot be among the best is
left out by its bounds; the rest is predicted, until the bound of the next is beyond the best. The best of those are
simulated event by event, and that time ranks them; of equals the simpler one wins.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf

import numpy as np
from numpy.typing import NDArray

from phalanx.config.layout import Layout
from phalanx.cost.memory.rank_memory import needed_bytes
from phalanx.cost.predict import predict
from phalanx.cost.spec import StepSpec
from phalanx.cost.time.step_time import step_parts
from phalanx.errors import JobError
from phalanx.plan.plan import Candidate
from phalanx.plan.search.bounds import Bounds
from phalanx.plan.search.request import PlanRequest
from phalanx.plan.search.space import Rows, Space, joined, space_of
from phalanx.schedule.catalogue import SCHEDULES
from phalanx.simulate.step import step_seconds

Mask = NDArray[np.bool_]
"""Of the pairs of a space, some."""
Keep = Callable[[Rows], Mask]
"""Of some rows, those that may be taken."""
Progress = Callable[[str, int, int], None]
"""What is done, how much of it, of how much."""

MARGIN, ENOUGH_FITTING = 1.03, 1000
"""Predicted times up to so much beyond the best are of interest: simulated ones are seldom faster by more. Once so many
layouts fit, only those are that may be the best."""
SIMULATED = 300
"""Layouts that are simulated at most."""
SIMULATED_ACTIONS, SIMULATED_MESHES = 400_000, 10
"""Actions of schedules that these have together at most, about half a second of simulating; but so many meshes are
simulated in any case."""
SEED_PAIRS, SEEDS = 512, 24
"""Pairs of each length of pipeline that are looked at first, and how many layouts of these that fit."""
PAIR_BLOCK = 2048
"""Pairs whose layouts are looked at at a time."""
ROW_BLOCK = 1_000_000
"""Layouts that are bounded at a time."""
FIRST_TIMED = 128
"""Layouts whose schedules' programs are run at first, the nearest; then twice as many, and so on."""
LEAN_BLOCK, LEAN_PAIRS, LEAN_LAYOUTS = 64, 1024, 1200
"""Pairs at a time, pairs and layouts at most, that are looked at for the one that needs the least memory."""
GAIN = 0.995
"""A layout is simulated while the search goes on where it may be faster than the best by so much."""
MOST_TOO_LARGE = 1000
"""Layouts that do not fit which are kept for the picture."""
TIE = 1.001
"""Times up to so much apart are equal: the simpler layout wins."""


@dataclass
class Found:
    """What a search has seen."""

    predicted: list[tuple[StepSpec, float]] = field(default_factory=list)
    """Layouts that fit."""
    too_large: list[tuple[StepSpec, float]] = field(default_factory=list)
    """A few that do not, and the bytes they need."""
    rejected: Counter[str] = field(default_factory=Counter)
    seen: set[Layout] = field(default_factory=set)
    """Layouts that were predicted."""
    least: float = inf
    """Seconds of the best, predicted or simulated, whichever are more."""
    known: dict[StepSpec, float] = field(default_factory=dict)
    """Simulated times."""
    simulates: bool = True
    """Whether the best goes by simulated times, or by predicted ones alone."""

    @property
    def cutoff(self) -> float:
        """Predicted seconds beyond which a layout is of no interest."""
        return self.least * (MARGIN if len(self.predicted) < ENOUGH_FITTING else 1)

    def add(self, spec: StepSpec, seconds: float) -> None:
        """A layout that fits, and its predicted time."""
        self.predicted.append((spec, seconds))
        if seconds < GAIN * self.least:
            self.looked_at(seconds, self.simulated(spec) if self.simulates else 0.0)

    def restart(self) -> None:
        """From now on the best goes by simulated times: first by that of the best so far."""
        self.simulates, self.least = True, inf
        if self.predicted:
            spec, seconds = min(self.predicted, key=lambda one: (one[1], complexity(one[0].layout)))
            self.looked_at(seconds, self.simulated(spec))

    def looked_at(self, predicted: float, simulated: float) -> None:
        """A layout that fits, and both its times."""
        self.least = min(self.least, max(predicted, simulated))

    def simulated(self, spec: StepSpec) -> float:
        """Seconds of its step, simulated once."""
        if spec not in self.known:
            self.known[spec] = step_seconds(spec)
        return self.known[spec]


TOO_LARGE = "memory: lower bound of state and activations exceeds the device"
SLOWER = "time: lower bound exceeds the best layout"


class Search:
    """One space, its bounds, and what was found in it."""

    def __init__(self, request: PlanRequest, progress: Progress | None = None):
        self.request, self.progress = request, progress or _silent
        self.space: Space = space_of(request)
        self.bounds = Bounds(request, self.space)
        self.limit = request.cluster.accelerator.memory_gib * 2**30
        self.pair_seconds, self.pair_bytes = self.bounds.pairs()

    def with_room(self, factor: float) -> Search:
        """The same, for layouts that would fit if they needed `factor` times the memory that is predicted."""
        other = copy(self)
        other.limit, other.progress = self.limit / factor, _silent
        return other

    def best(self, pairs: Mask | None = None, keep: Keep | None = None, simulates: bool = True) -> Found:
        """The fastest layouts of the space that fit, or of some `pairs` of it and of the rows to `keep`; by prediction
        alone where it does not simulate."""
        found = Found(simulates=False)
        chosen = np.ones(len(self.pair_seconds), bool) if pairs is None else pairs
        fits = self.pair_bytes <= self.limit
        for pair in np.flatnonzero(chosen & ~fits):
            found.rejected["memory: too large even with everything sharded and recomputed"] += len(
                self.space.options[pair]
            )
        order = np.flatnonzero(chosen & fits)
        order = order[np.argsort(self.pair_seconds[order], kind="stable")]
        # Some good layouts first, of pipelines of every length: they say where the others need not be looked at. The
        # very fastest seldom fit.
        near = self._near([self._seeds(self._first(order))], found, keep)
        self._best_of(*near, found, enough=SEEDS)
        if simulates:
            found.restart()
        near_pairs = self.pair_seconds[order] <= found.cutoff
        for pair in order[~near_pairs]:
            found.rejected["time: lower bound without bubble and gradient reduction exceeds the best layout"] += len(
                self.space.options[pair]
            )
        # By length of pipeline: whose layouts are bounded together.
        rest = order[near_pairs]
        rest = rest[np.argsort(self.bounds.pp[rest], kind="stable")]
        rows, seconds = self._near(
            self._possible(rest, found, keep, self.progress if pairs is None else _silent), found, None, counted=True
        )
        self._best_of(rows, seconds, found, counted=True)
        return found

    def one(self, pairs: Mask, keep: Keep | None = None) -> Candidate | None:
        """The fastest layout, as predicted, of some pairs and of the rows to `keep`; None where none
        fits."""
        found = self.best(pairs, keep, simulates=False)
        near = min(found.predicted, key=lambda one: (one[1], complexity(one[0].layout)), default=None)
        return near and Candidate.of(near[0])

    @cached_property
    def leanest(self) -> Candidate | None:
        """Of the whole space the layout that needs the least memory, as far as `least` looks."""
        return self.least(np.ones(len(self.pair_bytes), bool))

    def least(self, pairs: Mask, keep: Keep | None = None) -> Candidate | None:
        """The layout of some pairs and of the rows to `keep` that needs the least memory, of those with the lowest
        bounds; None where there is none."""
        order = np.flatnonzero(pairs)
        order = order[np.argsort(self.pair_bytes[order], kind="stable")][:LEAN_PAIRS]
        best, tried = None, 0
        for start in range(0, len(order), LEAN_BLOCK):
            if best and self.pair_bytes[order[start]] >= best[0][0]:
                break
            rows = self.space.rows(order[start : start + LEAN_BLOCK])
            rows = rows if keep is None else rows.select(keep(rows))
            if not len(rows):
                continue
            seconds, memory = self.bounds.rows(rows)
            for number in np.lexsort((seconds, memory)):
                if best and (memory[number] >= best[0][0] or tried > LEAN_LAYOUTS):
                    break
                try:
                    spec = self.request.spec(self.space.layout(rows, int(number)))
                except (JobError, ValueError):
                    continue
                tried += 1
                key = needed_bytes(spec), complexity(spec.layout)
                best = (key, spec) if best is None or key < best[0] else best
        return Candidate.of(best[1]) if best else None

    def _first(self, order: NDArray[np.intp]) -> NDArray[np.intp]:
        """Of every number of pipeline ranks some of the pairs with the lowest bounds."""
        pp = self.bounds.pp[order]
        return np.concatenate([order[pp == ranks][:SEED_PAIRS] for ranks in np.unique(pp)] or [order])

    def _seeds(self, pairs: NDArray[np.intp]) -> Rows:
        """The rows of some pairs under the schedules that seed a search, where they are among the space's."""
        rows = self.space.rows(pairs)
        seeding = {name for name, entry in SCHEDULES.items() if entry.seeds}
        few = [number for number, one in enumerate(self.space.schedules) if one.schedule in seeding]
        return rows.select(np.isin(rows.scheduled, few)) if few else rows

    def _possible(self, pairs: NDArray[np.intp], found: Found, keep: Keep | None, told: Progress) -> Iterator[Rows]:
        """The rows of some pairs whose recomputation and state can fit and can be among the best."""
        for start in range(0, len(pairs), PAIR_BLOCK):
            told("layouts", start, len(pairs))
            block = pairs[start : start + PAIR_BLOCK]
            seconds, memory = self.bounds.options(block)
            rows = self.space.rows(block)
            place = np.repeat(np.arange(len(block)), [len(self.space.options[pair]) for pair in block])
            fits = memory[place, rows.recompute, rows.scheduled, rows.state] <= self.limit
            near = seconds[place, rows.recompute, rows.scheduled] <= found.cutoff
            if keep is not None:
                chosen = keep(rows)
                fits, near, rows = fits[chosen], near[chosen], rows.select(chosen)
            found.rejected[TOO_LARGE] += int((~fits).sum())
            found.rejected[SLOWER] += int((fits & ~near).sum())
            yield rows.select(fits & near)
        told("layouts", len(pairs), len(pairs))

    def _near(
        self, blocks: Iterable[Rows], found: Found, keep: Keep | None, counted: bool = False
    ) -> tuple[Rows, NDArray[np.float64]]:
        """The rows that can fit and can be among the best, and their bounds."""
        near, times = [Rows(*np.empty((4, 0), np.int32))], [np.empty(0)]
        for rows in _joined(blocks):
            some = rows if keep is None else rows.select(keep(rows))
            seconds, memory = self.bounds.rows(some, self.limit)
            fits = memory <= self.limit
            kept = fits & (seconds <= found.cutoff)
            near.append(some.select(kept))
            times.append(seconds[kept])
            if counted:
                found.rejected[TOO_LARGE] += int((~fits).sum())
                found.rejected[SLOWER] += int((fits & ~kept).sum())
        return joined(near), np.concatenate(times)

    def _best_of(
        self, rows: Rows, seconds: NDArray[np.float64], found: Found, enough: float = inf, counted: bool = False
    ) -> None:
        """Predict what can be among the best of some rows, in the order of their bounds; with `enough`, only until so
        many fit."""
        order, start, few = np.argsort(seconds, kind="stable"), 0, FIRST_TIMED
        while start < len(order) and seconds[order[start]] <= found.cutoff and len(found.predicted) < enough:
            here = order[start : start + few]
            some = rows.select(here[seconds[here] <= found.cutoff])
            start, few = start + len(some), 2 * few
            exact, _ = self.bounds.rows(some, runs=True)
            nearest = np.argsort(exact, kind="stable")
            for place, number in enumerate(nearest):
                if exact[number] > found.cutoff:
                    if counted:
                        found.rejected[SLOWER] += len(nearest) - place
                    break
                self._predict(self.space.layout(some, int(number)), found)
                if len(found.predicted) >= enough:
                    break
        if counted:
            found.rejected[SLOWER] += len(order) - start

    def _predict(self, layout: Layout, found: Found) -> None:
        if layout in found.seen:
            return
        found.seen.add(layout)
        try:
            spec = self.request.spec(layout)
        except (JobError, ValueError):
            found.rejected["the schedule does not go with the batch or the layers"] += 1
            return
        needed = needed_bytes(spec, self.limit)
        if needed <= self.limit:
            found.add(spec, step_parts(spec).total)
            return
        found.rejected["memory: predicted not to fit"] += 1
        if len(found.too_large) < MOST_TOO_LARGE:
            found.too_large.append((spec, needed))


def _silent(*_: object) -> None:
    pass


def _joined(blocks: Iterable[Rows]) -> Iterator[Rows]:
    """The same rows in fewer blocks."""
    waiting = list[Rows]()
    for rows in blocks:
        waiting.append(rows)
        if sum(map(len, waiting)) >= ROW_BLOCK:
            yield joined(waiting)
            waiting = []
    if waiting:
        yield joined(waiting)


def simulated(found: Found) -> list[Candidate]:
    """The best of what was predicted, by their simulated time, the fastest first."""
    near = sorted(found.predicted, key=lambda one: (one[1], complexity(one[0].layout)))
    done, visits, alike = list[Candidate](), 0, Counter[Layout]()
    meshes = dict[tuple[int, ...], dict[str, float]]()
    for spec, seconds in near:
        layout = spec.layout
        if seconds > MARGIN * found.least or len(done) >= SIMULATED:
            break
        # Once that takes too long, of every mesh the first; and where that was slower than predicted, the first with
        # another schedule.
        times = meshes.get(degrees(layout), {})
        more = len(meshes) < SIMULATED_MESHES if not times else seconds < GAIN * min(times.values())
        if visits > SIMULATED_ACTIONS and (layout.schedule in times or not more):
            continue
        # Layouts that differ in how the state is shared have the same passes: two of each are enough.
        passes = same_passes(layout)
        if alike[passes] < 2:
            alike[passes] += 1
            visits += min(spec.batch.accumulation, 5 * max(layout.pp, 24)) * layout.pp * max(1, layout.pp_chunks) * 4
            done.append(Candidate(spec, predict(spec), found.simulated(spec)))
            found.looked_at(seconds, done[-1].seconds)
            known = meshes.setdefault(degrees(layout), {})
            known[layout.schedule] = min(known.get(layout.schedule, inf), done[-1].seconds)
    return ranked(done)


def ranked(candidates: Iterable[Candidate]) -> list[Candidate]:
    """The fastest first, and of those that are as fast as the first the simplest before the others."""
    left = sorted(candidates, key=lambda one: (one.seconds, complexity(one.layout)))
    if not left:
        return left
    ties = [one for one in left if one.seconds <= left[0].seconds * TIE]
    simple = min(ties, key=lambda one: (complexity(one.layout), one.seconds))
    return [simple, *(one for one in left if one is not simple)]


def complexity(layout: Layout) -> tuple[int, ...]:
    """How much there is to a layout: axes that it uses, settings that are not the default, the degrees of the axes that
    cut the model."""
    axes = sum(
        degree > 1 for degree in (layout.dp_replicate, layout.dp_shard, layout.cp, layout.tp, layout.pp, layout.ep)
    )
    settings = (
        (layout.pp > 1) * (layout.schedule != Layout.schedule)
        + (layout.recompute != "none")
        + bool(layout.pp_cut)
        + bool(layout.recompute_cut)
        + (layout.shard_ranks > 1) * ((layout.accumulate == "sharded") + (layout.zero == 3 and not layout.reshard))
        + (layout.ring > 1 and layout.cp_ulysses > 1)
    )
    return axes, settings, layout.tp * layout.pp * layout.cp * layout.ep, layout.pp_chunks, layout.zero


def degrees(layout: Layout) -> tuple[int, ...]:
    """The degrees of its mesh; how data ranks share the state is not among them."""
    return layout.tp, layout.cp, layout.pp, layout.data_ranks, layout.ep


def same_passes(layout: Layout) -> Layout:
    """The layout without how ranks share the state: what is left says what the passes do."""
    return replace(layout, dp_shard=1, dp_replicate=1, zero=3, reshard=True, accumulate="local")
