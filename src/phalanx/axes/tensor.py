"""The axis tp: parts of every matrix, and with sp of the tokens between them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from phalanx.axes.axis import AxisEntry
from phalanx.blocks.kinds import FEED_FORWARD, attention_models, block_kinds
from phalanx.blocks.parameters import block_weights
from phalanx.config.job import Job
from phalanx.config.layout import Layout
from phalanx.config.model import ModelConfig
from phalanx.nearest import Misfit, divisors, multiples
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


def _problems(job: Job) -> Iterator[Problem]:
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
    problems=_problems,
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
