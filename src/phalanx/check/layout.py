"""The problems of a layout: the degrees of the axes against the model, the devices and the batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from math import gcd

from phalanx.blocks.kinds import ATTENTION, FEED_FORWARD, block_kinds
from phalanx.blocks.operator import Weight
from phalanx.blocks.parameters import block_weights, parameter_shapes
from phalanx.blocks.residual import VOCABULARY, embedding_weights, head_weights
from phalanx.config.cluster import Cluster
from phalanx.config.job import Job, Optimizer
from phalanx.config.layout import TILED, Layout
from phalanx.config.model import ModelConfig
from phalanx.errors import JobError
from phalanx.nearest import Misfit, did_you_mean, divisors, multiples
from phalanx.optimizers.catalogue import OPTIMIZERS
from phalanx.optimizers.entry import block_of
from phalanx.partition import derived as batch
from phalanx.partition import derived as recompute
from phalanx.partition.derived import PARTS, Part, figures, flushes, is_offloaded, legal_hpz, named
from phalanx.partition.tensor_slices import ENDS, first_rank_tiles, is_tiled, layers_of, too_few_rows


def tile_problems(job: Job) -> Iterator[Problem]:
    """Yields the dotted path of each wrong field, and the message with the nearest legal choice."""
    layout, model = job.layout, job.model
    unknown = [name for name in layout.tiled_layers if name not in TILED]
    for name in sorted(unknown):
        yield "layout.tile", f"no layers {name!r}{did_you_mean(name, TILED)} ({', '.join(TILED)}, joined by +, or all)"
    if layout.tiles == 1 or unknown:
        return
    tiled = list(_tileable(model))
    there = [name for name in TILED if any(layers_of(weight.name) == name for weight in tiled)]
    absent = [name for name in TILED if name in layout.tiled_layers and name not in there]
    tied = [name for name in absent if name in ENDS.values()]
    if tied and layout.tile != "all":
        legal = "+".join(name for name in there if name in layout.tiled_layers) or "all"
        yield (
            "layout.tile",
            f"embedding and head are one matrix (model.tied=true), which both ends of the model read whole; nearest "
            f"legal: tile={legal}, or model.tied=false",
        )
        absent = [name for name in absent if name not in tied]
    if absent and (layout.tile != "all" or len(absent) == len(TILED)):
        legal = [f"tile={'+'.join(there)}"] if there else []
        yield (
            "layout.tile",
            f"this model has no layers of {' and '.join(absent)} that run in tiles, tiles is {layout.tiles}; nearest "
            f"legal: {', or '.join((*legal, 'tiles=1'))}",
        )
    if layout.sp_regather and layout.tp > 1:
        yield (
            "layout.sp_regather",
            f"the tiles {layout.tiles} of a matrix share the gathered input, which they save whole; nearest legal: "
            "sp_regather=false, or tiles=1",
        )
    yield from _divided(layout, model, [weight for weight in tiled if is_tiled(weight, layout) and not weight.padded])
    if any(is_tiled(weight, layout) for weight in tiled if weight.padded):
        rows = VOCABULARY._replace(shape=(model.vocab_size, 1)).part(layout.tp)
        # Without one the vocabulary is the tokenizer's, which is known at the start of the run.
        if model.vocab_size and (message := too_few_rows(rows, layout.tiles)):
            yield "layout.tiles", message


def _tileable(model: ModelConfig) -> Iterator[Weight]:
    """Yields the weights that may run in tiles, one of each kind of block, and those of the vocabulary."""
    every = [weight for kind in dict.fromkeys(block_kinds(model)) for weight in block_weights(model, kind)]
    every += [*embedding_weights(model, model.vocab_size), *head_weights(model, model.vocab_size)]
    yield from (weight for weight in every if weight.tiled)


def _divided(layout: Layout, model: ModelConfig, tiled: list[Weight]) -> Iterator[Problem]:
    """Yields the first of each size that a tensor rank holds and that does not divide by the tiles."""
    sizes = {weight.part(layout.tp): weight for weight in tiled[::-1] if weight.is_matrix}
    legal = {"layout.tiles": divisors(gcd(*sizes))}
    for size, weight in reversed(sizes.items()):
        assert weight.dim is not None, "a weight in tiles is cut"
        if size % layout.tiles:
            over = f"(tp {layout.tp} × tiles {layout.tiles})" if layout.tp > 1 else f"tiles {layout.tiles}"
            yield (
                "layout.tiles",
                Misfit(f"{_size_of(weight, model)} / {over} is not an integer", layout.tiles, legal),
            )


def _size_of(weight: Weight, model: ModelConfig) -> str:
    """Returns the size of a weight that tiles cut, in words."""
    assert weight.dim is not None, "a weight in tiles is cut"
    size = weight.shape[weight.dim]
    for kind in dict.fromkeys(each.feed_forward for each in block_kinds(model)):
        if not weight.name.startswith("attn.") and FEED_FORWARD[kind].width(model) == size:
            return f"{FEED_FORWARD[kind].width_name} {size}"
    return f"{size} {weight.cut} of {weight.name.removesuffix('.weight')}"


CHEAPEST_FIRST: tuple[Part, ...] = ("optimizer", "activations", "parameters")
"""Parts in the order in which they are offloaded where nothing fits otherwise."""
_NO_FOLDERS: dict[str, str] = {
    **dict.fromkeys(("", "host", "ram", "memory", "none"), "offload_to=cpu"),
    **dict.fromkeys(("disk", "nvme", "ssd", "file", "files"), "offload_to=/a/folder/on/the/disk"),
}
"""Words that `layout.offload_to` may get by mistake, each with its nearest legal choice."""


def offload_problems(job: Job) -> Iterator[Problem]:
    """Yields the dotted path of each wrong field, and the message with the nearest legal choice."""
    words = named(job.layout)
    known = ["none", "all", *PARTS]
    for word in words:
        if word not in PARTS:
            yield (
                "layout.offload",
                f"knows no {word!r}{did_you_mean(word, known)} (known: {', '.join(known)}; several with +)",
            )
    if len(set(words)) < len(words):
        yield "layout.offload", f"names a part twice; nearest legal: offload={'+'.join(dict.fromkeys(words))}"
    yield from _place(job)
    if job.layout.data_parallel == "threads" and words:
        yield "layout.offload", "threads of one process share its device; nearest legal: offload=none, or ddp"
    if is_offloaded(job.layout, "optimizer"):
        yield from _optimizer(job)
    if is_offloaded(job.layout, "parameters"):
        yield from _parameters(job.layout)
    yield from _activations(job)


def with_offload(part: Part, layout: Layout) -> Layout:
    """Returns the layout that also offloads a part; parameters with their optimizer."""
    wanted = {*named(layout), part, *(["optimizer"] if part == "parameters" else [])}
    parts = [each for each in PARTS if each in wanted]
    return replace(layout, offload="all" if len(parts) == len(PARTS) else "+".join(parts))


def can_offload(part: Part, layout: Layout, optimizer: Optimizer, cluster: Cluster) -> Layout | None:
    """Returns `with_offload`; None if the layout does it already, if it cannot, or if too little is known about the
    host to predict it."""
    more = with_offload(part, layout)
    if part in named(layout) or any(not getattr(cluster.host, name) for name in figures(more)):
        return None
    return None if any(True for _ in offload_problems(Job(layout=more, optimizer=optimizer))) else more


def offloads(layout: Layout, optimizer: Optimizer, cluster: Cluster) -> Iterator[Layout]:
    """Yields layouts that offload ever more, the parts first that cost least time."""
    for part in CHEAPEST_FIRST:
        if more := can_offload(part, layout, optimizer, cluster):
            layout = more
            yield layout


def _place(job: Job) -> Iterator[Problem]:
    place = job.layout.offload_to
    if place.lower() in _NO_FOLDERS:
        legal = _NO_FOLDERS[place.lower()]
        yield "layout.offload_to", f"{place!r} is neither cpu nor a folder of files; nearest legal: {legal}"


def _optimizer(job: Job) -> Iterator[Problem]:
    """Yields what cannot be combined with an optimizer on the host."""
    layout, name = job.layout, job.optimizer.name
    if layout.sync != "bsp":
        yield (
            "layout.offload",
            f"sync={layout.sync} averages parameters on the devices, which state on the host would miss; nearest "
            "legal: offload=none, or sync=bsp",
        )
    if name in OPTIMIZERS and OPTIMIZERS[name].needs_whole_matrices:
        legal = ", ".join(each for each, entry in OPTIMIZERS.items() if not entry.needs_whole_matrices)
        yield (
            "optimizer.name",
            f"{name} makes whole matrices orthogonal, which devices exchange and multiply, and an offloaded update "
            "runs on the host, element by element; nearest legal: offload=none, or "
            f"optimizer={legal.split(', ')[0]} (or {legal})",
        )
    try:
        overlaps = layout.pp > 1 and not flushes(layout)
    except (JobError, KeyError):
        return  # the schedule has a message of its own
    if overlaps:
        yield (
            "layout.offload",
            f"schedule {layout.schedule} computes with older versions of weights, which stay on the device; nearest "
            "legal: offload=none, or schedule=1f1b",
        )


def _parameters(layout: Layout) -> Iterator[Problem]:
    """Yields what cannot be combined with parameters on the host."""
    rest = "+".join(part for part in named(layout) if part != "parameters") or "none"
    if not is_offloaded(layout, "optimizer"):
        legal = "+".join(part for part in PARTS if part == "optimizer" or part in named(layout))
        yield (
            "layout.offload",
            f"parameters on the host are updated there, so their optimizer has to be there; nearest legal: "
            f"offload={'all' if legal == '+'.join(PARTS) else legal}, or offload={rest}",
        )
    if layout.zero != 3:
        yield (
            "layout.offload",
            f"parameters come from the host block by block, which is zero=3, and zero is {layout.zero}; nearest legal: "
            f"zero=3, or offload={rest}",
        )
    if layout.hpz > 1:
        yield (
            "layout.hpz",
            f"hpz {layout.hpz} keeps a second copy of the parameters on the devices, which offload={layout.offload} "
            "is to spare; nearest legal: hpz=1",
        )


def _activations(job: Job) -> Iterator[Problem]:
    """Yields what cannot be combined with activations on the host, and layers that there are not."""
    layout, layers = job.layout, job.model.n_layers
    if not is_offloaded(layout, "activations"):
        if layout.offload_blocks:
            yield (
                "layout.offload_blocks",
                f"counts layers whose activations leave the device, offload={layout.offload} keeps them; nearest "
                "legal: offload_blocks=0, or offload=activations",
            )
        return
    if layout.offload_blocks > layers:
        yield (
            "layout.offload_blocks",
            f"{layout.offload_blocks} layers of a model with n_layers {layers}; nearest legal: {layers}",
        )


Problem = tuple[str, str]
"""The dotted path of the field at fault, and the message."""


def layout_problems(job: Job) -> Iterator[Problem]:
    """Yields each problem with its equation and the nearest legal choice, without those of pipelines."""
    layout = job.layout
    yield from tensor_problems(job)
    if layout.sp_regather and not layout.sp:
        yield "layout.sp_regather", "is a part of sequence parallelism; nearest legal: sp=true, or sp_regather=false"
    yield from tile_problems(job)
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
    yield from _second_copy(layout)
    yield from _quantised(layout)
    yield from _ulysses(layout, job.model)
    yield from context_problems(job)
    yield from _experts(layout, job.model)
    yield from _recompute(layout, job.model)
    if layout.sync == "asp" and (layout.cp > 1 or layout.ep > 1):
        axis = "cp" if layout.cp > 1 else "ep"
        yield (
            "layout.sync",
            f"asp needs replicas with whole models and whole sequences, {axis} {getattr(layout, axis)} cuts them; "
            "nearest "
            f"legal: sync=bsp, or {axis}=1",
        )
    if layout.data_parallel == "threads" and layout.world != layout.dp_replicate:
        yield "layout.data_parallel", f"threads works with dp_replicate alone, not with {layout.line()}"
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


def _second_copy(layout: Layout) -> Iterator[Problem]:
    """Yields the problems of the ranks that keep a second copy of the parameters."""
    hpz, ranks = layout.hpz, layout.shard_ranks
    if hpz == 1:
        return
    if layout.zero < 3:
        yield (
            "layout.hpz",
            f"hpz {hpz} copies parameters that zero=3 shards, zero is {layout.zero}; nearest legal: zero=3, or hpz=1",
        )
    elif not layout.reshard:
        yield (
            "layout.hpz",
            f"hpz {hpz} copies parameters for the gathers of the backward pass, of which reshard=false has none; "
            "nearest legal: reshard=true, or hpz=1",
        )
    legal = legal_hpz(layout)
    if hpz in legal:
        return
    if ranks % hpz:
        equation = f"dp_shard {layout.dp_shard} × cp {layout.cp} = {ranks} / hpz {hpz} is not an integer"
    elif hpz == ranks:
        equation = f"hpz {hpz} ranks are all of dp_shard {layout.dp_shard} × cp {layout.cp}, which hold a copy already"
    else:
        equation = f"hpz {hpz} / ep {layout.ep} is not an integer"
    yield "layout.hpz", Misfit(equation, hpz, {"layout.hpz": legal})


def _quantised(layout: Layout) -> Iterator[Problem]:
    """Yields the problem of quantised messages that ZeRO-3 does not send."""
    for name in ("quantise_weights", "quantise_gradients"):
        if (format := getattr(layout, name)) == "none":
            continue
        if layout.zero < 3 or layout.shard_ranks == 1:
            ranks = f"dp_shard {layout.dp_shard} × cp {layout.cp} = {layout.shard_ranks}"
            yield (
                f"layout.{name}",
                f"{format} is for the messages of zero=3 on several ranks, zero is {layout.zero} and {ranks}; nearest "
                f"legal: {name}=none, or zero=3 with dp_shard=2",
            )


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


def _recompute(layout: Layout, model: ModelConfig) -> Iterator[Problem]:
    """Yields the problems of recomputation that is stated per layer."""
    if not layout.recompute_cut:
        return
    if layout.recompute != "none":
        yield (
            "layout.recompute_cut",
            f"sets recomputation per layer, recompute={layout.recompute} for all layers; nearest legal: "
            "recompute=none, or "
            "no recompute_cut",
        )
    try:
        recompute.modes(layout.recompute_cut, model.n_layers)
    except JobError as error:
        yield from (("layout.recompute_cut", problem) for problem in error.problems)


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
