"""Measures what `layout.offload` uses of the host: copies from the device to its memory, the optimizer's update, and a
local disk."""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from phalanx.comm.agree import on_every_rank, on_rank_zero
from phalanx.config.cluster import HostShare
from phalanx.config.model import ModelConfig
from phalanx.config.optimizer import Optimizer
from phalanx.errors import OffloadError
from phalanx.optimizers.facts import optimizer_costs
from phalanx.parallel.offload.state_file import StateFile
from phalanx.partition.derived import BUFFER_BYTES
from phalanx.train.optimizers.adamw import adamw

Call = Callable[[], Any]
DISK_BYTES = {True: 2**24, False: BUFFER_BYTES}
"""Bytes that are written, and read, at a time, by --quick."""
ELEMENTS = {True: 2**20, False: 2**23}
"""Parameters of the measured update, by --quick: 16 and 128 MiB of state."""


def calls(device: torch.device, *, quick: bool) -> tuple[Call, Call]:
    """Returns a copy of fp32 parameters from the device to host memory, and AdamW's update of as many on the host."""
    elements, pinned = ELEMENTS[quick], device.type == "cuda"
    there, here = torch.ones(elements, device=device), torch.empty(elements, pin_memory=pinned)
    parameter = torch.zeros(elements).requires_grad_()
    parameter.grad = torch.ones(elements)
    rule = adamw([{"params": [parameter], "shards": [None], "weight_decay": 0.0}], Optimizer())
    return partial(here.copy_, there, non_blocking=pinned), rule.step


def disk(quick: bool) -> tuple[StateFile, Call] | None:
    """Returns a file in the folder of temporary files ($TMPDIR), and a call that writes DISK_BYTES there and reads as
    many, as an update with `offload_to` does; None on all ranks if one of them cannot have the file. A collective of
    all ranks."""
    try:
        file = on_every_rank(lambda: StateFile(Path(tempfile.gettempdir()), 2 * DISK_BYTES[quick]))
    except OffloadError:
        return None
    memory = mmap.mmap(-1, DISK_BYTES[quick])  # begins with a page, as direct I/O needs it
    buffer = torch.frombuffer(memory, dtype=torch.uint8)
    file.write(buffer, 0)
    file.write(buffer, DISK_BYTES[quick])

    def call() -> None:
        file.write(buffer, 0)
        file.read(buffer, DISK_BYTES[quick])

    return file, call


def share(
    copy_s: float, update_s: float, disk_s: float, memory_gib: float, disk_gib: float, *, quick: bool
) -> HostShare:
    """Returns the host's figures from the seconds of the calls; `memory_gib` and `disk_gib` are the host's memory and
    the disk's free space per device. Without a disk its figures are 0."""
    moved = optimizer_costs(Optimizer(), ModelConfig(vocab_size=1), 4).moved
    return HostShare(
        memory_gib=memory_gib,
        link_gbs=4 * ELEMENTS[quick] / copy_s / 1e9,
        update_gbs=moved * ELEMENTS[quick] / update_s / 1e9,
        disk_gbs=2 * DISK_BYTES[quick] / disk_s / 1e9 if disk_s else 0.0,
        disk_gib=disk_gib,
    )


def free_space() -> float:
    """Returns the free bytes of the disk of temporary files, the same on all ranks."""

    def free() -> float:
        space = os.statvfs(tempfile.gettempdir())
        return float(space.f_bavail * space.f_frsize)

    return on_rank_zero(free)
