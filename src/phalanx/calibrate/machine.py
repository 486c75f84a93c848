"""What a measurement was made on, without names of hosts or users."""

from __future__ import annotations

import importlib.metadata
import platform
import time
from pathlib import Path


def processor() -> str:
    """The CPU's name, as its maker calls it."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def facts() -> str:
    """Date, processor and version of torch."""
    return f"{time.strftime('%Y-%m-%d')}, {processor()}, torch {importlib.metadata.version('torch')}"
