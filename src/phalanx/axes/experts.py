"""The axis ep: some of the routed experts, on ranks of dp_shard and cp, and with etp=1 of tp."""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd

from phalanx.axes.axis import AxisEntry
from phalanx.blocks.kinds import block_kinds
from phalanx.config.job import Job
from phalanx.nearest import Misfit, divisors, multiples
from phalanx.techniques.technique import Problem


def _problems(job: Job) -> Iterator[Problem]:
    """Yields the problems of the ranks that experts are distributed over."""
    layout, model = job.layout, job.model
    experts, tp = model.moe.n_experts, layout.tp if layout.folds else 1
    ranks = layout.shard_ranks * tp
    legal = {"layout.ep": [ep for ep in divisors(gcd(ranks, experts)) if ep % tp == 0] if experts else [1]}
    for field, value, none in (("ep", layout.ep, 1), ("etp", layout.etp, 0)):
        if value > 1 - (field == "etp") and not experts:
            yield (
                f"layout.{field}",
                f"{field} {value} distributes experts, the model has none (n_experts 0); nearest legal: {field}={none},"
                " or a model with experts",
            )
    if not experts:
        return
    yield from _folded(job)
    if ranks % layout.ep or layout.ep % tp:
        taken = f"ep is taken from dp_shard {layout.dp_shard} × cp {layout.cp}"
        taken += f" × tp {tp} (etp {layout.etp}) = {ranks}" if layout.folds else f" = {ranks}"
        if ranks % layout.ep:
            wrong = f"{taken}, which ep {layout.ep} does not divide"
        else:
            wrong = (
                f"with etp 1 each of tp {tp} ranks holds other experts, and ep {layout.ep} / tp {tp} is not an integer"
            )
        if not legal["layout.ep"]:
            legal = {"layout.etp": [0]}
        yield "layout.ep", Misfit(wrong, layout.ep, legal)
    if layout.ep > 1 and layout.ep_node > 1 and (layout.ep % layout.ep_node or layout.ep_node >= layout.ep):
        wrong = f"ep {layout.ep} / ep_node {layout.ep_node} is not a whole number above 1"
        yield "layout.ep_node", Misfit(wrong, layout.ep_node, {"layout.ep_node": divisors(layout.ep)[:-1] or [1]})
    if experts % layout.ep:
        more = {"model.moe.n_experts": multiples(layout.ep, experts)}
        yield "layout.ep", Misfit(f"n_experts {experts} / ep {layout.ep} is not an integer", layout.ep, legal | more)


def _folded(job: Job) -> Iterator[Problem]:
    """Yields the problems of routed experts that tensor ranks do not cut."""
    layout, model = job.layout, job.model
    if layout.etp not in (0, 1, layout.tp):
        wrong = f"etp {layout.etp} is neither 1, for whole experts, nor tp {layout.tp}, for parts of each"
        yield "layout.etp", Misfit(wrong, layout.etp, {"layout.etp": sorted({1, layout.tp})})
    if not layout.folds:
        return
    names = {kind.feed_forward for kind in block_kinds(model) if kind.routed} - {"experts"}
    refused = (
        (not layout.sp, "routes each tensor rank's own tokens, which without sequence parallelism are all", "sp=true"),
        (model.parallel_block, "has no exchange of its own around experts in parallel blocks", ""),
        (layout.tiles > 1 and "experts" in layout.tiled_layers, "leaves experts whole, which tile cuts", "tile=mlp"),
        (bool(names), f"is for the kind experts, not {', '.join(sorted(names))}", ""),
    )
    for wrong, why, instead in refused:
        if wrong:
            yield "layout.etp", f"etp 1 {why}; nearest legal: {f'{instead}, or ' if instead else ''}etp={layout.tp}"


EXPERTS = AxisEntry(
    "expert-parallel ranks, each with some of the routed experts",
    "Lepikhin et al. 2020",
    "experts",
    problems=_problems,
    layouts=(
        "dp_shard=2,ep=2",
        "dp_shard=4,ep=2,zero=1",
        "dp_shard=4,ep=2",
        "dp_shard=4,ep=4,zero=2",
        "cp=2,ep=2",
        "dp_shard=4,ep=4,ep_node=2",
        "tp=2,ep=2,etp=1,sp=true",
        "dp_shard=2,tp=2,ep=4,etp=1,zero=1,sp=true",
        "dp_shard=2,cp=2,tp=2,ep=8,etp=1,ep_node=4,sp=true",
        "dp_shard=2,tp=4,ep=4,etp=1,sp=true,recompute=full",
        "dp_shard=2,tp=2,pp=2,ep=4,etp=1,zero=2,sp=true,schedule=zb_h1,accumulation=4",
    ),
    combined=("ep=2", "ep=4"),
)
