"""The date, machine and software versions of a measurement."""

from __future__ import annotations

import importlib.metadata
import platform
import time

import phalanx
from phalanx.config import this_machine
from phalanx.config.calibration import Provenance


def provenance() -> Provenance:
    """Returns today's date, this machine and the versions of phalanx, torch and Python."""
    torch = importlib.metadata.version("torch")
    return Provenance(
        date=time.strftime("%Y-%m-%d"),
        host=this_machine.host_name(),
        processor=this_machine.processor(),
        cores=this_machine.core_count(),
        versions=f"phalanx {phalanx.__version__}, torch {torch}, python {platform.python_version()}",
    )
