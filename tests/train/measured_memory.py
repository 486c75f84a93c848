"""The memory that a rank really holds, which tests compare with the formulas."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable
from math import inf
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from cost.exact_state import StateBytes
from phalanx.dryrun.rehearse import gradients_of, parameters_of, state_of
from phalanx.parallel.data import Replica
from phalanx.parallel.offload import DeviceBudget
from phalanx.train.optimizer import ShardedOptimizer

LOOKS, LOOK_S = 10, 0.01
"""How often one looks what is alive, and how long apart, in seconds: the thread of a collective lets go of its tensors
a little after it has said that they are there."""


def least_device_peak(budget: DeviceBudget, take: Callable[[int], object], steps: int, *, alone: bool) -> int:
    """Takes `steps` steps, and returns the most bytes of the device.

    Takes four more, unless this rank is alone, and returns the most in one of those, if that is less: the thread of a
    collective may let go of its tensors late."""
    for step in range(steps):
        take(step)
    peaks = [budget.device_peak]
    for step in range(steps, steps + (0 if alone else 4)):
        budget.device_peak = budget.device
        take(step)
        peaks.append(budget.device_peak)
    return min(peaks)


def state_memory(replica: Replica, optimizer: ShardedOptimizer) -> StateBytes:
    """Bytes that this rank holds now, each storage once. The step counters of Adam, 4 bytes a tensor, do not count."""
    values, gradients = parameters_of(replica, optimizer), gradients_of(replica, optimizer)
    state_only = (
        storages_of(state_of(replica, optimizer)).items() - storages_of(values).items()
    )  # an empty moment stands for itself
    return StateBytes(
        sum(storages_of(values).values()), sum(storages_of(gradients).values()), sum(size for _, size in state_only)
    )


def activation_memory(block: nn.Module, x: Tensor, *others: Any) -> tuple[int, Tensor]:
    """Bytes that `block(x, *others)` keeps until its backward pass, and its output.

    They are `x` and what the forward pass made that is still alive after it, each storage once; without parameters, and
    without the output, which the next block counts."""
    with Made() as made:
        y = block(x, *others)
    gc.collect()
    output = y.untyped_storage()._cdata
    least = inf
    for look in range(LOOKS if dist.get_world_size() > 1 else 1):  # a rank alone has no collectives
        time.sleep(LOOK_S * (look > 0))
        kept = sum(size for key, (ref, size) in made.storages.items() if key != output and not ref.expired())
        least = min(least, kept)
    return int(least) + x.untyped_storage().nbytes(), y


class Made(TorchDispatchMode):
    """Every storage that an operation makes; not those that operations meet. Weak references keep the key of a storage
    from being used again for another."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self.met: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = tensors_in((args, kwargs))
        for tensor in given:
            storage = tensor.untyped_storage()
            if storage._cdata not in self.storages and storage._cdata not in self.met:
                self.met[storage._cdata] = StorageWeakRef(storage)
        result = func(*args, **(kwargs or {}))
        for tensor in tensors_in(result):
            storage = tensor.untyped_storage()
            if storage._cdata not in self.met and storage._cdata not in self.storages:
                self.add(storage._cdata, StorageWeakRef(storage), storage.nbytes())
        self.done(func, given)
        return result

    def add(self, key: int, ref: StorageWeakRef, size: int) -> None:
        """Records a storage that an operation made, of `size` bytes."""
        self.storages[key] = ref, size

    def done(self, func: Any, given: list[Tensor]) -> None:
        """Is called after every operation, with its tensors. A `__torch_dispatch__` that calls another one would take
        twice as long: torch wraps each."""


def tensors_in(tree: Any) -> list[Tensor]:
    """Returns the tensors among an operation's arguments or results; torch's own walk takes several times as long."""
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, dict):
        tree = tree.values()
    elif not isinstance(tree, (tuple, list)):
        return []
    return [tensor for branch in tree for tensor in tensors_in(branch)]


def storages_of(tensors: Iterable[Tensor | None]) -> dict[int, int]:
    """Bytes of each storage, by its identity."""
    local = (t.to_local() if isinstance(t, DTensor) else t for t in tensors if t is not None)
    return {(storage := t.untyped_storage())._cdata: storage.nbytes() for t in local}
