"""Branch and bound over one space of layouts: the fastest of all of it or of a part.

Layouts come in the order of a lower bound on their time (bounds.py). Bounds prune those that cannot fit or cannot be
among the best; the rest is predicted, until the next bound exceeds the best time. The best of those are simulated event
by event, and ranked by that time; the simplest of equals wins (simplicity.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from math import inf, nan
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from phalanx.config.layout import Layout
from phalanx.cost.prediction import step_parts
from phalanx.cost.rank_memory import needed_bytes
from phalanx.cost.spec import StepSpec
from phalanx.errors import JobError
from phalanx.plan.bounds import Bounds, SlowPipeline
from phalanx.plan.plan import Candidate
from phalanx.plan.simplicity import EQUAL, LONG_SEQUENCE, Simplicity, TieBand, ranked, simplicity
from phalanx.plan.space import RECOMPUTE, STATES, MeshDegrees, PlanRequest, Rows, Space, joined, space_of
from phalanx.plan.tables import present
from phalanx.schedule.catalogue import SCHEDULES
from phalanx.simulate.step import step_seconds

Mask = NDArray[np.bool_]
"""A mask over the pairs of a space."""
Keep = Callable[[Rows], Mask]
"""A function from rows to the mask of those that are allowed; it takes columns of any shapes that broadcast."""
Progress = Callable[[str, int, int], None]
"""A function of an activity, its steps done, and all its steps."""

MARGIN, ENOUGH_FITTING = 1.03, 1000
"""Factor on the best time up to which predicted layouts are kept: simulated times are seldom faster by more; number of
fitting layouts from which on only those that may be the best are kept."""
SIMULATED = 300
"""Most layouts that are simulated."""
SIMULATED_ACTIONS, SIMULATED_MESHES = 400_000, 10
"""Most actions in the schedules of all these, about half a second of simulation; meshes that are simulated in any
case."""
SEED_PAIRS, SEED_ROWS, SEEDS = 1024, 16_384, 24
"""Pairs of each pp degree that seed the search, the layouts of them that are bounded first, and the number of fitting
layouts that it begins with."""
PAIR_BLOCK = 8192
"""Pairs whose layouts are examined at a time."""
ROW_BLOCK = 1_000_000
"""Layouts that are bounded at a time."""
FIRST_TIMED = 128
"""Layouts whose schedules' programs are run first, those with the lowest bounds; then twice as many, and so on."""
LINK = 0.02
"""A schedule is run with its messages before a layout is predicted where a link sends for more than this share of a
step: below it they are hidden."""
LEAN_BLOCK, LEAN_PAIRS, LEAN_LAYOUTS = 64, 256, 1200
"""Pairs at a time, most pairs and most layouts that are examined for the one that needs the least memory."""
GAIN = 0.995
"""Factor on the best time below which a layout is simulated during the search."""
MOST_TOO_LARGE = 1000
"""Most layouts that do not fit that are kept for the picture."""


class Portion(NamedTuple):
    """A part of a space."""

    pairs: Mask
    """The pairs with layouts of the part."""
    keep: Keep | None
    """Selects the rows of the part."""
    sizes: NDArray[np.int64]
    """Number of layouts of the part, by pair."""


simulated_seconds = lru_cache(10_000)(step_seconds)
needed_at_least = lru_cache(10_000)(needed_bytes)


@lru_cache(10_000)
def predicted_seconds(spec: StepSpec) -> float:
    """Returns the seconds of a step by formula."""
    return step_parts(spec).total


@dataclass
class Found:
    """The state and the results of a search."""

    predicted: list[tuple[StepSpec, float]] = field(default_factory=list)
    """Layouts that fit, with their predicted seconds."""
    too_large: list[tuple[StepSpec, float]] = field(default_factory=list)
    """Some layouts that do not fit, with the bytes they need."""
    rejected: Counter[str] = field(default_factory=Counter)
    seen: set[Layout] = field(default_factory=set)
    """Layouts that were predicted."""
    least: float = inf
    """Seconds of the best layout, the larger of predicted and simulated."""
    below: float = inf
    """Seconds that a layout has to beat."""
    simulates: bool = True
    """Whether simulated times decide on the best, or predicted ones alone."""

    @property
    def cutoff(self) -> float:
        """Predicted seconds above which a layout is pruned."""
        wide = self.simulates and len(self.predicted) < ENOUGH_FITTING
        return min(self.below, self.least * (MARGIN if wide else 1))

    def add(self, spec: StepSpec, seconds: float) -> None:
        """Adds a layout that fits, with its predicted seconds."""
        self.predicted.append((spec, seconds))
        if not self.simulates:
            self.least = min(self.least, seconds)
        elif seconds < GAIN * self.least:
            self.improve(seconds, simulated_seconds(spec))

    def restart(self) -> None:
        """Ranks by simulated times from now on, beginning with that of the best layout so far."""
        self.simulates, self.least = True, self.below
        if self.predicted:
            spec, seconds = min(self.predicted, key=lambda one: (one[1], simplicity(one[0])))
            self.improve(seconds, simulated_seconds(spec))

    def improve(self, predicted: float, simulated: float) -> None:
        """Lowers the best time to that of a layout that fits, if it is better."""
        self.least = min(self.least, max(predicted, simulated))

    def merge(self, other: Found) -> None:
        """Adds the layouts of a search in another part of the space."""
        self.predicted += other.predicted
        self.too_large += other.too_large
        self.rejected += other.rejected


TOO_LARGE = "memory: lower bound of state and activations exceeds the device"
SLOWER = "time: lower bound exceeds the best layout"


def _silent(*_: object) -> None:
    pass


class Search:
    """A space, its bounds, and the searches in it."""

    def __init__(self, request: PlanRequest, progress: Progress | None = None):
        self.request, self.progress = request, progress or _silent
        self.space: Space = space_of(request)
        self.bounds = Bounds(request, self.space)
        self.limit = request.limit
        self._whole: Search | None = None
        """The search that this one is a copy of, of all of the device."""
        self.pair_seconds, self.pair_bytes = self.bounds.pairs()

    def leaving(self, headroom: float | None) -> Search:
        """Returns the search for layouts that leave so much of the device."""
        other = copy(self)
        other._whole = self._whole or self
        other.request = replace(self.request, headroom=headroom)
        other.limit = other.request.limit
        return other

    def best(self, part: Portion | None = None, simulates: bool = True, below: float = inf) -> Found:
        """Returns the fastest layouts of the space, or of a part of it, that fit; without simulation the fastest one by
        prediction alone, among others. Only those that may be faster than `below` seconds are of interest."""
        found = Found(simulates=False, least=below, below=below)
        part = part or self._everything
        chosen, _, sizes = part
        fits = self.pair_bytes <= self.limit
        found.rejected["memory: too large even with everything sharded and recomputed"] += int(
            sizes[chosen & ~fits].sum()
        )
        order = np.flatnonzero(chosen & fits)
        order = order[np.argsort(self.pair_seconds[order], kind="stable")]
        if simulates or below == inf:
            self._seed(order, found, part)
        if simulates:
            found.restart()
        near = self.pair_seconds[order] <= found.cutoff
        found.rejected["time: lower bound without bubble and gradient reduction exceeds the best layout"] += int(
            sizes[order[~near]].sum()
        )
        # Layouts with the same pp degree are bounded together.
        rest = order[near]
        rest = rest[np.argsort(self.bounds.pp[rest], kind="stable")]
        every, progress = range(len(self.space.schedules)), self.progress if simulates else _silent
        blocks = (rows for rows, _ in self._possible(rest, found, part, every, self.limit, progress))
        self._best_of(*self._near(_joined(blocks), found, counted=simulates), found)
        return found

    @cached_property
    def columns(self) -> SimpleNamespace:
        """The degrees of the meshes and the micro-batches of the pairs, by name."""
        columns = {name: self.space.column(name) for name in MeshDegrees._fields}
        return SimpleNamespace(**columns, micro_batch=self.space.micro_batch.astype(np.int64))

    def one(self, part: Portion | None = None, below: float = inf) -> Candidate | None:
        """Returns the fastest layout, as predicted, of the space or of a part of it; None if none fits and may be
        faster than `below` seconds."""
        found = self.best(part, simulates=False, below=below)
        near = min(found.predicted, key=lambda one: (one[1], simplicity(one[0])), default=None)
        return near and Candidate.of(near[0])

    @property
    def _everything(self) -> Portion:
        return Portion(np.ones(len(self.pair_seconds), bool), None, self.space.sizes)

    @cached_property
    def parts(self) -> tuple[Portion, Portion] | None:
        """The plain part of the space, which is searched first, and the rest: no context parallelism of short
        sequences, and 1F1B or interleaved 1F1B; None if the plain part is all or nothing of it."""
        short = self.request.model.seq_len < LONG_SEQUENCE
        pairs = (self.space.column("cp") == 1) | (not short)
        usual = np.array([one.schedule in SCHEDULES and SCHEDULES[one.schedule].usual for one in self.space.schedules])
        one_stage = self.bounds.pp == 1
        every = pairs.all() and (usual.all() or one_stage.all())
        if every or not pairs.any() or self.request.band == EQUAL:
            return None

        def is_plain(rows: Rows) -> Mask:
            return pairs[rows.pair] & (usual[rows.scheduled] | one_stage[rows.pair])

        sizes = self.space.sizes
        plain = np.where(pairs, np.where(one_stage, sizes, self.space.count(lambda options: usual[options[:, 0]])), 0)
        return Portion(pairs, is_plain, plain), Portion(plain < sizes, lambda rows: ~is_plain(rows), sizes - plain)

    @cached_property
    def leanest(self) -> Candidate | None:
        """The layout of the whole space that needs the least memory, among those that `least` examines."""
        return self._whole.leanest if self._whole else self.least()

    def least(self, part: Portion | None = None) -> Candidate | None:
        """Returns the layout that needs the least memory, of the space or of a part of it, among those with the lowest
        bounds; None if there is none."""
        part = part or self._everything
        order = np.flatnonzero(part.pairs)
        order = order[np.argsort(self.pair_bytes[order], kind="stable")][:LEAN_PAIRS]
        best = first = None
        tried, limit = 0, inf
        for turn, block in enumerate([order[:1], *np.split(order, range(LEAN_BLOCK, len(order), LEAN_BLOCK))]):
            if not len(block) or self.pair_bytes[block[0]] >= limit:
                break
            # What the first pair needs prunes the others; then it is among them, for ties.
            if turn == 1:
                best, first, tried = None, best, 0
            ((rows, _),) = self._possible(block, Found(), part, range(len(self.space.schedules)), limit)
            seconds, memory = self.bounds.rows(rows, limit)
            for number in np.lexsort((seconds, memory)):
                if memory[number] >= limit or tried > LEAN_LAYOUTS:
                    break
                try:
                    spec = self.request.spec(self.space.layout(rows, int(number)))
                except (JobError, ValueError):
                    continue
                tried += 1
                if (needed := needed_at_least(spec, limit)) <= limit:
                    key, limit = (needed, simplicity(spec)), needed
                    best = (key, spec) if best is None or key < best[0] else best
        best = best or first
        return Candidate.of(best[1]) if best else None

    def _seed(self, order: NDArray[np.intp], found: Found, part: Portion) -> None:
        """Predicts good layouts of every pp degree, whose times prune the others, in the order of the bounds of their
        schedule and recomputation. The very fastest seldom fit."""
        pp = self.bounds.pp[order]
        pairs = np.concatenate([order[pp == ranks][:SEED_PAIRS] for ranks in present(pp)] or [order])
        seeding = {name for name, entry in SCHEDULES.items() if entry.seeds}
        few = [number for number, one in enumerate(self.space.schedules) if one.schedule in seeding]
        every, uncounted = few or range(len(self.space.schedules)), replace(found, rejected=Counter())
        possible = list(self._possible(pairs, uncounted, part, every, self.limit))
        if not possible:
            return
        rows, seconds = joined([rows for rows, _ in possible]), np.concatenate([times for _, times in possible])
        nearest, start, many = np.argsort(seconds, kind="stable"), 0, SEED_ROWS
        while start < len(nearest) and seconds[nearest[start]] <= found.cutoff and len(found.predicted) < SEEDS:
            block = rows.select(np.sort(nearest[start : start + many]))
            self._best_of(*self._near([block], found, counted=False), found, enough=SEEDS, counted=False)
            start, many = start + many, 4 * many

    def _possible(
        self,
        pairs: NDArray[np.intp],
        found: Found,
        part: Portion,
        schedules: Container[int],
        limit: float,
        progress: Progress = _silent,
    ) -> Iterator[tuple[Rows, NDArray[np.float64]]]:
        """Yields the rows of some pairs whose recomputation and state can need at most `limit` bytes and can be among
        the best, with bounds in seconds."""
        available, option_of = self.space.available, self.space.option_of
        mode, scheduled, state = np.ogrid[: len(RECOMPUTE), : len(self.space.schedules), : len(STATES)]
        every = scheduled, state, mode
        for start in range(0, len(pairs), PAIR_BLOCK):
            progress("layouts", start, len(pairs))
            block = pairs[start : start + PAIR_BLOCK]
            near = available[option_of[block]]
            if part.keep:
                near &= part.keep(Rows(block.astype(np.int32)[:, None, None, None], *every))
            kept = [one for one in np.flatnonzero(near.any(0).any(-1).any(0)).tolist() if one in schedules]
            seconds, fits = self.bounds.options(block, kept, limit, found.cutoff)
            near &= (seconds <= found.cutoff)[..., None]
            chosen = int(np.count_nonzero(near))
            near &= fits
            options = np.flatnonzero(near).astype(np.int32)
            found.rejected[SLOWER] += int(part.sizes[block].sum()) - chosen
            found.rejected[TOO_LARGE] += chosen - len(options)
            rest, state = np.divmod(options, len(STATES))
            times = seconds.ravel()[rest]
            rest, scheduled = np.divmod(rest, len(self.space.schedules))
            place, mode = np.divmod(rest, len(RECOMPUTE))
            yield Rows(block[place].astype(np.int32), scheduled, state, mode), times
        progress("layouts", len(pairs), len(pairs))

    def _near(self, blocks: Iterable[Rows], found: Found, counted: bool = True) -> tuple[Rows, NDArray[np.float64]]:
        """Returns the rows that can fit and can be among the best, with their bounds in seconds."""
        near, times = [Rows(*np.empty((4, 0), np.int32))], [np.empty(0)]
        for rows in blocks:
            seconds, memory = self.bounds.rows(rows, self.limit, inf if counted else found.cutoff)
            fits = memory <= self.limit
            kept = fits & (seconds <= found.cutoff)
            near.append(rows.select(kept))
            times.append(seconds[kept])
            if counted:
                found.rejected[TOO_LARGE] += int((~fits).sum())
                found.rejected[SLOWER] += int((fits & ~kept).sum())
        return joined(near), np.concatenate(times)

    def _best_of(
        self, rows: Rows, seconds: NDArray[np.float64], found: Found, enough: float = inf, counted: bool = True
    ) -> None:
        """Predicts the rows that can be among the best, in the order of their bounds; with `enough`, only until so many
        fit."""
        order, start, few = np.argsort(seconds, kind="stable"), 0, FIRST_TIMED
        while start < len(order) and seconds[order[start]] <= found.cutoff and len(found.predicted) < enough:
            here = order[start : start + few]
            some = rows.select(here[seconds[here] <= found.cutoff])
            start, few = start + len(some), 2 * few
            exact, pp = self.bounds.seconds(some, runs=True), self.bounds.pp[some.pair]
            nearest, memory = np.argsort(exact, kind="stable"), np.where(pp > 1, nan, 0.0)
            pipelines: list[SlowPipeline | None] = [None] * len(some)
            for place, number in enumerate(nearest):
                if exact[number] > found.cutoff:
                    if counted:
                        found.rejected[SLOWER] += len(nearest) - place
                    break
                if np.isnan(memory[number]):  # those with the same pipeline are bounded together
                    alike = (pp == pp[number]) & (some.scheduled == some.scheduled[number]) & (exact <= found.cutoff)
                    memory[alike] = self.bounds.sizes(some.select(alike), runs=True)
                    small = np.flatnonzero(
                        alike & (memory <= self.limit) & (self.bounds.link[some.pair] > LINK * exact)
                    )
                    for one, pipeline in zip(small.tolist(), self.bounds.windows(some.select(small)), strict=True):
                        pipelines[one] = pipeline
                if (pipeline := pipelines[number]) and pipeline.seconds() > found.cutoff:
                    if counted:
                        found.rejected[SLOWER] += 1
                    continue
                self._predict(self.space.layout(some, int(number)), found, float(memory[number]))
                if len(found.predicted) >= enough:
                    break
        if counted:
            found.rejected[SLOWER] += len(order) - start

    def _predict(self, layout: Layout, found: Found, memory: float) -> None:
        """Predicts a layout that needs at least so many bytes of `memory`."""
        if layout in found.seen:
            return
        found.seen.add(layout)
        try:
            spec = self.request.spec(layout)
        except (JobError, ValueError):
            found.rejected["the schedule does not go with the batch or the layers"] += 1
            return
        needed = memory if memory > self.limit else needed_at_least(spec, self.limit)
        if needed <= self.limit:
            found.add(spec, predicted_seconds(spec))
            return
        found.rejected["memory: predicted not to fit"] += 1
        if len(found.too_large) < MOST_TOO_LARGE:
            found.too_large.append((spec, needed))


def _joined(blocks: Iterable[Rows]) -> Iterator[Rows]:
    """Yields the same rows in fewer blocks."""
    waiting = list[Rows]()
    for rows in blocks:
        waiting.append(rows)
        if sum(map(len, waiting)) >= ROW_BLOCK:
            yield joined(waiting)
            waiting = []
    if waiting:
        yield joined(waiting)


def simulated(found: Found, band: TieBand = EQUAL) -> list[Candidate]:
    """Returns the best of the predicted layouts by their simulated time, ranked."""
    near = sorted(found.predicted, key=lambda one: (one[1], simplicity(one[0])))
    done, visits, same = list[Candidate](), 0, Counter[Layout]()
    meshes, kinds = dict[tuple[int, ...], dict[str, float]](), set[Simplicity]()
    for spec, seconds in near:
        layout = spec.layout
        if seconds > min(found.below, max(MARGIN, 1 + band.alike) * found.least) or len(done) >= SIMULATED:
            break
        # Beyond the limit on actions only the first layout of every mesh is simulated, and if that was slower than
        # predicted, the first with another schedule; and the first that is as simple as no other before, for the tie.
        times = meshes.get(degrees(layout), {})
        more = len(meshes) < SIMULATED_MESHES if not times else seconds < GAIN * min(times.values())
        kind = simplicity(spec)._replace(cut=0, chunks=0, zero=0)
        if visits > SIMULATED_ACTIONS and (layout.schedule in times or not more) and kind in kinds:
            continue
        kinds.add(kind)
        # Layouts that differ only in their state sharding have the same passes: two of each are enough.
        passes = same_passes(layout)
        if same[passes] < 2:
            same[passes] += 1
            visits += min(spec.batch.accumulation, 5 * max(layout.pp, 24)) * layout.pp * max(1, layout.pp_chunks) * 4
            done.append(Candidate(spec, simulated_seconds(spec)))
            found.improve(seconds, done[-1].seconds)
            known = meshes.setdefault(degrees(layout), {})
            known[layout.schedule] = min(known.get(layout.schedule, inf), done[-1].seconds)
    return ranked(done, band)


def degrees(layout: Layout) -> tuple[int, ...]:
    """Returns the degrees of its mesh; the sharding of the state is not among them."""
    return layout.tp, layout.cp, layout.pp, layout.data_ranks, layout.ep, layout.etp


def same_passes(layout: Layout) -> Layout:
    """Returns the layout with the default state sharding: layouts with the same result have the same passes."""
    return replace(layout, dp_shard=1, dp_replicate=1, zero=3, reshard=True, accumulate="local")
