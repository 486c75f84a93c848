"""Checks before ranks start that this machine has the cores, memory and accelerators for them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

RANKS_PER_CORE = 8
"""Most ranks on a core of a CPU: beyond that they wait for each other's turns more than they compute."""
FEW_RANKS = 16
"""Ranks that every machine may have, however few cores it has."""
RANK_BYTES = 256 * 2**20
"""Memory of a rank's own before it holds a model: Python, torch and the process group."""
FLAG = "--oversubscribe"


@dataclass(frozen=True)
class Machine:
    """The resources of this machine that ranks use."""

    cores: int
    """Usable cores."""
    free_bytes: int
    """Memory that is available now; with swap space."""
    devices: int
    """Accelerators."""


def has_driver() -> bool:
    """Returns whether a driver of accelerators is loaded, so that it is worth importing torch to count them."""
    return any(os.path.exists(path) for path in ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg"))


def this_machine(devices: int) -> Machine:
    """Returns the cores and the free memory of this machine (of its control group, where that is less)."""
    facts = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines())
    free = sum(int(facts.get(name, "0").split()[0]) * 1024 for name in ("MemAvailable", "SwapFree"))
    return Machine(len(os.sched_getaffinity(0)), min([free, *_left_in_group()]), devices)


def _left_in_group() -> Iterator[int]:
    group = Path("/sys/fs/cgroup")
    try:
        most = (group / "memory.max").read_text(encoding="ascii").strip()
        used = int((group / "memory.current").read_text(encoding="ascii"))
        cache = next(
            line for line in (group / "memory.stat").read_text(encoding="ascii").splitlines() if "file " in line
        )
    except (OSError, StopIteration, ValueError):
        return
    if most != "max":
        yield int(most) - used + int(cache.split()[1])


def tasks_per_node(env: Mapping[str, str]) -> int:
    """Returns the processes that Slurm started on each node, 0 if they are unknown or differ: "64", "8(x4)"."""
    text = env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE", "")
    match = re.fullmatch(r"([1-9][0-9]{0,5})([(]x[0-9]+[)])?", text)
    return int(match[1]) if match else 0


def problems(ranks: int, device: str, machine: Machine, *, oversubscribe: bool, precision: str = "") -> Iterator[str]:
    """Yields why `ranks` processes cannot run here. `device` is the job's: auto, cpu or cuda; `precision` is
    that of training. `oversubscribe` allows more than cores and memory bear; an accelerator has one rank all the same.
    """
    if device == "cuda" and not machine.devices:
        yield "cluster.device is cuda, but this machine has 0 CUDA devices; use cluster.device=cpu"
        return
    if device != "cpu" and machine.devices:
        if ranks > machine.devices:
            yield (
                f"the layout starts {ranks} ranks on this machine, which has {machine.devices} devices, one rank each; "
                f"use a layout of {machine.devices}, or cluster.device=cpu"
            )
        return
    if precision == "fp8":
        yield (
            "train.precision: fp8 needs a GPU with matrix products in 8 bits; on a CPU they are only emulated, slower "
            "than in bf16, as `phalanx verify` does; nearest legal: bf16"
        )
    if oversubscribe:
        return
    most = max(FEW_RANKS, RANKS_PER_CORE * machine.cores)
    if ranks > most:
        yield (
            f"the layout starts {ranks} ranks on this machine, whose {machine.cores} cores bear {most} "
            f"({RANKS_PER_CORE} per core, at least {FEW_RANKS}); use a smaller layout, or insist with {FLAG}"
        )
    elif ranks > FEW_RANKS // 4 and ranks * RANK_BYTES > machine.free_bytes:
        yield (
            f"the layout starts {ranks} ranks, which take {ranks * RANK_BYTES / 2**30:.1f} GiB before they hold a "
            f"model; {machine.free_bytes / 2**30:.1f} GiB are free on this machine; use a smaller layout, or insist "
            f"with {FLAG}"
        )
