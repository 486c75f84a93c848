"""Offloaded activations: what blocks save for the backward pass waits in host memory.

After a block's forward pass the tensors that autograd has saved in it are copied down and given up; with full
recomputation that is the block's input alone. When the backward pass reaches the block after it, they are fetched, so
that the copies run beside that block's computation (vDNN: Rhu et al. 2016; ZeRO-Infinity: Rajbhandari et al. 2021,
section 5.1). Parameters, and inputs that all blocks share such as the table of positions, stay where they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from phalanx.config.layout import Layout
from phalanx.model.layers import Run
from phalanx.model.transformer import Block, Transformer
from phalanx.parallel.offload.host import Arrival, Host
from phalanx.partition.derived import offloaded_layers

LEAST_BYTES = 1024
"""Smaller tensors stay: a copy would take longer than it is worth."""


def offload_activations(model: Transformer, layout: Layout, stages: Sequence[range], host: Host) -> int:
    """Makes blocks of `model` keep what they save in host memory if the layout says so for their place in one of the
    `stages`, of which only those are local whose blocks the model has. Returns their number."""
    found = 0
    for stage in stages:
        away = offloaded_layers(layout, stage)
        earlier: SwappingRun | None = None
        for layer in stage:
            if str(layer) not in model.blocks:
                continue
            block = model.blocks[str(layer)]
            assert isinstance(block, Block), "nothing wraps blocks before this"
            block.run = earlier = SwappingRun(block, host, earlier, leaves=layer in away)
            found += earlier.leaves
    return found


class SwappingRun:
    """The `run` of a block whose saved tensors leave the device, or of one in whose backward pass those of the block
    before it are fetched. It calls the `run` that it replaces."""

    def __init__(self, block: Block, host: Host, earlier: SwappingRun | None, *, leaves: bool):
        self.block, self.host, self.earlier, self.leaves = block, host, earlier, leaves
        self.run: Run = block.run
        self.latest: SavedByPass | None = None
        """The latest forward pass, until the next block's takes it over."""

    def __call__(self, compute: Run, *inputs: Any) -> Tensor:
        if not torch.is_grad_enabled():
            return self.run(compute, *inputs)
        mine = SavedByPass(self.host, self._before())
        if not self.leaves:
            output = self.run(compute, *inputs)
        else:
            # Autograd may save the other inputs, which do not belong to this block.
            shared = {_key(tensor) for tensor in inputs[1:] if isinstance(tensor, Tensor)}
            with saved_tensors_hooks(lambda tensor: mine.pack(tensor, self.block, shared), unpack):
                output = self.run(compute, *inputs)
            mine.leave()
        self.latest = mine
        if output.requires_grad:
            output.register_hook(mine.arrive)
        return output

    def _before(self) -> SavedByPass | None:
        """Returns the pass of the block before this one that has just ended."""
        if self.earlier is None:
            return None
        before, self.earlier.latest = self.earlier.latest, None
        return before


class SavedByPass:
    """The tensors that one forward pass of a block has saved."""

    def __init__(self, host: Host, before: SavedByPass | None):
        self.host, self.before = host, before
        self.made: dict[int, SavedStorage] = {}
        """By storage, while the forward pass runs."""
        self.saved: list[ref[SavedStorage]] = []
        """Autograd alone keeps them: each ends with the last operation that needs it."""

    def pack(self, tensor: Tensor, block: nn.Module, shared: set[int]) -> Tensor | PackedView:
        """Returns what autograd keeps in place of a tensor that it saves."""
        if (
            tensor.device.type != self.host.device.type
            or tensor.layout != torch.strided
            or _bytes(tensor) < LEAST_BYTES
        ):
            return tensor
        key = _key(tensor)
        if key not in self.made:
            # Gathered parameters are the module's only while it computes.
            if key in shared or key in map(_key, block.parameters()):
                return tensor
            self.made[key] = SavedStorage(tensor.untyped_storage(), self.host)
        return PackedView(self.made[key], tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def leave(self) -> None:
        """Starts copying everything to the host, and gives up the device's memory of it."""
        for each in self.made.values():
            each.leave()
        self.saved = [ref(each) for each in self.made.values()]
        self.made = {}

    def fetch(self) -> None:
        """Starts copying everything to the device that the backward pass still needs."""
        for each in self._needed():
            each.fetch()

    def arrive(self, _: Tensor) -> None:
        """Called when the block's backward pass begins: what it needs is here for the device's next computation, and
        what the block before it needs is on its way."""
        self.fetch()
        for each in self._needed():
            each.arrive()
        if self.before is not None:
            self.before.fetch()
            self.before = None

    def _needed(self) -> Iterator[SavedStorage]:
        return (each for weak in self.saved if (each := weak()) is not None)


class SavedStorage:
    """The memory of saved tensors: on the device, in host memory, or on its way."""

    def __init__(self, storage: torch.UntypedStorage, host: Host):
        self.host, self.size = host, storage.nbytes()
        self.storage: torch.UntypedStorage | None = storage
        """The device's memory, if it is there."""
        self.copy: Tensor | None = None
        """The host's, if it is there."""
        self.arrival: Arrival | None = None

    def leave(self) -> None:
        """Starts copying it to the host."""
        assert self.storage is not None, "only once, after the forward pass"
        self.copy = self.host.lend(self.size)
        self.host.down(torch.empty(0, dtype=torch.uint8, device=self.host.device).set_(self.storage), self.copy)
        self.storage = None

    def fetch(self) -> None:
        """Starts copying it to the device, unless it is there or on its way."""
        if self.storage is not None:
            return
        assert self.copy is not None, "it is on the host or on the device"
        bytes_of = torch.empty(self.size, dtype=torch.uint8, device=self.host.device)
        self.host.up(self.copy, bytes_of)
        self.arrival = self.host.arrival(bytes_of)
        self.storage = bytes_of.untyped_storage()
        self._free()

    def arrive(self) -> None:
        """Makes the device's next computation wait until it is there."""
        if self.arrival is not None:
            self.host.wait(self.arrival)
            self.arrival = None

    def _free(self) -> None:
        if self.copy is not None:
            self.host.take_back(self.copy)
            self.copy = None

    def __del__(self) -> None:
        self._free()  # of a step that was given up


class PackedView(NamedTuple):
    """A saved tensor as a view of its storage."""

    saved: SavedStorage
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


def unpack(packed: Tensor | PackedView) -> Tensor:
    """Returns a saved tensor for the backward pass."""
    if isinstance(packed, Tensor):
        return packed
    saved, dtype, size, stride, offset = packed
    saved.fetch()
    saved.arrive()
    assert saved.storage is not None, "it was fetched"
    return torch.empty(0, dtype=dtype, device=saved.host.device).set_(saved.storage, offset, size, stride)


def _key(tensor: Tensor) -> int:
    """Returns a number that tensors with the same memory share."""
    return tensor.untyped_storage()._cdata if type(tensor) in (Tensor, nn.Parameter) else 0


def _bytes(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes() if type(tensor) in (Tensor, nn.Parameter) else 0
