"""The parts of tensors that one rank holds, writes and reads: from parameter shards to boxes of whole tensors.

Every rank writes its own part of the state, and every element is written once. Where several ranks hold the same
(replicas, tensor ranks with whole parameters or shared key/value heads), their common elements are laid end to end and
each writes an equal share of the bytes: no rank gathers anything, and no rank has to ask another who writes what.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from phalanx.checkpoint.boxes import Box, flat_boxes
from phalanx.parallel.parameter_shards import ParameterShard


@dataclass(frozen=True)
class Part:
    """A box of a tensor of the state, with its elements."""

    tensor: str
    """The tensor's name in checkpoints."""
    shape: tuple[int, ...]
    """The whole tensor's shape."""
    box: Box
    value: Tensor
    """The elements, in the box's shape: a view of this rank's memory."""


@dataclass(frozen=True)
class HeldTensor:
    """This rank's elements of one tensor of the state: a parameter, a moment, or another of a parameter's shape."""

    name: str
    """The tensor's name in checkpoints: the parameter's, behind "exp_avg/" and the like."""
    shard: ParameterShard
    value: Tensor
    """The elements of the shard, in a contiguous tensor of any shape."""
    replica: int = 0
    """This rank's place among the replicas that hold the same elements."""
    replicas: int = 1

    def parts(self, start: int = 0, stop: int | None = None) -> Iterator[Part]:
        """Yields elements `start` to `stop` - 1 of the shard as boxes of the whole tensor; padding is left out."""
        tensor_slice, first = self.shard.tensor_slice, self.shard.start
        flat = self.value.detach().view(-1)
        position = start
        for box in flat_boxes(tensor_slice.shape, first + start, first + (flat.numel() if stop is None else stop)):
            view = flat[position : position + box.elements].view(box.sizes)
            position += box.elements
            dim = tensor_slice.dim
            if dim is None:
                yield Part(self.name, tensor_slice.whole, box, view)
            elif (size := min(box.sizes[dim], tensor_slice.real - box.offsets[dim])) > 0:
                there = box.moved(dim, tensor_slice.start, size)
                yield Part(self.name, tensor_slice.whole, there, view.narrow(dim, 0, size))

    def cut(self, at: int) -> int:
        """Returns the element nearest below byte `at` at which a row of the slice begins, within the shard."""
        elements = self.value.numel()
        if not 0 < at < self.value.nbytes:
            return 0 if at <= 0 else elements
        row = prod(self.shard.tensor_slice.shape[1:])
        return max(0, (self.shard.start + at // self.value.element_size()) // row * row - self.shard.start)


def held(
    shards: Sequence[ParameterShard],
    tensors: Mapping[str, Tensor],
    prefix: str = "",
    replica: int = 0,
    replicas: int = 1,
) -> Iterator[HeldTensor]:
    """Yields the elements of one kind that this rank holds; `tensors` has, under a shard's own name, a tensor of its
    shape. `replicas` ranks hold the same, of which this is the `replica`-th."""
    for shard in shards:
        yield HeldTensor(prefix + shard.whole_name, shard, tensors[shard.name], replica, replicas)


def owned(state: Iterable[HeldTensor]) -> Iterator[Part]:
    """Yields the parts that this rank writes. Over all ranks they are every element of the state, once.

    `state` is all that this rank holds; ranks that hold the same list it in the same order. Copies on other ranks of a
    pipeline (ParameterShard.copy) are left to the rank that counts the parameter."""
    streams: dict[tuple[int, int], list[HeldTensor]] = {}
    for tensor in state:
        if not tensor.shard.copy:
            streams.setdefault((tensor.replicas, tensor.shard.tensor_slice.copies), []).append(tensor)
    for (replicas, copies), tensors in streams.items():
        total = sum(tensor.value.nbytes for tensor in tensors)
        position = 0
        for tensor in tensors:
            writers = replicas * copies
            writer = tensor.replica * copies + tensor.shard.tp_rank % copies
            first, end = (total * number // writers - position for number in (writer, writer + 1))
            yield from tensor.parts(tensor.cut(first), tensor.cut(end))
            position += tensor.value.nbytes


def whole_parts(tensors: Mapping[str, Tensor]) -> Iterator[Part]:
    """Yields whole tensors as parts, for a checkpoint that one process writes."""
    for name, tensor in tensors.items():
        shape = tuple(tensor.shape)
        yield Part(name, shape, Box.of(shape), tensor.detach())


def is_finite(tensor: Tensor) -> Tensor:
    """Returns, as a tensor without dimensions, whether all elements are finite: one pass, and no memory of the tensor's
    size."""
    if not tensor.numel() or not tensor.is_floating_point():
        return torch.ones((), dtype=torch.bool, device=tensor.device)
    least, most = torch.aminmax(tensor.detach())
    return least.isfinite() & most.isfinite()
