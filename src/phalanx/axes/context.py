"""The axis cp: parts of every sequence, by a ring, by heads exchanged for tokens, or both."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from phalanx.axes.axis import AxisEntry
from phalanx.blocks.kinds import ATTENTION, attention_models, block_kinds, chosen_kinds
from phalanx.config.job import Job
from phalanx.config.layout import Layout
from phalanx.config.model import ModelConfig
from phalanx.nearest import Misfit, divisors, multiples
from phalanx.partition.derived import slices_of
from phalanx.techniques.technique import Problem


def kinds_without_cores(model: ModelConfig, *, by_heads: bool = False) -> list[str]:
    """Returns the model's kinds of attention whose layers need whole sequences; `by_heads`: also those of which ranks
    may share the heads."""
    names = dict.fromkeys(kind.attention for kind in block_kinds(model))
    return [name for name in names if not ATTENTION[name].cores and (by_heads or not ATTENTION[name].by_heads)]


def context_problems(job: Job, slices: int = 1) -> Iterator[Problem]:
    """Yields at most one problem if context-parallel ranks cannot get equal parts of every sequence, or of each of the
    `slices` equal parts in which sequences are pipelined."""
    layout, tokens = job.layout, job.model.seq_len // slices
    without_cores = kinds_without_cores(job.model)
    if layout.cp > 1 and without_cores:
        yield (
            "layout.cp",
            f"attention {', '.join(without_cores)} states no cores, so its ranks need whole sequences; nearest cp: 1",
        )
        return
    length = (
        f"seq_len {tokens}" if slices == 1 else f"a slice of {tokens} tokens (seq_len {job.model.seq_len} / {slices})"
    )
    tp, alternative = layout.tp if layout.sp else 1, ""
    if problem := _without_heads(layout, job.model):
        yield problem
        return
    if tokens % layout.cp:
        equation = f"{length} / cp {layout.cp} is not an integer"
    elif layout.cp % layout.cp_ulysses or layout.cp == 1:
        return  # cp_ulysses has its own message
    elif not _evenly(tokens, layout, 1):
        equation = (
            f"{length} / (2 × ring {layout.ring}) is not an integer: each ring group holds a chunk from either end"
        )
    elif not _evenly(tokens, layout, tp):
        equation, alternative = f"{length} / (cp {layout.cp} × tp {tp} (sp)) is not an integer", ", or sp=false"
        if tokens % tp:
            return  # sp without cp has its own message
    else:
        return
    alone = layout.cp_ulysses == layout.cp
    legal = []
    for cp in (cp for cp in divisors(tokens) if cp <= 2 * layout.cp):
        changed = dataclasses.replace(layout, cp=cp, cp_ulysses=cp if alone else layout.cp_ulysses)
        if not cp % changed.cp_ulysses and _evenly(tokens, changed, tp) and _exchanges(changed, job.model):
            legal.append(cp)
    both = " (and cp_ulysses the same)" if alone or not legal else ""
    sizes = multiples(2 * slices * layout.cp * tp, job.model.seq_len)
    choices = {"layout.cp": legal or [1], "model.seq_len": sizes}
    yield "layout.cp", Misfit(equation, layout.cp, choices, f"{both}{alternative}")


def _without_heads(layout: Layout, model: ModelConfig) -> Problem | None:
    """Returns the problem of kinds without cores whose heads context ranks share, if there is one."""
    for name in dict.fromkeys(kind.attention for kind in block_kinds(model)):
        count = ATTENTION[name].by_heads
        if count is None or layout.cp == 1:
            continue
        heads, shared = (max(1, each // layout.tp) for each in count(model))
        if heads % layout.cp or (shared % layout.cp and layout.cp % shared):
            legal = [n for n in divisors(heads) if not shared % n or not n % shared]
            equation = (
                f"attention {name}: {heads} heads per tensor rank, {shared} of keys, / cp {layout.cp} is not whole"
            )
            return "layout.cp", Misfit(equation, layout.cp, {"layout.cp": legal})
    return None


def _evenly(tokens: int, layout: Layout, tp: int) -> bool:
    """Returns whether cp × tp ranks get equal parts of `tokens`, and the groups of a ring equal chunks."""
    return tokens % (layout.cp * tp) == 0 and (layout.ring == 1 or tokens % (2 * layout.ring) == 0)


def _exchanges(layout: Layout, model: ModelConfig) -> bool:
    """Returns whether `cp_ulysses` ranks can share the heads of a tensor rank: query heads in equal parts, and of
    key/value heads and ranks one divides the other. True if the heads do not divide by tp, which has its own message.
    """
    ranks = layout.cp_ulysses
    if model.n_heads % layout.tp:
        return True
    heads = model.n_heads // layout.tp
    every = (heads if own.mla.kv_rank else max(1, own.kv_heads // layout.tp) for own in attention_models(model))
    return heads % ranks == 0 and all(keys % ranks == 0 or ranks % keys == 0 for keys in every)


def _ulysses(layout: Layout, model: ModelConfig) -> Iterator[Problem]:
    """Yields the problems of the number of cp ranks that exchange heads."""
    ranks = layout.cp_ulysses
    gathering = [name for name in chosen_kinds(model, "attention") if ATTENTION[name].gathers]
    if ranks > 1 and gathering:
        yield (
            "layout.cp_ulysses",
            f"attention {gathering[0]} chooses from the keys of whole sequences, which each rank gathers for its own "
            f"queries: ranks do not exchange heads, cp_ulysses is {ranks}; nearest legal: 1",
        )
        return
    if layout.cp % ranks:
        equation = f"cp {layout.cp} / cp_ulysses {ranks} is not an integer"
    elif _exchanges(layout, model):
        return
    elif model.n_heads % (layout.tp * ranks):
        equation = f"n_heads {model.n_heads} / (tp {layout.tp} × cp_ulysses {ranks}) is not an integer"
    else:
        kv_heads = min(own.kv_heads for own in attention_models(model))
        keys = max(1, kv_heads // layout.tp)
        equation = (
            f"n_kv_heads {kv_heads}, {keys} on each of tp {layout.tp}, neither divide by cp_ulysses {ranks} nor "
            "divide it"
        )
    legal = [
        n
        for n in divisors(layout.cp)
        if n <= model.n_heads and _exchanges(dataclasses.replace(layout, cp_ulysses=n), model)
    ]
    yield "layout.cp_ulysses", Misfit(equation, ranks, {"layout.cp_ulysses": legal})


def unbalanced(job: Job) -> str:
    """Returns why a ring's groups get their tokens by position; empty if documents decide."""
    layout, model = job.layout, job.model
    if layout.ring == 1 or not job.data.document_mask or layout.cp_balance == "position":
        return "nothing to balance"
    if slices_of(layout) > 1:
        return "slices of sequences are pipelined one after the other, each cut by position; schedule=1f1b does not"
    if model.moe.capacity:
        return "experts with a capacity count whole sequences by position; model.moe.capacity=0 does not"
    if any(ATTENTION[name].gathers for name in chosen_kinds(model, "attention")):
        return "sparse attention chooses among keys by position; model.sparse.top_k=0 does not"
    if any(ATTENTION[kind.attention].by_heads for kind in block_kinds(model)):
        return "recurrent layers exchange whole sequences by position; model.attention=attention does not"
    return ""


def _problems(job: Job) -> Iterator[Problem]:
    yield from _ulysses(job.layout, job.model)
    asked = job.layout.cp_balance == "documents" and job.layout.ring > 1 and job.data.document_mask
    if asked and (why := unbalanced(job)):
        yield "layout.cp_balance", f"{why}; nearest legal: cp_balance=position"
    yield from context_problems(job)


CONTEXT = AxisEntry(
    "context-parallel ranks, each with a part of every sequence",
    "Liu et al. 2023; Jacobs et al. 2023; Fang and Zhao 2024",
    "tokens",
    problems=_problems,
    layouts=(
        "cp=2",
        "cp=4",
        "cp=2,cp_ulysses=2",
        "cp=4,cp_ulysses=2",
        "cp=4,cp_ulysses=2,cp_inner=ring",
        "cp=2,recompute=selective,zero=1",
        "dp_replicate=2,dp_shard=2,cp=2",
    ),
    combined=("cp=2", "cp=2,cp_ulysses=2", "cp=4,cp_ulysses=2"),
)
