"""Disturbances of a machine: slow devices and slow links."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from phalanx.cost.spec import StepSpec
from phalanx.cost.time.communication import boundary_seconds
from phalanx.errors import JobError
from phalanx.schedule.schedule import Schedule

AXES = ("tp", "cp", "ep", "dp")
"""Axes whose links can be slow; dp stands for the collectives of the state, over dp_shard and dp_replicate."""


@dataclass(frozen=True)
class Disturbance:
    """Slow devices and links of one replica; the other replicas wait for it once per step."""

    slow: tuple[tuple[int, float], ...] = ()
    """Pipeline ranks with the factor on the time of their passes."""
    links: tuple[tuple[tuple[int, int], float], ...] = ()
    """Pairs of pipeline ranks with the factor on messages between them, both ways."""
    axes: tuple[tuple[str, float], ...] = ()
    """Axes of the mesh with the factor on the time of their collectives."""

    def device(self, rank: int) -> float:
        """Returns the factor on the passes of a pipeline rank."""
        return dict(self.slow).get(rank, 1.0)

    def axis(self, name: str) -> float:
        """Returns the factor on the collectives of an axis."""
        return dict(self.axes).get(name, 1.0)

    def p2p_seconds(self, spec: StepSpec, schedule: Schedule) -> dict[tuple[int, int], float]:
        """Returns the seconds of a message by sender and receiver, for all pairs of pipeline ranks that communicate."""
        slow = {frozenset(pair): factor for pair, factor in self.links}
        pairs = {
            (one, other)
            for placement in schedule.placements
            for a, b in itertools.pairwise(placement)
            for one, other in ((a, b), (b, a))
            if one != other
        }
        return {
            pair: boundary_seconds(spec, *pair) / schedule.slices * slow.get(frozenset(pair), 1.0) for pair in pairs
        }


def check(disturbance: Disturbance, spec: StepSpec) -> None:
    """Raises JobError with every rank and axis that the spec does not have."""
    if problems := list(_problems(disturbance, spec)):
        raise JobError(problems)


def _problems(disturbance: Disturbance, spec: StepSpec) -> Iterator[str]:
    pp = spec.layout.pp
    ranks = "the pipeline has rank 0 alone" if pp == 1 else f"pipeline ranks are 0 to {pp - 1}"
    for rank, factor in disturbance.slow:
        if not 0 <= rank < pp:
            yield f"--straggler {rank}={factor:g}: {ranks}"
    for (one, other), factor in disturbance.links:
        if not (0 <= one < pp and 0 <= other < pp) or one == other:
            yield f"--slow-link {one}-{other}={factor:g}: {ranks}; a link joins two of them"
    for axis, factor in disturbance.axes:
        if axis not in AXES:
            yield f"--slow-link {axis}={factor:g}: axes are {', '.join(AXES)}; between pipeline ranks: 2-3={factor:g}"
    given = [(f"--straggler {rank}", factor) for rank, factor in disturbance.slow]
    given += [(f"--slow-link {one}-{other}", factor) for (one, other), factor in disturbance.links]
    given += [(f"--slow-link {axis}", factor) for axis, factor in disturbance.axes]
    for option, factor in given:
        if factor <= 0:
            yield f"{option}={factor:g}: the factor must be more than 0; 2 is twice as slow"
