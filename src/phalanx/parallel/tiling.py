"""Memory-centric tiling: the MLP's matrices as tiles, modules of their own that run one after the other.

ZeRO-3 gathers a module's parameters at once. The MLP's matrices are the largest of a block: in tiles, each gathered
when it runs and resharded after it, only one tile of them is whole at a time (Rajbhandari et al. 2021, section 5.1.3).
The computation is the same. `up` and `gate` are cut by rows, and their tiles' outputs are concatenated; `down` is cut
by columns, each tile reads its part of the width, and the outputs are summed.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from phalanx.model.layers import MLP, Linear
from phalanx.model.transformer import Transformer
from phalanx.partition import tensor_slices as arithmetic
from phalanx.partition.tensor_slices import TensorSlice


class Tile(Linear):
    """A part of a matrix."""


class _TiledRows(nn.Module):
    """Maps (..., inputs) to (..., outputs): each tile has some of the outputs."""

    def __init__(self, whole: Linear, tiles: int):
        super().__init__()
        outputs = whole.out_features // tiles
        self.tiles = nn.ModuleList(
            _tile(whole, whole.in_features, outputs, whole.bias is not None) for _ in range(tiles)
        )

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)  # of a matrix a product is no view, which FSDP2 warns of
        return torch.cat([tile(tokens) for tile in self.tiles], dim=-1).unflatten(0, x.shape[:-1])


class _TiledColumns(nn.Module):
    """Maps (..., inputs) to (..., outputs): each tile has some of the inputs, the first one the bias."""

    def __init__(self, whole: Linear, tiles: int):
        super().__init__()
        biased = whole.bias is not None
        inputs = whole.in_features // tiles
        self.tiles = nn.ModuleList(
            _tile(whole, inputs, whole.out_features, biased and number == 0) for number in range(tiles)
        )

    def forward(self, x: Tensor) -> Tensor:
        first, *others = x.flatten(0, -2).chunk(len(self.tiles), dim=-1)
        y = self.tiles[0](first)
        for tile, part in zip(list(self.tiles)[1:], others, strict=True):
            y = y + tile(part)
        return y.unflatten(0, x.shape[:-1])


def tile(
    model: Transformer, tensor_slices: Mapping[str, tuple[TensorSlice, ...]], tiles: int
) -> tuple[dict[str, tuple[TensorSlice, ...]], dict[str, str]]:
    """Replaces the matrices of `model`'s MLPs, on the meta device, by `tiles` tiles each; there is one tensor rank.

    Returns, by the parameters' new names, their slices of the whole parameters, and by the tiles' names the whole's
    name."""
    for module in list(model.modules()):
        if isinstance(module, MLP):
            for name, kind in (("up", _TiledRows), ("gate", _TiledRows), ("down", _TiledColumns)):
                if isinstance(layer := getattr(module, name), Linear):
                    setattr(module, name, kind(layer, tiles))
    slices, names = {}, {}
    for name, _ in model.named_parameters():
        owner, tiled, rest = name.partition(".tiles.")
        if not tiled:
            slices[name] = tensor_slices[name]
            continue
        number, leaf = rest.split(".")
        names[name] = f"{owner}.{leaf}"
        parts = arithmetic.tile(names[name], tensor_slices[names[name]][0].whole, tiles, model.config)
        slices[name] = (parts[int(number)],)
    return slices, names


def _tile(whole: Linear, inputs: int, outputs: int, bias: bool) -> Tile:
    return Tile(inputs, outputs, bias, device="meta", dtype=whole.weight.dtype)
