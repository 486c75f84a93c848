"""A device's memory, counted tensor by tensor: on a CPU the stand-in for an accelerator's allocator.

A CPU has no device memory that could run out. With `run.device_budget_mib` every storage that is made outside `on_host`
counts as the device's until it is freed, so that what is offloaded is measured, and a layout that would not fit into so
large a device fails as it would there. Maps of files count as neither.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from phalanx.errors import RunError
from phalanx.parallel.offload.host import is_on_host
from phalanx.parallel.offload.state_file import file_of
from phalanx.units import MIB, gib


class BudgetError(RunError, MemoryError):
    """A device's budget is spent; `free` are the bytes that were left of it."""

    def __init__(self, message: str, free: int):
        super().__init__(message)
        self.free = free


class DeviceBudget(TorchDispatchMode):
    """Counts the storages of the thread in whose `with` block they are made. `limit` is in bytes; 0: only counts."""

    def __init__(self, limit: int = 0):
        super().__init__()
        self.limit = limit
        self.device = self.host = self.device_peak = self.host_peak = 0
        """Bytes of tensors now, and at most so far."""
        self._sizes: dict[int, tuple[bool, int]] = {}
        """By storage, whether it is the host's, and its bytes."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # what counts are the local tensors inside
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.device.type == "cpu":
                self._meet(tensor.untyped_storage())
        return result

    def _meet(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._sizes or file_of(storage):
            return
        self._sizes[key] = is_on_host(), 0
        weakref.finalize(storage, self._forget, key)
        self._resize(key, storage.nbytes())

    def _resize(self, key: int, size: int) -> None:
        on_host, before = self._sizes[key]
        self._sizes[key] = on_host, size
        if on_host:
            self.host += size - before
            self.host_peak = max(self.host_peak, self.host)
            return
        self.device += size - before
        self.device_peak = max(self.device_peak, self.device)
        if size > before and self.limit and self.device > self.limit:
            raise BudgetError(
                f"tensors of {gib(self.device)} exceed run.device_budget_mib, {gib(self.limit)} per device",
                max(0, self.limit - self.device + size - before),
            )

    def _forget(self, key: int) -> None:
        on_host, size = self._sizes.pop(key)
        if on_host:
            self.host -= size
        else:
            self.device -= size

    @contextmanager
    def counting(self) -> Iterator[DeviceBudget]:
        """Counts in the `with` block, also storages that are resized without an operation, as FSDP2 does."""
        plain: Callable[..., Any] = torch.UntypedStorage.resize_

        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            result = plain(storage, size)
            if storage._cdata in self._sizes:
                self._resize(storage._cdata, size)
            return result

        with self, mock.patch.object(torch.UntypedStorage, "resize_", resize):
            yield self


@contextmanager
def device_budget(mib: float) -> Iterator[dict[str, int]]:
    """Enforces `run.device_budget_mib` in the `with` block. Yields the peaks in bytes, which are known after it; empty
    without a budget."""
    peaks: dict[str, int] = {}
    if not mib:
        yield peaks
        return
    with DeviceBudget(round(mib * MIB)).counting() as budget:
        yield peaks
    peaks |= {"device_peak_bytes": budget.device_peak, "host_peak_bytes": budget.host_peak}
