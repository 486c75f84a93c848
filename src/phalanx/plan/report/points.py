"""A sample of the search space for its picture: predicted layouts, and layouts drawn from every family."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from math import ceil
from operator import itemgetter

import numpy as np

from phalanx.config.layout import Layout
from phalanx.cost.predict import predict
from phalanx.cost.spec import StepSpec
from phalanx.errors import JobError
from phalanx.plan.plan import SpacePoint
from phalanx.plan.report.families import AXES
from phalanx.plan.search.branch import Found, Search

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
    return tuple(_point(name if name in listed else OTHERS, spec) for name, spec in drawn)


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


def _point(name: str, spec: StepSpec) -> SpacePoint:
    prediction = predict(spec)
    return SpacePoint(name, prediction.step_time_s, prediction.fullest.peak, prediction.fits, spec.layout.line())


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
