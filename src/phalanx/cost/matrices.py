"""The matrices that ranks update as a whole (Muon), as time and memory count them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from math import ceil, prod
from typing import Literal

from phalanx.blocks.kinds import BlockKind
from phalanx.blocks.operator import Weight
from phalanx.blocks.parameters import block_weights
from phalanx.blocks.residual import embedding_weights, head_weights
from phalanx.config.model import ModelConfig
from phalanx.cost.communication import RankGroup, group, seconds
from phalanx.cost.held import Content
from phalanx.cost.kernels import product_seconds
from phalanx.cost.spec import StepSpec
from phalanx.optimizers.catalogue import entry_of
from phalanx.optimizers.entry import (
    ITERATIONS,
    is_hidden_matrix,
    matrix_elements,
    newton_schulz_flops,
    newton_schulz_products,
)
from phalanx.partition.derived import bucket_bytes
from phalanx.partition.matrices import ROUND_ELEMENTS, Owner, Piece, ShardRanges, SharedMatrix, bucket_cut, rounds
from phalanx.partition.tensor_slices import in_buckets

MANY = 32
"""Matrices per rank from which on it hardly matters which rank has which: they are counted as dealt in turn."""
Kinds = tuple[tuple[BlockKind, int], ...]
"""Blocks of a rank: each kind with its number."""
Shape = tuple[int, int]
Owned = tuple[tuple[Shape, int], ...]
"""Shapes of whole matrices with their numbers, the most work first."""


@dataclass(frozen=True)
class MatrixWork:
    """Matrices that the same ranks share, and who computes with them."""

    experts: bool
    """Whether they are experts' that ep distributes."""
    ranks: int
    """Ranks that shard their state."""
    tp: int
    """Tensor ranks that hold slices; 1 if each holds the whole."""
    elements: int
    """Elements on a tensor rank before they are sharded."""
    moved: float
    """Share of the elements whose pieces travel between the ranks that shard them: all with ZeRO-3, otherwise those of
    buckets that are not cut at matrices."""
    owned: tuple[Owned, ...]
    """The matrices that a rank computes with: those of the busiest one, or of several different ones."""

    def together(self, owned: Owned) -> int:
        """Returns how many of its matrices a rank computes with at a time, at most."""
        return min(sum(n for _, n in owned), max(1, ROUND_ELEMENTS // max(prod(shape) for shape, _ in owned)))

    @property
    def rounds(self) -> int:
        """How often pieces travel, at most."""
        return max(ceil(sum(n for _, n in owned) / self.together(owned)) for owned in self.owned)

    @property
    def most_elements(self) -> int:
        """The most elements of temporary tensors at a time on any rank, while the largest matrices are computed: all of
        them if their pieces have come, otherwise those that are computed with others of their shape; besides, for
        one shape at a time, a second copy and two Gram matrices."""
        most, comes = 0, self.tp > 1 or self.moved > 0
        for owned in self.owned:
            left, total, largest = self.together(owned), 0, 0
            for shape, number in owned:
                here = min(left, number)
                left -= here
                size = here * prod(shape)
                total += size if comes or here > 1 else 0
                largest = max(largest, size + 2 * here * min(shape) ** 2)
            most = max(most, total + largest, 2 * total)
        return most


def matrix_work(spec: StepSpec, kinds: Kinds, ends: tuple[bool, bool]) -> tuple[MatrixWork, ...]:
    """Returns the hidden matrices of ranks with these blocks, by the ranks that share them; nothing for an optimizer
    that updates elements. `ends`: whether the ranks have the embedding and the head."""
    if not entry_of(spec.optimizer.name).needs_whole_matrices:
        return ()
    layout = spec.layout
    if layout.zero == 3 or layout.shard_ranks == 1:
        return _balanced(spec.model, layout.tp, layout.ep_shard, layout.shard_ranks, kinds, layout.folds)
    least = bucket_bytes(layout) / spec.width
    if layout.ep == 1:
        return _in_buckets(spec.model, layout.tp, 1, layout.shard_ranks, kinds, ends, least)
    dense = _in_buckets(spec.model, layout.tp, 1, layout.shard_ranks, kinds, ends, least, "dense")
    ranks, no_ends, folds = layout.ep_shard, (False, False), layout.folds
    experts = _in_buckets(spec.model, layout.tp, ranks, layout.edp, kinds, no_ends, least, "experts", folds=folds)
    return dense + experts


@lru_cache(10_000)
def _balanced(
    model: ModelConfig, tp: int, ep: int, shard_ranks: int, kinds: Kinds, folds: bool
) -> tuple[MatrixWork, ...]:
    """Returns the matrices if each rank may have any of them."""
    numbers: dict[tuple[bool, int], Counter[Shape]] = {}
    elements = Counter[tuple[bool, int]]()
    for kind, blocks in kinds:
        for weight in _weights(model, kind, folds):
            if not is_hidden_matrix(weight.name, weight.shape):
                continue
            key = weight.routed and (folds or ep > 1), _slices(weight, tp)
            held = weight.shape_on(tp, ep)
            elements[key] += blocks * prod(held)
            numbers.setdefault(key, Counter())[_shape(weight)] += blocks * (held[0] if weight.routed else 1)
    found = []
    for (experts, slices), of_shape in numbers.items():
        ranks = shard_ranks // ep if experts else shard_ranks
        if of_shape.total() > MANY * ranks * slices:
            owned = (_first_owner(of_shape, ranks * slices),)
        else:
            matrices = [matrix for shape, number in of_shape.items() for matrix in [_free(shape, ranks)] * number]
            owned = _of_owners(matrices, ranks, slices)
        found.append(MatrixWork(experts, ranks, slices, elements[experts, slices], float(ranks > 1), owned))
    return tuple(found)


def _free(shape: Shape, ranks: int) -> SharedMatrix:
    """Returns a matrix of which each rank has a part."""
    size = prod(shape)
    return SharedMatrix(shape, (Piece(ShardRanges(size, -(-size // ranks)), 0, size),))


def _first_owner(of_shape: Counter[Shape], owners: int) -> Owned:
    """Returns the matrices of the first of so many owners, to whom they are dealt in turn, the most work first."""
    first, owned = 0, list[tuple[Shape, int]]()
    for shape, number in sorted(of_shape.items(), key=lambda pair: -newton_schulz_flops(*pair[0])):
        if mine := len(range(-first % owners, number, owners)):
            owned.append((shape, mine))
        first += number
    return tuple(owned)


@lru_cache(10_000)
def _in_buckets(
    model: ModelConfig,
    tp: int,
    ep: int,
    ranks: int,
    kinds: Kinds,
    ends: tuple[bool, bool],
    least: float,
    which: Literal["all", "dense", "experts"] = "all",
    *,
    folds: bool = False,
) -> tuple[MatrixWork, ...]:
    """Returns the matrices of flat buckets of at least `least` elements, of `which` weights."""
    weights = [
        weight
        for weight in _in_backward(model, kinds, ends, folds)
        if which in ("all", "experts" if weight.routed else "dense")
    ]
    shapes = [weight.shape_on(tp, ep) for weight in weights]
    sizes = [prod(shape) for shape in shapes]
    shared: dict[int, list[SharedMatrix]] = {}
    elements, moved = Counter[int](), Counter[int]()
    for bucket in in_buckets(sizes, least) if sizes else ():
        matrices = tuple(matrix_elements(weights[n].name, weights[n].shape, shapes[n]) for n in bucket)
        starts, each = bucket_cut(tuple(sizes[n] for n in bucket), matrices, ranks)
        for n, size, start in zip(bucket, matrices, starts, strict=True):
            slices, ranges = _slices(weights[n], tp), ShardRanges(sizes[n], each, -start)
            for at in range(0, sizes[n], size) if size else ():
                matrix = SharedMatrix(_shape(weights[n]), (Piece(ranges, at, at + size),))
                shared.setdefault(slices, []).append(matrix)
                elements[slices] += size
                moved[slices] += size if matrix.holder is None else 0
    return tuple(
        MatrixWork(
            which == "experts",
            ranks,
            slices,
            elements[slices],
            moved[slices] / elements[slices],
            _of_owners(matrices, ranks, slices),
        )
        for slices, matrices in shared.items()
    )


def _in_backward(model: ModelConfig, kinds: Kinds, ends: tuple[bool, bool], folds: bool) -> list[Weight]:
    """Returns the weights of these blocks and ends in the order of the backward pass."""
    weights = [*(embedding_weights(model, model.vocab_size) if ends[0] else ())]
    for kind, blocks in kinds:
        weights += _weights(model, kind, folds) * blocks
    weights += head_weights(model, model.vocab_size) if ends[1] else ()
    return weights[::-1]


@lru_cache(10_000)
def bucket_ends(
    model: ModelConfig, tp: int, ep: int, kinds: Kinds, ends: tuple[bool, bool], least: float, *, folds: bool
) -> tuple[int, ...]:
    """Returns how many trained parameters have gradients when each flat bucket of at least `least` elements is full."""
    weights = _in_backward(model, kinds, ends, folds)
    sizes = [each.size_on(tp, ep) for each in weights if not each.frozen]
    total = list(accumulate(sizes))
    return tuple(total[bucket[-1]] for bucket in in_buckets(sizes, least) if bucket)


def _of_owners(matrices: Sequence[SharedMatrix], ranks: int, tp: int) -> tuple[Owned, ...]:
    """Returns the different lists of matrices that owners have."""
    of_owner: dict[Owner, Counter[Shape]] = {}
    for owners in rounds(matrices, ranks, tp):
        for number, owner in owners.items():
            of_owner.setdefault(owner, Counter())[matrices[number].shape] += 1
    return tuple(dict.fromkeys(tuple(counts.items()) for counts in of_owner.values()))


def _weights(model: ModelConfig, kind: BlockKind, folds: bool) -> list[Weight]:
    """Returns the weights of a block, with names as in a model."""
    return [weight._replace(name=f"blocks.0.{weight.name}").folded(folds) for weight in block_weights(model, kind)]


def _shape(weight: Weight) -> Shape:
    rows, columns = weight.shape[-2:]
    return rows, columns


def _slices(weight: Weight, tp: int) -> int:
    """Returns how many tensor ranks have slices of a matrix; 1 if each has the whole."""
    return tp if weight.cuts_matrices else 1


def matrix_seconds(spec: StepSpec, content: Content) -> float:
    """Returns the seconds of the busiest of the ranks with `content`; 0 for an optimizer that updates elements."""
    total = 0.0
    for work in matrix_work(spec, tuple(content.of_kind.items()), (content.embedding, content.head)):
        total += max(_orthogonal_seconds(spec, owned) for owned in work.owned)
        mine = work.elements / work.ranks * max(4, spec.width)
        among = group(spec.layout, "edp" if work.experts else "shard")
        total += _both_ways(spec, mine * work.moved, among, work.rounds)
        if work.tp > 1:
            total += _both_ways(spec, mine, group(spec.layout, "tp"), work.rounds)
    return total


def _orthogonal_seconds(spec: StepSpec, owned: Owned) -> float:
    """Returns the seconds of orthogonalising some matrices."""
    device, products = spec.cluster.accelerator, "bf16" if spec.optimizer.newton_schulz == "bf16" else "fp32"
    return ITERATIONS * sum(
        product_seconds(device, products, *sizes, number)
        for shape, number in owned
        for sizes in newton_schulz_products(*shape)
    )


def _both_ways(spec: StepSpec, payload: float, among: RankGroup, rounds: int) -> float:
    """Returns the seconds of sending `payload` bytes to owners and back, in some rounds."""
    return 2 * rounds * seconds(spec.cluster, "all_to_all", payload / rounds, among)
