"""Whole matrices from shards: every rank orthogonalises some of the updates whose pieces all ranks hold.

Each matrix has an owner (phalanx.partition.matrices.rounds). Round by round the pieces of the matrices travel to their
owners, first over the ranks that share the state, then over the tensor ranks; the owners compute, and the pieces of the
results go back the same way. Both ways are all-to-alls with parts of unequal sizes, so nothing is padded, and each
matrix is computed once. Ranks that hold the same (replicas; tensor ranks with a whole matrix) compute the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from phalanx.comm.axis import Axis
from phalanx.optimizers.entry import is_hidden_matrix
from phalanx.parallel.parameter_shards import ParameterShard, cut
from phalanx.partition.matrices import (
    Piece,
    Round,
    ShardRanges,
    SharedMatrix,
    rounds,
)
from phalanx.partition.tensor_slices import TensorSlice

Compute = Callable[[Tensor], Tensor]
"""Maps matrices (n, rows, columns) to their orthogonal factors, of the same shape; may overwrite its argument."""


@dataclass(frozen=True)
class _Source:
    """The place of one piece of a matrix: in a shard's flattened elements, and in the whole matrix."""

    shard: ParameterShard
    piece: Piece
    slices: tuple[TensorSlice, ...]
    """The slice of the matrix that each tensor rank holds."""

    def local(self, updates: Mapping[str, Tensor], rank: int) -> Tensor:
        """Returns this rank's elements of the piece: a view of the shard's update."""
        start, stop = self.piece.of(rank)
        begin = self.piece.ranges.of(rank)[0]
        return updates[self.shard.name].view(-1)[start - begin : stop - begin]


@dataclass
class _Group:
    """Matrices that the same ranks share, in the same way."""

    shard: Axis
    tp: Axis
    copies: int
    """Neighbouring tensor ranks that hold the same slices."""
    matrices: list[SharedMatrix]
    sources: list[tuple[_Source, ...]]
    """By matrix, one source per piece."""
    rounds: list[Round]


class MatrixUpdates:
    """The hidden matrices among a rank's parameter shards, with the plan of who computes which."""

    def __init__(self, shards: Sequence[ParameterShard], tp: Axis):
        """Plans the exchange; all ranks that share parameters make the same plan from their own shards."""
        alone = Axis("tp")
        found: dict[tuple[Axis, Axis, int], dict[tuple[str, int], list[_Source]]] = {}
        for shard in shards:
            part = shard.tensor_slice
            if not is_hidden_matrix(shard.whole_name, part.whole):
                continue
            axis = shard.sharing.axis if shard.sharing else _ALONE
            between = tp if part.dim is not None and tp.size > 1 else alone
            copies = part.copies if between is tp else 1
            of_name = found.setdefault((axis, between, copies), {})
            for number, source in enumerate(_sources(shard)):
                of_name.setdefault((shard.whole_name, number), []).append(source)
        self.groups: list[_Group] = []
        for (axis, between, copies), of_name in found.items():
            sources = [tuple(parts) for parts in of_name.values()]
            matrices = [_shared(parts) for parts in sources]
            plan = rounds(matrices, axis.size, between.size)
            self.groups.append(_Group(axis, between, copies, matrices, sources, plan))
        self.names = frozenset(s.shard.name for group in self.groups for parts in group.sources for s in parts)
        """The shards' own names."""

    @torch.no_grad()
    def apply(self, updates: Mapping[str, Tensor], compute: Compute) -> None:
        """Replaces the shards of `updates`, contiguous tensors by the shards' own names, by those of the orthogonal
        factors of the whole matrices. A collective over all ranks that share them."""
        for group in self.groups:
            for owners in group.rounds:
                _run_round(group, owners, updates, compute)


_ALONE = Axis("dp_shard")


def _sources(shard: ParameterShard) -> Iterator[_Source]:
    """Yields the matrices of a shard's parameter, of which this rank may hold nothing."""
    stacked = len(shard.tensor_slice.whole) == 3
    each = prod(shard.tensor_slice.shape[-2:])
    slices = tuple(_of_one(part) if stacked else part for part in shard.tensor_slices)
    ranges = shard.sharing.ranges if shard.sharing else ShardRanges(shard.value.numel(), shard.value.numel())
    for start in range(0, ranges.elements, each):
        yield _Source(shard, Piece(ranges, start, start + each), slices)


def _of_one(stacked: TensorSlice) -> TensorSlice:
    """Returns the slice of one matrix of a stack, of which ranks hold equal parts."""
    dim = None if stacked.dim is None else stacked.dim - 1
    return TensorSlice(stacked.whole[1:], dim, stacked.start, stacked.size, stacked.copies, stacked.first)


def _shared(parts: Sequence[_Source]) -> SharedMatrix:
    rows, columns = parts[0].slices[0].whole
    return SharedMatrix((rows, columns), tuple(part.piece for part in parts))


def _run_round(group: _Group, owners: Round, updates: Mapping[str, Tensor], compute: Compute) -> None:
    """Computes the matrices of one round, in place in `updates`."""
    shard, ranks = group.shard, range(group.shard.size)
    of_rank = [[n for n, owner in owners.items() if owner.rank == other] for other in ranks]
    local = [[s.local(updates, shard.rank) for n in theirs for s in group.sources[n]] for theirs in of_rank]
    mine, own = of_rank[shard.rank], local[shard.rank]
    compute_here = _here if group.tp.size == 1 else _over_tensor_ranks
    here = {n: owners[n] for n in mine}
    if all(group.matrices[n].holder is not None for n in owners):
        # Every matrix is whole on its owner.
        local, returned = [own], [compute_here(group, here, [*own], compute)]
    else:
        like = next(piece for theirs in local for piece in theirs)[:0]
        held = [[piece.on(other) for n in mine for piece in group.matrices[n].pieces] for other in ranks]
        pieces = _gathered(shard, [[*theirs] for theirs in local], held, like)
        results = compute_here(group, here, pieces, compute)
        split = [results.pop(0).split(sizes) for sizes in zip(*held, strict=True)]
        back = [[parts[other] for parts in split] for other in ranks]
        del split
        returned = _exchange(shard, back, [[piece.numel() for piece in theirs] for theirs in local], like)
    for theirs, parts in zip(local, returned, strict=True):
        for piece, part in zip(theirs, parts, strict=True):
            piece.copy_(part)


def _gathered(axis: Axis, parts: list[list[Tensor]], sizes: Sequence[Sequence[int]], like: Tensor) -> list[Tensor]:
    """Does the same as _exchange, and joins what the ranks sent, place by place."""
    arrived = _exchange(axis, parts, sizes, like)
    return [torch.cat(each) for each in zip(*arrived, strict=True)]


def _here(group: _Group, owners: Round, pieces: list[Tensor], compute: Compute) -> list[Tensor]:
    """Computes matrices of which this rank has all pieces, given and returned flat, matrix by matrix. Empties
    `pieces`."""
    slices = [[source.slices[0] for source in group.sources[n]] for n in owners]
    wholes = [_assembled([(pieces.pop(0), part) for part in parts]) for parts in slices]
    results = _computed(wholes, compute)
    return [_flat(result, part) for result, parts in zip(results, slices, strict=True) for part in parts]


def _over_tensor_ranks(group: _Group, owners: Round, pieces: list[Tensor], compute: Compute) -> list[Tensor]:
    """Computes matrices of which every tensor rank has a slice, in one piece or in tiles, given and returned flat,
    matrix by matrix. Empties `pieces`."""
    if not pieces:
        return []  # so it is on all of these tensor ranks
    tp, ranks, like = group.tp, range(group.tp.size), pieces[0][:0]
    tiles = {n: [source.piece.stop - source.piece.start for source in group.sources[n]] for n in owners}
    sizes = {n: sum(tiles[n]) for n in owners}
    of_rank = [[n for n, owner in owners.items() if owner.tp == other] for other in ranks]
    mine = of_rank[tp.rank]
    # Of ranks with the same slice the first one sends it; all get the result.
    senders = ranks[:: group.copies]
    piece_of = {n: _joined([pieces.pop(0) for _ in tiles[n]]) for n in owners}
    sent = [[piece_of.pop(n) for n in theirs] if tp.rank in senders else [] for theirs in of_rank]
    arrived = _exchange(tp, sent, [[sizes[n] for n in mine] if other in senders else [] for other in ranks], like)
    slices = {n: [[source.slices[other] for source in group.sources[n]] for other in ranks] for n in mine}
    wholes = [_whole([arrived[other].pop(0) for other in senders], tiles[n], slices[n], senders) for n in mine]
    results = _computed(wholes, compute)
    back = [
        [_flat(result, part) for n, result in zip(mine, results, strict=True) for part in slices[n][other]]
        for other in ranks
    ]
    del results
    returned = _exchange(tp, back, [[sizes[n] for n in theirs] for theirs in of_rank], like)
    result_of = {
        n: result
        for theirs, parts in zip(of_rank, returned, strict=True)
        for n, result in zip(theirs, parts, strict=True)
    }
    return [part for n in owners for part in result_of[n].split(tiles[n])]


def _joined(tiles: list[Tensor]) -> Tensor:
    """Returns flat tiles in one tensor; a single one as it is, without a copy."""
    return torch.cat(tiles) if len(tiles) > 1 else tiles[0]


def _whole(arrived: list[Tensor], tiles: list[int], slices: list[list[TensorSlice]], senders: Sequence[int]) -> Tensor:
    """Returns a matrix, put together from the tiles that each of `senders` has sent in one flat tensor."""
    parts = [zip(flat.split(tiles), slices[other], strict=True) for flat, other in zip(arrived, senders, strict=True)]
    return _assembled([part for of_sender in parts for part in of_sender])


def _exchange(
    axis: Axis, parts: list[list[Tensor]], sizes: Sequence[Sequence[int]], like: Tensor
) -> list[list[Tensor]]:
    """Sends some flat tensors of the type of `like` to each rank of the axis, and returns those that each rank sent
    here, which have `sizes` elements. Every rank takes part, also one that sends nothing. Empties `parts`."""
    given = [sum(part.numel() for part in theirs) for theirs in parts]
    sent = torch.cat([part for theirs in parts for part in theirs] or [like])
    parts.clear()
    counts = [sum(theirs) for theirs in sizes]
    received = sent.new_empty(sum(counts))
    axis.all_to_all(received, sent, counts, given).wait()
    found = iter(received.split([size for theirs in sizes for size in theirs]))
    return [[next(found) for _ in theirs] for theirs in sizes]


def _assembled(parts: Sequence[tuple[Tensor, TensorSlice]]) -> Tensor:
    """Returns a matrix from its slices, flat ones."""
    (first, part), *_ = parts
    if part.dim is None:
        return first.view(part.whole)
    whole = first.new_empty(part.whole)
    for flat, part in parts:
        assert part.dim is not None, "the slices of one matrix are cut alike"
        whole.narrow(part.dim, part.start, part.size).copy_(flat.view(part.shape))
    return whole


def _flat(matrix: Tensor, part: TensorSlice) -> Tensor:
    return cut(matrix, part).reshape(-1)


def _computed(matrices: list[Tensor], compute: Compute) -> list[Tensor]:
    """Returns the results for matrices; those of one shape are computed together. Empties the list."""
    of_shape: dict[torch.Size, list[int]] = {}
    for place, shape in enumerate([matrix.shape for matrix in matrices]):
        of_shape.setdefault(shape, []).append(place)
    batches = [
        matrices[places[0]].unsqueeze(0) if len(places) == 1 else torch.stack([matrices[place] for place in places])
        for places in of_shape.values()
    ]
    matrices.clear()
    results: dict[int, Tensor] = {}
    for places in of_shape.values():
        results.update(zip(places, compute(batches.pop(0)), strict=True))
    return [results[place] for place in range(len(results))]
