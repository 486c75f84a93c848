"""The table of axes: the project's own, and those of packages."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from functools import lru_cache
from math import gcd
from types import MappingProxyType
from typing import Any

from phalanx.axes.axis import AxisEntry, problems
from phalanx.blocks.kinds import ATTENTION, FEED_FORWARD, attention_models, block_kinds, chosen_kinds
from phalanx.blocks.operator import Collective
from phalanx.blocks.parameters import block_weights
from phalanx.config.added import AXIS_OPTIONS, OptionsTable
from phalanx.config.fields import get
from phalanx.config.job import Job
from phalanx.config.layout import Layout
from phalanx.config.model import ModelConfig
from phalanx.errors import JobError
from phalanx.nearest import Misfit, divisors, multiples
from phalanx.partition import derived as batch
from phalanx.partition.derived import is_file, written_stages
from phalanx.partition.tensor_slices import cut_by_position
from phalanx.schedule import catalogue, file
from phalanx.schedule.generators import pipedream
from phalanx.techniques.catalogue import freezing, techniques_of
from phalanx.techniques.technique import Problem


def tensor_problems(job: Job) -> Iterator[Problem]:
    """Yields the problems of heads, widths and sequences against tp."""
    layout, model = job.layout, job.model
    found = list(_heads_and_widths(layout, model))
    yield from found or _weights(layout, model)
    if layout.sp and model.seq_len % layout.tp:
        yield _divided_by_tp(
            f"sequence parallel: seq_len {model.seq_len}", model.seq_len, layout.tp, "model.seq_len", ", or sp=false"
        )


def _tensor_problems(job: Job) -> Iterator[Problem]:
    yield from tensor_problems(job)
    if job.layout.sp_regather and not job.layout.sp:
        yield "layout.sp_regather", "is a part of sequence parallelism; nearest legal: sp=true, or sp_regather=false"


def _divided_by_tp(dividend: str, size: int, tp: int, path: str = "", after: str = "") -> Problem:
    """Returns the problem of a size that tp does not divide; it is the field's at `path`, if any."""
    other = {path: multiples(tp, size)} if path else {}
    return "layout.tp" if not after else "layout.sp", Misfit(
        f"{dividend} / tp {tp} is not an integer", tp, {"layout.tp": divisors(size), **other}, after
    )


def _heads_and_widths(layout: Layout, model: ModelConfig) -> Iterator[Problem]:
    if model.n_heads % layout.tp:
        yield _divided_by_tp(f"n_heads {model.n_heads}", model.n_heads, layout.tp, "model.n_heads")
    for width, name in _widths(layout, model):
        if width % layout.tp:
            yield _divided_by_tp(f"{name} {width}", width, layout.tp, "model.d_ff" if width == model.d_ff else "")
    every = {own.n_heads if own.mla.kv_rank else own.kv_heads for own in attention_models(model)}
    for kv_heads in sorted(every):
        if model.n_heads % layout.tp == 0 and kv_heads % layout.tp and layout.tp % kv_heads:
            legal = [tp for tp in divisors(model.n_heads) if all(n % tp == 0 or tp % n == 0 for n in every)]
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
    for name, size in _cut_sizes(model, layout.folds):
        if size % layout.tp:
            yield _divided_by_tp(f"{name} has {size} rows or columns, and {size}", size, layout.tp)


@lru_cache(maxsize=256)
def _cut_sizes(model: ModelConfig, folds: bool) -> tuple[tuple[str, int], ...]:
    """Returns the weights of blocks that tp cuts into equal parts, each with its rows or columns."""
    weights = (weight for kind in dict.fromkeys(block_kinds(model)) for weight in block_weights(model, kind))
    cut = (each for each in weights if each.dim is not None and each.unit == 1 and not each.padded)
    cut = (each for each in cut if not (folds and each.routed))
    return tuple((each.name, each.shape[each.dim or 0]) for each in cut)


def _widths(layout: Layout, model: ModelConfig) -> Iterator[tuple[int, str]]:
    """Yields the hidden widths that tp cuts: of experts that it leaves whole those of the shared ones, whose width is a
    multiple of one expert's."""
    for name in _feed_forward_kinds(model):
        kind = FEED_FORWARD[name]
        shared = model.moe.n_shared if kind.routed and layout.folds else 1
        yield shared * kind.width(model), kind.width_name


def _feed_forward_kinds(model: ModelConfig) -> Iterator[str]:
    """Yields the kinds of feed-forward layers, each once."""
    yield from dict.fromkeys(kind.feed_forward for kind in block_kinds(model))


TENSOR = AxisEntry(
    "tensor-parallel ranks, each with a part of every matrix",
    "Shoeybi et al. 2019; Korthikanti et al. 2022",
    "matrices",
    problems=_tensor_problems,
    layouts=(
        "tp=2",
        "tp=4,accumulation=2,loss_chunk=24",
        "tp=2,sp=true,recompute=selective",
        "tp=2,sp=true,sp_regather=true,recompute=products",
        "tp=2,sp=true,sp_regather=true,recompute=mlp",
        "tp=2,sp=true,sp_regather=true,loss_chunk=24",
        "tp=4,sp=true,recompute=full",
        "tp=2,pp=2,accumulation=4,sp=true,sp_regather=true,recompute_cut=1*full+2*selective+1*none",
    ),
    combined=("tp=2", "tp=2,sp=true"),
)


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
    """Returns why context-parallel ranks get their tokens by position; empty if documents decide."""
    return cut_by_position(job.model, job.layout) if job.data.document_mask else "nothing to balance"


def _context_problems(job: Job) -> Iterator[Problem]:
    yield from _ulysses(job.layout, job.model)
    asked = job.layout.cp_balance == "documents" and job.layout.cp > 1 and job.data.document_mask
    if asked and (why := unbalanced(job)):
        yield "layout.cp_balance", f"{why}; nearest legal: cp_balance=position"
    yield from context_problems(job)


CONTEXT = AxisEntry(
    "context-parallel ranks, each with a part of every sequence",
    "Liu et al. 2023; Jacobs et al. 2023; Fang and Zhao 2024",
    "tokens",
    problems=_context_problems,
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


def pipeline_problems(job: Job) -> Iterator[Problem]:
    """Yields the dotted path of each wrong field, and the message with the nearest legal choice. Without a pipeline (pp
    1) only an unknown schedule is a problem."""
    layout = job.layout
    if not is_file(layout.schedule) and layout.schedule not in catalogue.SCHEDULES:
        for problem in catalogue.problems(layout.schedule, layout.pp, 1):
            yield (
                "layout.schedule",
                f"{problem}; the learning rate's: optimizer.schedule; a schedule of your own: the path of its file",
            )
    if layout.pp == 1:
        return
    if is_file(layout.schedule):
        yield from _file(job)
    elif layout.schedule in catalogue.SCHEDULES:
        yield from _named(job)


def _named(job: Job) -> Iterator[Problem]:
    """Yields the problems of a schedule from the catalogue."""
    layout, name = job.layout, job.layout.schedule
    equation, entry = _equation(job), catalogue.SCHEDULES[name]
    if equation is not None:  # else the batch equation has its own message
        note = f" (accumulation in {equation.equation()})"
        choice = layout.pp, equation.accumulation, layout.pp_chunks, layout.pp_slices
        # With more stages than layers, the nearest legal number of ranks follows from the layers.
        sized = catalogue.stages(name, layout.pp, layout.pp_chunks) <= job.model.most_stages
        for problem in catalogue.problems(name, *choice, sized=sized):
            yield "layout.schedule", problem + (note if "micro-batch" in problem else "")
    least, most = entry.chunks
    if least <= catalogue.chunks_of(name, layout.pp_chunks) <= most:
        stages = catalogue.stages(name, layout.pp, layout.pp_chunks)
        chunks = stages // layout.pp
        equals = f"pp {layout.pp} × chunks {chunks} = {stages}" if chunks > 1 else f"pp {layout.pp}"
        yield from _stages(job, stages, equals, _fewer(job) if stages > job.model.most_stages else "")
    if entry.sliced:
        yield from _slices(job, layout.pp_slices or entry.slices)
    if entry.steps > 1:
        yield from _without_flush(job)
    if entry.stashes:
        yield from _stashing(job)


def _file(job: Job) -> Iterator[Problem]:
    """Yields the problems of a schedule from a file."""
    layout = job.layout
    path = layout.schedule
    try:
        schedule = file.read(path)
    except JobError as error:
        yield from (("layout.schedule", problem) for problem in error.problems)
        return
    if schedule.ranks != layout.pp:
        yield (
            "layout.pp",
            f"{path} is for pp {schedule.ranks}, pp is {layout.pp}; nearest legal: pp {schedule.ranks}, or another "
            "schedule",
        )
    equation, micro_batches = _equation(job), schedule.micro_batches // schedule.steps
    if equation is not None and equation.accumulation != micro_batches:
        yield (
            "layout.schedule",
            f"{path} is for {micro_batches} micro-batches per step, but {equation.equation()}; nearest legal: "
            f"accumulation {micro_batches} with a global batch that is a multiple of "
            f"{micro_batches * equation.data_ranks}",
        )
    for name, own in (("pp_chunks", len(schedule.stages_on(0))), ("pp_slices", schedule.slices)):
        value = getattr(layout, name)
        if value and value != own:
            yield f"layout.{name}", f"{path} has {own}, {name} is {value}; nearest legal: {name}=0"
    yield from _stages(job, schedule.stages, f"{path}: {schedule.stages}", f"n_layers {schedule.stages}")
    yield from _slices(job, schedule.slices)
    if schedule.steps > 1:
        own = pipedream(schedule.ranks, micro_batches, schedule.steps)
        if (schedule.programs, schedule.placements) != (own.programs, own.placements):
            yield (
                "layout.schedule",
                f"{path} spans {schedule.steps} optimizer steps without a flush in an order of its own; only "
                "pipedream's is trained. Nearest legal: schedule=pipedream, or a file with one step",
            )
        yield from _without_flush(job)


def _stages(job: Job, stages: int, equals: str, legal: str) -> Iterator[Problem]:
    """Yields the problems of the number of stages, and of the user's cut, with the model's layers."""
    layers, most, text, together = job.model.n_layers, job.model.most_stages, job.layout.pp_cut, job.model.together
    if stages > most:
        why = "modules for further tokens" if job.model.mtp else "which share keys"
        has = f", the last with the last {together} layers, {why}" if most < layers else ""
        yield (
            "layout.pp",
            f"{equals} stages need at least as many layers{has}, the model has {layers}; nearest legal: {legal}",
        )
    if text:
        try:
            written_stages(text, stages, layers, together)
        except JobError as error:
            yield from (("layout.pp_cut", problem) for problem in error.problems)


def _slices(job: Job, slices: int) -> Iterator[Problem]:
    """Yields the options that exclude slices of sequences."""
    if slices == 1:
        return
    layout, tokens = job.layout, job.model.seq_len
    if without_cores := kinds_without_cores(job.model, by_heads=True):
        yield (
            "layout.pp_slices",
            f"attention {', '.join(without_cores)} states no cores, so its layers need whole sequences, and slices "
            f"{slices} cut them; nearest legal: a schedule without slices, such as 1f1b",
        )
        return
    ranks = layout.tp if layout.sp else 1
    if tokens % (slices * ranks):
        tp = f" × tp {ranks} (sp)" if ranks > 1 else ""
        equation = f"seq_len {tokens} / (slices {slices}{tp}) is not an integer"
        legal = {
            "layout.pp_slices": divisors(tokens // ranks),
            "model.seq_len": multiples(slices * ranks, tokens),
        }
        yield (
            "layout.pp_slices",
            f"{equation}; nearest legal: sp=false" if tokens % ranks else Misfit(equation, slices, legal),
        )
    if tokens % slices == 0 and not any(context_problems(job)):  # else the whole sequence has its own message
        yield from context_problems(job, slices)
    moe = job.model.moe
    if moe.n_experts:
        for name, value in (("aux_loss", moe.aux_loss), ("capacity", moe.capacity)):
            if value > 0:
                yield (
                    f"model.moe.{name}",
                    f"{name} {value} counts the tokens of whole sequences, slices {slices} cut them; nearest legal: "
                    f"{name}=0, or a schedule without slices, such as 1f1b",
                )


def _without_flush(job: Job) -> Iterator[Problem]:
    """Yields the options that exclude a pipeline without a flush (PipeDream): micro-batches in flight keep the weights
    that they began with, whole, in several versions."""
    layout, name = job.layout, job.layout.schedule
    if layout.accumulate == "sharded":
        yield (
            "layout.accumulate",
            f"{name} keeps gradients whole until their step; nearest legal: accumulate=local, or schedule=1f1b",
        )
    if layout.shard_ranks > 1:
        axis = "cp" if layout.dp_shard == 1 else "dp_shard"
        degree = getattr(layout, axis)
        yield (
            f"layout.{axis}",
            f"{name} keeps two versions of the weights whole on each rank, {axis} {degree} shards state; nearest "
            f"legal: {axis}=1 with dp_replicate={degree * layout.dp_replicate}, or schedule=1f1b",
        )


def _stashing(job: Job) -> Iterator[Problem]:
    """Yields the options that exclude an update of each stage after each micro-batch, at weights of its own."""
    layout, name = job.layout, job.layout.schedule
    each = f"{name} updates a stage as soon as a micro-batch has returned there"
    if job.optimizer.clip:
        yield (
            "optimizer.clip",
            f"{each}, before the norm of all stages' gradients is known; nearest legal: clip=0, or schedule=pipedream",
        )
    for field in ("dp_replicate", "dp_shard", "cp", "ep"):
        if (degree := getattr(layout, field)) > 1:
            yield (
                f"layout.{field}",
                f"{each}, and {field} {degree} would exchange its gradients each time, which is not built; "
                f"nearest legal: {field}=1, or schedule=pipedream",
            )
    for field, value, legal in (
        ("model.tied", job.model.tied, "false"),
        ("model.mtp", job.model.mtp, 0),
        ("model.moe.n_experts", job.model.moe.n_experts, 0),
        ("layout.offload", layout.offload != "none", "none"),
    ):
        if value:
            why = (
                "both ends share a matrix" if field in ("model.tied", "model.mtp") else f"{field} counts on whole steps"
            )
            yield field, f"{each}, and {why}; nearest legal: {field.rpartition('.')[2]}={legal}, or 1f1b"
    if job.train.precision == "fp16":
        yield "train.precision", f"{each}, with one loss scale per step; nearest legal: precision=bf16, or 1f1b"


def _fewer(job: Job) -> str:
    """Returns the nearest legal changes for fewer layers than stages: fewer ranks, or fewer stages per rank."""
    layout, layers = job.layout, job.model.most_stages
    chunks = catalogue.chunks_of(layout.schedule, layout.pp_chunks)
    by_pp = next((pp for pp in range(min(layout.pp - 1, layers), 1, -1) if _fits(job, pp=pp)), 1)
    by_chunks = next((n for n in range(min(chunks - 1, layers), 0, -1) if _fits(job, pp_chunks=n)), 0)
    return f"pp {by_pp}" + (f", or pp_chunks {by_chunks}" if by_chunks else "")


def _fits(job: Job, **changed: Any) -> bool:
    """Returns whether a pipeline with a changed layout is legal for the model's layers and the batch."""
    layout = dataclasses.replace(job.layout, **changed)
    if layout.pp == 1:
        return True
    equation = _equation(dataclasses.replace(job, layout=layout))
    return (
        equation is not None
        and catalogue.stages(layout.schedule, layout.pp, layout.pp_chunks) <= job.model.most_stages
        and not catalogue.problems(
            layout.schedule, layout.pp, equation.accumulation, layout.pp_chunks, layout.pp_slices
        )
    )


def _equation(job: Job) -> batch.Batch | None:
    """Returns the solved batch equation; None if it has no solution."""
    try:
        return batch.solve(job.train.global_batch, job.layout)
    except ValueError:
        return None


PIPELINE = AxisEntry(
    "pipeline ranks, each with stages of consecutive layers",
    "Huang et al. 2019; Narayanan et al. 2021",
    "layers",
    problems=pipeline_problems,
    layouts=(
        "pp=2,accumulation=4",
        "pp=4,schedule=gpipe,accumulation=4",
        "pp=2,schedule=interleaved_1f1b,accumulation=4,recompute=selective",
        "pp=4,schedule=zb_h1,accumulation=8",
        "pp=2,schedule=zb_v,accumulation=4,recompute=full,loss_chunk=24",
        "pp=2,schedule=dualpipe,accumulation=4",
        "pp=2,schedule=terapipe,pp_slices=4,accumulation=2",
        "pp=3,schedule=pipedream,accumulation=4",
    ),
    combined=(
        *("pp=2", "pp=2,schedule=interleaved_1f1b", "pp=2,schedule=zb_h1", "pp=2,schedule=zb_v"),
        *("pp=2,schedule=dualpipe", "pp=2,schedule=terapipe,pp_slices=2"),
    ),
)


def _data_problems(job: Job) -> Iterator[Problem]:
    layout = job.layout
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


REPLICATE = AxisEntry(
    "data-parallel replicas with whole copies",
    "Li et al. 2020",
    "samples",
    layouts=("dp_replicate=2", "dp_replicate=4,accumulation=2"),
    combined=("dp_replicate=2",),
)
SHARD = AxisEntry(
    "data-parallel ranks that share the state",
    "Rajbhandari et al. 2020; Zhao et al. 2023",
    "state",
    problems=_data_problems,
    layouts=(
        "dp_shard=2,zero=1,accumulation=2",
        "dp_shard=4,zero=2",
        "dp_shard=2,zero=2,accumulate=sharded,accumulation=2",
        "dp_shard=4,zero=3",
        "dp_shard=2,zero=3,reshard=false,accumulation=2",
        "dp_shard=2,zero=3,accumulate=sharded,accumulation=2,recompute=full",
        "dp_replicate=2,dp_shard=2,zero=1",
        "dp_replicate=2,dp_shard=2,zero=2,accumulate=sharded,accumulation=2",
        "dp_replicate=2,dp_shard=2,zero=3,accumulation=2",
    ),
    combined=("dp_shard=2,zero=1", "dp_shard=2,zero=2", "dp_shard=2,zero=3"),
)


OWN: Mapping[str, AxisEntry] = MappingProxyType(
    {
        "dp_replicate": REPLICATE,
        "dp_shard": SHARD,
        "cp": CONTEXT,
        "tp": TENSOR,
        "pp": PIPELINE,
        "ep": EXPERTS,
    }
)
"""The project's own axes."""


AXES_TABLE = OptionsTable("axis", dict(OWN), problems, AXIS_OPTIONS)


def axes_of(layout: Layout) -> Mapping[str, AxisEntry]:
    """Returns the axes that a layout may have by name: the project's own, and the packages' whose options it sets."""
    return OWN if not layout.axes.chosen else {**OWN, **{name: AXES_TABLE[name] for name, _ in layout.axes.chosen}}


def period(layout: Layout) -> int:
    """Returns the steps from one agreement of independent replicas to the next; 1 if every step sums gradients, or
    nobody waits (asp)."""
    if sizes := layout.axes.sizes:
        name = next(iter(sizes))
        return AXES_TABLE[name].every(getattr(layout.axes, name))
    return layout.sync_every if layout.sync in ("local_sgd", "diloco") else 1


def agreement(layout: Layout) -> tuple[float, tuple[tuple[Collective, float], ...]]:
    """Returns the share of an agreement of independent replicas that one step has, and its collectives with the
    multiples of the parameters' bytes."""
    sizes = layout.axes.sizes
    return 1 / period(layout), AXES_TABLE[next(iter(sizes))].messages if sizes else (("all_reduce", 1.0),)


def axis_problems(job: Job) -> Iterator[Problem]:
    """Yields what the axes of a layout cannot have."""
    # What tp cuts is said before what other axes cut of the rest.
    for name, axis in sorted(axes_of(job.layout).items(), key=lambda item: item[0] != "tp"):
        if name in OWN or name in job.layout.axes.sizes:
            yield from axis.problems(job)
    yield from _outside(job)


def added_problems(job: Job) -> Iterator[Problem]:
    """Yields a choice that is the planner's, where it knows no axis of a package."""
    if job.layout.auto and job.layout.axes.sizes:
        name = next(iter(job.layout.axes.sizes))
        yield (
            f"layout.axes.{name}.size",
            "the planner does not choose axes of packages; nearest legal: size 1, or a layout without auto",
        )


def _outside(job: Job) -> Iterator[Problem]:
    """Yields what replicas along an axis of a package cannot be combined with."""
    layout, sizes = job.layout, job.layout.axes.sizes
    for name, options in layout.axes.chosen:
        if options.size < 1:
            yield f"layout.axes.{name}.size", f"must be at least 1, is {options.size}"
        elif options.size == 1:
            yield f"layout.axes.{name}", "has no effect here: its options are for size above 1"
    if not sizes:
        return
    name, *others = sizes
    at, own = f"layout.axes.{name}.size", f"axis {name} of {sizes[name]} ranks"
    if others:
        yield at, f"one axis of a package at a time, are {' and '.join(sizes)}; nearest legal: {others[0]}'s size 1"
    if layout.sync != "bsp":
        yield "layout.sync", f"{layout.sync} and {own} would both have independent replicas; nearest legal: sync=bsp"
    if layout.data_parallel == "threads":
        yield "layout.data_parallel", f"threads share the parameters of {own}; nearest legal: data_parallel=ddp"
    if layout.offload != "none":
        yield "layout.offload", f"replicas along {own} agree on their device; nearest legal: offload=none"
    if job.model.freezes:
        path, legal = freezing(job.model)
        yield path, f"{own} averages all parameters, and most are frozen; nearest legal: {legal}"
    for other, technique in techniques_of(job).items():
        if other in ("preference", "policy") and technique.is_on(job):
            yield at, "a loss that compares sequences needs replicas that sum gradients; nearest legal: size 1"
    for path in ("train.eval_every", "checkpoint.every", "checkpoint.memory_every"):
        if (every := get(job, path)) % (steps := period(layout)):
            nearest = -(-every // steps) * steps
            yield path, f"{own} agrees every {steps} steps, and {every} is no multiple of it; nearest: {nearest}"
