"""Refinement of good layouts: a second copy of ZeRO-3's parameters inside a node (hpZ), where gathers cross nodes.

The search (branch.py) has every layout without a copy, or with the one that is fixed. Here its best ZeRO-3 layouts get
one, if a node has ranks for it: less traffic between nodes for more memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from phalanx.cost.memory.rank_memory import needed_bytes
from phalanx.cost.predict import predict
from phalanx.cost.spec import StepSpec
from phalanx.cost.time.communication import group
from phalanx.cost.time.step_time import step_parts
from phalanx.partition.second_copy import legal_hpz
from phalanx.partition.tiers import is_offloaded
from phalanx.plan.plan import Candidate
from phalanx.plan.search.request import PlanRequest
from phalanx.simulate.step import step_seconds

WORTH = 1.002
"""Least speedup for which a layout gets a second copy."""
TRIED = 8
"""Layouts that are tried at most."""


def with_second_copies(request: PlanRequest, candidates: Sequence[Candidate]) -> list[Candidate]:
    """Returns the best of the candidates, which are sorted, with a second copy of the parameters: those that fit and
    are faster than without."""
    if "hpz" in request.fixed:
        return []
    limit, better = request.cluster.accelerator.memory_gib * 2**30, list[Candidate]()
    crossing = [candidate for candidate in candidates if crosses_nodes(candidate.spec)][:TRIED]
    for candidate in crossing:
        copied = replace(candidate.layout, hpz=_largest(candidate.spec))
        spec = replace(candidate.spec, layout=copied)
        if needed_bytes(spec, limit) > limit or step_parts(spec).total * WORTH > step_parts(candidate.spec).total:
            continue
        seconds = step_seconds(spec)
        if seconds * WORTH < candidate.seconds:
            better.append(Candidate(spec, predict(spec), seconds))
    return better


def crosses_nodes(spec: StepSpec) -> bool:
    """Returns whether ZeRO-3 gathers parameters twice a step from ranks on several nodes."""
    layout, ranks = spec.layout, group(spec.layout, "shard")
    if is_offloaded(layout, "parameters"):
        return False  # the copy would be on the device
    return layout.zero == 3 and layout.reshard and ranks.ranks > ranks.near(spec.cluster.joined)


def _largest(spec: StepSpec) -> int:
    """Returns the most ranks of a node that can keep a copy together: fewer would need more memory."""
    near = group(spec.layout, "shard").near(spec.cluster.joined)
    return max(ranks for ranks in legal_hpz(spec.layout) if ranks <= near)
