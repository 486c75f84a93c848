"""Whole matrices on single ranks, for optimizers that update a matrix as a whole (Muon): who computes which.

Three cases, by what shards the state:

- Flat buckets (DDP, ZeRO-1, ZeRO-2) are cut at the boundaries of matrices where that needs little padding, as
  veScale-FSDP's ragged shards are: each rank then has whole matrices and updates them without a message. Where padding
  would cost more bytes than sending updates, the bucket keeps its equal cut.
- Other shards (FSDP's rows, equally cut buckets) and the slices of tensor ranks travel: each matrix has an owner among
  the ranks that share it, which gets all pieces of its update and returns the pieces of the result, as torchtitan's
  DistMuon does. All that goes both ways is 2/N of the matrices on each of N ranks.
- What every tensor rank holds whole, each computes by itself.

Execution, memory and traffic call the functions of this file, so that they agree to the byte.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from heapq import heapify, heapreplace
from itertools import accumulate
from math import prod
from typing import NamedTuple

from phalanx.optimizers.entry import BLOCK, Granularity, Shape, matrix_elements, newton_schulz_flops

ROUND_ELEMENTS = 2**24
"""Elements of whole matrices that a rank computes with at a time, if several matrices are that small."""
TRIES = 24
"""Sizes of a share that are tried at most between the smallest one and the largest worth its padding."""


@dataclass(frozen=True)
class ShardRanges:
    """The contiguous ranges of a flattened tensor that ranks hold: rank r has `each` elements from
    `first` + r × `each` on, as far as they exist."""

    elements: int
    each: int
    first: int = 0

    def of(self, rank: int) -> tuple[int, int]:
        """Returns the first element of a rank and the one after its last; they are equal if it has none."""
        start = self.first + rank * self.each
        return min(max(start, 0), self.elements), min(max(start + self.each, 0), self.elements)

    def held(self, rank: int) -> int:
        """Returns how many elements a rank has."""
        start, stop = self.of(rank)
        return stop - start

    def rank_of(self, element: int) -> int:
        """Returns the rank that holds an element."""
        return (element - self.first) // self.each


def row_ranges(rows: int, elements: int, ranks: int) -> ShardRanges:
    """Returns FSDP2's ranges: rows are distributed as by torch.chunk, equally many per rank, the last ones fewer or
    none."""
    return ShardRanges(elements, -(-rows // ranks) * (elements // rows))


class Piece(NamedTuple):
    """The elements `start` to `stop` - 1 of a sharded tensor: a matrix, or one tile or tensor rank's slice of it."""

    ranges: ShardRanges
    start: int
    stop: int

    def of(self, rank: int) -> tuple[int, int]:
        """Returns the range of the tensor's elements that are the piece's and the rank's, which may be empty."""
        first, last = self.ranges.of(rank)
        start = min(max(first, self.start), self.stop)
        return start, max(start, min(last, self.stop))

    def on(self, rank: int) -> int:
        """Returns how many elements of the piece a rank holds."""
        start, stop = self.of(rank)
        return stop - start


class SharedMatrix(NamedTuple):
    """A matrix whose elements the ranks of an axis share."""

    shape: tuple[int, int]
    """Rows and columns of the whole matrix."""
    pieces: tuple[Piece, ...]
    """The pieces that one tensor rank holds: one, or one per tile."""

    @property
    def size(self) -> int:
        """Elements that one tensor rank holds."""
        return sum(piece.stop - piece.start for piece in self.pieces)

    def on(self, rank: int) -> int:
        """Returns how many elements a rank holds."""
        return sum(piece.on(rank) for piece in self.pieces)

    @property
    def holder(self) -> int | None:
        """The rank that holds all elements; None if several share them."""
        ends = {p.ranges.rank_of(place) for p in self.pieces for place in (p.start, p.stop - 1)}
        return ends.pop() if len(ends) == 1 else None


class Owner(NamedTuple):
    """The rank that computes with a matrix."""

    rank: int
    """Its place on the axis that shards the matrix."""
    tp: int
    """Its place among the tensor ranks that hold slices of it."""


Round = dict[int, Owner]
"""The owners of the matrices that are computed together, by the matrices' numbers: owner by owner, in rank order."""


def rounds(matrices: Sequence[SharedMatrix], ranks: int, tp: int) -> list[Round]:
    """Gives every matrix an owner among `ranks` × `tp` ranks, and groups them into rounds.

    A matrix that one rank holds stays there. The others go to the rank with the least work so far, the most work first
    (Graham 1969, LPT). In a round each rank has one matrix, or several small ones."""
    if not matrices:
        return []
    lists: list[list[int]] = [[] for _ in range(ranks)]
    load, free = [0] * ranks, list[tuple[int, int]]()
    for number, matrix in enumerate(matrices):
        holder, work = matrix.holder if ranks > 1 else 0, newton_schulz_flops(*matrix.shape)
        if holder is None:
            free.append((-work, number))
        else:
            lists[holder].append(number)
            load[holder] += work
    least = [(work, rank) for rank, work in enumerate(load)]
    heapify(least)
    for negative, number in sorted(free):
        work, rank = least[0]
        lists[rank].append(number)
        heapreplace(least, (work - negative, rank))
    for mine in lists:
        mine.sort(key=lambda number: (-newton_schulz_flops(*matrices[number].shape), number))
    several = max(1, ROUND_ELEMENTS // max(prod(matrix.shape) for matrix in matrices)) * tp
    found = []
    for start in range(0, max(map(len, lists)), several):
        here = {
            number: Owner(rank, place % tp)
            for rank, mine in enumerate(lists)
            for place, number in enumerate(mine[start : start + several])
        }
        found.append(here)
    return found


class Sent(NamedTuple):
    """Elements that one rank sends for the updates of matrices, there and back."""

    shards: int
    """To the ranks that share the state."""
    tp: int
    """To tensor ranks."""


def sent_elements(
    matrices: Sequence[SharedMatrix], owners: Mapping[int, Owner], rank: int, tp: int, tp_rank: int, copies: int
) -> Sent:
    """Returns what rank `rank` of the axis that shards the matrices sends, if it is tensor rank `tp_rank` of `tp`, of
    which `copies` neighbours hold the same slice: the first of them sends it, all of them get the result."""
    shards = between = 0
    for number, owner in owners.items():
        matrix = matrices[number]
        mine, size = matrix.on(rank), matrix.size
        if owner.rank != rank:
            shards += mine
            continue
        shards += size - mine
        if owner.tp == tp_rank:
            between += (tp - 1) * size
        elif tp_rank % copies == 0:
            between += size
    return Sent(shards, between)


class BucketCut(NamedTuple):
    """The places of a bucket's parameters, and the equal shares in which ranks own it."""

    starts: tuple[int, ...]
    """First element of each parameter."""
    each: int
    """Elements of one rank's share."""


def equal_cut(sizes: Sequence[int], ranks: int) -> BucketCut:
    """Returns parameters of these sizes end to end, in equal shares wherever their boundaries fall."""
    return BucketCut(tuple(accumulate(sizes[:-1], initial=0)), -(-sum(sizes) // ranks))


@lru_cache(4096)
def bucket_cut(sizes: tuple[int, ...], matrices: tuple[int, ...], ranks: int) -> BucketCut:
    """Returns the places of the parameters of a bucket: the smallest shares that are found in which no matrix is cut.

    `matrices` has the elements of one matrix for each parameter: its size, or that of one expert's; 0 for a parameter
    that may be cut anywhere. If padding would be more than 1/`ranks` of the matrices, the cut is equal instead: sending
    the pieces of their updates to owners and back moves fewer bytes then (see the top of this file)."""
    equal = equal_cut(sizes, ranks)
    whole = sum(size for size, matrix in zip(sizes, matrices, strict=True) if matrix)
    if ranks == 1 or not whole:
        return equal
    most = (equal.each * ranks + whole // ranks) // ranks
    least = max(equal.each, *matrices)
    candidates = {least + (most - least) * step // TRIES for step in range(TRIES + 1)} if least <= most else set()
    stacks = {matrix for size, matrix in zip(sizes, matrices, strict=True) if 0 < matrix < size}
    candidates |= {-(-each // matrix) * matrix for each in list(candidates) for matrix in stacks}
    single = {matrix for size, matrix in zip(sizes, matrices, strict=True) if matrix == size}
    for each in sorted(candidates):
        # What may be cut can fill the end of the first share, behind as many matrices of one size as fit.
        for first in sorted({0, *(each // matrix * matrix for matrix in single)}):
            if each <= most and (starts := _placed(sizes, matrices, each, ranks, first)) is not None:
                return BucketCut(starts, each)
    return equal


def _placed(sizes: Sequence[int], matrices: Sequence[int], each: int, ranks: int, first: int) -> tuple[int, ...] | None:
    """Returns places for the parameters in shares of `each` elements without cutting a matrix, or None if none are
    found: what may be cut, end to end from element `first` on, then single matrices, the largest first, each where the
    least room is left."""
    starts, end = [0] * len(sizes), first
    order = sorted(range(len(sizes)), key=lambda n: (matrices[n] == sizes[n], matrices[n] > 0, -sizes[n], n))
    single = [n for n in order if matrices[n] == sizes[n]]
    for n in order[: len(order) - len(single)]:
        if matrix := matrices[n]:
            # A boundary between shares has to fall between two matrices.
            shift = (each - end % each) % matrix if end % each + sizes[n] > each else 0
            if end % each + shift + sizes[n] > 2 * each and each % matrix:
                return None
            end += shift
        starts[n] = end
        end += sizes[n]
    if end > each * ranks:
        return None
    # Room for single matrices: its elements, and its end.
    room = [(first, first)] if first else []
    room += [(min(each, stop - end), stop) for stop in range((end // each + 1) * each, each * ranks + 1, each)]
    room.sort()
    for n in single:
        place = bisect_left(room, (sizes[n], -1))
        if place == len(room):
            return None
        left, stop = room.pop(place)
        starts[n] = stop - left
        insort(room, (left - sizes[n], stop))
    return tuple(starts)


def granular_cut(
    granularity: Granularity, sizes: Sequence[int], named: Sequence[tuple[str, Shape]], ranks: int
) -> BucketCut:
    """Returns the places of the parameters of a bucket in shares of `ranks` ranks. `sizes` are the elements of which a
    rank has a replica, `named` the parameters' names and the shapes with which a rank computes."""
    if granularity == "element" or ranks == 1:
        return equal_cut(sizes, ranks)
    if granularity == "block":
        blocks = equal_cut([-(-size // BLOCK) for size in sizes], ranks)
        return BucketCut(tuple(start * BLOCK for start in blocks.starts), blocks.each * BLOCK)
    return bucket_cut(tuple(sizes), tuple(matrix_elements(name, shape, shape) for name, shape in named), ranks)
