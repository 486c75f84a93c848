"""Tiles of large matrices: which parameters `layout.tiles` cuts, and the part of each in every tile.

A tile is a part of what a tensor rank holds, along the dimension that tensor parallelism cuts: rows of a matrix that
reads the residual stream, columns of one that writes to it (memory-centric tiling: Rajbhandari et al. 2021, section
5.1.3). Of experts, stacked along a leading dimension, each tile has a part of every expert. Tiles of the vocabulary,
which no other layer's width follows from, need not be equal: some have a row more than others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby

from phalanx.blocks.operator import Weight, is_expert
from phalanx.blocks.parameters import Shapes, weight_of
from phalanx.config.layout import Layout
from phalanx.config.model import ModelConfig
from phalanx.partition.tensor_slices import TensorSlice, slice_of

ENDS = {"embed.weight": "embedding", "head.weight": "head"}
"""The names by which `layout.tile` means the matrices of the vocabulary."""


def layers_of(name: str) -> str:
    """Returns the name by which `layout.tile` means the layer of a parameter, which has its name in a block."""
    if name in ENDS:
        return ENDS[name]
    if is_expert(name):
        return "experts"
    return "attention" if name.startswith("attn.") else "mlp"


def is_tiled(weight: Weight, layout: Layout) -> bool:
    """Returns whether a layout runs a weight in tiles."""
    return layout.tiles > 1 and weight.tiled and layers_of(weight.name) in layout.tiled_layers


def head_tiles(model: ModelConfig, layout: Layout) -> int:
    """Returns the number of tiles of the head, each of which has its own logits; 1: all logits exist at once."""
    return layout.tiles if not model.tied and is_tiled(weight_of(model, "head.weight"), layout) else 1


def too_few_rows(rows: int, tiles: int) -> str:
    """Returns why the rows of the vocabulary that a tensor rank holds do not go into so many tiles; empty if they
    do."""
    if rows >= tiles:
        return ""
    return (
        f"a tensor rank's {rows} rows of the vocabulary cannot fill tiles {tiles}; nearest legal: tiles={rows}, or a "
        "tile without embedding and head"
    )


def in_tiles(
    slices: Mapping[str, Sequence[TensorSlice]], layout: Layout, model: ModelConfig
) -> Iterator[tuple[str, int | None, tuple[TensorSlice, ...]]]:
    """Yields name, tile and slices of every parameter, given by what each tensor rank holds of it, in the order of the
    module tree: of a module that runs in tiles first what no tile has (tile None), then tile after tile. The layout
    must be legal: what a rank holds divides by the tiles, or has a row of the vocabulary for each."""
    for _, names in groupby(slices, lambda name: name.rpartition(".")[0]):
        tiled = list[str]()
        for name in names:
            if is_tiled(weight_of(model, name), layout):
                tiled.append(name)
            else:
                yield name, None, tuple(slices[name])
        for number in range(layout.tiles if tiled else 0):
            for name in tiled:
                dim = weight_of(model, name).dim
                yield name, number, tuple(_tile(held, dim, layout.tiles, number) for held in slices[name])


def first_rank_tiles(
    shapes: Shapes, layout: Layout, model: ModelConfig
) -> Iterator[tuple[str, int | None, TensorSlice]]:
    """Yields what the first tensor rank, which holds at least as much as any other, has of parameters of these whole
    `shapes`: name, tile and slice, as `in_tiles`."""
    slices = {name: (slice_of(name, whole, model, layout.tp, 0),) for name, whole in shapes.items()}
    for name, number, (part,) in in_tiles(slices, layout, model):
        yield name, number, part


def _tile(held: TensorSlice, dim: int | None, tiles: int, number: int) -> TensorSlice:
    """Returns tile `number` of what a rank holds."""
    assert dim is not None, "only what tensor ranks cut runs in tiles"
    start, stop = (held.shape[dim] * end // tiles for end in (number, number + 1))
    return replace(held, dim=dim, start=held.start + start, size=stop - start)
