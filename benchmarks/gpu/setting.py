"""The setting of a run of benchmarks.gpu: the device, its memory, and the versions of its drivers."""

from __future__ import annotations

import platform
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

ROOT = Path(__file__).parents[2]
"""Commands run here, so that `python -m benchmarks.gpu...` is found."""


class NoGpuError(Exception):
    """Raised when this machine has no NVIDIA GPU that torch can use; the message says what to do."""


@dataclass(frozen=True)
class Setting:
    """The facts about the machine that every part needs."""

    device: Literal["cuda", "cpu"]
    quick: bool
    name: str
    """The device's name from its driver."""
    gpus: int
    """Number of GPUs; 1 on a CPU."""
    memory: int
    """Bytes of one device."""

    @property
    def precision(self) -> str:
        """The training precision: bf16 on a GPU, fp32 on a CPU."""
        return "bf16" if self.device == "cuda" else "fp32"

    @property
    def file_name(self) -> str:
        """The results' file name without a suffix."""
        return f"gpu-{slug(self.name)}" + ("-quick" if self.quick else "")


def find(device: Literal["cuda", "cpu"], quick: bool) -> Setting:
    """Returns the setting of this machine. Raises NoGpuError where `device` is cuda and there is none."""
    if device == "cpu":
        return Setting("cpu", quick, "CPU", 1, 8 * 2**30)
    if not torch.cuda.is_available():
        built = "" if torch.version.cuda else f" (torch {torch.__version__} is built without CUDA)"
        raise NoGpuError(
            f"no NVIDIA GPU here that torch can use{built}; `--device cpu --quick` rehearses every part on the CPU"
        )
    facts = torch.cuda.get_device_properties(0)
    return Setting("cuda", quick, facts.name, torch.cuda.device_count(), facts.total_memory)


def facts(setting: Setting) -> dict[str, Any]:
    """Returns the facts that figures depend on: device, versions of the driver, CUDA, NCCL and torch."""
    on_gpu = setting.device == "cuda"
    return {
        "device": setting.name,
        "gpus": setting.gpus,
        "memory_gib": round(setting.memory / 2**30, 1),
        "driver": driver() if on_gpu else None,
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if on_gpu else None,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def driver() -> str:
    """Returns the version of NVIDIA's kernel driver from nvidia-smi; "unknown" without that program."""
    words = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        said = subprocess.run(words, capture_output=True, text=True, check=True, timeout=30).stdout.split()
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return said[0] if said else "unknown"


def slug(name: str) -> str:
    """Returns a device's name as part of a file name: "NVIDIA H100 80GB HBM3" is "nvidia-h100-80gb-hbm3"."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "unknown"
