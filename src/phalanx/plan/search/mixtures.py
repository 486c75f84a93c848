"""Layouts that do not fit without recomputation and are slow with it: recomputation of only some layers helps both."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice

import numpy as np

from phalanx.config.layout import Layout
from phalanx.cost.memory.rank_memory import needed_bytes
from phalanx.cost.spec import StepSpec
from phalanx.cost.time.step_time import step_parts
from phalanx.errors import JobError
from phalanx.plan.search.branch import Found, Search, same_passes
from phalanx.plan.search.space import RECOMPUTE, Rows

PAIRS = 512
"""Pairs of a mesh and a micro-batch that are examined: those with the lowest bounds."""
PREDICTED = 24
"""Layouts that are predicted: those with the lowest bounds."""
NEAR = 1.1
"""Factor on the best time up to which layouts are returned: the recomputation they need is only an estimate."""


def mixtures(search: Search, found: Found, seconds: float) -> list[StepSpec]:
    """Returns layouts that fit with full recomputation, in the order of their estimated time with only as much as they
    need to fit; `seconds` are the best layout's. The estimate interpolates between no and full recomputation by the
    device's memory: with bounds, then with predictions."""
    estimates = list[tuple[float, int, StepSpec]]()
    for layout in islice(_by_bounds(search, found, seconds), PREDICTED):
        try:
            small, large = (search.request.spec(replace(layout, recompute=mode)) for mode in ("full", "none"))
        except (JobError, ValueError):
            continue
        least, most = needed_bytes(small), needed_bytes(large)
        if least > search.limit:
            continue
        fast, slow = step_parts(large).total, step_parts(small).total
        about = fast + (slow - fast) * min(1.0, max(0.0, most - search.limit) / max(most - least, 1))
        if about < NEAR * seconds:
            estimates.append((about, len(estimates), small))
    return [spec for _, _, spec in sorted(estimates)]


def _by_bounds(search: Search, found: Found, seconds: float) -> Iterator[Layout]:
    fixed = search.request.fixed
    if "recompute" in fixed or fixed.get("recompute_cut"):
        return
    pairs = np.flatnonzero((search.pair_bytes <= search.limit) & (search.pair_seconds < seconds))
    pairs = pairs[np.argsort(search.pair_seconds[pairs], kind="stable")][:PAIRS]
    rows = search.space.rows(pairs)
    rows = rows.select(rows.recompute == RECOMPUTE.index("full"))
    if not len(rows):
        return
    keeping = Rows(rows.pair, rows.scheduled, rows.state, np.zeros_like(rows.recompute))
    slow, small = search.bounds.rows(rows)
    fast, large = search.bounds.rows(keeping)
    share = np.clip((large - search.limit) / np.maximum(large - small, 1.0), 0.0, 1.0)
    about = fast + share * (slow - fast)
    order = np.flatnonzero((small <= search.limit) & (about < seconds))
    fitting = {spec.layout for spec, _ in found.predicted}
    seen = set[Layout]()
    for number in order[np.argsort(about[order], kind="stable")]:
        layout = search.space.layout(rows, int(number))
        passes = same_passes(layout)
        if passes in seen or replace(layout, recompute="none") in fitting:
            continue
        seen.add(passes)
        yield layout
