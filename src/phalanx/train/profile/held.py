"""The tensors that a rank keeps from step to step, each storage once, by part."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor
from torch.distributed.tensor import DTensor

from phalanx.parallel.pipeline import PipeDream
from phalanx.parallel.zero import BucketReplica
from phalanx.train.profile.largest import LiveTensor
from phalanx.train.step import Stepper


def held_tensors(stepper: Stepper) -> list[LiveTensor]:
    """Returns parameters, gradient buffers and optimizer state, between two steps."""
    seen: set[int] = set()
    found = []
    for part, name, tensor in _tensors(stepper):
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        storage = local.untyped_storage()
        if storage.nbytes() and storage._cdata not in seen:
            seen.add(storage._cdata)
            found.append(LiveTensor(part, name, storage.nbytes()))
    return found


def _tensors(stepper: Stepper) -> Iterator[tuple[str, str, Tensor]]:
    replica, optimizer = stepper.replica, stepper.optimizer
    for number, bucket in enumerate(replica.buckets if isinstance(replica, BucketReplica) else ()):
        yield "parameters", f"bucket {number} of parameters", bucket.parameters
        if bucket.gradients is not None:
            yield "gradients", f"bucket {number} of gradients", bucket.gradients
    for name, parameter in replica.objective.model.named_parameters():
        yield "parameters", name, parameter
        if parameter.grad is not None:
            yield "gradients", f"{name}.grad", parameter.grad
    for shard in replica.shards:
        yield "parameters", shard.name, shard.value
    if isinstance(replica.runner, PipeDream):
        for number, weights in enumerate(replica.runner.versions):
            for weight in weights:
                yield "parameters", f"version {number} of the weights", weight
    for kind, tensors in optimizer.state_tensors().items():
        for name, tensor in tensors.items():
            yield "optimizer", f"{name} ({kind})", tensor
