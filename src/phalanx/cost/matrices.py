"""The matrices that ranks update as a whole (Muon), as time and memory count them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import ceil, prod

from phalanx.blocks.ends import embedding_weights, head_weights
from phalanx.blocks.kinds import BlockKind
from phalanx.blocks.operator import Weight
from phalanx.blocks.parameters import block_weights
from phalanx.config.layout import Layout
from phalanx.config.model import ModelConfig
from phalanx.optimizers.catalogue import entry_of
from phalanx.optimizers.matrices import is_hidden_matrix, matrix_elements, newton_schulz_flops
from phalanx.partition.matrices import ROUND_ELEMENTS, ShardRanges, bucket_cut
from phalanx.partition.tensor_slices import in_buckets

Kinds = tuple[tuple[BlockKind, int], ...]
"""Blocks of a rank: each kind with its number."""
Shape = tuple[int, int]


@dataclass(frozen=True)
class MatrixWork:
    """Matrices that the same ranks share, and what the busiest of them does."""

    experts: bool
    """Whether they are experts' that ep distributes."""
    ranks: int
    """Ranks that shard their state."""
    tp: int
    """Tensor ranks that hold slices; 1 if each holds the whole."""
    elements: int
    """Elements on a tensor rank before they are sharded."""
    owned: tuple[tuple[Shape, int], ...]
    """The shapes of whole matrices that the busiest rank computes with, and their numbers."""

    @property
    def together(self) -> int:
        """Matrices that the rank computes with at a time, at most."""
        return min(sum(n for _, n in self.owned), several(max(prod(shape) for shape, _ in self.owned)))

    @property
    def rounds(self) -> int:
        """How often pieces travel."""
        return ceil(sum(n for _, n in self.owned) / self.together)


def several(largest: int) -> int:
    """Returns how many matrices of at most `largest` elements a rank computes with at a time."""
    return max(1, ROUND_ELEMENTS // largest)


def matrix_work(model: ModelConfig, layout: Layout, kinds: Kinds) -> tuple[MatrixWork, ...]:
    """Returns the hidden matrices of a rank's blocks by the ranks that share them: the most work first, they are dealt
    out in turn (partition/matrices.py)."""
    return _work(model, layout.tp, layout.ep, layout.shard_ranks, kinds)


@lru_cache(10_000)
def _work(model: ModelConfig, tp: int, ep: int, shard_ranks: int, kinds: Kinds) -> tuple[MatrixWork, ...]:
    shapes: dict[tuple[bool, int], dict[Shape, int]] = {}
    elements: dict[tuple[bool, int], int] = {}
    for kind, blocks in kinds:
        for weight in _matrices(model, kind):
            key = weight.routed and ep > 1, tp if weight.dim is not None else 1
            held = weight.shape_on(tp, ep)
            rows, columns = weight.shape[-2:]
            of_shape = shapes.setdefault(key, {})
            number = blocks * (held[0] if weight.routed else 1)
            of_shape[rows, columns] = of_shape.get((rows, columns), 0) + number
            elements[key] = elements.get(key, 0) + blocks * prod(held)
    found = []
    for (dealt_out, slices), of_shape in shapes.items():
        ranks = shard_ranks // ep if dealt_out else shard_ranks
        owned = tuple(_owned(of_shape, ranks * slices))
        found.append(MatrixWork(dealt_out, ranks, slices, elements[dealt_out, slices], owned))
    return tuple(found)


def _matrices(model: ModelConfig, kind: BlockKind) -> Iterator[Weight]:
    return (
        weight for weight in block_weights(model, kind) if is_hidden_matrix(f"blocks.0.{weight.name}", weight.shape)
    )


def _owned(of_shape: dict[Shape, int], owners: int) -> Iterator[tuple[Shape, int]]:
    """Yields the matrices of the first of so many owners, which has the most work."""
    first = 0
    for shape, number in sorted(of_shape.items(), key=lambda pair: -newton_schulz_flops(*pair[0])):
        mine = len(range(-first % owners, number, owners))
        first += number
        if mine:
            yield shape, mine


def travelling(
    model: ModelConfig, layout: Layout, kinds: Kinds, ends: tuple[bool, bool], width: int, work: MatrixWork
) -> float:
    """Returns the share of the elements of some matrices whose pieces travel between the ranks that shard them: all
    with ZeRO-3, otherwise those of buckets that are not cut at matrices. `ends`: whether the rank has the embedding and
    the head; `width`: bytes per element."""
    if work.ranks == 1 or layout.zero == 3:
        return float(work.ranks > 1)
    degrees = layout.tp, layout.ep, work.ranks
    return _travelling(model, degrees, kinds, ends, layout.bucket_mb * 2**20 / width, work.experts)


@lru_cache(10_000)
def _travelling(
    model: ModelConfig,
    degrees: tuple[int, int, int],
    kinds: Kinds,
    ends: tuple[bool, bool],
    least: float,
    experts: bool,
) -> float:
    """Returns the same for tp, ep and the ranks that shard, and buckets of at least `least` elements."""
    tp, ep, ranks = degrees
    named: list[tuple[str, Weight]] = []
    if not experts:
        named += [("", weight) for weight in embedding_weights(model, model.vocab_size) if ends[0]]
    for kind, blocks in kinds:
        own = [(f"blocks.0.{weight.name}", weight) for weight in block_weights(model, kind)]
        named += [pair for pair in own if (pair[1].routed and ep > 1) == experts] * blocks
    if not experts:
        named += [("", weight) for weight in head_weights(model, model.vocab_size) if ends[1]]
    shapes = [(name, weight.shape, weight.shape_on(tp, ep)) for name, weight in reversed(named)]
    sizes = [prod(held) for *_, held in shapes]
    whole = moving = 0
    for bucket in in_buckets(sizes, least):
        here = tuple(sizes[n] for n in bucket)
        matrices = tuple(matrix_elements(*shapes[n]) for n in bucket)
        starts, each = bucket_cut(here, matrices, ranks)
        for size, matrix, start in zip(here, matrices, starts, strict=True):
            whole += size if matrix else 0
            ranges = ShardRanges(size, each, -start)
            cut = any(ranges.rank_of(at) != ranges.rank_of(at + matrix - 1) for at in range(0, size, matrix or size))
            moving += size if matrix and cut else 0
    return moving / whole if whole else 0.0


def is_whole(optimizer: str) -> bool:
    """Returns whether an optimizer updates matrices as a whole."""
    return entry_of(optimizer).needs_whole_matrices
