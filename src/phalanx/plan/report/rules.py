"""The rules of thumb as a decision: the usual layout without a search, with the reasons.

One device: plain, or with its optimizer on the host, or activations and parameters too. One node: data parallel,
sharded as much as needed; with slow links pipelines first. Where a layer is too large to be gathered whole and cannot
be cut otherwise: tiles.
Several nodes: FSDP if the network is fast and it fits; otherwise tensor parallel inside a node, pipelines across nodes
until the model fits, and data parallel with ZeRO-1 over the rest. The rest of a batch is accumulated (ALCF, "AI at
Scale" 2024; Inha ECE7115, "Parallelism" 2026, after Hugging Face's "Model parallelism").
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import product
from math import gcd

from phalanx.check.layout import offloads
from phalanx.config.layout import Layout
from phalanx.cost.memory.rank_memory import needed_bytes
from phalanx.partition.tiers import named, tier_of
from phalanx.plan.report.families import neighbours
from phalanx.plan.search.request import PlanRequest
from phalanx.plan.search.space import OPEN, RECOMPUTE, divisors

FAST_LINKS = 100
"""Fewest GB/s per device of fast links inside a node: NVLink of every generation is close to that or above, a PCIe bus
(32 and 64) is not."""
TILES = 4, 16
"""Tiles of a layer that are tried where nothing fits otherwise."""
FAST_NETWORK = 25
"""Fewest GB/s per device of a fast network: a card of 200 Gb/s for every device, as in DGX machines from the A100 on.
"""


def rule(request: PlanRequest) -> tuple[str, Layout]:
    """Returns the reasons and the layout of the rules of thumb, for the first number of devices of a request. The
    layout does not fit if none of the rules' layouts does."""
    world = request.devices[0]
    if world == 1:
        return _one_device(request)
    return _one_node(request, world) if world <= node_of(request) else _many_nodes(request, world)


def node_of(request: PlanRequest) -> int:
    """Returns the number of devices that the rules treat as a node: all of a rack with fast links throughout."""
    return neighbours(request.cluster)[0]


def fitted(request: PlanRequest, layout: Layout) -> Layout | None:
    """Returns the layout with the least recomputation and, without a pipeline, the largest micro-batch with which it
    fits; None if it is illegal or does not fit."""
    fixed = {name: value for name, value in request.fixed.items() if name not in OPEN}
    layout = replace(layout, **fixed, micro_batch=1)
    if layout.pp > 1:
        layout = replace(layout, **{name: request.fixed[name] for name in _PIPELINE if name in request.fixed})
    if request.problems(layout):
        return None
    several = request.global_batch > layout.data_ranks and layout.shard_ranks > 1 and layout.zero > 1
    for mode, accumulate in product(RECOMPUTE, ("local", "sharded") if several else ("local",)):
        found = replace(layout, recompute=request.fixed.get("recompute", mode), accumulate=accumulate)
        if _fits(request, found):
            return found if layout.pp > 1 else _with_larger_batches(request, found)
    return None


_PIPELINE = ("schedule", "pp_chunks")


def _fits(request: PlanRequest, layout: Layout) -> bool:
    limit = request.cluster.accelerator.memory_gib * 2**30
    return needed_bytes(request.spec(layout), limit) <= limit


def _with_larger_batches(request: PlanRequest, layout: Layout) -> Layout:
    share = request.global_batch // layout.data_ranks
    while share % (2 * layout.micro_batch) == 0:
        larger = replace(layout, micro_batch=2 * layout.micro_batch)
        if not _fits(request, larger):
            break
        layout = larger
    # A single micro-batch needs no accumulation.
    return replace(layout, accumulate="local") if layout.micro_batch == share else layout


def on_host(layout: Layout) -> str:
    """Says what a layout offloads: "optimizer state and its update and activations on the host"."""
    update, files = "optimizer state and its update", ""
    if tier_of(layout, "optimizer") == "disk":
        update, files = "the optimizer's update", f", its state in files of {layout.offload_to}"
    words = {"optimizer": update}
    return f"{' and '.join(words.get(part, part) for part in named(layout))} on the host{files}"


def _one_device(request: PlanRequest) -> tuple[str, Layout]:
    if found := fitted(request, Layout()):
        how = "plain" if found.offload == "none" else on_host(found)
        return _explained(request, "one device, and the model fits", how, found)
    why = "one device, and the model does not fit"
    most = Layout()
    for most in offloads(Layout(), request.optimizer, request.cluster):
        if found := fitted(request, most):
            return _explained(request, why, f"{on_host(most)} (offload={most.offload})", found)
    why += f", nor with offload={most.offload}" if named(most) else ""
    block = replace(request.model, n_layers=1)
    if fitted(replace(request, model=block), Layout()) is None:
        why += "; not even one layer fits without tiling"
    return why, Layout(micro_batch=1, recompute="full")


def _one_node(request: PlanRequest, world: int) -> tuple[str, Layout]:
    fast, where = _links(request.cluster.intra.gbs, FAST_LINKS, "one node")
    if found := fitted(request, Layout(dp_replicate=world)):
        return _explained(request, f"{where}, a whole copy fits on a device", "DDP", found)
    sharded = [(f"ZeRO-{zero}", _with_experts(request, Layout(dp_shard=world, zero=zero))) for zero in (1, 2, 3)]
    pipelines = [(_name(layout), layout) for layout in _combinations(request, world, most_tp=1) if layout.pp > 1]
    tensor = [(_name(layout), layout) for layout in _combinations(request, world)]
    # On slow links pipelines come first: a stage's hidden states are the least traffic.
    tried = [*sharded, *tensor, *pipelines] if fast else [*pipelines, *sharded, *tensor]
    tried += _tiled(sharded[-1][1])
    return _first(request, f"{where}, a whole copy does not fit on a device", tried)


def _many_nodes(request: PlanRequest, world: int) -> tuple[str, Layout]:
    fast, where = _links(request.cluster.inter.gbs, FAST_NETWORK, "many nodes")
    combined = [(_name(layout), layout) for layout in _combinations(request, world)]
    whole = [("FSDP over all devices", _with_experts(request, Layout(dp_shard=world)))]
    if not fast:
        return _first(request, where, combined or whole)
    whole += _tiled(whole[0][1])
    if fitted(request, whole[0][1]) is None:
        problems = request.problems(replace(whole[0][1], micro_batch=1))
        where += f", FSDP over all devices {'is not legal' if problems else 'does not fit'}"
    return _first(request, where, [whole[0], *combined, *whole[1:]])


def _tiled(layout: Layout) -> list[tuple[str, Layout]]:
    """Returns ZeRO-3 for a block that does not fit while it is gathered whole."""
    return [(f"ZeRO-3, large layers in {tiles} tiles", replace(layout, tiles=tiles, tile="all")) for tiles in TILES]


def _links(gbs: float, fast: float, where: str) -> tuple[bool, str]:
    kind = "fast" if gbs >= fast else "slow"
    links = "network" if where == "many nodes" else "links"
    return gbs >= fast, f"{where}, {kind} {links} ({gbs:.3g} GB/s per device)"


def _combinations(request: PlanRequest, world: int, most_tp: int = 0) -> Iterator[Layout]:
    """Yields layouts with tensor ranks in a node, ever longer pipelines, and context parallelism for long sequences."""
    tp = _tensor_ranks(request, world, most_tp or node_of(request))
    model = request.model
    for cp, pp in product(divisors(world // tp, max(1, model.seq_len // 8192)), divisors(world // tp, model.n_layers)):
        if world // tp % (cp * pp) == 0:
            shard = world // (tp * cp * pp)
            layout = Layout(tp=tp, cp=cp, pp=pp, dp_shard=shard, zero=1 if shard * cp > 1 else 3)
            for parts in [True, False] if tp > 1 else [False]:
                chosen = _with_experts(request, replace(layout, sp=parts))
                if not request.problems(chosen):
                    yield chosen
                    break


def _name(layout: Layout) -> str:
    parts = [
        (layout.tp, f"tensor parallel inside a node (tp {layout.tp})"),
        (layout.cp, f"context parallel (cp {layout.cp})"),
        (layout.pp, f"the shortest pipeline that fits (pp {layout.pp})"),
        (layout.shard_ranks, "ZeRO-1"),
    ]
    return ", ".join(name for degree, name in parts if degree > 1)


def _tensor_ranks(request: PlanRequest, world: int, most: int) -> int:
    """Returns the most tensor ranks that the heads allow."""
    model = request.model
    return max(tp for tp in divisors(world, most) if model.n_heads % tp == 0 and model.kv_heads % tp == 0)


def _with_experts(request: PlanRequest, layout: Layout) -> Layout:
    """Returns the layout with its experts over the devices of a node that tensor ranks leave."""
    experts = request.model.moe.n_experts or 1
    free = max(1, node_of(request) // layout.tp)
    return replace(layout, ep=max(divisors(gcd(experts, layout.shard_ranks), free)))


def _first(request: PlanRequest, where: str, tried: Iterable[tuple[str, Layout]]) -> tuple[str, Layout]:
    """Returns the first layout that fits; else the last."""
    name, layout = "", Layout()
    for name, layout in tried:
        if found := fitted(request, layout):
            return _explained(request, where, name, found)
    return f"{where}: no layout of the rules fits, not even {name}", replace(layout, micro_batch=1, recompute="full")


def _explained(request: PlanRequest, where: str, name: str, layout: Layout) -> tuple[str, Layout]:
    accumulation = request.global_batch // (layout.data_ranks * layout.micro_batch)
    rest = f", {accumulation} micro-batches accumulated" if accumulation > 1 and layout.pp == 1 else ""
    again = {mode: f", {mode} recomputation" for mode in RECOMPUTE} | {"none": ""}
    again["products"] = ", recomputation of all but products"
    return f"{where}: {name}{again[layout.recompute]}{rest}", layout
