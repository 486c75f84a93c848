"""The parts of tensors that one rank holds, writes and reads: from parameter shards to boxes of whole tensors.

Every rank writes its own part of the state, and every element is written once. Where several ranks hold the same
(replicas, tensor ranks with whole parameters or shared key/value heads), their common elements are laid end to end and
each writes an equal share of the bytes: no rank gathers anything, and no rank has to ask another who writes what.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from phalanx.checkpoint.manifest import Box, flat_boxes
from phalanx.parallel.offload import file_of, on_host
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

    def parts(self) -> Iterator[Part]:
        """Yields the shard as boxes of the whole tensor; padding is left out."""
        return Share(self, 0, self.value.numel()).parts()

    def boxes(self, start: int, flat: Tensor) -> Iterator[Part]:
        """Yields the elements of the shard from `start` on, of which `flat` are the values, as `parts` does."""
        tensor_slice, first = self.shard.tensor_slice, self.shard.start + start
        position = 0
        for box in flat_boxes(tensor_slice.shape, first, first + flat.numel()):
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


@dataclass(frozen=True)
class Share:
    """Elements `start` to `stop` - 1 of a shard that several ranks hold: those that this rank writes."""

    tensor: HeldTensor
    start: int
    stop: int

    @property
    def flat(self) -> Tensor:
        """The elements, a view of this rank's memory (stop - start,)."""
        return self.tensor.value.detach().view(-1)[self.start : self.stop]

    @property
    def all(self) -> list[Tensor]:
        """All elements of the shard, as up to three flat views: those that other ranks write may differ by mistake."""
        flat = self.tensor.value.detach().view(-1)
        return [part for part in (flat[: self.start], self.flat, flat[self.stop :]) if part.numel()]

    def parts(self, values: Tensor | None = None) -> Iterator[Part]:
        """Yields the share as boxes of the whole tensor, views of `values`, a copy of `flat`, if it is given."""
        return self.tensor.boxes(self.start, self.flat if values is None else values)


def shares(state: Iterable[HeldTensor]) -> Iterator[Share]:
    """Yields what this rank writes of every tensor that it holds, which may be nothing. Over all ranks it is every
    element of the state, once.

    `state` is all that this rank holds; ranks that hold the same list it in the same order. Copies on other ranks of a
    pipeline (ParameterShard.copy) are left to the rank that counts the parameter."""
    streams: dict[tuple[int, int], list[HeldTensor]] = {}
    for tensor in state:
        if tensor.shard.copy:
            yield Share(tensor, 0, 0)
        else:
            streams.setdefault((tensor.replicas, tensor.shard.tensor_slice.copies), []).append(tensor)
    for (replicas, copies), tensors in streams.items():
        total = sum(tensor.value.nbytes for tensor in tensors)
        position = 0
        for tensor in tensors:
            writers = replicas * copies
            writer = tensor.replica * copies + tensor.shard.tp_rank % copies
            first, end = (total * number // writers - position for number in (writer, writer + 1))
            yield Share(tensor, tensor.cut(first), tensor.cut(end))
            position += tensor.value.nbytes


def is_finite(tensor: Tensor) -> Tensor:
    """Returns, as a tensor without dimensions, whether all elements are finite: one pass, and no memory of the tensor's
    size."""
    return all_finite([tensor])[0]


def all_finite(tensors: Sequence[Tensor]) -> Tensor:
    """Returns by tensor whether all of its elements are finite, a bool tensor (n,) on their device."""
    extremes: list[Tensor] = []
    for tensor in tensors:
        if tensor.numel() and tensor.is_floating_point():
            extremes += [extreme.double() for extreme in torch.aminmax(tensor.detach())]
        else:
            extremes += [torch.zeros((), dtype=torch.float64, device=tensor.device)] * 2
    return torch.stack(extremes).view(-1, 2).isfinite().all(dim=1) if extremes else torch.ones(0, dtype=torch.bool)


_ALIGNMENT = 64


class Snapshot:
    """Host memory for one copy of what a rank writes. It is kept and used again: fresh memory costs more than a
    copy."""

    def __init__(self, device: torch.device):
        self.device = device
        self.memory = torch.empty(0, dtype=torch.uint8)
        self.borrows = False
        """Whether some of the last `take` is not copied, so that it must not change before it has been written."""
        self._pairs: list[tuple[Tensor, Tensor]] = []
        self._filled = 0
        self._error: Exception | None = None
        self._changed = threading.Condition()
        self._copied: torch.Event | None = None

    def take(self, values: Sequence[Tensor]) -> list[Tensor]:
        """Returns memory for copies of flat tensors, which `begin` fills in this order; copies of the last time become
        invalid. Maps of files are returned themselves.

        Raises MemoryError if the host has too little memory."""
        mapped = [file_of(value.untyped_storage()) is not None for value in values]
        self.borrows = any(mapped)
        sizes = [
            0 if there else -(-value.nbytes // _ALIGNMENT) * _ALIGNMENT
            for value, there in zip(values, mapped, strict=True)
        ]
        if self.memory.numel() < sum(sizes):
            self.memory = self._allocate(sum(sizes))
        copies, position = [], 0
        for value, size, there in zip(values, sizes, mapped, strict=True):
            copies.append(value if there else self.memory[position : position + value.nbytes].view(value.dtype))
            position += size
        self._pairs, self._filled = list(zip(copies, values, strict=True)), len(copies)
        return copies

    def begin(self) -> None:
        """Begins to copy the tensors of the last `take`: from an accelerator before whatever the current stream does
        next, on a CPU in a thread."""
        self._filled, self._error = 0, None
        if self.device.type != "cpu":
            self.fill()
        else:
            threading.Thread(target=self.fill, name="copy of the state", daemon=True).start()

    def fill(self) -> None:
        """Copies the tensors of the last `take`."""
        try:
            for number, (copy, value) in enumerate(self._pairs):
                if copy is not value:
                    copy.copy_(value.detach(), non_blocking=True)
                self._tell(number + 1)
            if self.device.type != "cpu":
                self._copied = torch.accelerator.current_stream(self.device).record_event()
        except Exception as error:
            self._error = error
            self._tell(len(self._pairs))

    def hold(self) -> None:
        """Waits until the tensors of the last `take` may change."""
        with self._changed:
            self._changed.wait_for(lambda: self._filled == len(self._pairs))

    def wait(self, number: int) -> None:
        """Waits until the copies up to this number are complete. Raises what the copying raised."""
        with self._changed:
            self._changed.wait_for(lambda: self._filled > number)
        if self._error:
            raise self._error
        if self._copied is not None:
            self._copied.synchronize()

    def _tell(self, filled: int) -> None:
        with self._changed:
            self._filled = filled
            self._changed.notify_all()

    def _allocate(self, size: int) -> Tensor:
        self.memory = torch.empty(0, dtype=torch.uint8)
        try:
            with on_host():
                return torch.empty(size, dtype=torch.uint8, pin_memory=self.device.type != "cpu")
        except RuntimeError as error:
            raise MemoryError(str(error)) from None
