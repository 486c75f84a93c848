"""The accelerators of this machine, of the kinds that Phalanx uses: NVIDIA's, AMD's and Intel's GPUs."""

from __future__ import annotations

import os
import sys

from phalanx.config.cluster import DEVICE_TYPES, DEVICE_WORDS, no_device
from phalanx.errors import JobError


def accelerators(wanted: str) -> tuple[str, int]:
    """Returns torch's type and the number of this machine's devices that `wanted` means, a value of cluster.device:
    ("cpu", 0) if there are none. Where no driver of such devices is loaded, torch need not be imported for that."""
    modules = ("i915", "xe")  # Intel's
    paths = "/dev/nvidiactl", "/dev/kfd", "/dev/dxg", *(f"/sys/bus/pci/drivers/{module}" for module in modules)
    if "torch" not in sys.modules and not any(map(os.path.exists, paths)):
        return "cpu", 0
    import torch

    found = torch.accelerator.current_accelerator()
    kind = found.type if found else "cpu"
    here = DEVICE_TYPES.get(wanted) or kind
    if kind != here or kind not in DEVICE_TYPES.values() or (wanted == "rocm" and not torch.version.hip):
        return "cpu", 0
    count = torch.accelerator.device_count()
    return (kind, count) if count else ("cpu", 0)


def require(wanted: str, field: str = "cluster.device") -> None:
    """Raises JobError if `wanted`, the value of a field, names accelerators that this machine does not have."""
    if wanted in DEVICE_WORDS and not accelerators(wanted)[1]:
        raise JobError(no_device(wanted, field))
