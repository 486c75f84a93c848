"""Parameters that a tensor rank holds, block by block: each kind of block is counted once."""

from __future__ import annotations

from functools import lru_cache
from itertools import groupby
from math import prod
from typing import NamedTuple

from phalanx.blocks.ends import VOCABULARY, embedding_weights, head_weights
from phalanx.blocks.kinds import BlockKind, block_kinds
from phalanx.blocks.parameters import block_weights
from phalanx.config.model import ModelConfig
from phalanx.partition.recompute import Mode, modes


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


@lru_cache(maxsize=4096)
def block_parameters(model: ModelConfig, tp: int, ep: int, kind: BlockKind) -> BlockParameters:
    """Returns the parameters of a block of one kind on one of tp × ep ranks."""
    dense = routed = matrices = largest = 0
    for weight in block_weights(model, kind):
        size = weight.size_on(tp, ep)
        if weight.routed:
            routed += size
        else:
            dense += size
        if weight.is_matrix:
            matrices += prod(weight.shape_on(tp)[-2:])
        largest = max(largest, size)
    return BlockParameters(dense, routed, matrices, largest)


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
