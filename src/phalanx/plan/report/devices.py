"""The number of devices that would suffice if no layout fits on the given ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from phalanx.config.layout import Layout
from phalanx.errors import JobError
from phalanx.plan.plan import Candidate
from phalanx.plan.search.branch import Search
from phalanx.plan.search.request import PlanRequest
from phalanx.units import gib

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
        least = search.least(everything) if everything.any() else None
        if least and least.prediction.fits:
            yield more, least
        more *= 2
