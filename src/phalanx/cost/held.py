"""Parameters that a tensor rank holds, block by block: each kind of block is counted once."""

from __future__ import annotations

from functools import lru_cache
from itertools import groupby
from math import prod
from typing import NamedTuple

from phalanx.blocks.parameters import Shapes, block_shapes
from phalanx.config.model import ModelConfig
from phalanx.partition.recompute import Mode, modes
from phalanx.partition.tensor_slices import is_expert, padded_vocabulary, piece


class BlockParameters(NamedTuple):
    """Numbers of a block on the first tensor rank."""

    dense: int
    """What all expert-parallel ranks have."""
    experts: int
    """Of the routed experts that the rank holds."""
    matrices: int
    """Of all matrices, one expert's in place of all."""
    largest: int
    """Of the largest matrix; the same matrix of all experts held is one."""


@lru_cache(maxsize=4096)
def block_parameters(model: ModelConfig, tp: int, ep: int, experts: bool) -> BlockParameters:
    """Of a block with or without experts, on one of tp × ep ranks."""
    dense = routed = matrices = largest = 0
    for name, whole in _shapes(model, experts).items():
        shape = piece(f"blocks.0.{name}", whole, model, tp, 0).shape
        size = prod(shape)
        if is_expert(name):
            size //= ep
            routed += size
        else:
            dense += size
        if len(shape) > 1 and not name.endswith("bias"):
            matrices += prod(shape[-2:])
        largest = max(largest, size)
    return BlockParameters(dense, routed, matrices, largest)


class BlockKind(NamedTuple):
    """What tells one block from another."""

    experts: bool
    recompute: Mode


@lru_cache(maxsize=4096)
def block_kinds(model: ModelConfig, recomputes: str) -> tuple[BlockKind, ...]:
    """Of every layer; `recomputes` is what the layout says of them (job.recompute.written)."""
    every = modes(recomputes, model.n_layers)
    return tuple(BlockKind(model.is_moe_layer(layer), mode) for layer, mode in enumerate(every))


@lru_cache(maxsize=4096)
def kinds_of(model: ModelConfig, recomputes: str, layers: range) -> tuple[tuple[BlockKind, int], ...]:
    """Of some layers, the kinds and how many of each come one after the other."""
    kinds = block_kinds(model, recomputes)
    return tuple((kind, len(list(run))) for kind, run in groupby(kinds[layer] for layer in layers))


def table(model: ModelConfig, tp: int) -> int:
    """Numbers of a tensor rank's part of the embedding, or of the head."""
    return padded_vocabulary(model.vocab_size, tp) // tp * model.d_model


def outside(model: ModelConfig, tp: int, first: bool, last: bool) -> int:
    """Numbers that lie around the blocks, on a rank that has the first stage, the last, or both."""
    norm = model.d_model * (2 if model.bias and model.norm == "layernorm" else 1)
    positions = model.seq_len * model.d_model if model.positions == "learned" else 0
    tables = 1 if model.tied and first and last else first + last
    return tables * table(model, tp) + first * positions + last * norm


def _shapes(model: ModelConfig, experts: bool) -> Shapes:
    dense = 0 if model.moe.n_dense_layers else model.n_layers - 1
    return block_shapes(model, model.n_layers - 1 if experts else dense)
