"""Tiling: large matrices of layers run in tiles, of which zero=3 gathers one at a time."""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd

from phalanx.blocks.kinds import FEED_FORWARD, block_kinds
from phalanx.blocks.operator import Weight
from phalanx.blocks.parameters import block_weights
from phalanx.blocks.residual import VOCABULARY, embedding_weights, head_weights
from phalanx.config.job import Job
from phalanx.config.layout import TILED, Layout
from phalanx.config.model import ModelConfig
from phalanx.nearest import Misfit, did_you_mean, divisors
from phalanx.partition.tensor_slices import ENDS, is_tiled, layers_of, too_few_rows
from phalanx.techniques.technique import Problem, Technique, above


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
            "embedding and head are one matrix (model.tied=true), which both ends of the model read whole; nearest "
            f"legal: tile={legal}, or model.tied=false"
            if model.tied
            else f"modules for further tokens (model.mtp={model.mtp}) read embedding and head too, so that both run "
            f"whole; nearest legal: tile={legal}",
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


TILING = Technique(
    "large matrices in tiles",
    "docs/techniques/tiling.md",
    is_on=lambda job: job.layout.tiles > 1,
    fields=("layout.tiles", "layout.tile"),
    layout_problems=tile_problems,
    conditions={"layout.tile": above("layout.tiles", 1)},
    stage="layers",
    apply="phalanx.parallel.apply:apply_tiling",
    layouts=(
        "dp_shard=2,zero=3,tiles=2,tile=all,accumulation=2,recompute=products",
        "dp_shard=2,tp=2,zero=3,sp=true,tiles=2,tile=all,recompute=full",
    ),
)
