"""Branch and bound over one space of layouts: the fastest of all of it or of a part.

Layouts come in the order of a lower bound on their time (bounds.py). Bounds prune those that cannot fit or cannot be
among the best; the rest is predicted, until the next bound exceeds the best time. The best of those are simulated event
by event, and ranked by that time; the simplest of equals wins (simplicity.py).
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
from phalanx.cost.prediction import predict, step_parts
from phalanx.cost.rank_memory import needed_bytes
from phalanx.cost.spec import StepSpec
from phalanx.errors import JobError
from phalanx.plan.bounds import Bounds
from phalanx.plan.plan import Candidate
from phalanx.plan.simplicity import EQUAL, LONG_SEQUENCE, Simplicity, TieBand, ranked, simplicity
from phalanx.plan.space import PlanRequest, Rows, Space, joined, space_of
from phalanx.schedule.catalogue import SCHEDULES
from phalanx.simulate.step import step_seconds

Mask = NDArray[np.bool_]
"""A mask over the pairs of a space."""
Keep = Callable[[Rows], Mask]
"""A function from rows to the mask of those that are allowed."""
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
SEED_PAIRS, SEEDS = 2048, 24
"""Pairs of each pp degree that seed the search, and the number of fitting layouts that it begins with."""
PAIR_BLOCK = 2048
"""Pairs whose layouts are examined at a time."""
ROW_BLOCK = 1_000_000
"""Layouts that are bounded at a time."""
FIRST_TIMED = 128
"""Layouts whose schedules' programs are run first, those with the lowest bounds; then twice as many, and so on."""
LEAN_BLOCK, LEAN_PAIRS, LEAN_LAYOUTS = 64, 1024, 1200
"""Pairs at a time, most pairs and most layouts that are examined for the one that needs the least memory."""
GAIN = 0.995
"""Factor on the best time below which a layout is simulated during the search."""
MOST_TOO_LARGE = 1000
"""Most layouts that do not fit that are kept for the picture."""


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
    known: dict[StepSpec, float] = field(default_factory=dict)
    """Simulated seconds."""
    simulates: bool = True
    """Whether simulated times decide on the best, or predicted ones alone."""

    @property
    def cutoff(self) -> float:
        """Predicted seconds above which a layout is pruned."""
        return min(self.below, self.least * (MARGIN if len(self.predicted) < ENOUGH_FITTING else 1))

    def add(self, spec: StepSpec, seconds: float) -> None:
        """Adds a layout that fits, with its predicted seconds."""
        self.predicted.append((spec, seconds))
        if seconds < GAIN * self.least:
            self.improve(seconds, self.simulated(spec) if self.simulates else 0.0)

    def restart(self) -> None:
        """Ranks by simulated times from now on, beginning with that of the best layout so far."""
        self.simulates, self.least = True, self.below
        if self.predicted:
            spec, seconds = min(self.predicted, key=lambda one: (one[1], simplicity(one[0])))
            self.improve(seconds, self.simulated(spec))

    def improve(self, predicted: float, simulated: float) -> None:
        """Lowers the best time to that of a layout that fits, if it is better."""
        self.least = min(self.least, max(predicted, simulated))

    def simulated(self, spec: StepSpec) -> float:
        """Returns the seconds of its step, simulated once."""
        if spec not in self.known:
            self.known[spec] = step_seconds(spec)
        return self.known[spec]


TOO_LARGE = "memory: lower bound of state and activations exceeds the device"
SLOWER = "time: lower bound exceeds the best layout"


class Search:
    """A space, its bounds, and the searches in it."""

    def __init__(self, request: PlanRequest, progress: Progress | None = None):
        self.request, self.progress = request, progress or _silent
        self.space: Space = space_of(request)
        self.bounds = Bounds(request, self.space)
        self.limit = request.limit
        self.pair_seconds, self.pair_bytes = self.bounds.pairs()

    def filling(self) -> Search:
        """Returns the search for layouts that may fill the device."""
        other = copy(self)
        other.request, other.progress = replace(self.request, headroom=None), _silent
        other.limit = other.request.limit
        return other

    def best(
        self, pairs: Mask | None = None, keep: Keep | None = None, simulates: bool = True, below: float = inf
    ) -> Found:
        """Returns the fastest layouts of the space that fit, or of some `pairs` of it and of the rows to `keep`;
        without simulation by prediction alone. Only those that may be faster than `below` seconds are of interest."""
        found = Found(simulates=False, least=below, below=below)
        chosen = np.ones(len(self.pair_seconds), bool) if pairs is None else pairs
        fits = self.pair_bytes <= self.limit
        for pair in np.flatnonzero(chosen & ~fits):
            found.rejected["memory: too large even with everything sharded and recomputed"] += len(
                self.space.options[pair]
            )
        order = np.flatnonzero(chosen & fits)
        order = order[np.argsort(self.pair_seconds[order], kind="stable")]
        # The search is seeded with good layouts for each pp degree, whose times prune the others. The very fastest
        # seldom fit.
        near = self._near([self._seeds(self._first(order))], found, keep)
        self._best_of(*near, found, enough=SEEDS)
        if simulates:
            found.restart()
        near_pairs = self.pair_seconds[order] <= found.cutoff
        for pair in order[~near_pairs]:
            found.rejected["time: lower bound without bubble and gradient reduction exceeds the best layout"] += len(
                self.space.options[pair]
            )
        # Layouts with the same pp degree are bounded together.
        rest = order[near_pairs]
        rest = rest[np.argsort(self.bounds.pp[rest], kind="stable")]
        rows, seconds = self._near(
            self._possible(rest, found, keep, self.progress if pairs is None else _silent), found, None, counted=True
        )
        self._best_of(rows, seconds, found, counted=True)
        return found

    def one(self, pairs: Mask | None = None, keep: Keep | None = None, below: float = inf) -> Candidate | None:
        """Returns the fastest layout, as predicted, of some pairs and of the rows to `keep`; None if none fits and may
        be faster than `below` seconds."""
        found = self.best(pairs, keep, simulates=False, below=below)
        near = min(found.predicted, key=lambda one: (one[1], simplicity(one[0])), default=None)
        return near and Candidate.of(near[0])

    @cached_property
    def plain(self) -> tuple[Mask, Keep] | None:
        """The plain part of the space, which is searched first: no context parallelism of short sequences, and 1F1B or
        interleaved 1F1B; None if that is all or nothing of it."""
        short = self.request.model.seq_len < LONG_SEQUENCE
        pairs = (self.space.column("cp") == 1) | (not short)
        usual = np.array([one.schedule in SCHEDULES and SCHEDULES[one.schedule].usual for one in self.space.schedules])
        one_stage = self.bounds.pp == 1
        every = pairs.all() and (usual.all() or one_stage.all())
        if every or not pairs.any() or self.request.band == EQUAL:
            return None
        return pairs, lambda rows: pairs[rows.pair] & (usual[rows.scheduled] | one_stage[rows.pair])

    @cached_property
    def leanest(self) -> Candidate | None:
        """The layout of the whole space that needs the least memory, among those that `least` examines."""
        return self.least(np.ones(len(self.pair_bytes), bool))

    def least(self, pairs: Mask, keep: Keep | None = None) -> Candidate | None:
        """Returns the layout that needs the least memory, of some pairs and of the rows to `keep`, among those with the
        lowest bounds; None if there is none."""
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
                key = needed_bytes(spec), simplicity(spec)
                best = (key, spec) if best is None or key < best[0] else best
        return Candidate.of(best[1]) if best else None

    def _first(self, order: NDArray[np.intp]) -> NDArray[np.intp]:
        """Returns for every pp degree some of the pairs with the lowest bounds."""
        pp = self.bounds.pp[order]
        return np.concatenate([order[pp == ranks][:SEED_PAIRS] for ranks in np.unique(pp)] or [order])

    def _seeds(self, pairs: NDArray[np.intp]) -> Rows:
        """Returns the rows of some pairs under the schedules that seed a search, if the space has any, else all."""
        rows = self.space.rows(pairs)
        seeding = {name for name, entry in SCHEDULES.items() if entry.seeds}
        few = [number for number, one in enumerate(self.space.schedules) if one.schedule in seeding]
        return rows.select(np.isin(rows.scheduled, few)) if few else rows

    def _possible(self, pairs: NDArray[np.intp], found: Found, keep: Keep | None, progress: Progress) -> Iterator[Rows]:
        """Yields the rows of some pairs whose recomputation and state can fit and can be among the best."""
        for start in range(0, len(pairs), PAIR_BLOCK):
            progress("layouts", start, len(pairs))
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
        progress("layouts", len(pairs), len(pairs))

    def _near(
        self, blocks: Iterable[Rows], found: Found, keep: Keep | None, counted: bool = False
    ) -> tuple[Rows, NDArray[np.float64]]:
        """Returns the rows that can fit and can be among the best, with their bounds in seconds."""
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
        """Predicts the rows that can be among the best, in the order of their bounds; with `enough`, only until so many
        fit."""
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
            done.append(Candidate(spec, predict(spec), found.simulated(spec)))
            found.improve(seconds, done[-1].seconds)
            known = meshes.setdefault(degrees(layout), {})
            known[layout.schedule] = min(known.get(layout.schedule, inf), done[-1].seconds)
    return ranked(done, band)


def degrees(layout: Layout) -> tuple[int, ...]:
    """Returns the degrees of its mesh; the sharding of the state is not among them."""
    return layout.tp, layout.cp, layout.pp, layout.data_ranks, layout.ep


def same_passes(layout: Layout) -> Layout:
    """Returns the layout with the default state sharding: layouts with the same result have the same passes."""
    return replace(layout, dp_shard=1, dp_replicate=1, zero=3, reshard=True, accumulate="local")
