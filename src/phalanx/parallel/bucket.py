"""A bucket: parameters whose gradients share one flat buffer and one collective.

The layout is that of Megatron's distributed optimizer: on an axis of N ranks, rank r owns the r-th N-th of the buffer,
whatever parameters are there; one reduce-scatter produces the gradient's shard, one all-gather returns the updated
parameters. For an optimizer that updates whole matrices, parameters are placed so that no share ends within a matrix,
if little padding achieves that (phalanx.partition.matrices.bucket_cut).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from phalanx.comm.axis import Axis, Pending
from phalanx.partition.matrices import ShardRanges
from phalanx.partition.tensor_slices import in_buckets


@dataclass
class Slot:
    """A parameter's place in its bucket."""

    name: str
    parameter: nn.Parameter
    start: int
    filled: bool = False
    """True if the buffer holds this step's gradient of an earlier micro-batch."""

    @property
    def stop(self) -> int:
        return self.start + self.parameter.numel()


@dataclass
class Bucket:
    """Parameters whose gradients are reduced together, with the progress of the reduction."""

    slots: list[Slot]
    shard: Axis
    replicate: Axis
    transient: bool
    """True if the whole gradient exists only until it is reduced (ZeRO-2)."""
    dtype: torch.dtype
    """The type in which gradients are accumulated and sent."""
    each: int
    """Elements of one rank's share."""
    waiting: int = 0
    """Number of the current micro-batch's gradients still missing."""
    parameters: Tensor = field(init=False)
    """All parameters, flat and padded to a multiple of the ranks; empty if they are not sharded."""
    gradients: Tensor | None = None
    reduced: Tensor | None = None
    """This rank's shard of the summed gradient: a view of `gradients`, or its own tensor if those are transient."""
    arriving: Tensor | None = None
    """The tensor that receives a shard to be added to an earlier one."""
    work: Pending | None = None
    left: bool = False
    """True if this step's summed gradient has left the device."""
    gathering: Pending | None = None

    def __post_init__(self) -> None:
        self.length = self.each * self.shard.size
        self.share = slice(self.each * self.shard.rank, self.each * (self.shard.rank + 1))
        self.end = max(slot.stop for slot in self.slots)
        self.gaps = sum(slot.parameter.numel() for slot in self.slots) < self.end
        self.expect()
        first = self.slots[0].parameter
        self.parameters = first.new_zeros(self.length if self.shard.size > 1 else 0).detach()
        if self.shard.size == 1:
            return
        for slot in self.slots:
            view = self.parameters[slot.start : slot.stop]
            view.copy_(slot.parameter.detach().view(-1))
            slot.parameter.data = view.view_as(slot.parameter)

    def expect(self) -> None:
        """Prepares for the gradients of another micro-batch."""
        self.waiting = len(self.slots)

    def take(self, slot: Slot) -> None:
        """Moves a parameter's new gradient into the buffer, where autograd accumulates those of later micro-batches. A
        head whose micro-batches share one (vocabulary.py) has none before the last of them."""
        view = self._buffer()[slot.start : slot.stop].view_as(slot.parameter)
        gradient = slot.parameter.grad
        if gradient is not None and gradient.data_ptr() != view.data_ptr():
            if slot.filled:
                view.add_(gradient)
            else:
                view.copy_(gradient)
            slot.filled = True
            stays = not self.transient and self.dtype == slot.parameter.dtype
            slot.parameter.grad = view if stays else None
        self.waiting -= 1

    def _buffer(self) -> Tensor:
        if self.gradients is None:
            new = torch.zeros if self.gaps else torch.empty  # what pads the end is never read
            self.gradients = new(self.length, dtype=self.dtype, device=self.slots[0].parameter.device)
        return self.gradients

    def reduce(self, before_sum: Callable[[Tensor], None] | None = None) -> None:
        """Starts summing over the data ranks, after `before_sum` got this rank's own gradients. Afterwards this rank's
        shard is in `reduced`."""
        gradients = self._buffer()
        for slot in self.slots:
            # A split backward pass may have produced some gradients with an earlier one.
            if not slot.filled:
                gradients[slot.start : slot.stop] = 0
        if before_sum is not None:
            before_sum(gradients[: self.end])  # what pads the end is not set
        if self.shard.size == 1:
            self.reduced = gradients
            self.work = self.replicate.all_reduce(gradients)
            return
        share = gradients[self.share]
        if self.transient:
            share = torch.empty_like(share)
            if self.reduced is None:
                self.reduced = share
            else:
                self.arriving = share
        else:
            self.reduced = share
        self.work = self.shard.reduce_scatter(share, gradients)

    def settle(self) -> None:
        """Waits for the sum."""
        assert self.work is not None, "settle follows reduce"
        self.work.wait()
        self.work = None
        if self.arriving is not None and self.reduced is not None:
            self.reduced += self.arriving
            self.arriving = None
        if self.transient:
            self.gradients = None
            for slot in self.slots:
                slot.filled = False

    def release(self) -> None:
        """Frees the memory of a sum that has left the device."""
        self.clear()
        self.gradients, self.left = None, True

    def gather(self) -> None:
        """Starts all-gathering the parameters."""
        self.arrive()  # an all-gather still in flight would write into the same memory
        self.gathering = self.shard.all_gather(self.parameters, self.parameters[self.share])

    def arrive(self) -> None:
        """Waits until the parameters are whole."""
        if self.gathering is not None:
            self.gathering.wait()
            self.gathering = None

    def clear(self) -> None:
        """Discards the gradients. The buffer stays, unless it is transient: its values are replaced, not added to."""
        self.reduced, self.left = None, False
        for slot in self.slots:
            slot.parameter.grad = None
            slot.filled = False

    def ranges(self, slot: Slot) -> ShardRanges:
        """Returns the ranges of a parameter that the ranks own."""
        return ShardRanges(slot.parameter.numel(), self.each, -slot.start)

    def owned(self) -> Iterator[tuple[Slot, int, int]]:
        """Yields each parameter with the range of the buffer that is the parameter's and this rank's, maybe empty."""
        first, last = (self.share.start, self.share.stop) if self.shard.size > 1 else (0, self.length)
        for slot in self.slots:
            start = min(max(slot.start, first), slot.stop)
            yield slot, start, max(start, min(slot.stop, last))


def fill(named: Sequence[tuple[str, nn.Parameter]], bytes_each: float) -> list[list[tuple[str, nn.Parameter]]]:
    """Group parameters, in their order, so that each group but the last reaches at least `bytes_each`."""
    return [[named[i] for i in group] for group in in_buckets([p.nbytes for _, p in named], bytes_each)]
