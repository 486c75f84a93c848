"""The device of a rank: which one, how many threads, and what it can do at most."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.config.devices import device_reported_as
from phalanx.cost.time.kernel import peak_flops as data_sheet_peak
from phalanx.errors import RunError
from phalanx.parallel.linear import linear, onednn_is_faster

DTYPES: dict[torch.dtype, str] = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
"""Precisions of matrix products that the table of devices has peaks of."""

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


def peak_flops(stated_tflops: float, device: torch.device, dtype: torch.dtype) -> tuple[float, str]:
    """Returns the FLOP/s that one rank can do at most, and where that figure comes from.

    That is the job's own figure, or the data sheet's for an accelerator, 0 for one that the table of devices does not
    have, or, on a CPU, the best of a few square matrix products measured now, by all ranks at once, because ranks of
    one machine share it.
    """
    if stated_tflops:
        return stated_tflops * 1e12, "the job's cluster.peak_tflops"
    if device.type == "cuda":
        name, gib = reported(device)
        if known := data_sheet_flops(device, dtype):
            return known, f"data sheet of {name}"
        kind = str(dtype).removeprefix("torch.")
        return 0.0, (
            f"{name} with {gib:.0f} GiB has no peak in {kind} in the table of devices (docs/devices.md): lines are "
            "without mfu; cluster.peak_tflops states one"
        )
    if dist.is_initialized():
        dist.barrier()
    kind = str(dtype).removeprefix("torch.")
    if onednn_is_faster(device, dtype):
        return _measure(device, dtype, lambda a, _: linear(a, a)), f"measured {kind} matrix product, oneDNN"
    return _measure(device, dtype, lambda a, out: torch.mm(a, a, out=out)), f"measured {kind} matrix product"


def data_sheet_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Returns the data sheet's FLOP/s of a CUDA or ROCm device, 0 where it or the precision is not in the table."""
    known = device_reported_as(*reported(device))
    return data_sheet_peak(known, DTYPES[dtype]) if known and dtype in DTYPES else 0.0


def reported(device: torch.device) -> tuple[str, float]:
    """Returns what the driver calls a device, and its memory in GiB."""
    return torch.cuda.get_device_name(device), torch.cuda.get_device_properties(device).total_memory / 2**30


def _measure(
    device: torch.device, dtype: torch.dtype, multiply: Callable[[Tensor, Tensor], Tensor], seconds: float = 0.25
) -> float:
    """FLOP/s of `multiply(a, out)`, which may write a × a to `out`."""
    half_on_cpu = device.type == "cpu" and dtype in (torch.bfloat16, torch.float16)
    n = 256 if half_on_cpu else 1024 if device.type == "cpu" else 8192
    a = torch.ones(n, n, dtype=dtype, device=device)
    out = multiply(a, torch.empty_like(a))
    best, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end or best == float("inf"):
        began = time.perf_counter()
        multiply(a, out)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - began)
    return 2 * n**3 / best


def peak_memory(device: torch.device) -> int:
    """Most bytes this rank has used so far: allocated on an accelerator, resident in a CPU process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
