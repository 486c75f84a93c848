"""Memory-centric tiling: large matrices as tiles, modules of their own that run one after the other.

ZeRO-3 gathers a module's parameters at once. In tiles, each gathered when it runs and resharded after it, only one part
of a matrix is whole at a time (Rajbhandari et al. 2021, section 5.1.3). The computation is the same. Matrices that are
cut by rows, `wq`, `up` and others, concatenate their tiles' outputs; of those that are cut by columns, `wo` and `down`,
each tile reads its part of the width, and the outputs are summed. The sum's bias stays outside the tiles. Tensor ranks
cut their own slices into tiles, and communicate around all of them. Embedding and head are cut by rows of the
vocabulary (vocabulary.py). An adapter stays whole beside the tiles of its frozen matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.blocks.parameters import weight_of
from phalanx.config.layout import Layout
from phalanx.errors import JobError
from phalanx.model.layers import Linear, project, uncompiled
from phalanx.model.moe import Ends, GroupedLinear, add_bias
from phalanx.model.transformer import Block, Transformer
from phalanx.parallel.linear import Tile
from phalanx.parallel.tensor import (
    ColumnParallel,
    FirstRankBias,
    RowParallelLinear,
    TensorParallel,
)
from phalanx.parallel.vocabulary import CrossEntropy, TiledEmbedding, TiledHead
from phalanx.partition.tensor_slices import TensorSlice, in_tiles, is_tiled, too_few_rows


class LinearTile(Linear, Tile):
    """A part of a linear layer."""


class ExpertTile(GroupedLinear, Tile):
    """A part of a linear layer of every expert."""


class _Tiled(nn.Module):
    """A linear layer in tiles, with the adapter of the whole one."""

    def __init__(self, whole: Linear | GroupedLinear, tiles: nn.ModuleList):
        super().__init__()
        self.tiles, self.lora_a, self.lora_b = tiles, whole.lora_a, whole.lora_b
        self.lora_scale = whole.lora_scale

    def adapt(self, y: Tensor, x: Tensor, *ends: Ends) -> Tensor:
        """Returns `y` (..., outputs) and the adapter's output for `x` (..., inputs), if there is one."""
        if self.lora_a is None or self.lora_b is None:
            return y
        return y + self.lora_b(self.lora_a(x, *ends) * self.lora_scale, *ends)


class TiledRows(_Tiled):
    """Maps (..., inputs) to (..., outputs): each tile has some of the outputs. Rows of experts come with `ends`."""

    @uncompiled
    def forward(self, x: Tensor, *ends: Ends) -> Tensor:
        tokens = x.flatten(0, -2)  # of a matrix a product is no view, which FSDP2 warns of
        y = torch.cat([tile(tokens, *ends) for tile in self.tiles], dim=-1).unflatten(0, x.shape[:-1])
        return self.adapt(y, x, *ends)


class TiledColumns(_Tiled):
    """Maps (..., inputs) to (..., outputs): each tile has some of the inputs. Rows of experts come with `ends`."""

    def __init__(self, whole: Linear | GroupedLinear, tiles: nn.ModuleList, bias_factor: float = 1.0):
        """The bias is multiplied by `bias_factor`, and added to the sum."""
        super().__init__(whole, tiles)
        self.bias, self.bias_factor = whole.bias, bias_factor
        self.reduce: Callable[[Tensor], Tensor] | None = None
        """Sums the tensor ranks' outputs, before the bias is added."""

    @uncompiled
    def forward(self, x: Tensor, *ends: Ends) -> Tensor:
        parts = x.flatten(0, -2).chunk(len(self.tiles), dim=-1)
        if ends:
            parts = [part.contiguous() for part in parts]  # as torch's grouped product needs them
        first, *others = parts
        y = self.tiles[0](first, *ends)
        for tile, part in zip(list(self.tiles)[1:], others, strict=True):
            y = y + tile(part, *ends)
        y = self.adapt(y.unflatten(0, x.shape[:-1]), x, *ends)
        if self.reduce is not None:
            y = self.reduce(y)
        if self.bias is None:
            return y
        bias = self.bias if self.bias_factor == 1 else self.bias * self.bias_factor
        return add_bias(y, bias, *ends) if ends else y + bias


@dataclass(frozen=True)
class ProjectGathered:
    """Applies layers one after the other to an input that is gathered once: the `project` where tiles, which ZeRO-3
    gathers one by one, take the place of linear layers."""

    parallel: TensorParallel

    @uncompiled
    def __call__(self, layers: Sequence[Linear], x: Tensor) -> tuple[Tensor, ...]:
        """Maps (batch, seq, d_model), or this rank's part of it, to (batch, seq, outputs / tp) for each layer."""
        return project(layers, self.parallel.gathered(x))


def tile(
    model: Transformer, tensor_slices: Mapping[str, tuple[TensorSlice, ...]], layout: Layout, loss: CrossEntropy
) -> tuple[dict[str, tuple[TensorSlice, ...]], dict[str, str]]:
    """Replaces the layers of `model`, on the meta device, that the layout tiles; tensor ranks hold their slices of it.
    Raises JobError if the vocabulary has fewer rows than tiles.

    Returns, by the parameters' new names, their slices of the whole parameters, and by the tiles' names the whole's
    name."""
    for name, module in list(model.named_modules()):
        if isinstance(module, Linear | GroupedLinear) and f"{name}.weight" in tensor_slices:
            weight = weight_of(model.config, f"{name}.weight")
            if is_tiled(weight, layout):
                make = _rows if weight.cut == "rows" else _columns
                model.set_submodule(name, make(module, layout.tiles))
    slices, names = {}, {}
    rows: dict[str, list[TensorSlice]] = {"embed.weight": [], "head.weight": []}
    for name, number, parts in in_tiles(tensor_slices, layout, model.config):
        here = name
        if number is not None:
            owner, _, leaf = name.rpartition(".")
            here = f"{owner}.tiles.{number}.{leaf}"
            names[here] = name
            rows.get(name, []).append(parts[loss.tp.rank])
        slices[here] = parts
    if any(part.size == 0 for parts in rows.values() for part in parts):
        held = sum(part.size for part in rows["head.weight"] or rows["embed.weight"])
        raise JobError(f"layout.tiles: {too_few_rows(held, layout.tiles)}")
    if of_tiles := rows["embed.weight"]:
        model.set_submodule("embed", TiledEmbedding(model.embed, of_tiles))
    if of_tiles := rows["head.weight"]:
        model.set_submodule("head", TiledHead(model.head, model.config, of_tiles, int(layout.loss_chunk), loss))
    return slices, names


def project_tiles(model: Transformer) -> set[nn.Module]:
    """Makes sublayers of `model` whose tiles read the input gather it once for all of them, if there are tensor ranks.
    Returns the layers that do so besides tiles: their own products no longer communicate."""
    others = set[nn.Module]()
    for block in model.blocks.modules():
        for kind, half in block.sublayers() if isinstance(block, Block) else ():
            named = dict(half.named_modules())
            reads = [named[name] for name in kind.connection.reads if name in named]
            column = getattr(half, "project", None)
            if isinstance(column, ColumnParallel) and any(isinstance(layer, TiledRows) for layer in reads):
                half.project = ProjectGathered(column.parallel)  # pyrefly: ignore[bad-argument-type]
                others |= set(reads)
    return others


def _rows(whole: Linear | GroupedLinear, tiles: int) -> TiledRows:
    *_, outputs, inputs = whole.weight.shape
    return TiledRows(whole, _tiles(whole, tiles, inputs, outputs // tiles, bias=whole.bias is not None))


def _columns(whole: Linear | GroupedLinear, tiles: int) -> TiledColumns:
    *_, outputs, inputs = whole.weight.shape
    found = _tiles(whole, tiles, inputs // tiles, outputs, bias=False)
    if isinstance(whole, FirstRankBias):
        return TiledColumns(whole, found, float(whole.parallel.tp.rank == 0))
    tiled = TiledColumns(whole, found, whole.bias_factor if isinstance(whole, GroupedLinear) else 1.0)
    if isinstance(whole, RowParallelLinear):
        tiled.reduce = whole.parallel.reduced
    return tiled


def _tiles(whole: Linear | GroupedLinear, tiles: int, inputs: int, outputs: int, *, bias: bool) -> nn.ModuleList:
    options: dict[str, Any] = {"bias": bias}
    with torch.device("meta"):
        if isinstance(whole, GroupedLinear):
            made = [ExpertTile(len(whole.weight), inputs, outputs, **options) for _ in range(tiles)]
        else:
            made = [LinearTile(inputs, outputs, **options) for _ in range(tiles)]
    return nn.ModuleList(made).to(whole.weight.dtype).requires_grad_(whole.weight.requires_grad)
