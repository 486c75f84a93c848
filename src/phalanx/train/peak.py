"""A rank's peak FLOP/s, the divisor of MFU: the job's, a data sheet's, this CPU's stored measurement, or a new one."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.comm import blocking
from phalanx.comm.agree import on_rank_zero
from phalanx.config import clusters
from phalanx.config.calibration import assess, relative_spread
from phalanx.config.cluster import Cluster, with_processes
from phalanx.errors import JobError
from phalanx.parallel.linear import linear, onednn_is_faster
from phalanx.train.device import data_sheet_flops, reported

PEAK_FIELDS = {torch.float32: "fp32_tflops", torch.bfloat16: "bf16_tflops", torch.float16: "fp16_tflops"}
"""The Accelerator field with the peak of each data type."""
MEASUREMENTS, MEASUREMENT_S = 5, 0.1
"""Number of peak measurements if none is stored, and seconds of each: half a second at the start of a run, in which a
product of 1,024 × 1,024 runs five times per measurement at 0.1 TFLOP/s."""


@dataclass(frozen=True)
class Peak:
    """The peak FLOP/s of one rank, the divisor of MFU."""

    flops: float
    source: str
    """The origin of the figure."""
    spread: float = 0.0
    """Relative spread of the measurements; 0 if it was not measured or is not known."""


def peak_flops(cluster: Cluster, device: torch.device, dtype: torch.dtype, processes: int) -> Peak:
    """Returns the peak of one of `processes` ranks on each node. Must be called on all ranks.

    It is the first of: the job's cluster.peak_tflops; the data sheet's for a known accelerator; on a CPU the value that
    `phalanx bench compute` measured here, if its spread is within bounds; the median of MEASUREMENTS short measurements
    of a square matrix product, made by all ranks at once, because ranks of one machine share it.
    """
    if cluster.peak_tflops:
        return Peak(cluster.peak_tflops * 1e12, "the job's cluster.peak_tflops")
    if device.type == "cuda":
        name, gib = reported(device)
        if known := data_sheet_flops(device, dtype):
            return Peak(known, f"data sheet of {name}")
        kind = str(dtype).removeprefix("torch.")
        return Peak(
            0.0,
            f"{name} with {gib:.0f} GiB has no peak in {kind} in the table of devices (docs/devices.md): lines have "
            "no mfu; set cluster.peak_tflops",
        )
    if device.type == "cpu":
        # Rank 0's file decides for all, so that all ranks continue alike.
        stored = on_rank_zero(lambda: stored_cpu_peak(cluster, dtype, processes))
        if stored:
            return Peak(*stored)
    return measured_peak(device, dtype)


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
    """Measures a square matrix product MEASUREMENTS times and returns the median, with the spread in the source."""
    if onednn_is_faster(device, dtype):
        multiply, library = (lambda a, _: linear(a, a)), ", oneDNN"
    else:
        multiply, library = (lambda a, out: torch.mm(a, a, out=out)), ""
    found = []
    for _ in range(MEASUREMENTS):
        if dist.is_initialized():
            blocking.barrier()
        found.append(_product_flops(device, dtype, multiply, now))
    spread = relative_spread(found)
    kind = str(dtype).removeprefix("torch.")
    source = f"median of {MEASUREMENTS} measurements of a {kind} matrix product{library}: spread {spread:.1%}"
    if device.type == "cpu":
        source += "; `phalanx bench compute` stores a steadier one"
    return Peak(statistics.median(found), source, spread)


def _product_flops(
    device: torch.device,
    dtype: torch.dtype,
    multiply: Callable[[Tensor, Tensor], Tensor],
    now: Callable[[], float],
) -> float:
    """Returns the best FLOP/s of `multiply(a, out)` within MEASUREMENT_S; it may write a × a to `out`."""
    half_on_cpu = device.type == "cpu" and dtype in (torch.bfloat16, torch.float16)
    n = 256 if half_on_cpu else 1024 if device.type == "cpu" else 8192
    a = torch.ones(n, n, dtype=dtype, device=device)
    out = multiply(a, torch.empty_like(a))
    best, end = float("inf"), now() + MEASUREMENT_S
    while now() < end or best == float("inf"):
        began = now()
        multiply(a, out)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, now() - began)
    return 2 * n**3 / best
