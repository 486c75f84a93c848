"""The way of tokens to their experts: the dispatcher, what overlaps it, and copies of the fullest experts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from phalanx.config.cluster import DEVICE_WORDS
from phalanx.config.dispatchers import DISPATCHERS
from phalanx.config.job import Job
from phalanx.nearest import Misfit, did_you_mean
from phalanx.partition.derived import gathers_parameters, slices_of, solve
from phalanx.techniques.technique import Effect, Problem, Technique, above


def _problems(job: Job) -> Iterator[Problem]:
    layout, name = job.layout, job.layout.dispatch
    if name not in DISPATCHERS:
        known = f"{did_you_mean(name, DISPATCHERS)} (known: {', '.join(DISPATCHERS)})"
        yield "layout.dispatch", f"dispatch {name!r} is no dispatcher{known}"
        return
    entry, nearest, device = DISPATCHERS[name], "nearest legal: dispatch=tokens, or rows", job.cluster.device
    if entry.device not in ("any", device) and device != "auto":
        wanted = DEVICE_WORDS[entry.device]
        yield "layout.dispatch", f"dispatch {name} runs on {wanted}, cluster.device is {device}; {nearest}"
    if entry.precisions and job.train.precision not in entry.precisions:
        takes = f"dispatch {name} sends activations of {' or '.join(entry.precisions)}"
        yield "layout.dispatch", f"{takes}, precision is {job.train.precision}; {nearest}"
    if layout.auto and layout.ep_overlap:
        yield "layout.ep_overlap", "the planner does not choose for it; nearest legal: false, or a layout without auto"
    if layout.ep_node > 1 and entry.sends == "tokens":
        yield (
            "layout.ep_node",
            f"dispatch {name} sends tokens to all ranks at once, ep_node {layout.ep_node} rows inside nodes first; "
            "nearest legal: ep_node=1, or dispatch=rows",
        )


def _layout_problems(job: Job) -> Iterator[Problem]:
    """Yields what has no halves that could overlap."""
    layout, off = job.layout, "ep_overlap=false"
    if not layout.ep_overlap or layout.ep == 1:
        return
    with suppress(ValueError):  # reported with the layout
        if (micro := solve(job.train.global_batch, layout).micro_batch) < 2:
            why = f"micro_batch {micro} has no halves of sequences, which ep_overlap needs"
            yield "layout.micro_batch", f"{why}; nearest legal: micro_batch=2, or {off}"
    if gathers_parameters(layout) and layout.edp > 1:
        why = f"zero 3 gathers the experts of edp {layout.edp} ranks again for each half of ep_overlap"
        yield "layout.zero", f"{why}; nearest legal: zero=2, ep={layout.shard_ranks}, or {off}"
    if slices_of(layout) > 1:
        why = f"schedule {layout.schedule} has slices of sequences, ep_overlap none"
        yield "layout.schedule", f"{why}; nearest legal: 1f1b, or {off}"
    if job.model.shared_keys or job.model.parallel_block:
        why = "layers that share keys" if job.model.shared_keys else "parallel blocks, which attend beside experts,"
        yield "layout.ep_overlap", f"{why} have no halves that overlap; nearest legal: {off}"


def _effect(job: Job) -> Effect:
    entry = DISPATCHERS[job.layout.dispatch]
    figures = {"ep_once": True, "ep_forwards": entry.forwards} if entry.sends == "tokens" else {}
    return Effect(framework=figures | {"ep_cores": entry.cores})


DISPATCH = Technique(
    "the way of tokens to their experts",
    "Lepikhin et al. 2021; DeepSeek-AI 2024, sections 3.2.1 and 3.2.2",
    is_on=lambda job: job.layout.dispatch != "rows" or job.layout.ep_overlap,
    fields=("layout.dispatch", "layout.ep_overlap"),
    problems=_problems,
    layout_problems=_layout_problems,
    conditions={
        path: above("layout.ep", 1, "expert parallelism: ", auto=True)
        for path in ("layout.dispatch", "layout.ep_overlap")
    },
    effect=_effect,
    layouts=(
        "dp_shard=4,ep=4,dispatch=tokens",
        "dp_shard=2,tp=2,ep=4,etp=1,sp=true,dispatch=tokens",
        "dp_shard=2,ep=2,ep_overlap=true,micro_batch=2",
        "dp_shard=2,tp=2,sp=true,ep=4,etp=1,ep_overlap=true,micro_batch=3",
        "dp_shard=2,tp=2,ep=2,pp=2,zero=2,schedule=zb_h1,accumulation=2,ep_overlap=true,micro_batch=2",
        "cp=2,ep=2,ep_overlap=true,micro_batch=3,dispatch=tokens,recompute=full",
        "dp_shard=2,pp=2,ep=2,zero=2,schedule=interleaved_1f1b,accumulation=2,ep_overlap=true,micro_batch=2",
    ),
)


def _redundancy_problems(job: Job) -> Iterator[Problem]:
    """Yields what needs no copies, has none to make, or would have to send them at other times."""
    layout, moe, copies = job.layout, job.model.moe, job.layout.redundant_experts
    if layout.auto and copies:
        why = "the planner, which predicts even loads, does not choose for redundant experts"
        yield "layout.redundant_experts", f"{why}; nearest legal: 0, or a layout without auto"
    if not copies or layout.ep == 1 or not moe.n_experts:
        return
    if copies > (others := moe.n_experts - moe.n_experts // layout.ep):
        wrong = f"redundant_experts {copies} exceeds the {others} experts of other ranks"
        yield "layout.redundant_experts", Misfit(wrong, copies, {"layout.redundant_experts": range(others + 1)})
    refused = {
        "layout.dispatch": (
            layout.dispatch not in ("rows", "tokens", "deepep"),
            f"dispatch {layout.dispatch} is a package's own and sends to owners of experts only",
            "dispatch=tokens",
        ),
        "layout.ep_overlap": (layout.ep_overlap, "halves of the sequences would each send them", "ep_overlap=false"),
        "model.moe.capacity": (
            moe.capacity > 0 and layout.dispatch == "rows",
            "with a capacity rows of all experts are equally many",
            "capacity=0, dispatch=tokens",
        ),
        "layout.tile": (
            layout.tiles > 1 and "experts" in layout.tiled_layers,
            "a tile is gathered when it computes",
            "a tile without experts",
        ),
        "layout.quantise_weights": (
            layout.quantise_weights == "fp8",
            "experts that are gathered in fp8 are not sent on",
            "quantise_weights=int8, or none",
        ),
    }
    for path, (wrong, why, legal) in refused.items():
        if wrong:
            yield path, f"{why}, and redundant_experts is {copies}; nearest legal: {legal}, or redundant_experts=0"
    if job.model.freezes:
        yield (
            "layout.redundant_experts",
            "copies send back the gradients of all weights, and most are frozen; nearest legal: 0",
        )


def _redundancy_layout_problems(job: Job) -> Iterator[Problem]:
    layout = job.layout
    if not layout.redundant_experts or layout.ep == 1:
        return
    if slices_of(layout) > 1:
        why = f"schedule {layout.schedule} has slices of sequences, of which each would send redundant_experts"
        yield "layout.schedule", f"{why}; nearest legal: 1f1b, or redundant_experts=0"


REDUNDANCY = Technique(
    "redundant experts: copies of the fullest ones on other ranks",
    "DeepSeek-AI 2024, section 3.4; He et al. 2022, section 4.2",
    is_on=lambda job: job.layout.redundant_experts > 0,
    fields=("layout.redundant_experts",),
    problems=_redundancy_problems,
    layout_problems=_redundancy_layout_problems,
    conditions={"layout.redundant_experts": above("layout.ep", 1, "expert parallelism: ", auto=True)},
    layouts=(
        "dp_shard=2,ep=2,redundant_experts=1",
        "dp_shard=4,ep=2,zero=3,redundant_experts=2,recompute=full",
        "dp_shard=4,ep=4,ep_node=2,zero=2,redundant_experts=2,accumulation=2",
        "dp_shard=4,ep=4,zero=1,redundant_experts=1,dispatch=tokens",
        "dp_shard=2,tp=2,ep=4,etp=1,sp=true,redundant_experts=1,recompute=mlp",
        "dp_replicate=2,dp_shard=2,ep=2,zero=1,redundant_experts=1,recompute=products",
        "cp=2,tp=2,pp=2,ep=2,redundant_experts=1,accumulation=2",
        "dp_shard=2,pp=2,ep=2,zero=2,schedule=zb_h1,redundant_experts=1,accumulation=2,dispatch=tokens",
    ),
)
