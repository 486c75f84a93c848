"""The device of a rank, its memory, and its peak FLOP/s, the divisor of MFU."""

from __future__ import annotations

import ctypes
import logging
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from phalanx.comm import blocking
from phalanx.comm.agree import on_rank_zero
from phalanx.config import clusters
from phalanx.config.calibration import assess, relative_spread
from phalanx.config.cluster import DEVICE_WORDS, Cluster, no_device, with_processes
from phalanx.config.clusters import device_reported_as
from phalanx.config.job import Job
from phalanx.config.precision import HALF
from phalanx.cost.kernels import peak_flops as data_sheet_peak
from phalanx.errors import JobError, RunError
from phalanx.launch.accelerators import accelerators
from phalanx.parallel.linear import linear, onednn_is_faster
from phalanx.parallel.precision import DTYPES as PRECISIONS

log = logging.getLogger(__name__)

DTYPES: dict[torch.dtype, str] = {
    torch.float8_e4m3fn: "fp8",
    **{PRECISIONS[name]: name for name in (*HALF, "fp32")},
}
"""Precisions of matrix products for which the device table has peaks."""

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # malloc.h


def choose(wanted: str, local_rank: int | None) -> torch.device:
    """Returns the device of a rank. Raises RunError if the job asks for one that does not exist, or if the rank does
    not know its place on its node and so not which one is its own."""
    kind, count = accelerators(wanted)
    if not count and wanted in DEVICE_WORDS:
        raise RunError(no_device(wanted))
    if not count:
        return torch.device("cpu")
    if local_rank is None:
        raise RunError(
            "the launcher does not say which rank of its node this is: start it with torchrun, srun or mpiexec"
        )
    if local_rank >= count:
        raise RunError(f"rank {local_rank} of this node has no device: the node has {count}, one process each")
    torch.accelerator.set_device_index(local_rank)
    return torch.device(kind, local_rank)


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
    """Returns the data sheet's FLOP/s of an accelerator, 0 if it or the precision is not in the table."""
    known = device_reported_as(*reported(device))
    return data_sheet_peak(known, DTYPES[dtype]) if known and dtype in DTYPES else 0.0


def reported(device: torch.device) -> tuple[str, float]:
    """Returns the driver's name of a device, and its memory in GiB."""
    facts = torch.get_device_module(device)
    return facts.get_device_name(device), facts.get_device_properties(device).total_memory / 2**30


def memory_limit(device: torch.device, processes_on_node: int) -> int:
    """Returns the bytes that this rank can have: its accelerator's, or its share of the machine's."""
    if device.type != "cpu":
        return torch.get_device_module(device).get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // max(1, processes_on_node)


def peak_memory(device: torch.device) -> int:
    """Returns this rank's peak memory so far in bytes: allocated on an accelerator, resident in a CPU process."""
    if device.type != "cpu":
        return torch.get_device_module(device).max_memory_allocated(device)
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


PEAK_FIELDS = {torch.float32: "fp32_tflops", torch.bfloat16: "bf16_tflops", torch.float16: "fp16_tflops"}
"""The Accelerator field with the peak of each data type."""
MEASUREMENTS, MEASUREMENT_S, SIDE = 5, 0.02, 1024
"""Number of peak measurements if none is stored, their least seconds, and the rows of a matrix, in 16 bits a fourth: an
eighth of a second at the start of a run, in which a product runs once per measurement at 0.1 TFLOP/s."""


@dataclass(frozen=True)
class Peak:
    """The peak FLOP/s of one rank, the divisor of MFU."""

    flops: float
    source: str
    """The origin of the figure."""
    spread: float = 0.0
    """Relative spread of the measurements; 0 if it was not measured or is not known."""


def peak_of(job: Job, device: torch.device, processes: int) -> Peak:
    """Returns and logs the peak of one of `processes` ranks on each node, in a job's precision. Must be called on all
    ranks."""
    products = torch.float8_e4m3fn if job.train.precision == "fp8" else PRECISIONS[job.train.precision]
    peak = peak_flops(job.cluster, device, products, processes)
    if peak.flops:
        log.info("peak: %.3g TFLOP/s per rank (%s), for mfu", peak.flops / 1e12, peak.source)
    else:
        log.warning("peak: %s", peak.source)
    return peak


def peak_flops(cluster: Cluster, device: torch.device, dtype: torch.dtype, processes: int) -> Peak:
    """Returns the peak of one of `processes` ranks on each node. Must be called on all ranks.

    It is the first of: the job's cluster.peak_tflops; the data sheet's for a known accelerator; on a CPU the value that
    `phalanx bench compute` measured here, if its spread is within bounds; the median of MEASUREMENTS short measurements
    of a square matrix product, made by all ranks at once, because ranks of one machine share it.
    """
    if cluster.peak_tflops:
        return Peak(cluster.peak_tflops * 1e12, "the job's cluster.peak_tflops")
    if device.type != "cpu":
        name, gib = reported(device)
        if known := data_sheet_flops(device, dtype):
            return Peak(known, f"data sheet of {name}")
        kind = str(dtype).removeprefix("torch.")
        return Peak(
            0.0,
            f"{name} with {gib:.0f} GiB has no peak in {kind} in the table of devices (`phalanx docs devices`): lines "
            "have no mfu; set cluster.peak_tflops",
        )
    # Rank 0's file decides for all, so that all ranks continue alike.
    stored = on_rank_zero(lambda: stored_cpu_peak(cluster, dtype, processes))
    return Peak(*stored) if stored else measured_peak(device, dtype)


def stored_cpu_peak(cluster: Cluster, dtype: torch.dtype, processes: int) -> tuple[float, str, float] | None:
    """Returns FLOP/s, source and spread of one of `processes` ranks per node as `phalanx bench compute` measured this
    CPU: from the job's cluster, or else from the file of cluster=local. Returns None if there is no such measurement,
    or if it is unreliable or of another machine."""
    path = clusters.default_path()
    measured, where = cluster, "cluster of the job"
    if not cluster.sharing.processes:
        try:
            measured, where = clusters.read_local_partly(path), str(path)
        except JobError:
            return None
    name = PEAK_FIELDS.get(dtype)
    cpu = measured.accelerator.name
    assessment = assess(measured.calibration, ("compute",), here=True, cpu=cpu)
    products = measured.calibration.compute.products
    unreliable = any(part.level for part in assessment.parts if part.name == "products")
    tflops = getattr(with_processes(measured, processes).accelerator, name) if name else 0.0
    if measured.device != "cpu" or not tflops or unreliable or assessment.changed:
        return None
    spread = f"spread {products.spread:.1%}" if products.rounds else "spread unknown"
    return tflops * 1e12, f"phalanx bench compute, {where}: {spread}", products.spread


def measured_peak(device: torch.device, dtype: torch.dtype, now: Callable[[], float] = time.perf_counter) -> Peak:
    """Measures a square matrix product on a CPU MEASUREMENTS times and returns the median, with the spread in the
    source."""
    if onednn_is_faster(device, dtype):
        multiply, library = (lambda a, _: linear(a, a)), ", oneDNN"
    else:
        multiply, library = (lambda a, out: torch.mm(a, a, out=out)), ""
    n = SIDE // 4 if dtype in (torch.bfloat16, torch.float16) else SIDE
    a = torch.ones(n, n, dtype=dtype, device=device)
    out = multiply(a, torch.empty_like(a))  # the first product takes longer
    found = []
    for _ in range(MEASUREMENTS):
        if dist.is_initialized():
            blocking.barrier()
        best, end = float("inf"), now() + MEASUREMENT_S
        while now() < end or best == float("inf"):
            began = now()
            multiply(a, out)
            best = min(best, now() - began)
        found.append(2 * n**3 / best)
    spread = relative_spread(found)
    kind = str(dtype).removeprefix("torch.")
    source = f"median of {MEASUREMENTS} measurements of a {kind} matrix product{library}: spread {spread:.1%}"
    source += "; `phalanx bench compute` stores a steadier one"
    return Peak(statistics.median(found), source, spread)
