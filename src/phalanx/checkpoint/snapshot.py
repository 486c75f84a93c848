"""Copies of a rank's part of the state in host memory, from which a checkpoint is written while training goes on.

The optimizer changes the state at the end of a step, not before. So the copy is made while the next step runs forward
and backward, and the optimizer waits for it (CheckFreq, Mohan et al. 2021, section 4.1). What is copied is written
while the rest is copied. State that is in files because memory is short is not copied: the checkpoint is written from
the files, and the optimizer waits for that.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from phalanx.parallel.offload import file_of, on_host

_ALIGNMENT = 64


class Snapshot:
    """Host memory for one copy of what a rank writes. It is kept and used again: fresh memory costs more than a
    copy."""

    def __init__(self, device: torch.device):
        self.device = device
        self.memory = torch.empty(0, dtype=torch.uint8)
        self.borrows = False
        """Whether some of the last `take` is not copied, so that it must not change before it has been written."""
        self._pairs: list[tuple[Tensor, Tensor]] = []
        self._filled = 0
        self._error: Exception | None = None
        self._changed = threading.Condition()
        self._copied: torch.cuda.Event | None = None

    def take(self, values: Sequence[Tensor]) -> list[Tensor]:
        """Returns memory for copies of flat tensors, which `begin` fills in this order; copies of the last time become
        invalid. Maps of files are returned themselves.

        Raises MemoryError if the host has too little memory."""
        mapped = [file_of(value.untyped_storage()) is not None for value in values]
        self.borrows = any(mapped)
        sizes = [
            0 if there else -(-value.nbytes // _ALIGNMENT) * _ALIGNMENT
            for value, there in zip(values, mapped, strict=True)
        ]
        if self.memory.numel() < sum(sizes):
            self.memory = self._allocate(sum(sizes))
        copies, position = [], 0
        for value, size, there in zip(values, sizes, mapped, strict=True):
            copies.append(value if there else self.memory[position : position + value.nbytes].view(value.dtype))
            position += size
        self._pairs, self._filled = list(zip(copies, values, strict=True)), len(copies)
        return copies

    def begin(self) -> None:
        """Begins to copy the tensors of the last `take`: from an accelerator before whatever the current stream does
        next, on a CPU in a thread."""
        self._filled, self._error = 0, None
        if self.device.type == "cuda":
            self.fill()
        else:
            threading.Thread(target=self.fill, name="copy of the state", daemon=True).start()

    def fill(self) -> None:
        """Copies the tensors of the last `take`."""
        try:
            for number, (copy, value) in enumerate(self._pairs):
                if copy is not value:
                    copy.copy_(value.detach(), non_blocking=True)
                self._tell(number + 1)
            if self.device.type == "cuda":
                self._copied = torch.cuda.Event()
                self._copied.record()
        except Exception as error:
            self._error = error
            self._tell(len(self._pairs))

    def hold(self) -> None:
        """Waits until the tensors of the last `take` may change."""
        with self._changed:
            self._changed.wait_for(lambda: self._filled == len(self._pairs))

    def wait(self, number: int) -> None:
        """Waits until the copies up to this number are complete. Raises what the copying raised."""
        with self._changed:
            self._changed.wait_for(lambda: self._filled > number)
        if self._error:
            raise self._error
        if self._copied is not None:
            self._copied.synchronize()

    def _tell(self, filled: int) -> None:
        with self._changed:
            self._filled = filled
            self._changed.notify_all()

    def _allocate(self, size: int) -> Tensor:
        self.memory = torch.empty(0, dtype=torch.uint8)
        try:
            with on_host():
                return torch.empty(size, dtype=torch.uint8, pin_memory=self.device.type == "cuda")
        except RuntimeError as error:
            raise MemoryError(str(error)) from None
