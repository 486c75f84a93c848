"""Copies of a rank's part of the state in host memory, from which a checkpoint is written while training goes on.

The optimizer changes the state at the end of a step, not before. So the copy is made while the next step runs forward
and backward, and the optimizer waits for it (CheckFreq, Mohan et al. 2021, section 4.1).
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch import Tensor

_ALIGNMENT = 64


class Snapshot:
    """Host memory for one copy of what a rank writes. It is kept and used again: fresh memory costs more than a
    copy."""

    def __init__(self, device: torch.device):
        self.device = device
        self.memory = torch.empty(0, dtype=torch.uint8)
        self.copied: torch.cuda.Event | None = None
        self._pending: list[tuple[Tensor, Tensor]] = []
        self._complete = threading.Event()
        self._complete.set()

    def take(self, values: Sequence[Tensor]) -> list[Tensor]:
        """Returns copies of flat tensors, which `fill` fills; those of the last time become invalid. From an
        accelerator the copy is begun now, before whatever the current stream does next.

        Raises MemoryError if the host has too little memory."""
        sizes = [-(-value.nbytes // _ALIGNMENT) * _ALIGNMENT for value in values]
        if self.memory.numel() < sum(sizes):
            self.memory = self._allocate(sum(sizes))
        copies, position = [], 0
        for value, size in zip(values, sizes, strict=True):
            copies.append(self.memory[position : position + value.nbytes].view(value.dtype))
            position += size
        self._pending = list(zip(copies, values, strict=True))
        self._complete.clear()
        if self.device.type == "cuda":
            self.fill()
        return copies

    @torch.no_grad()
    def fill(self) -> None:
        """Copies the tensors of the last `take`; any thread may do it. Afterwards they may change."""
        try:
            for copy, value in self._pending:
                copy.copy_(value, non_blocking=True)
            self._pending = []
            if self.device.type == "cuda":
                self.copied = torch.cuda.Event()
                self.copied.record()
        finally:
            self._complete.set()

    def hold(self) -> None:
        """Waits until the tensors of the last `take` may change."""
        self._complete.wait()

    def wait(self) -> None:
        """Waits until the copy is complete."""
        self.hold()
        if self.copied is not None:
            self.copied.synchronize()

    def _allocate(self, size: int) -> Tensor:
        self.memory = torch.empty(0, dtype=torch.uint8)
        try:
            return torch.empty(size, dtype=torch.uint8, pin_memory=self.device.type == "cuda")
        except RuntimeError as error:
            raise MemoryError(str(error)) from None
