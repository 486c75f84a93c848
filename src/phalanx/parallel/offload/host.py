"""Host memory of a rank, and the copies between it and the device.

On an accelerator host memory is pinned, and copies run on a stream of their own, beside the computation. On a CPU both
are the same memory: tensors made inside `on_host` count as the host's, and everything else as the device's
(parallel/offload/budget.py).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_PLACE = threading.local()
Arrival = Any
"""A mark in the stream of copies; None on a CPU, whose copies have ended when they are started."""


@contextmanager
def on_host() -> Iterator[None]:
    """Counts the tensors that this thread makes in the `with` block as the host's."""
    before = is_on_host()
    _PLACE.host = True
    try:
        yield
    finally:
        _PLACE.host = before


def is_on_host() -> bool:
    """Returns whether tensors that this thread makes now are the host's."""
    return getattr(_PLACE, "host", False)


@dataclass
class CopiedBytes:
    """Bytes copied between device and host since the start of a run."""

    down: int = 0
    """From the device."""
    up: int = 0
    """To the device."""

    def goes_up(self, size: int) -> None:
        """Counts bytes that are copied to the device by others."""
        self.up += size


class Host:
    """The host memory beside one device."""

    def __init__(self, device: torch.device):
        self.device = device
        self.copied = CopiedBytes()
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        """The stream of copies."""
        self._free: dict[int, list[Tensor]] = {}
        """By size, memory to be lent again: pinning memory is slow."""

    def empty(self, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Returns host memory for a tensor of the shape of `like`, uninitialised."""
        with on_host():
            return torch.empty(
                like.shape, dtype=dtype or like.dtype, device="cpu", pin_memory=self.device.type == "cuda"
            )

    def lend(self, size: int) -> Tensor:
        """Returns `size` bytes of host memory that `take_back` has got earlier, or new ones: uninitialised."""
        free = self._free.get(size)
        if free:
            return free.pop()
        with on_host():
            return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=self.device.type == "cuda")

    def take_back(self, memory: Tensor) -> None:
        """Keeps memory that was lent. Copies from it may still be on their way: later ones into it wait for them."""
        self._free.setdefault(memory.numel(), []).append(memory)

    def down(self, tensor: Tensor, into: Tensor) -> None:
        """Starts copying a tensor of the device to host memory of the same type. `settle` waits for it."""
        self.copied.down += tensor.nbytes
        if self.stream is None:
            into.copy_(tensor)
            return
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            into.copy_(tensor, non_blocking=True)
        tensor.record_stream(self.stream)  # its memory may be used again only after the copy

    def up(self, source: Tensor, into: Tensor) -> None:
        """Starts copying host memory to a tensor of the device of the same type. What the device computes after the
        next `join` sees it."""
        self.copied.up += into.nbytes
        if self.stream is None:
            into.copy_(source)
            return
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            into.copy_(source, non_blocking=True)

    def arrival(self, into: Tensor) -> Arrival:
        """Returns a mark in the stream of copies: those into `into` are before it."""
        if self.stream is None:
            return None
        into.record_stream(self.stream)  # it may be freed before they end
        return self.stream.record_event()

    def wait(self, arrival: Arrival) -> None:
        """Makes the device's next computation wait for the copies before a mark."""
        if arrival is not None:
            torch.cuda.current_stream(self.device).wait_event(arrival)

    def join(self) -> None:
        """Makes the device's next computation wait for all copies."""
        if self.stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self.stream)

    def settle(self) -> None:
        """Waits until all copies have ended."""
        if self.stream is not None:
            self.stream.synchronize()
