"""The axis ep: some of the routed experts, on ranks of dp_shard and cp."""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd

from phalanx.axes.axis import AxisEntry
from phalanx.config.job import Job
from phalanx.nearest import Misfit, divisors, multiples
from phalanx.techniques.technique import Problem


def _problems(job: Job) -> Iterator[Problem]:
    """Yields the problems of the ranks that experts are distributed over."""
    layout, model = job.layout, job.model
    ranks, experts = layout.shard_ranks, model.moe.n_experts
    legal = {"layout.ep": divisors(gcd(ranks, experts)) if experts else [1]}
    if layout.ep > 1 and not experts:
        yield (
            "layout.ep",
            f"ep {layout.ep} distributes experts, the model has none (n_experts 0); nearest legal: ep=1, or a model "
            "with experts",
        )
        return
    if ranks % layout.ep:
        taken = f"ep is taken from dp_shard {layout.dp_shard} × cp {layout.cp} = {ranks}, which ep {layout.ep} does not"
        yield "layout.ep", Misfit(f"{taken} divide", layout.ep, legal)
    if experts % layout.ep:
        more = {"model.moe.n_experts": multiples(layout.ep, experts)}
        yield "layout.ep", Misfit(f"n_experts {experts} / ep {layout.ep} is not an integer", layout.ep, legal | more)


EXPERTS = AxisEntry(
    "expert-parallel ranks, each with some of the routed experts",
    "Lepikhin et al. 2020",
    "experts",
    problems=_problems,
    layouts=("dp_shard=2,ep=2", "dp_shard=4,ep=2,zero=1", "dp_shard=4,ep=2", "dp_shard=4,ep=4,zero=2", "cp=2,ep=2"),
    combined=("ep=2", "ep=4"),
)
