"""Parameter shards: the elements of every parameter that this rank's optimizer updates.

Whatever shards the parameters (flat buckets, FSDP's rows, or nothing), a rank's shard of one parameter is a contiguous
range of the flattened tensor slice that its tensor rank holds. So the optimizer, norms, checkpoints and the comparison
with one process are written once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor

from phalanx.comm.axis import Axis
from phalanx.parallel.mesh import Mesh
from phalanx.partition.matrices import ShardRanges
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

    def places(self, first: int, last: int, device: torch.device) -> Tensor:
        """Returns the places in the flattened whole parameter of elements `first` to `last` - 1 of this shard, (n,) of
        int64; -1 for padding."""
        part = self.tensor_slice
        places = torch.arange(self.start + first, self.start + last, device=device)
        if part.dim is None:
            return places
        each = prod(part.whole[part.dim + 1 :])  # elements per row (column) of the slice
        before, inside = places // (part.size * each), places % (part.size * each)
        whole = before * (part.whole[part.dim] * each) + inside + part.start * each
        return whole.masked_fill_(inside >= part.real * each, -1) if part.padding else whole

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
    return torch.cat([row[: end - first] for (first, end), row in sorted(zip(runs, every, strict=True), key=_first)])


def _first(run: tuple[tuple[int, int], Tensor]) -> tuple[int, int]:
    return run[0]


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
