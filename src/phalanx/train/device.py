"""The device of a rank: which one, how many threads, and its memory."""

from __future__ import annotations

import ctypes
import os

import torch

from phalanx.errors import RunError

# Dense bf16/fp16 peaks in TFLOP/s, from the vendors' data sheets (SXM forms where there are several).
KNOWN_PEAKS = {
    "H100 PCIe": 756.0,
    "H100": 989.0,
    "H200": 989.0,
    "H800": 989.0,
    "GH200": 989.0,
    "B200": 2250.0,
    "A100": 312.0,
    "A800": 312.0,
    "V100": 125.0,
    "MI300X": 1307.0,
    "MI250X": 191.5,  # of one of its two dies, which is what a process sees
}

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # malloc.h


def choose(wanted: str, local_rank: int) -> torch.device:
    """The device of a rank. Raises RunError where the job asks for one that is not there."""
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if not count:
        raise RunError(
            f"cluster.device is {wanted}, but this machine has {count} CUDA devices; cluster.device=cpu runs"
        )
    if local_rank >= count:
        raise RunError(f"rank {local_rank} of this node has no device: the node has {count}, one process each")
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def threads_for(wanted: int, processes_on_node: int) -> int:
    """CPU threads of each process: the job's number, or OMP_NUM_THREADS, or the node's usable cores divided among its
    processes."""
    stated = os.environ.get("OMP_NUM_THREADS", "")
    if not wanted and stated.isdigit():
        return max(1, int(stated))
    return wanted or max(1, len(os.sched_getaffinity(0)) // processes_on_node)


def keep_freed_memory() -> None:
    """Have the C library keep the memory that tensors free, for the next step's tensors.

    By default glibc hands large blocks back to the kernel at once: a step of a GPT of 10 million parameters (4 × 256
    tokens) then faults 38,000 pages in again, 3 to 11 % of its processor time on two cores. A process that trains
    needs the same memory in every step. Does nothing where the C library has no mallopt.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(_M_MMAP_MAX, 0)
        libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


def peak_memory(device: torch.device) -> int:
    """Most bytes this rank has used so far: allocated on an accelerator, resident in a CPU process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
