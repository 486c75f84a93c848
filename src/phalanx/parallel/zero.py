"""DDP, ZeRO-1 and ZeRO-2 over flat buckets: gradients are reduced during the backward pass.

DDP (Li et al. 2020) sums every bucket over the replicas. With a dp_shard axis each rank keeps the optimizer state of
its shard of every bucket (ZeRO-1: Rajbhandari et al. 2020, section 5.1), and with ZeRO-2 also of the gradients (section
5.2): a step is one reduce-scatter and one all-gather of every bucket, the bytes of one all-reduce. With both axes the
shards are also summed over dp_replicate (HSDP).

A bucket's layout is that of Megatron's distributed optimizer: on an axis of N ranks, rank r owns the r-th N-th of its
flat buffer, whatever parameters are there. For an optimizer that updates whole matrices, parameters are placed so that
no share ends within a matrix, if little padding achieves that (phalanx.partition.matrices.bucket_cut).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.blocks.operator import is_expert
from phalanx.comm.axis import Axis, Pending
from phalanx.model.transformer import Head
from phalanx.optimizers.entry import Granularity
from phalanx.parallel.compression import CompressedSum, Phases, Summand
from phalanx.parallel.data import GradientSum, LocalModel, Replica, TensorSlices, call_when_complete
from phalanx.parallel.linear import DeferringProduct
from phalanx.parallel.objective import Objective
from phalanx.parallel.parameter_shards import ParameterShard, ShardGroup
from phalanx.partition.matrices import ShardRanges, granular_cut
from phalanx.partition.tensor_slices import in_buckets


@dataclass
class Slot:
    """A parameter's place in its bucket."""

    name: str
    parameter: nn.Parameter
    start: int
    uses: int = 1
    """Gradients that arrive one by one in a micro-batch: those of a matrix that several losses read, where they bypass
    autograd, which would add them."""
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
    compression: CompressedSum | None = None
    """How replicas sum; None: the numbers as they are."""
    shards: Sequence[ParameterShard] = ()
    """This rank's of the slots."""
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
        self.waiting = sum(slot.uses for slot in self.slots)

    def take(self, slot: Slot) -> None:
        """Moves a parameter's new gradient into the buffer, where autograd accumulates those of later micro-batches. A
        head whose micro-batches share one (vocabulary.py) has none before the last of them."""
        view = self._buffer()[slot.start : slot.stop].view_as(slot.parameter)
        gradient = slot.parameter.grad
        if gradient is not None and gradient.data_ptr() != view.data_ptr():
            (view.add_ if slot.filled else view.copy_)(gradient)
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
            self.work = self.sum_replicas()
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

    def sum_replicas(self) -> Pending:
        """Starts summing `reduced` over the replicas."""
        assert self.reduced is not None, "computed"
        if self.compression is None:
            return self.replicate.all_reduce(self.reduced)
        begin = self.share.start if self.shard.size > 1 else 0
        places = zip(self.shards, self.owned(), strict=True)
        own = [Summand(shard, self.reduced[start - begin : stop - begin]) for shard, (_, start, stop) in places]
        return self.compression.all_reduce(own)

    def settle(self) -> None:
        """Waits for the sum, unless that has been done."""
        if self.work is None:
            return
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


class BucketReplica(Replica):
    """One of several replicas, each in its own process (or in its own tensor ranks)."""

    def __init__(self, model: LocalModel, sums: GradientSum, *, zero: int, bucket_mb: float):
        """Builds the buckets. `zero` 1 keeps whole gradients until the optimizer is done, 2 only shards of them. All
        parameters of a bucket are used by the same pipeline stages and held by the same ranks."""
        self.sharded, self.experts, self.every_micro_batch = sums.shard.size > 1, sums.experts, sums.every_micro_batch
        # The backward pass reaches the last layers first: their bucket is sent first.
        named = list(model.objective.model.named_parameters())[::-1]
        together: dict[tuple[tuple[int, ...], tuple[int, ...], Axis, bool], list[tuple[str, nn.Parameter]]] = {}
        for name, parameter in named:
            over = sums.experts[1] if sums.experts and is_expert(name) else sums.shard
            key = tuple(model.users(name)), tuple(model.holders(name)), over, parameter.requires_grad
            together.setdefault(key, []).append((name, parameter))
        self.buckets: list[Bucket] = []
        self.frozen: list[Bucket] = []
        """Buckets without gradients: ranks share who saves them in checkpoints."""
        self.of_stage: dict[int, list[Bucket]] = {}
        """By stage, the buckets that only it fills; the others are reduced after all stages."""
        for (stages, _, over, trained), parameters in together.items():
            for group in fill(parameters, bucket_mb * 2**20):
                dtype = sums.dtype or group[0][1].dtype
                slots, each = _slots(group, over.size, model.tensor_slices, sums.granularity)
                bucket = Bucket(slots, over, sums.replicate, zero == 2 and over.size > 1, dtype, each)
                (self.buckets if trained else self.frozen).append(bucket)
                if trained and len(stages) == 1:
                    self.of_stage.setdefault(stages[0], []).append(self.buckets[-1])
        self.filling: list[Bucket] = []
        """Buckets to reduce after the current backward pass that have not been sent, in sending order."""
        self.sent: Bucket | None = None
        """The bucket whose sum was started last."""
        self.leaving: Bucket | None = None
        """The bucket that is summed for the last time and then leaves the device."""
        transformer = model.objective.model
        head, modules, tied = transformer.head, transformer.config.mtp, transformer.config.tied
        if modules and isinstance(head, Head) and isinstance(head.multiply, DeferringProduct):
            matrix = getattr(transformer.embed, "weight", None) if tied else head.weight
            for slot in (slot for bucket in self.buckets for slot in bucket.slots if slot.parameter is matrix):
                slot.uses = 1 + modules + tied  # as a tied one is looked up in as well
        self.slots: dict[Tensor, tuple[Bucket, Slot]] = {
            slot.parameter: (bucket, slot) for bucket in self.buckets for slot in bucket.slots
        }
        call_when_complete(self.slots, self.arrived)
        if self.sharded:
            self._wait_where_needed(model.objective)
        super().__init__(model)

    def begin_backward(self, stage: int, *, last: bool) -> None:
        for bucket in self.of_stage.get(stage, ()):
            bucket.expect()
        self.filling = self._reduced(stage, last)
        self.final = last

    def end_backward(self, stage: int, *, last: bool) -> None:
        for bucket in self.filling:
            self._reduce(bucket)
        self.filling = []
        if not last:
            for bucket in self._reduced(stage, last):
                bucket.settle()

    def _reduced(self, stage: int, last: bool) -> list[Bucket]:
        """Returns the stage's buckets that are reduced after a micro-batch, which may be the last one."""
        # A persistent buffer is reduced once: later micro-batches would be added to what has already been summed.
        return [b for b in self.of_stage.get(stage, ()) if last or (self.every_micro_batch and b.transient)]

    def arrived(self, weight: Tensor) -> None:
        """Records that a parameter's gradient of this micro-batch is complete. Every rank sends buckets in order."""
        bucket, slot = self.slots[weight]
        bucket.take(slot)
        while self.filling and not self.filling[0].waiting:
            self._reduce(self.filling.pop(0))

    def _reduce(self, bucket: Bucket) -> None:
        """Starts summing a bucket. The one before it leaves the device first if its sum is final, and is freed if it is
        transient: so two of them are there at most, one that is summed and one that is filled."""
        if self.move is not None and self.final:
            before, self.leaving = self.leaving, bucket
            if before is not None:
                self._leave(before)
        if self.sent is not None and self.sent.transient:
            self.sent.settle()
        elif self.sent is not None and isinstance(self.sent.work, Phases):
            self.sent.work.advance()  # its second message travels beside this bucket's first one
        bucket.reduce(self.before_sum)
        self.sent = bucket

    def _leave(self, bucket: Bucket) -> None:
        """Lets the shards of a bucket that is being summed leave the device, but for those with a part of the gradient
        on other ranks."""
        bucket.settle()
        if bucket.shard.size > 1 and bucket.replicate.size > 1:
            bucket.sum_replicas().wait()
        for shard in bucket.shards:
            gradient = self._gradient(shard)
            if shard.whole_name in self.partial_names:
                shard.gradient = gradient.clone()
            else:
                self.leave(shard, gradient)
        bucket.release()

    def _gradient(self, shard: ParameterShard) -> Tensor:
        """Returns a shard's part of the settled sum of its bucket."""
        bucket, start, stop = self.places[shard.name]
        assert bucket.reduced is not None, "settled"
        begin = bucket.share.start if bucket.shard.size > 1 else 0
        return bucket.reduced[start - begin : stop - begin].view(shard.value.shape)

    def publish(self, *, frozen: bool = False) -> None:
        """All-gathers the parameters that this rank's optimizer changed, in the order of the next forward pass, which
        waits for each where it needs it; and the `frozen` ones if they have been set, too."""
        for bucket in reversed([*self.buckets, *(self.frozen if frozen else ())]):
            if bucket.shard.size > 1:
                bucket.gather()

    def local_parameters(self) -> list[ParameterShard]:
        if not self.sharded:
            return self.shards
        # Every rank computes with whole parameters, of which its shards are views.
        return [
            self.model.shard(slot.name, preceding(slot.name, slot.parameter.numel(), self.experts), slot.parameter)
            for bucket in (*self.buckets, *self.frozen)
            for slot in bucket.slots
        ]

    def arrive(self) -> None:
        for bucket in (*self.buckets, *self.frozen):
            bucket.arrive()

    def leave_early(self) -> None:
        """Buckets leave as soon as the next one is sent."""

    def release(self) -> None:
        for bucket in self.buckets:
            bucket.release()

    def compress(self, compression: CompressedSum) -> None:
        super().compress(compression)
        for bucket in self.buckets:
            bucket.compression = compression

    def clear(self) -> None:
        self.left.clear()
        self.leaving = self.sent = None
        for shard in self.shards:
            shard.gradient = None
        for bucket in self.buckets:
            bucket.clear()

    def _wait_where_needed(self, objective: Objective) -> None:
        """Makes the model's parts wait for their parameters: the embeddings at the start, each block, and the end."""
        model = objective.model
        parts: dict[nn.Module, list[nn.Module]] = {
            objective: [model.embed],
            model.final_norm: [model.final_norm, model.head],
        }
        parts[objective] += [part for part in (model.positions, model.layer_inputs) if part is not None]
        parts |= {block: [block] for block in model.blocks.values()}
        for module, owners in parts.items():
            needed = {p for owner in owners for p in owner.parameters()}
            buckets = [b for b in (*self.buckets, *self.frozen) if any(slot.parameter in needed for slot in b.slots)]
            module.register_forward_pre_hook(partial(_arrive, buckets))

    def collect(self) -> None:
        here = [bucket for bucket in self.buckets if not bucket.left]
        for bucket in here:
            if bucket.reduced is None:  # filled by several stages
                bucket.reduce(self.before_sum)
        for bucket in here:
            bucket.settle()
        shared = [b for b in here if b.shard.size > 1 and b.replicate.size > 1 and b.reduced is not None]
        for work in [bucket.sum_replicas() for bucket in shared]:
            work.wait()
        for bucket in here:
            for shard in bucket.shards:
                shard.gradient = self._gradient(shard)

    def _shards(self) -> list[ParameterShard]:
        shards: dict[str, ParameterShard] = {}
        places: dict[str, tuple[Bucket, int, int]] = {}
        for bucket in (*self.buckets, *self.frozen):
            for slot, start, stop in bucket.owned():
                value: Tensor = slot.parameter
                if bucket.shard.size > 1:
                    value = bucket.parameters[start:stop].detach().requires_grad_()
                first = start - slot.start + preceding(slot.name, slot.parameter.numel(), self.experts)
                shard = shards[slot.name] = self.model.shard(slot.name, first, value)
                shard.sharing = ShardGroup(bucket.shard, bucket.ranges(slot))
                places[slot.name] = bucket, start, stop
        self.places = places
        for bucket in (*self.buckets, *self.frozen):
            bucket.shards = [shards[slot.name] for slot in bucket.slots]
        return [shards[name] for name, _ in self._parameters()]


def preceding(name: str, elements: int, experts: tuple[int, Axis] | None) -> int:
    """Returns the elements of a tensor slice that earlier ranks hold, where this one holds `elements`: those of their
    experts."""
    return experts[0] * elements if experts and is_expert(name) else 0


def _arrive(buckets: Sequence[Bucket], *_: Any) -> None:
    for bucket in buckets:
        bucket.arrive()


def _slots(
    group: Sequence[tuple[str, nn.Parameter]], ranks: int, slices: TensorSlices, granularity: Granularity
) -> tuple[list[Slot], int]:
    """Returns the parameters' places in a bucket, and the elements of one rank's share."""
    sizes, named = [parameter.numel() for _, parameter in group], [(name, slices[name][0].shape) for name, _ in group]
    starts, each = granular_cut(granularity, sizes, named, ranks)
    return [Slot(name, parameter, start) for (name, parameter), start in zip(group, starts, strict=True)], each
