"""Parameters that a tensor rank holds, block by block: each kind of block is counted once."""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from itertools import groupby
from math import prod
from typing import Any, NamedTuple

from phalanx.blocks.ends import VOCABULARY, embedding_weights, head_weights
from phalanx.blocks.kinds import BlockKind, block_kinds
from phalanx.blocks.operator import is_expert
from phalanx.blocks.parameters import block_weights
from phalanx.config.layout import Layout
from phalanx.config.model import ModelConfig
from phalanx.cost.elementwise import larger
from phalanx.partition.recompute import Mode, modes
from phalanx.partition.tiles import head_tiles, is_tiled


class BlockParameters(NamedTuple):
    """Parameters of a block on one tensor and expert rank."""

    dense: int
    """Parameters that all expert ranks have."""
    experts: int
    """Parameters of the routed experts that the rank holds."""
    matrices: int
    """Parameters of all matrices, with one expert's in place of all."""
    largest: int
    """Parameters of the largest matrix; the same matrix of all local experts counts as one."""
    trained_dense: int
    """The part of `dense` that training changes: with adapters, theirs."""
    trained_experts: int
    tiled_dense: int
    """The part of `dense` that runs in tiles."""
    tiled_experts: int
    tile_dense: int
    """Parameters of the largest tile of dense layers."""
    tile_experts: int
    tiles: int
    """Number of its tiles."""

    def gathered(self, experts: Any, *, tiled: bool) -> GatheredParameters:
        """Returns what ZeRO-3 gathers: with parameters of `experts`, if several ranks share them. `tiled`: tiles, if
        there are any, are given up one after the other, as after a forward pass that reshards."""
        block = self.dense + experts * self.experts
        trained = self.trained_dense + experts * self.trained_experts
        if not (tiled and self.tiled_dense + self.tiled_experts):
            return GatheredParameters(block, trained, 0)
        # No tile is frozen.
        within = self.tiled_dense + experts * self.tiled_experts
        tile = larger(self.tile_dense, experts * self.tile_experts)
        return GatheredParameters(block - within, trained - within + tile, tile)


class GatheredParameters(NamedTuple):
    """Parameters of a block that ZeRO-3 gathers."""

    block: Any
    """Those that are whole for as long as the block computes."""
    trained: Any
    """Those whose gradients are whole at once."""
    tile: Any
    """Those of the tile that is whole beside the block."""


def block_parameters(model: ModelConfig, layout: Layout, kind: BlockKind) -> BlockParameters:
    """Returns the parameters of a block of one kind on one rank of the layout's tp × ep."""
    return _block_parameters(model, Layout(tp=layout.tp, ep=layout.ep, tiles=layout.tiles, tile=layout.tile), kind)


@lru_cache(maxsize=4096)
def _block_parameters(model: ModelConfig, layout: Layout, kind: BlockKind) -> BlockParameters:
    tp, ep = layout.tp, layout.ep
    dense = routed = matrices = largest = trained_dense = trained_routed = 0
    tiled = Counter[str]()
    for weight in block_weights(model, kind):
        size = weight.size_on(tp, ep)
        if is_tiled(weight, layout):
            tiled[weight.name.rpartition(".")[0]] += size
        trained = 0 if weight.frozen else size
        if weight.routed:
            routed, trained_routed = routed + size, trained_routed + trained
        else:
            dense, trained_dense = dense + size, trained_dense + trained
        if weight.is_matrix:
            matrices += prod(weight.shape_on(tp)[-2:])
        largest = max(largest, size)
    # A layer's bias, if it is cut, is in the same tiles as its matrix.
    of_experts = [size for name, size in tiled.items() if is_expert(f"{name}.")]
    of_dense = [size for name, size in tiled.items() if not is_expert(f"{name}.")]
    return BlockParameters(
        dense,
        routed,
        matrices,
        largest,
        trained_dense,
        trained_routed,
        sum(of_dense),
        sum(of_experts),
        max(of_dense, default=0) // layout.tiles,
        max(of_experts, default=0) // layout.tiles,
        len(tiled) * layout.tiles,
    )


class LayerKind(NamedTuple):
    """A kind of block with its recomputation."""

    block: BlockKind
    recompute: Mode


@lru_cache(maxsize=4096)
def layer_kinds(model: ModelConfig, recomputes: str) -> tuple[LayerKind, ...]:
    """Returns the kind of every layer; `recomputes` is the layout's (partition.recompute.written)."""
    every = modes(recomputes, model.n_layers)
    return tuple(LayerKind(kind, mode) for kind, mode in zip(block_kinds(model), every, strict=True))


@lru_cache(maxsize=4096)
def kinds_of(model: ModelConfig, recomputes: str, layers: range) -> tuple[tuple[LayerKind, int], ...]:
    """Returns the kinds of some layers as runs: each kind with the number of consecutive layers."""
    kinds = layer_kinds(model, recomputes)
    return tuple((kind, len(list(run))) for kind, run in groupby(kinds[layer] for layer in layers))


@lru_cache(maxsize=4096)
def table(model: ModelConfig, tp: int) -> int:
    """Returns the parameters of a tensor rank's part of the embedding, or of the head."""
    return VOCABULARY._replace(shape=(model.vocab_size, model.d_model)).size_on(tp)


@lru_cache(maxsize=4096)
def outside(model: ModelConfig, tp: int, first: bool, last: bool) -> int:
    """Returns the parameters outside the blocks, on a rank that has the first stage, the last, or both."""
    vocab = model.vocab_size
    weights = [*(embedding_weights(model, vocab) if first else ()), *(head_weights(model, vocab) if last else ())]
    copied = table(model, tp) if model.tied and last and not first else 0
    return sum(weight.size_on(tp) for weight in weights) + copied


def gathered_outside(model: ModelConfig, layout: Layout, first: bool, last: bool, *, tiled: bool) -> GatheredParameters:
    """Returns what ZeRO-3 gathers outside the blocks, with the head's gradient alone under `trained`. `tiled`: tiles,
    if there are any, are given up one after the other."""
    only = Layout(tp=layout.tp, tiles=layout.tiles if tiled else 1, tile=layout.tile)
    return _gathered_outside(model, only, first, last)


@lru_cache(maxsize=4096)
def _gathered_outside(model: ModelConfig, layout: Layout, first: bool, last: bool) -> GatheredParameters:
    vocab, tp = model.vocab_size, layout.tp
    weights = [*(embedding_weights(model, vocab) if first else ()), *(head_weights(model, vocab) if last else ())]
    within = sum(weight.size_on(tp) for weight in weights if is_tiled(weight, layout))
    tile = -(-table(model, tp) // model.d_model // layout.tiles) * model.d_model
    gradient = 0 if model.lora.rank or not last else tile if head_tiles(model, layout) > 1 else table(model, tp)
    return GatheredParameters(outside(model, tp, first, last) - within, gradient, tile if within else 0)


def trained_outside(model: ModelConfig, tp: int, first: bool, last: bool) -> int:
    """Returns those of them that training changes: none beside adapters."""
    return 0 if model.lora.rank else outside(model, tp, first, last)
