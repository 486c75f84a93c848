"""Facts by which a measurement recognises the machine that it was made on."""

from __future__ import annotations

import os
import platform
from pathlib import Path


def processor() -> str:
    """Returns the CPU's model name from /proc/cpuinfo, or the architecture where there is none."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def core_count() -> int:
    """Returns the number of logical cores of the machine, whichever of them this process may use."""
    return os.cpu_count() or 1


def host_name() -> str:
    """Returns the network name of this machine."""
    return platform.node()
