"""The way of tokens to their experts: the dispatcher, and what overlaps it."""

from __future__ import annotations

from collections.abc import Iterator

from phalanx.config.cluster import DEVICE_WORDS
from phalanx.config.dispatchers import DISPATCHERS
from phalanx.config.job import Job
from phalanx.nearest import did_you_mean
from phalanx.techniques.technique import Effect, Problem, Technique, above


def _problems(job: Job) -> Iterator[Problem]:
    layout, name = job.layout, job.layout.dispatch
    if name not in DISPATCHERS:
        known = ", ".join(DISPATCHERS)
        yield "layout.dispatch", f"no dispatcher {name!r}{did_you_mean(name, DISPATCHERS)} (known: {known})"
        return
    entry = DISPATCHERS[name]
    nearest = "nearest legal: dispatch=tokens, or rows"
    if entry.device not in ("any", job.cluster.device) and job.cluster.device not in ("", "auto"):
        wanted = DEVICE_WORDS[entry.device]
        yield "layout.dispatch", f"{name} runs on {wanted}, cluster.device is {job.cluster.device}; {nearest}"
    if entry.precisions and job.train.precision not in entry.precisions:
        takes = " or ".join(entry.precisions)
        yield "layout.dispatch", f"{name} sends activations of {takes}, precision is {job.train.precision}; {nearest}"
    if layout.ep_node > 1 and entry.sends == "tokens":
        yield (
            "layout.ep_node",
            f"{name} sends tokens to all ranks at once, ep_node {layout.ep_node} rows inside nodes first; nearest "
            "legal: ep_node=1, or dispatch=rows",
        )


def _layout_problems(job: Job) -> Iterator[Problem]:
    """Yields what has no halves that could overlap."""
    layout = job.layout
    if not layout.ep_overlap or layout.ep == 1:
        return
    if job.model.parallel_block:
        yield (
            "layout.ep_overlap",
            "overlaps experts with the attention before them, and a parallel block has both at once; nearest legal: "
            "ep_overlap=false",
        )


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
    layouts=("dp_shard=4,ep=4,dispatch=tokens", "dp_shard=2,tp=2,ep=4,etp=1,sp=true,dispatch=tokens"),
    combined=("ep=2,dispatch=tokens",),
)
