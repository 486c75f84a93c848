"""Data parallelism: each replica computes the gradients of its own samples, and they are summed.

`Replica` is one replica alone; `BucketReplica` (parallel/zero.py) and `ShardedReplica` (parallel/fsdp.py) are one of
several processes; `ThreadReplicas` runs them all as threads of one process, the baseline that shows what one
interpreter costs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Protocol
from weakref import WeakMethod

import torch
from torch import Tensor, nn

from phalanx.blocks.parameters import weight_of
from phalanx.comm.axis import Axis
from phalanx.launch.watchdog import heartbeat
from phalanx.optimizers.entry import Granularity
from phalanx.parallel.compression import CompressedSum
from phalanx.parallel.objective import MicroTensors, Objective
from phalanx.parallel.parameter_shards import ParameterShard
from phalanx.parallel.stages import Stages
from phalanx.partition.tensor_slices import TensorSlice

TensorSlices = Mapping[str, tuple[TensorSlice, ...]]
"""By parameter name, the tensor slice of each tensor rank."""


@dataclass(frozen=True)
class PartialGradients:
    """Parameters replicated on several ranks that each compute only part of the gradient, that of their own tokens or
    heads: the parts are summed over `axis` once per step."""

    axis: Axis
    names: frozenset[str]
    """Parameter names in the plain model."""


@dataclass(frozen=True)
class LocalModel:
    """This rank's part of the model with its loss: the input of data parallelism."""

    objective: Objective
    tensor_slices: TensorSlices
    """Slices of all parameters of the objective's model."""
    tp: Axis
    partials: Sequence[PartialGradients] = ()
    plain_names: Mapping[str, str] = field(default_factory=dict)
    """Plain-model names of the parameters that are renamed: those of tiles."""
    stages: Stages | None = None
    """This rank's part of a pipeline; None without one."""

    def plain_name(self, name: str) -> str:
        """Returns the plain model's name of the parameter that is called `name` here."""
        return self.plain_names.get(name, name)

    def users(self, name: str) -> list[int]:
        """Returns the stages on this rank that compute with a parameter: [0] without a pipeline."""
        return [0] if self.stages is None else self.stages.users(self.plain_name(name))

    def holders(self, name: str) -> list[int]:
        """Returns the pipeline ranks that hold a parameter, the one that counts it first: [0] without a pipeline."""
        return [0] if self.stages is None else self.stages.holders(self.plain_name(name))

    def shard(self, name: str, start: int, value: Tensor) -> ParameterShard:
        """Returns this rank's shard `value` of a parameter, from element `start` of the tensor slice on."""
        copy = self.stages is not None and self.holders(name)[0] != self.stages.rank
        slices, plain = self.tensor_slices[name], self.plain_name(name)
        frozen = weight_of(self.objective.model.config, plain).frozen
        return ParameterShard(name, slices, self.tp.rank, start, value, copy=copy, whole_name=plain, frozen=frozen)


@dataclass(frozen=True)
class GradientSum:
    """The way the data ranks sum their gradients."""

    shard: Axis
    """The ranks that share the state."""
    replicate: Axis
    """The ranks that hold the same state."""
    dtype: torch.dtype | None = None
    """The type in which gradients are accumulated and sent; None for the parameters' type."""
    every_micro_batch: bool = False
    """Reduce sharded gradients after every micro-batch instead of once per step: less memory, more traffic."""
    granularity: Granularity = "element"
    """Where shards of flat buckets may end: the optimizer's."""
    experts: tuple[int, Axis] | None = None
    """With expert parallelism, this rank's place among those of `shard` that hold different experts, and edp, which
    replaces `shard` for the experts' state."""


class Runner(Protocol):
    """Runs a replica's micro-batches in an order other than sequential: a pipeline (parallel/pipeline.py)."""

    def gradients(self, micros: Sequence[MicroTensors], factor: float) -> Tensor:
        """Computes the same as Replica.gradients. The loss is zero on ranks that do not compute it."""
        ...

    def loss(self, micro: MicroTensors) -> Tensor:
        """Computes the same as Replica.loss. The loss is zero on ranks that do not compute it."""
        ...


Move = Callable[[ParameterShard, Tensor], Tensor]
"""Copies a shard's final gradient to the memory of an offloaded optimizer, and returns the copy."""


def call_when_complete(weights: Iterable[Tensor], method: Callable[[Tensor], None]) -> None:
    """Makes autograd call a bound method with each of the weights when its gradient of a backward pass is complete.

    It is referenced weakly: the garbage collector does not see references held by a parameter's hook, and they would
    keep the replica alive, with its process groups and their threads."""
    told = WeakMethod(method)
    for weight in weights:
        weight.register_post_accumulate_grad_hook(lambda weight: tell(weight) if (tell := told()) else None)


class Replica:
    """One process that computes a whole step by itself, or with its tensor ranks."""

    runner: Runner | None = None
    before_sum: Callable[[Tensor], None] | None = None
    """Gets this rank's own gradients, a flat tensor at a time, before they are summed over the data ranks."""
    move: Move | None = None
    """Takes final gradients off the device; None: they stay there."""
    compression: CompressedSum | None = None
    """How replicas sum their gradients; None: the numbers as they are."""
    final = False
    """True in the backward pass after which gradients are final."""

    def __init__(self, model: LocalModel):
        self.model, self.objective = model, model.objective
        self.shards = self._shards()
        self.partial_names = {name for partial in model.partials for name in partial.names}
        self.left: set[str] = set()
        """Names of the shards whose gradients have left the device in this step."""

    def gradients(self, micros: Sequence[MicroTensors], factor: float) -> Tensor:
        """Computes `factor` × the gradient of the micro-batches' summed loss. Returns that loss, in fp64, detached.

        Afterwards every parameter shard's gradient is the sum over all data ranks."""
        if self.runner is not None:
            return self.runner.gradients(micros, factor)
        losses = [self.forward_backward(m, factor, last=n == len(micros) - 1) for n, m in enumerate(micros)]
        return torch.stack(losses).double().sum()

    def forward_backward(self, micro: MicroTensors, factor: float, *, last: bool) -> Tensor:
        """Adds `factor` × the gradient of one micro-batch's summed loss to the accumulated gradients.

        Returns the loss summed over the micro-batch's tokens, detached. After the call with `last`, every parameter
        shard's gradient is the sum over all data ranks.
        """
        heartbeat.beat()
        self.final = last
        self.begin_backward(0, last=last)
        loss = self.objective(micro)
        (loss * factor).backward()
        self.end_backward(0, last=last)
        if last:
            self.finish()
        return loss.detach()

    def begin_backward(self, stage: int, *, last: bool) -> None:
        """Prepares a stage's parameters for the gradients of another micro-batch, which may be the `last` one."""

    def end_backward(self, stage: int, *, last: bool) -> None:
        """Records that a stage's parameters have the micro-batch's gradients."""

    def arrived(self, weight: Tensor) -> None:
        """Records that a gradient was added to weight.grad, bypassing autograd's hooks."""

    def finish(self) -> None:
        """Gives the parameter shards their gradients, after the last micro-batch's backward pass on all stages."""
        self.collect()
        self._sum_partials()
        if self.move is not None:
            for shard in self.shards:
                self.leave(shard, shard.gradient)
            self.release()

    def collect(self) -> None:
        """Moves this rank's gradients, summed over the data ranks, to the parameter shards."""
        for shard in self.shards:
            if shard.name not in self.left:
                shard.gradient = shard.value.grad

    def offload(self, move: Move) -> None:
        """Makes final gradients leave the device through `move`, those of most parameters during the backward pass."""
        self.move = move
        self.leave_early()

    def leave_early(self) -> None:
        """Arranges that gradients leave during the backward pass: without a pipeline, whose stages may share
        parameters."""
        self.of_weight = {shard.value: shard for shard in self.shards if not shard.frozen}
        call_when_complete(self.of_weight, self._ready)

    def _ready(self, weight: Tensor) -> None:
        """Lets a gradient leave that autograd has just completed."""
        shard = self.of_weight[weight]
        if self.final and self.runner is None and shard.whole_name not in self.partial_names:
            self.leave(shard, weight.grad)
            weight.grad = None

    def leave(self, shard: ParameterShard, gradient: Tensor | None) -> None:
        """Lets a shard's final gradient leave the device, once per step."""
        if self.move is not None and gradient is not None and shard.name not in self.left:
            shard.gradient = self.move(shard, gradient)
            self.left.add(shard.name)

    def release(self) -> None:
        """Frees the device's memory of gradients that have left it."""
        for shard in self.shards:
            shard.value.grad = None

    def loss(self, micro: MicroTensors) -> Tensor:
        """Returns the loss summed over the micro-batch's valid tokens, for validation: no gradients, no dropout."""
        with torch.no_grad():
            micro = replace(micro, noise=None)
            return self.objective(micro) if self.runner is None else self.runner.loss(micro)

    def publish(self, *, frozen: bool = False) -> None:
        """All-gathers the parameters that the optimizers changed, and the `frozen` ones if they have been set, too."""

    def local_parameters(self) -> Sequence[ParameterShard]:
        """Returns what this rank keeps of every parameter from step to step."""
        return self.shards

    def arrive(self) -> None:
        """Waits until the parameters are here that `publish` gathers."""

    def compress(self, compression: CompressedSum) -> None:
        """Makes replicas sum their gradients so."""
        self.compression = compression

    def observe(self, before_sum: Callable[[Tensor], None] | None) -> None:
        """Sets `before_sum`."""
        self.before_sum = before_sum

    def clear(self) -> None:
        """Discards the gradients."""
        self.left.clear()
        for shard in self.shards:
            shard.gradient = None
        self.objective.zero_grad(set_to_none=True)

    def _shards(self) -> list[ParameterShard]:
        return [self.model.shard(name, 0, parameter) for name, parameter in self._parameters()]

    def _sum_partials(self) -> None:
        for partial in self.model.partials:
            gradients = [f.gradient for f in self.shards if f.whole_name in partial.names and f.gradient is not None]
            if not gradients or not (flat := torch.cat([g.flatten() for g in gradients])).numel():
                continue
            partial.axis.all_reduce(flat).wait()
            for gradient, summed in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
                gradient.copy_(summed.view_as(gradient))

    def _parameters(self) -> list[tuple[str, nn.Parameter]]:
        return list(self.objective.model.named_parameters())


class ThreadReplicas(Replica):
    """All replicas in one process, each a thread over its part of the micro-batch, on shared parameters."""

    def __init__(self, model: LocalModel, replicas: int):
        super().__init__(model)
        self.replicas = replicas
        share = max(1, torch.get_num_threads() // replicas)
        self.pool = ThreadPoolExecutor(replicas, "replica", initializer=torch.set_num_threads, initargs=(share,))

    def forward_backward(self, micro: MicroTensors, factor: float, *, last: bool) -> Tensor:
        size = len(micro.tokens)
        bounds = [size * i // self.replicas for i in range(self.replicas + 1)]
        parts = [micro.part(slice(a, b)) for a, b in itertools.pairwise(bounds) if b > a]
        run = super().forward_backward
        losses = list(self.pool.map(lambda part: run(part, factor, last=False), parts))
        if last:
            self.finish()
        return torch.stack(losses).sum()
