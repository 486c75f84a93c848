"""A row of the table of known devices, and the figures that it must state."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from phalanx.config.cluster import Accelerator
from phalanx.facts import stated


@stated
@dataclass(frozen=True)
class DeviceEntry:
    """One row of the table."""

    accelerator: Accelerator
    source: str
    """Source of the figures."""
    reported_as: tuple[str, ...] = ()
    """Names that torch.cuda.get_device_name reports, without the maker's; none for devices without CUDA or ROCm. Rows
    that share a name differ in memory."""


def device_problems(device: Accelerator) -> Iterator[str]:
    """Yields every figure that a known device must state and this one does not."""
    for name in ("fp32_tflops", "memory_gib", "bandwidth_gbs"):
        if not getattr(device, name) > 0:
            yield f"{name} is missing"
    if not (device.bf16_tflops > 0 or device.fp16_tflops > 0):
        yield "bf16_tflops or fp16_tflops is missing"
