"""Copies of a rank's part of the state in host memory, from which a checkpoint is written while training goes on."""

from __future__ import annotations

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

    def take(self, values: Sequence[Tensor]) -> list[Tensor]:
        """Returns copies of flat tensors; those of the last time become invalid. From an accelerator the copy is only
        begun, before whatever the current stream does next: `wait` waits for it.

        Raises MemoryError if the host has too little memory."""
        sizes = [-(-value.nbytes // _ALIGNMENT) * _ALIGNMENT for value in values]
        if self.memory.numel() < sum(sizes):
            self.memory = self._allocate(sum(sizes))
        copies, position = [], 0
        for value, size in zip(values, sizes, strict=True):
            copy = self.memory[position : position + value.nbytes].view(value.dtype)
            copies.append(copy.copy_(value, non_blocking=True))
            position += size
        if self.device.type == "cuda":
            self.copied = torch.cuda.Event()
            self.copied.record()
        return copies

    def wait(self) -> None:
        """Waits until the copy is complete."""
        if self.copied is not None:
            self.copied.synchronize()

    def _allocate(self, size: int) -> Tensor:
        self.memory = torch.empty(0, dtype=torch.uint8)
        try:
            return torch.empty(size, dtype=torch.uint8, pin_memory=self.device.type == "cuda")
        except RuntimeError as error:
            raise MemoryError(str(error)) from None
