"""The lectures' rules of thumb as a decision: what one would take without a search, and the reasons in words.

One device: plain, or nothing. One node: data parallel, sharded as far as it must be; with slow links pipelines first.
Several nodes: FSDP where the network is fast and it fits; otherwise tensor parallel inside a node, pipelines between
nodes until the model fits, data parallel with ZeRO-1 over the rest. What is left of a batch is accumulated (ALCF, "AI
at Scale" 2024; Inha ECE7115, "Parallelism" 2026, after Hugging Face's "Model parallelism").
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import product
from math import gcd

from phalanx.cost.stage_memory import needed_bytes
from phalanx.job.layout import Layout
from phalanx.plan.families import neighbours
from phalanx.plan.question import Question
from phalanx.plan.space import OPEN, RECOMPUTE, divisors

FAST_LINKS = 100
"""GB/s a device from which on links inside a node are fast: NVLink of every generation is near that or beyond, a PCIe
bus (32 and 64) is not."""
FAST_NETWORK = 25
"""The same between nodes: a card of 200 Gb/s for every device, as in DGX machines from the A100 on."""


def rule(question: Question) -> tuple[str, Layout]:
    """What the rules of thumb take, and why in words; a layout that does not fit where nothing of theirs does. For the
    first number of devices of a question."""
    world = question.devices[0]
    if world == 1:
        return _one_device(question)
    return _one_node(question, world) if world <= node_of(question) else _many_nodes(question, world)


def node_of(question: Question) -> int:
    """Devices that the rules take for a node: of a rack with fast links throughout, all."""
    return neighbours(question.cluster)[0]


def fitted(question: Question, layout: Layout) -> Layout | None:
    """The layout with the least recomputation and, without a pipeline, the largest micro-batch with which it fits; None
    where it is not legal or does not fit."""
    kept = {name: value for name, value in question.fixed.items() if name not in OPEN}
    layout = replace(layout, **kept, micro_batch=1)
    if layout.pp > 1:
        layout = replace(layout, **{name: question.fixed[name] for name in _PIPELINE if name in question.fixed})
    if question.problems(layout):
        return None
    several = question.global_batch > layout.data_ranks and layout.shard_ranks > 1 and layout.zero > 1
    for mode, accumulate in product(RECOMPUTE, ("local", "sharded") if several else ("local",)):
        found = replace(layout, recompute=question.fixed.get("recompute", mode), accumulate=accumulate)
        if _fits(question, found):
            return found if layout.pp > 1 else _with_larger_batches(question, found)
    return None


_PIPELINE = ("schedule", "pp_chunks")


def _fits(question: Question, layout: Layout) -> bool:
    limit = question.cluster.accelerator.memory_gib * 2**30
    return needed_bytes(question.case(layout), limit) <= limit


def _with_larger_batches(question: Question, layout: Layout) -> Layout:
    share = question.global_batch // layout.data_ranks
    while share % (2 * layout.micro_batch) == 0:
        larger = replace(layout, micro_batch=2 * layout.micro_batch)
        if not _fits(question, larger):
            break
        layout = larger
    # Of one micro-batch there is nothing to accumulate.
    return replace(layout, accumulate="local") if layout.micro_batch == share else layout


def _one_device(question: Question) -> tuple[str, Layout]:
    if found := fitted(question, Layout()):
        return _told(question, "one device, and the model fits", "plain", found)
    why = "one device, and the model does not fit: ZeRO with offload to host memory, which this program does not run"
    block = replace(question.model, n_layers=1)
    if fitted(replace(question, model=block), Layout()) is None:
        why += "; not even one layer fits, which then runs in tiles"
    return why, Layout(micro_batch=1, recompute="full")


def _one_node(question: Question, world: int) -> tuple[str, Layout]:
    fast, where = _links(question.cluster.intra.gbs, FAST_LINKS, "one node")
    if found := fitted(question, Layout(dp_replicate=world)):
        return _told(question, f"{where}, a whole copy fits a device", "DDP", found)
    sharded = [(f"ZeRO-{zero}", _with_experts(question, Layout(dp_shard=world, zero=zero))) for zero in (1, 2, 3)]
    pipelines = [(_name(layout), layout) for layout in _three(question, world, most_tp=1) if layout.pp > 1]
    tensor = [(_name(layout), layout) for layout in _three(question, world)]
    # Between slow links a stage's hidden states are the least there is to send.
    tried = [*sharded, *tensor, *pipelines] if fast else [*pipelines, *sharded, *tensor]
    return _first(question, f"{where}, a whole copy does not fit a device", tried)


def _many_nodes(question: Question, world: int) -> tuple[str, Layout]:
    fast, where = _links(question.cluster.inter.gbs, FAST_NETWORK, "many nodes")
    three = [(_name(layout), layout) for layout in _three(question, world)]
    whole = [("FSDP over all devices", _with_experts(question, Layout(dp_shard=world)))]
    if not fast:
        return _first(question, where, three or whole)
    if fitted(question, whole[0][1]) is None:
        problems = question.problems(replace(whole[0][1], micro_batch=1))
        where += f", FSDP over all devices {'is not legal' if problems else 'does not fit'}"
    return _first(question, where, [*whole, *three])


def _links(gbs: float, fast: float, where: str) -> tuple[bool, str]:
    kind = "fast" if gbs >= fast else "slow"
    links = "network" if where == "many nodes" else "links"
    return gbs >= fast, f"{where}, {kind} {links} ({gbs:.3g} GB/s a device)"


def _three(question: Question, world: int, most_tp: int = 0) -> Iterator[Layout]:
    """Tensor ranks in a node, then ever longer pipelines, and where sequences are too long, parts of them."""
    tp = _tensor_ranks(question, world, most_tp or node_of(question))
    model = question.model
    for cp, pp in product(divisors(world // tp, max(1, model.seq_len // 8192)), divisors(world // tp, model.n_layers)):
        if world // tp % (cp * pp) == 0:
            shard = world // (tp * cp * pp)
            layout = Layout(tp=tp, cp=cp, pp=pp, dp_shard=shard, zero=1 if shard * cp > 1 else 3)
            for parts in [True, False] if tp > 1 else [False]:
                chosen = _with_experts(question, replace(layout, sp=parts))
                if not question.problems(chosen):
                    yield chosen
                    break


def _name(layout: Layout) -> str:
    parts = [
        (layout.tp, f"tensor parallel in a node (tp {layout.tp})"),
        (layout.cp, f"parts of sequences (cp {layout.cp})"),
        (layout.pp, f"a pipeline as long as it must be to fit (pp {layout.pp})"),
        (layout.shard_ranks, "ZeRO-1"),
    ]
    return ", ".join(name for degree, name in parts if degree > 1)


def _tensor_ranks(question: Question, world: int, most: int) -> int:
    """The most that the heads allow."""
    model = question.model
    return max(tp for tp in divisors(world, most) if model.n_heads % tp == 0 and model.kv_heads % tp == 0)


def _with_experts(question: Question, layout: Layout) -> Layout:
    """Experts over the devices of a node, as far as tensor ranks leave some."""
    experts = question.model.moe.n_experts or 1
    free = max(1, node_of(question) // layout.tp)
    return replace(layout, ep=max(divisors(gcd(experts, layout.shard_ranks), free)))


def _first(question: Question, where: str, tried: Iterable[tuple[str, Layout]]) -> tuple[str, Layout]:
    """The first that fits; else the last."""
    name, layout = "", Layout()
    for name, layout in tried:
        if found := fitted(question, layout):
            return _told(question, where, name, found)
    return f"{where}: nothing of the rules fits, not even {name}", replace(layout, micro_batch=1, recompute="full")


def _told(question: Question, where: str, name: str, layout: Layout) -> tuple[str, Layout]:
    accumulation = question.global_batch // (layout.data_ranks * layout.micro_batch)
    rest = f", {accumulation} micro-batches accumulated" if accumulation > 1 and layout.pp == 1 else ""
    again = {"none": "", "selective": ", attention computed again", "full": ", everything computed again"}
    return f"{where}: {name}{again[layout.recompute]}{rest}", layout
