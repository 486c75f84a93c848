"""Parameters that a tensor rank holds, block by block: each kind of block is counted once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from math import prod
from typing import Any, NamedTuple

from phalanx.blocks.kinds import BlockKind, block_kinds
from phalanx.blocks.operator import is_expert
from phalanx.blocks.parameters import block_weights
from phalanx.blocks.residual import VOCABULARY, embedding_weights, head_rows, head_weights
from phalanx.config.layout import Layout
from phalanx.config.model import ModelConfig
from phalanx.cost.exposed import larger
from phalanx.cost.in_flight import Flight, flights
from phalanx.cost.spec import StepSpec
from phalanx.partition import derived
from phalanx.partition.tensor_slices import head_tiles, is_tiled


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
    last: int
    """Parameters of the last trained one that ZeRO-3 sends with the rest of the block."""

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
    return _block_parameters(model, layout.tp, layout.ep_shard, layout.tiles, layout.tile, kind, layout.folds)


@lru_cache(maxsize=4096)
def _block_parameters(
    model: ModelConfig, tp: int, ep: int, tiles: int, tile: str, kind: BlockKind, folds: bool
) -> BlockParameters:
    layout = Layout(tiles=tiles, tile=tile)
    dense = routed = matrices = largest = trained_dense = trained_routed = last = 0
    tiled = Counter[str]()
    for weight in (each.folded(folds) for each in block_weights(model, kind)):
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
        last = trained if trained and not (weight.routed and ep > 1) else last
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
        max(of_dense, default=0) // tiles,
        max(of_experts, default=0) // tiles,
        len(tiled) * tiles,
        last,
    )


class LayerKind(NamedTuple):
    """A kind of block with its recomputation."""

    block: BlockKind
    recompute: derived.Mode


@lru_cache(maxsize=4096)
def layer_kinds(model: ModelConfig, recomputes: str) -> tuple[LayerKind, ...]:
    """Returns the kind of every layer; `recomputes` is the layout's (partition.recompute.written)."""
    every = derived.modes(recomputes, model.n_layers)
    return tuple(LayerKind(kind, mode) for kind, mode in zip(block_kinds(model), every, strict=True))


@lru_cache(maxsize=4096)
def kinds_of(model: ModelConfig, recomputes: str, layers: range) -> tuple[tuple[LayerKind, int], ...]:
    """Returns the kinds of some layers as runs: each kind with the number of consecutive layers."""
    kinds = layer_kinds(model, recomputes)
    return tuple((kind, len(list(run))) for kind, run in groupby(kinds[layer] for layer in layers))


@lru_cache(maxsize=4096)
def table(model: ModelConfig, tp: int) -> int:
    """Returns the parameters of a tensor rank's part of the head, which may be the embedding."""
    return VOCABULARY._replace(shape=(head_rows(model, model.vocab_size), model.d_model)).size_on(tp)


@lru_cache(maxsize=4096)
def outside(model: ModelConfig, tp: int, first: bool, last: bool) -> int:
    """Returns the parameters outside the blocks, on a rank that has the first stage, the last, or both."""
    vocab = model.vocab_size
    weights = [*(embedding_weights(model, vocab) if first else ()), *(head_weights(model, vocab) if last else ())]
    copied = table(model, tp) if model.embeds_at_end and last and not first else 0
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
    gradient = 0 if model.freezes or not last else tile if head_tiles(model, layout) > 1 else table(model, tp)
    return GatheredParameters(outside(model, tp, first, last) - within, gradient, tile if within else 0)


class ParameterCounts(NamedTuple):
    """Parameters on a tensor rank, before the data ranks shard them: dense ones, and those of routed experts."""

    dense: int
    experts: int
    trained_dense: int
    """The dense ones that training changes: all, or adapters."""
    trained_experts: int

    @property
    def trained(self) -> int:
        return self.trained_dense + self.trained_experts

    def sent(self, layout: Layout, number: str) -> tuple[int, int]:
        """Returns the numbers, dense and of experts, in messages of parameters or gradients: ZeRO-3 gathers also what
        training leaves as it is."""
        if number == "parameter" and derived.gathers_parameters(layout):
            return self.dense, self.experts
        return self.trained_dense, self.trained_experts


def parameter_counts(
    model: ModelConfig, layout: Layout, blocks: Iterable[tuple[BlockKind, int]], first: bool, last: bool
) -> ParameterCounts:
    """Returns the parameters of a rank with so many `blocks` of each kind, and with the embedding (`first`) and the
    head (`last`)."""
    dense = outside(model, layout.tp, first, last)
    trained = 0 if model.freezes else dense
    experts = trained_experts = 0
    for kind, many in blocks:
        each = block_parameters(model, layout, kind)
        dense, experts = dense + many * each.dense, experts + many * each.experts
        trained, trained_experts = trained + many * each.trained_dense, trained_experts + many * each.trained_experts
    return ParameterCounts(dense, experts, trained, trained_experts)


def expert_ranks(shard_ranks: Any, ep_shard: Any) -> Any:
    """Returns over how many ranks the state of a rank's experts is sharded, of `shard_ranks` for dense parameters."""
    return larger(1, shard_ranks // ep_shard)


def shards_of(held: ParameterCounts, layout: Layout) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Returns parameters on a rank as groups of dense ones and experts: all, those that are trained, and over how many
    ranks their state is sharded."""
    ranks = layout.shard_ranks
    experts = held.experts, held.trained_experts, expert_ranks(ranks, layout.ep_shard)
    return (held.dense, held.trained_dense, ranks), experts


@dataclass(frozen=True)
class Content:
    """The part of the model on a pipeline rank, or in one stage, in blocks of each kind."""

    kinds: tuple[tuple[LayerKind, int], ...]
    embedding: bool
    head: bool
    share: float = 1.0
    """Share of the micro-batches that pass each of its stages."""
    swapped: tuple[tuple[LayerKind, int], ...] = ()
    """Those of its blocks whose activations leave the device."""

    @property
    def blocks(self) -> int:
        return sum(number for _, number in self.kinds)

    @property
    def of_kind(self) -> dict[BlockKind, int]:
        """The number of blocks of each kind, whatever they recompute."""
        counts: dict[BlockKind, int] = {}
        for kind, number in self.kinds:
            counts[kind.block] = counts.get(kind.block, 0) + number
        return counts


def contents(spec: StepSpec) -> tuple[Content, ...]:
    """Returns the contents of each pipeline rank."""
    stages, ranks = placed(spec)
    return tuple(_content(spec.model, *_options(spec.layout, stages), stages, rank.held, rank.share) for rank in ranks)


def content_of(spec: StepSpec, stages: Sequence[range], held: Sequence[int]) -> Content:
    """Returns the contents of some of the `stages`, given by their numbers in `held`."""
    return _content(spec.model, *_options(spec.layout, stages), tuple(stages), tuple(held), share=1.0)


def _options(layout: Layout, stages: Sequence[range]) -> tuple[str, tuple[range, ...]]:
    """Returns recomputation as the layout states it, and the layers of each stage whose activations it offloads."""
    if not derived.is_offloaded(layout, "activations"):
        return derived.written(layout), (range(0),) * len(stages)
    return derived.written(layout), tuple(derived.offloaded_layers(layout, stage) for stage in stages)


@lru_cache(10_000)
def _content(
    model: ModelConfig,
    recomputes: str,
    away: tuple[range, ...],
    stages: tuple[range, ...],
    held: tuple[int, ...],
    share: float,
) -> Content:
    every = layer_kinds(model, recomputes)
    kinds, swapped = (
        tuple(sorted(Counter(every[layer] for stage in held for layer in layers[stage]).items()))
        for layers in (stages, away)
    )
    return Content(kinds, 0 in held, len(stages) - 1 in held, share, swapped)


def placed(spec: StepSpec) -> tuple[tuple[range, ...], tuple[Flight, ...]]:
    """Returns the layers of every stage, and the stages and micro-batches in flight of every rank. Raises JobError if
    pp_cut or the schedule does not fit."""
    ranks = flights(spec.layout, spec.batch.accumulation)
    return stages_of_case(spec, ranks[0].stages), ranks


def stages_of_case(spec: StepSpec, stages: int) -> tuple[range, ...]:
    """Returns the layers of each of `stages` stages: `spec.stages`, else those of `layout.pp_cut`, else as even as
    possible. Raises JobError if pp_cut does not fit."""
    return spec.stages or _cut(
        spec.layout.pp_cut if spec.layout.pp > 1 else "", stages, spec.model.n_layers, spec.model.together
    )


@lru_cache(1024)
def _cut(text: str, stages: int, layers: int, together: int) -> tuple[range, ...]:
    return derived.written_stages(text, stages, layers, together) if text else derived.even(layers, stages, together)
