"""The device of a rank, its number of threads, and its memory."""

from __future__ import annotations

import ctypes
import os

import torch

from phalanx.config.devices import device_reported_as
from phalanx.cost.kernels import peak_flops as data_sheet_peak
from phalanx.errors import RunError

DTYPES: dict[torch.dtype, str] = {
    torch.float8_e4m3fn: "fp8",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
}
"""Precisions of matrix products for which the device table has peaks."""

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # malloc.h


def choose(wanted: str, local_rank: int | None) -> torch.device:
    """Returns the device of a rank. Raises RunError if the job asks for one that does not exist, or if the rank does
    not know its place on its node and so not which one is its own."""
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if not count:
        raise RunError(f"cluster.device is {wanted}, but this machine has {count} CUDA devices; use cluster.device=cpu")
    if local_rank is None:
        raise RunError(
            "the launcher does not say which rank of its node this is: start it with torchrun, srun or mpiexec"
        )
    if local_rank >= count:
        raise RunError(f"rank {local_rank} of this node has no device: the node has {count}, one process each")
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def threads_for(wanted: int, processes_on_node: int) -> int:
    """Returns the CPU threads per process: the job's number, or OMP_NUM_THREADS, or the node's usable cores divided
    among its processes."""
    stated = os.environ.get("OMP_NUM_THREADS", "")
    if not wanted and stated.isdigit():
        return max(1, int(stated))
    return wanted or max(1, len(os.sched_getaffinity(0)) // processes_on_node)


def keep_freed_memory() -> None:
    """Makes the C library keep the memory that tensors free, for the next step's tensors.

    By default glibc returns large blocks to the kernel at once: a step of a GPT of 10 million parameters (4 × 256
    tokens) then faults in 38,000 pages again, 3 to 11 % of its processor time on two cores. Training needs the same
    memory in every step. Does nothing if the C library has no mallopt.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(_M_MMAP_MAX, 0)
        libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


def data_sheet_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Returns the data sheet's FLOP/s of a CUDA or ROCm device, 0 if it or the precision is not in the table."""
    known = device_reported_as(*reported(device))
    return data_sheet_peak(known, DTYPES[dtype]) if known and dtype in DTYPES else 0.0


def reported(device: torch.device) -> tuple[str, float]:
    """Returns the driver's name of a device, and its memory in GiB."""
    return torch.cuda.get_device_name(device), torch.cuda.get_device_properties(device).total_memory / 2**30


def memory_limit(device: torch.device, processes_on_node: int) -> int:
    """Returns the bytes that this rank can have: its accelerator's, or its share of the machine's."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // max(1, processes_on_node)


def peak_memory(device: torch.device) -> int:
    """Returns this rank's peak memory so far in bytes: allocated on an accelerator, resident in a CPU process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
