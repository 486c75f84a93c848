"""The fastest layout that fits: exhaustive over the legal space, by branch and bound.

Layouts come in the order of a lower bound on their time (bounds.py). What cannot fit or cannot be among the best is left
out by its bounds; the rest is predicted, until the bound of the next is beyond the best. The best of those are simulated
event by event, and that time ranks them; of equals the simpler one wins.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from math import inf

import numpy as np
from numpy.typing import NDArray

from phalanx.cost.case import Case
from phalanx.cost.predict import predict
from phalanx.cost.stage_memory import needed_bytes
from phalanx.cost.step_time import step_parts
from phalanx.errors import JobError
from phalanx.job.layout import Layout
from phalanx.plan.bounds import Bounds
from phalanx.plan.plan import Candidate
from phalanx.plan.question import Question
from phalanx.plan.space import Rows, Space, space_of
from phalanx.simulate.step import step_seconds

Progress = Callable[[str, int, int], None]
"""What is done, how much of it, of how much."""

MARGIN = 1.03
"""Predicted times up to so much beyond the best are simulated: by more the two do not differ where it matters."""
SIMULATED = 300
"""Layouts that are simulated at most."""
FIRST = 64
"""Pairs whose layouts are bounded first; then twice as many each time."""
ALIKE = 1.001
"""Times up to so much apart are equal: the simpler layout wins."""


@dataclass
class Found:
    """What a search has seen."""

    predicted: list[tuple[Case, float]] = field(default_factory=list)
    """Layouts that fit."""
    too_large: list[tuple[Case, float]] = field(default_factory=list)
    """A few that do not, and the bytes they need."""
    rejected: Counter[str] = field(default_factory=Counter)
    looked_at: int = 0
    cutoff: float = inf
    """Seconds beyond which a layout is of no interest."""

    def add(self, case: Case, seconds: float) -> None:
        """A layout that fits, and its predicted time."""
        self.predicted.append((case, seconds))
        self.cutoff = min(self.cutoff, MARGIN * seconds)


class Search:
    """One space, its bounds, and what was found in it."""

    def __init__(self, question: Question, progress: Progress | None = None):
        self.question, self.progress = question, progress or (lambda *_: None)
        self.space: Space = space_of(question)
        self.bounds = Bounds(question, self.space)
        self.limit = question.cluster.accelerator.memory_gib * 2**30
        self.pair_seconds, self.pair_bytes = self.bounds.pairs()

    def best(
        self, pairs: NDArray[np.bool_] | None = None, keep: Callable[[Rows], NDArray[np.bool_]] | None = None
    ) -> Found:
        """The fastest layouts of the space that fit, or of some `pairs` of it and of the rows to `keep`."""
        found = Found()
        chosen = np.ones(len(self.pair_seconds), bool) if pairs is None else pairs
        fits = self.pair_bytes <= self.limit
        for pair in np.flatnonzero(chosen & ~fits):
            found.rejected["memory: too large even if everything is sharded and recomputed"] += len(
                self.space.options[pair]
            )
        order = np.flatnonzero(chosen & fits)
        order = order[np.argsort(self.pair_seconds[order], kind="stable")]
        start, count = 0, FIRST
        while start < len(order) and self.pair_seconds[order[start]] <= found.cutoff:
            self.progress("layouts", start, len(order))
            block = order[start : start + count]
            self._rows(self.space.rows(block[self.pair_seconds[block] <= found.cutoff]), found, keep)
            start, count = start + count, 2 * count
        for pair in order[start:]:
            found.rejected["slower than the best, even without bubble and communication of the state"] += len(
                self.space.options[pair]
            )
        return found

    def _rows(self, rows: Rows, found: Found, keep: Callable[[Rows], NDArray[np.bool_]] | None) -> None:
        """Predict what can be among the best of some rows."""
        if keep is not None:
            rows = rows.select(keep(rows))
        if not len(rows):
            return
        seconds, memory = self.bounds.rows(rows)
        fits = memory <= self.limit
        found.rejected["memory: the state and the activations of the first rank are too large"] += int((~fits).sum())
        order = np.flatnonzero(fits)
        order = order[np.argsort(seconds[order], kind="stable")]
        for place, number in enumerate(order):
            if seconds[number] > found.cutoff:
                found.rejected["slower than the best, by what it computes and sends at least"] += len(order) - place
                return
            self._predict(self.space.layout(rows, int(number)), found)

    def _predict(self, layout: Layout, found: Found) -> None:
        found.looked_at += 1
        try:
            case = self.question.case(layout)
        except (JobError, ValueError):
            found.rejected["not legal: " + "the schedule does not go with the batch or the layers"] += 1
            return
        needed = needed_bytes(case)
        if needed <= self.limit:
            found.add(case, step_parts(case).total)
            return
        found.rejected["memory: predicted not to fit"] += 1
        if len(found.too_large) < 1000:
            found.too_large.append((case, needed))


def simulated(found: Found) -> list[Candidate]:
    """The best of what was predicted, by their simulated time, the fastest first."""
    near = [one for one in found.predicted if one[1] <= found.cutoff]
    near.sort(key=lambda one: (one[1], complexity(one[0].layout)))
    return ranked(Candidate(case, predict(case), step_seconds(case)) for case, _ in near[:SIMULATED])


def ranked(candidates: Iterable[Candidate]) -> list[Candidate]:
    """The fastest first, and of those that are as fast as the first the simplest before the others."""
    left = sorted(candidates, key=lambda one: (one.seconds, complexity(one.layout)))
    if not left:
        return left
    ties = [one for one in left if one.seconds <= left[0].seconds * ALIKE]
    simple = min(ties, key=lambda one: (complexity(one.layout), one.seconds))
    return [simple, *(one for one in left if one is not simple)]


def complexity(layout: Layout) -> tuple[int, ...]:
    """How much there is to a layout: axes that it uses, settings that are not the default, the degrees of the axes that
    cut the model."""
    axes = sum(
        degree > 1 for degree in (layout.dp_replicate, layout.dp_shard, layout.cp, layout.tp, layout.pp, layout.ep)
    )
    settings = (
        (layout.pp > 1) * (layout.schedule != "1f1b")
        + (layout.recompute != "none")
        + (layout.shard_ranks > 1) * ((layout.accumulate == "sharded") + (layout.zero == 3 and not layout.reshard))
        + (layout.ring > 1 and layout.cp_ulysses > 1)
    )
    return axes, settings, layout.tp * layout.pp * layout.cp * layout.ep, layout.pp_chunks, layout.zero


def families(layout: Layout) -> Iterator[str]:
    """The kinds of parallelism that a layout is made of, in words."""
    if layout.tp > 1:
        yield "tensor"
    if layout.pp > 1:
        yield "pipeline"
    if layout.cp > 1:
        yield "context"
    if layout.ep > 1:
        yield "expert"
    if layout.dp_shard > 1:
        yield {1: "ZeRO-1", 2: "ZeRO-2", 3: "FSDP"}[layout.zero]
    if layout.dp_replicate > 1:
        yield "replicas"


def clock() -> float:
    return time.perf_counter()
