"""Checks of the environment: variables with values that are known to hurt, and folders that programs write to.

Only the variables named here are looked at, and only their values are shown: an environment also holds secrets.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from phalanx.doctor.findings import CheckResult, DoctorCheck, error, ok, warn
from phalanx.doctor.machine import CheckedMachine
from phalanx.units import gib

ON = ("1", "true", "TRUE", "True", "yes", "on")
HARMFUL: dict[str, tuple[tuple[str, ...], str]] = {
    "TORCH_NCCL_BLOCKING_WAIT": (ON, "collectives block the CPU thread, and nothing overlaps"),
    "NCCL_BLOCKING_WAIT": (ON, "collectives block the CPU thread, and nothing overlaps"),
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": (("0",), "a failed collective is not noticed"),
    "NCCL_ASYNC_ERROR_HANDLING": (("0",), "a failed collective is not noticed"),
    "TORCH_NCCL_USE_COMM_NONBLOCKING": (ON, "experimental"),
    "NCCL_P2P_DISABLE": (ON, "GPUs of a node communicate through host memory"),
    "NCCL_SHM_DISABLE": (ON, "ranks of a node communicate through sockets"),
    "NCCL_IB_DISABLE": (ON, "NCCL does not use InfiniBand or RoCE"),
    "NCCL_NET": (("Socket", "socket"), "NCCL does not use InfiniBand or RoCE"),
    "NCCL_DEBUG": (("TRACE", "trace"), "NCCL writes a line for every call"),
    "NCCL_LAUNCH_MODE": (("PARALLEL",), "removed from NCCL"),
    "CUDA_LAUNCH_BLOCKING": (ON, "every kernel waits for the last one"),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": (ON, "every tensor asks the driver for memory"),
    "TORCH_DISTRIBUTED_DEBUG": (("DETAIL", "detail"), "every collective is checked by another one"),
    "TORCH_USE_CUDA_DSA": (ON, "kernels check every access"),
    "TORCH_SHOW_CPP_STACKTRACES": (ON, "every error carries a stack of C++"),
    "TORCH_COMPILE_DISABLE": (ON, "train.compile has no effect"),
    "TORCHDYNAMO_DISABLE": (ON, "train.compile has no effect"),
    "MALLOC_CHECK_": (("1", "2", "3"), "the C library checks every allocation"),
    "PYTHONMALLOC": (("debug", "malloc_debug", "pymalloc_debug"), "Python checks every allocation"),
    "PYTHONDEVMODE": (ON, "Python checks much"),
}
"""Variables, the values that hurt, and their effect."""
_BINDING = ("GOMP_CPU_AFFINITY", "KMP_AFFINITY", "OMP_PLACES", "OMP_PROC_BIND")
_PROXIES = ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
_CACHES = ("HF_HOME", "HF_HUB_CACHE", "HF_DATASETS_CACHE", "TORCH_HOME", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
_LITTLE = 2**30
_LEAST = 64 * 2**20
_LONGEST_FOLDER = 60


def checks(machine: CheckedMachine) -> list[DoctorCheck]:
    """Returns the checks of this group."""
    slow = "its file system does not answer: point the variable at another one"
    return [
        DoctorCheck("environment", "variables", lambda: variables(machine)),
        DoctorCheck("environment", "temporary files", lambda: temporary(machine), slow),
        DoctorCheck("environment", "caches", lambda: caches(machine), slow),
    ]


def variables(machine: CheckedMachine) -> Iterator[CheckResult]:
    """Yields variables whose values are known to hurt."""
    env, problems = machine.env, False
    for name, (values, effect) in HARMFUL.items():
        if env.get(name) in values:
            problems = True
            yield warn(f"{name}={env[name]}: {effect}", f"unset {name}")
    bound = [name for name in _BINDING if env.get(name, "false").lower() not in ("false", "")]
    if bound and machine.local_ranks > 1:
        problems = True
        yield warn(
            f"{', '.join(bound)} set, and {machine.local_ranks} ranks share the node: all may bind to the same cores",
            f"unset {' '.join(bound)}, or let the launcher bind ranks",
        )
    proxies = [name for name in _PROXIES if env.get(name)]
    if proxies and machine.job.checkpoint.remote and not (env.get("no_proxy") or env.get("NO_PROXY")):
        problems = True
        yield warn(
            f"{', '.join(proxies)} set: checkpoints for the object store pass a proxy",
            "set no_proxy to the store's host if it is in your network",
        )
    if not problems:
        yield ok("none that is known to hurt" + (f"; {', '.join(proxies)} set (sockets ignore it)" if proxies else ""))


def temporary(machine: CheckedMachine) -> Iterator[CheckResult]:
    """Yields whether the launcher can make its private folder, through which the ranks of a machine meet."""
    stated = machine.env.get("TMPDIR", "")
    folder = Path(stated or tempfile.gettempdir())
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"x" * 4096)
            file.flush()
        free = _free(folder)
    except OSError as problem:
        yield error(f"{folder}: {problem.strerror}", "set TMPDIR to a folder that you may write")
        return
    if free < _LEAST:
        yield error(f"{folder}: {gib(free)} free", "free some space, or set TMPDIR to another folder")
    elif len(str(folder)) > _LONGEST_FOLDER:
        yield warn(f"{folder}: too long for a socket's name (108 characters)", "set TMPDIR to a shorter path")
    else:
        yield ok(f"{folder}: {gib(free)} free")


def _free(folder: Path) -> int:
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


def caches(machine: CheckedMachine) -> Iterator[CheckResult]:
    """Yields folders of caches that are full or cannot be written."""
    problems, fine = False, []
    for name in _CACHES:
        if not (stated := machine.env.get(name)):
            continue
        folder = Path(stated).expanduser()
        there = next((each for each in (folder, *folder.parents) if each.is_dir()), Path("/"))
        if not os.access(there, os.W_OK):
            problems = True
            yield warn(f"{name}={folder} cannot be written", f"set {name} to a folder of yours")
        elif (free := _free(there)) < _LITTLE:
            problems = True
            yield warn(f"{name}={folder} has {gib(free)} free", f"free some space, or set {name} to another disk")
        else:
            fine.append(f"{name}={folder} has {gib(free)} free")
    if not problems:
        yield ok("; ".join(fine) or "no folder is set")
