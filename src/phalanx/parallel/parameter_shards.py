"""Parameter shards: the elements of every parameter that this rank's optimizer updates.

Whatever shards the parameters (flat buckets, FSDP's rows, or nothing), a rank's shard of one parameter is a contiguous
range of the flattened tensor slice that its tensor rank holds. So the optimizer, norms, checkpoints and the comparison
with one process are written once.

Optimizers of whole matrices: each matrix has an owner (phalanx.partition.matrices.rounds). Round by round the pieces of
updates travel to the owners, first over the ranks that share the state, then over the tensor ranks, and the pieces of
the results go back the same way: all-to-alls with parts of unequal sizes, so nothing is padded, and each matrix is
computed once. Ranks that hold the same (replicas; tensor ranks with a whole matrix) compute the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from operator import itemgetter

import torch
from torch import Tensor

from phalanx.comm.axis import Axis
from phalanx.optimizers.entry import is_hidden_matrix
from phalanx.parallel.mesh import Mesh
from phalanx.partition.matrices import Piece, Round, ShardRanges, SharedMatrix, rounds
from phalanx.partition.tensor_slices import TensorSlice

BALANCING_BIAS = "router.bias"
"""Suffix of the names of routers' balancing biases."""
_NAMES = {dtype: str(dtype) for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


@dataclass(frozen=True)
class ShardGroup:
    """The ranks that share a tensor slice, or the part of it that expert parallelism leaves to them."""

    axis: Axis
    ranges: ShardRanges


@dataclass(eq=False)
class ParameterShard:
    """This rank's shard of one parameter, or of one tile of it."""

    name: str
    """The parameter's name in the module."""
    tensor_slices: tuple[TensorSlice, ...]
    """The part of the whole that each tensor rank holds."""
    tp_rank: int
    start: int
    """First element in the flattened tensor slice; the shard may be empty. For experts cut over several ranks the slice
    is that of all experts."""
    value: Tensor
    """The elements, a leaf, which the optimizer updates in place."""
    gradient: Tensor | None = None
    """The gradient of the global batch's loss, summed over all data ranks; set after the last micro-batch."""
    copy: bool = False
    """True if another rank of the pipeline holds the same and counts it."""
    whole_name: str = ""
    """The parameter's name in the plain model and in checkpoints; several tiles share one. By default `name`."""
    frozen: bool = False
    """True if training leaves the parameter as it is: no gradient, and no optimizer."""
    sharing: ShardGroup | None = None
    """The ranks that hold the other elements; None if this one holds all."""

    def __post_init__(self) -> None:
        self.whole_name = self.whole_name or self.name

    @property
    def tensor_slice(self) -> TensorSlice:
        return self.tensor_slices[self.tp_rank]

    @property
    def decays(self) -> bool:
        """True for matrices: weight decay of a norm or a bias regularises nothing."""
        return len(self.tensor_slice.whole) >= 2 and not self.name.endswith(".bias")

    @property
    def balances(self) -> bool:
        """True for a router's balancing bias: its gradient is the experts' excess load, which only the rule of the bias
        method follows, not the optimizer (model/moe.py)."""
        return self.whole_name.endswith(BALANCING_BIAS)

    def in_blocks(self, block: int) -> ParameterShard:
        """Returns the place of a tensor with one element for each `block` elements of a row of this shard: the shard
        has whole blocks. Its value is the shard's own."""
        if block == 1:
            return self
        slices = tuple(part.in_blocks(block) for part in self.tensor_slices)
        return replace(self, tensor_slices=slices, start=self.start // block, gradient=None)

    def place_numbers(self, first: int) -> tuple[int, int, int, int]:
        """Returns the place of element `first` of this shard in the flattened slice, and three numbers that turn a
        place p there into one in the whole parameter: p // row × whole row + p % row + offset; p itself if row is 0."""
        part, start = self.tensor_slice, self.start + first
        if part.dim is None:
            return start, 0, 0, 0
        each = prod(part.whole[part.dim + 1 :])  # elements per row (column) of the slice
        return start, part.size * each, part.whole[part.dim] * each, part.start * each

    def places(self, first: int, last: int, device: torch.device) -> Tensor:
        """Returns the places in the flattened whole parameter of elements `first` to `last` - 1 of this shard, (n,) of
        int64; -1 for padding."""
        part, (start, row, whole_row, offset) = self.tensor_slice, self.place_numbers(first)
        places = torch.arange(start, self.start + last, device=device)
        if not row:
            return places
        inside = places % row
        whole = places // row * whole_row + inside + offset
        return whole.masked_fill_(inside >= part.real * (row // part.size), -1) if part.padding else whole

    @torch.no_grad()
    def assign(self, whole: Tensor, into: Tensor | None = None) -> None:
        """Copies this rank's shard of the whole parameter (or one of its moments) to `into` or to the value."""
        target = self.value if into is None else into
        if target.numel():
            part = cut(whole, self.tensor_slice).reshape(-1)[self.start : self.start + target.numel()]
            target.copy_(part.view(target.shape))


def cut(whole: Tensor, tensor_slice: TensorSlice) -> Tensor:
    """Returns the part of a whole parameter that a tensor rank holds; padding is zero."""
    if tensor_slice.dim is None:
        return whole
    real = whole.narrow(tensor_slice.dim, min(tensor_slice.start, whole.shape[tensor_slice.dim]), tensor_slice.real)
    if not tensor_slice.padding:
        return real
    padded = whole.new_zeros(tensor_slice.shape)
    padded.narrow(tensor_slice.dim, 0, tensor_slice.real).copy_(real)
    return padded


@torch.no_grad()
def wholes(
    shards: Sequence[ParameterShard], tensors: Mapping[str, Tensor], mesh: Mesh, keep: bool
) -> Iterator[tuple[str, Tensor]]:
    """Yields every parameter-like tensor reassembled from the ranks' shards, by name in the plain model, on the CPU.

    `tensors` holds, under a shard's own name, a tensor of that shard's shape (its value, gradient, a moment). Ranks
    that do not `keep` take part and get nothing; in a pipeline only the first rank of all may keep. One tensor at a
    time is whole, so a model larger than a device can be read out.
    """
    pp = mesh.axis("pp")
    line = pp.size > 1 and all(place == 0 for axis, place in mesh.coordinates.items() if axis != "pp")
    own = _of_stages(shards, tensors, mesh.axis("shard"), mesh.axis("tp"), keep or line)
    if not line:
        yield from own
        return
    # Each rank of a pipeline has its own layers, and they send them to the first one in turn.
    of = by_whole(shards)
    mine = [(name, f[0].tensor_slice.whole, _NAMES[tensors[f[0].name].dtype], f[0].copy) for name, f in of.items()]
    for rank, theirs in enumerate(pp.gather_json(mine)):
        for name, shape, dtype, copy in theirs:
            whole = None
            if rank == pp.rank:
                _, whole = next(own)
                if pp.rank and not copy:
                    pp.send(whole.to(shards[0].value.device), 0)
            elif pp.rank == 0 and not copy:
                whole = torch.empty(shape, dtype=_DTYPES[dtype], device=shards[0].value.device)
                pp.receive(whole, rank)
            if keep and whole is not None and not copy:
                yield name, whole.cpu()
    assert next(own, None) is None, "every tensor was sent or kept"


def _of_stages(
    shards: Sequence[ParameterShard], tensors: Mapping[str, Tensor], axis: Axis, tp: Axis, keep: bool
) -> Iterator[tuple[str, Tensor]]:
    """Yields the whole tensors of the layers that this rank holds a part of."""
    device = shards[0].value.device
    every = torch.empty(axis.size, len(shards), 2, dtype=torch.int64, device=device)
    mine = torch.tensor([(f.start, f.start + f.value.numel()) for f in shards], device=device)
    axis.all_gather(every.view(-1), mine.view(-1)).wait()
    runs = dict(zip([f.name for f in shards], every.transpose(0, 1).tolist(), strict=True))
    for name, parts in by_whole(shards).items():
        whole = None
        for shard in parts:
            part = _join(tensors[shard.name].detach().reshape(-1), runs[shard.name], axis)
            every = part.view(1, -1)
            if shard.tensor_slice.dim is not None and tp.size > 1:
                every = part.new_empty(tp.size, part.numel())
                tp.all_gather(every.view(-1), part).wait()
            if keep:
                whole = _place(every, shard.tensor_slices, whole)
        if whole is not None:
            yield name, whole.cpu()


def by_whole(shards: Iterable[ParameterShard]) -> dict[str, list[ParameterShard]]:
    """Returns the shards of each parameter of the plain model, by its name: one, or its tiles."""
    of_whole: dict[str, list[ParameterShard]] = {}
    for shard in shards:
        of_whole.setdefault(shard.whole_name, []).append(shard)
    return of_whole


def _join(mine: Tensor, runs: Sequence[tuple[int, int]], axis: Axis) -> Tensor:
    """Returns the flattened slice from the element ranges, (first, end) each, that the shard axis's ranks hold."""
    if axis.size == 1:
        return mine
    longest = max(end - first for first, end in runs)
    padded = mine.new_zeros(longest)
    padded[: mine.numel()] = mine
    every = mine.new_empty(axis.size, longest)
    axis.all_gather(every.view(-1), padded).wait()
    return torch.cat(
        [row[: end - first] for (first, end), row in sorted(zip(runs, every, strict=True), key=itemgetter(0))]
    )


def _place(parts: Tensor, tensor_slices: Sequence[TensorSlice], whole: Tensor | None) -> Tensor:
    """Copies flattened slices, a row of `parts` each, to their places in `whole`, which is allocated if missing."""
    if tensor_slices[0].dim is None:
        return parts[0].view(tensor_slices[0].whole)
    if whole is None:
        whole = parts.new_empty(tensor_slices[0].whole)
    for part, tensor_slice in zip(parts, tensor_slices, strict=True):
        if tensor_slice.first and tensor_slice.dim is not None and tensor_slice.real:
            target = whole.narrow(tensor_slice.dim, tensor_slice.start, tensor_slice.real)
            target.copy_(part.view(tensor_slice.shape).narrow(tensor_slice.dim, 0, tensor_slice.real))
    return whole


def counted(shards: Iterable[ParameterShard]) -> Iterator[ParameterShard]:
    """Yields the shards that this rank counts in norms of the whole model: copies on other ranks are skipped, and
    balancing biases, which have no gradient of the loss."""
    return (f for f in shards if f.tensor_slice.first and not f.copy and not f.balances and f.value.numel())


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
            between = tp if part.cuts_matrices and tp.size > 1 else alone
            copies = part.copies if between is tp else 1
            of_name = found.setdefault((axis, between, copies), {})
            for number, source in enumerate(_sources(shard)):
                of_name.setdefault((shard.whole_name, number), []).append(source)
        self.groups: list[_Group] = []
        for (axis, between, copies), of_name in found.items():
            sources = [tuple(parts) for parts in of_name.values()]
            matrices = list[SharedMatrix]()
            for parts in sources:
                rows, columns = parts[0].slices[0].whole
                matrices.append(SharedMatrix((rows, columns), tuple(part.piece for part in parts)))
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
    if not stacked.cuts_matrices or stacked.dim is None:
        return TensorSlice(stacked.whole[1:])
    return TensorSlice(stacked.whole[1:], stacked.dim - 1, stacked.start, stacked.size, stacked.copies, stacked.first)


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
        arrived = _exchange(shard, [[*theirs] for theirs in local], held, like)
        pieces = [torch.cat(each) for each in zip(*arrived, strict=True)]
        del arrived
        results = compute_here(group, here, pieces, compute)
        split = [results.pop(0).split(sizes) for sizes in zip(*held, strict=True)]
        back = [[parts[other] for parts in split] for other in ranks]
        del split
        returned = _exchange(shard, back, [[piece.numel() for piece in theirs] for theirs in local], like)
    for theirs, parts in zip(local, returned, strict=True):
        for piece, part in zip(theirs, parts, strict=True):
            piece.copy_(part)


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
