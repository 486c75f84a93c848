"""The problems of a layout: the degrees of the axes against the model, the devices and the batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import lru_cache
from math import gcd

from phalanx.blocks.kinds import ATTENTION, FEED_FORWARD, block_kinds
from phalanx.blocks.parameters import block_weights, parameter_shapes
from phalanx.config.job import Job
from phalanx.config.layout import Layout
from phalanx.config.model import ModelConfig
from phalanx.nearest import Misfit, divisors, multiples
from phalanx.optimizers.catalogue import OPTIMIZERS
from phalanx.optimizers.entry import block_of
from phalanx.partition import derived as batch
from phalanx.partition.tensor_slices import first_rank_tiles
from phalanx.techniques.catalogue import techniques_of
from phalanx.techniques.technique import Problem


def layout_problems(job: Job) -> Iterator[Problem]:
    """Yields each problem with its equation and the nearest legal choice, without those of pipelines."""
    layout = job.layout
    yield from tensor_problems(job)
    if layout.sp_regather and not layout.sp:
        yield "layout.sp_regather", "is a part of sequence parallelism; nearest legal: sp=true, or sp_regather=false"
    yield from block_problems(job)
    if layout.accumulate == "sharded" and layout.zero == 1:
        yield (
            "layout.accumulate",
            "sharded accumulation needs zero 2 or 3, zero is 1; nearest legal: accumulate=local, or zero=2",
        )
    if layout.accumulate == "sharded" and layout.shard_ranks == 1:
        yield (
            "layout.accumulate",
            f"dp_shard {layout.dp_shard} × cp {layout.cp} = 1 rank cannot shard gradients; nearest legal: "
            "accumulate=local, or dp_shard=2",
        )
    yield from _ulysses(layout, job.model)
    yield from context_problems(job)
    yield from _experts(layout, job.model)
    for technique in techniques_of(job).values():
        yield from technique.layout_problems(job)
    yield from _world(layout, job.cluster.nodes, job.cluster.devices_per_node)
    yield from _batch(job)


def kinds_without_cores(model: ModelConfig) -> list[str]:
    """Returns the model's kinds of attention whose layers need whole sequences."""
    return [name for name in dict.fromkeys(kind.attention for kind in block_kinds(model)) if not ATTENTION[name].cores]


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
    keys = heads if model.mla.kv_rank else max(1, model.kv_heads // layout.tp)
    return heads % ranks == 0 and (keys % ranks == 0 or ranks % keys == 0)


def tensor_problems(job: Job) -> Iterator[Problem]:
    """Yields the problems of heads, widths and sequences against tp."""
    layout, model = job.layout, job.model
    found = list(_heads_and_widths(layout, model))
    yield from found or _weights(layout, model)
    if layout.sp and model.seq_len % layout.tp:
        yield _divided_by_tp(
            f"sequence parallel: seq_len {model.seq_len}", model.seq_len, layout.tp, "model.seq_len", ", or sp=false"
        )


def _divided_by_tp(dividend: str, size: int, tp: int, path: str = "", after: str = "") -> Problem:
    """Returns the problem of a size that tp does not divide; it is the field's at `path`, if any."""
    other = {path: multiples(tp, size)} if path else {}
    return "layout.tp" if not after else "layout.sp", Misfit(
        f"{dividend} / tp {tp} is not an integer", tp, {"layout.tp": divisors(size), **other}, after
    )


def _heads_and_widths(layout: Layout, model: ModelConfig) -> Iterator[Problem]:
    if model.n_heads % layout.tp:
        yield _divided_by_tp(f"n_heads {model.n_heads}", model.n_heads, layout.tp, "model.n_heads")
    for width, name in _widths(model):
        if width % layout.tp:
            yield _divided_by_tp(f"{name} {width}", width, layout.tp, "model.d_ff" if width == model.d_ff else "")
    kv_heads = model.n_heads if model.mla.kv_rank else model.kv_heads
    if model.n_heads % layout.tp == 0 and kv_heads % layout.tp and layout.tp % kv_heads:
        legal = [tp for tp in divisors(model.n_heads) if kv_heads % tp == 0 or tp % kv_heads == 0]
        yield (
            "layout.tp",
            Misfit(
                f"tp {layout.tp} neither divides the n_kv_heads {kv_heads} nor is a multiple of them",
                layout.tp,
                {"layout.tp": legal, "model.n_kv_heads": divisors(model.n_heads)},
            ),
        )


def _weights(layout: Layout, model: ModelConfig) -> Iterator[Problem]:
    """Yields the problems of other weights that tp cuts: of kinds that packages add."""
    for name, size in _cut_sizes(model):
        if size % layout.tp:
            yield _divided_by_tp(f"{name} has {size} rows or columns, and {size}", size, layout.tp)


@lru_cache(maxsize=256)
def _cut_sizes(model: ModelConfig) -> tuple[tuple[str, int], ...]:
    """Returns the weights of blocks that tp cuts into equal parts, each with its rows or columns."""
    weights = (weight for kind in dict.fromkeys(block_kinds(model)) for weight in block_weights(model, kind))
    return tuple((each.name, each.shape[each.dim]) for each in weights if each.dim is not None and each.unit == 1)


def _widths(model: ModelConfig) -> Iterator[tuple[int, str]]:
    """Yields the hidden widths that tp cuts. The width of shared experts is a multiple of one expert's."""
    for name in _feed_forward_kinds(model):
        kind = FEED_FORWARD[name]
        yield kind.width(model), kind.width_name


def _feed_forward_kinds(model: ModelConfig) -> Iterator[str]:
    """Yields the kinds of feed-forward layers, each once."""
    yield from dict.fromkeys(kind.feed_forward for kind in block_kinds(model))


def _ulysses(layout: Layout, model: ModelConfig) -> Iterator[Problem]:
    """Yields the problems of the number of cp ranks that exchange heads."""
    ranks = layout.cp_ulysses
    if layout.cp % ranks:
        equation = f"cp {layout.cp} / cp_ulysses {ranks} is not an integer"
    elif _exchanges(layout, model):
        return
    elif model.n_heads % (layout.tp * ranks):
        equation = f"n_heads {model.n_heads} / (tp {layout.tp} × cp_ulysses {ranks}) is not an integer"
    else:
        keys = max(1, model.kv_heads // layout.tp)
        equation = (
            f"n_kv_heads {model.kv_heads}, {keys} on each of tp {layout.tp}, neither divide by cp_ulysses {ranks} nor "
            "divide it"
        )
    legal = [
        n
        for n in divisors(layout.cp)
        if n <= model.n_heads and _exchanges(dataclasses.replace(layout, cp_ulysses=n), model)
    ]
    yield "layout.cp_ulysses", Misfit(equation, ranks, {"layout.cp_ulysses": legal})


def _experts(layout: Layout, model: ModelConfig) -> Iterator[Problem]:
    """Yields the problems of the ranks that experts are distributed over."""
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


def _world(layout: Layout, nodes: int, devices_per_node: int) -> Iterator[Problem]:
    product = (
        f"dp_replicate {layout.dp_replicate} × dp_shard {layout.dp_shard} × cp {layout.cp} × tp {layout.tp} × pp "
        f"{layout.pp} = {layout.world}"
    )
    if not devices_per_node:
        if layout.world % nodes:
            yield "cluster.nodes", f"{product} devices are not divisible by nodes {nodes}"
        return
    devices = nodes * devices_per_node
    if layout.world != devices:
        others = layout.world // layout.dp_replicate
        fits = devices // others
        legal = (
            f"dp_replicate={fits} makes it {devices}"
            if fits and devices % others == 0
            else f"the axes without dp_replicate make {others}, which must divide {devices}"
        )
        yield (
            "layout",
            f"{product}, but the cluster has nodes {nodes} × devices {devices_per_node} = {devices}; {legal}; "
            "`phalanx plan` finds the best layout, layout=auto uses it",
        )


def _batch(job: Job) -> Iterator[Problem]:
    try:
        batch.solve(job.train.global_batch, job.layout)
    except ValueError as error:
        yield "train.global_batch", str(error)


def block_problems(job: Job) -> Iterator[Problem]:
    """Yields the tensor ranks, or the tiles, that cut the blocks over which an optimizer's state has a scale."""
    layout, model, name = job.layout, job.model, job.optimizer.name
    if name not in OPTIMIZERS or OPTIMIZERS[name].granularity != "block":
        return
    shapes = parameter_shapes(model, model.vocab_size or 1)
    for field, of_ranks in (("tp", Layout(tp=layout.tp)), ("tiles", layout)):
        parts = getattr(layout, field)
        for weight, _, held in first_rank_tiles(shapes, of_ranks, model) if parts > 1 else ():
            whole = held.whole
            block = block_of(whole)
            if block and held.dim == len(whole) - 1 and held.size % block:
                rest = whole[-1] // (layout.tp if field == "tiles" else 1)
                legal = [n for n in divisors(max(1, rest // block)) if n < parts]
                yield (
                    f"layout.{field}",
                    Misfit(
                        f"{name} has a scale per {block} elements of a row, and {field} {parts} cuts the rows of "
                        f"{weight} ({whole[-1]}) into parts of {held.size}",
                        parts,
                        {f"layout.{field}": legal},
                        ", or optimizer=adamw",
                    ),
                )
                break
