"""Runs a whole measurement on one rank: threads, process group, progress, and the report, which every rank gets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch._C._distributed_c10d import Store  # torch.distributed.Store, to the type stubs

from phalanx.calibrate import cluster_file, comm, compute, report
from phalanx.calibrate.report import CalibrationReport
from phalanx.comm.agreement import Facts
from phalanx.cost.communication import Collective
from phalanx.cost.fit import Precision
from phalanx.data.progress import Progress, silent, stderr_progress
from phalanx.launch.process_group import process_group
from phalanx.launch.ranks import Ranks
from phalanx.train.agreement import agree

TIMEOUT_S = 120.0
"""Seconds that a collective may wait for a peer. The longest call, a product of one thread, takes a few."""


def compute_report(
    ranks: Ranks,
    device: torch.device,
    threads: int,
    *,
    precision: Precision,
    quick: bool,
    known: Mapping[str, Any],
    store: Store | None = None,
) -> CalibrationReport:
    """Measures one device while all ranks do the same. `known` are the fields of the cluster's file; `store` is that of
    ranks that have met."""
    on_node = ranks.local_world or 1
    known = cluster_file.of_device(known, device.type, compute.look_up(device, on_node).name)
    ceiling = known.get("accelerator.ceiling", 1.0)
    chosen = {"--precision": precision, "--quick": quick}
    with _measuring(ranks, device, threads, chosen, store) as progress:
        measured = compute.measure(device, precision, on_node, quick, ceiling, progress)
    return report.of_compute(
        measured, known, device.type, f"{_processes(ranks, threads)}, {precision} on {device.type}"
    )


def comm_report(
    ranks: Ranks,
    device: torch.device,
    threads: int,
    *,
    collectives: Sequence[Collective],
    quick: bool,
    store: Store | None = None,
) -> CalibrationReport:
    """Measures the links between the ranks. Raises JobError where there is one rank (comm.per_node_of)."""
    per_node = comm.per_node_of(ranks)
    chosen = {"--collectives": list(collectives), "--quick": quick}
    with _measuring(ranks, device, threads, chosen, store) as progress:
        fits = comm.measure(ranks, device, collectives, quick, progress)
    backend = "nccl" if device.type == "cuda" else "gloo"
    name, setting = compute.look_up(device, per_node).name, f"collectives of {backend}, {_processes(ranks, threads)}"
    return report.of_comm(fits, per_node, device.type, name, setting)


@contextmanager
def _measuring(
    ranks: Ranks, device: torch.device, threads: int, chosen: Facts, store: Store | None
) -> Iterator[Progress]:
    """Sets the threads and joins the process group for the block, and gives its progress, which rank 0 shows. Raises
    JobError if ranks differ in the `chosen` options, RunError if they differ in versions or settings."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with _group(ranks, device, store), stderr_progress() if ranks.rank == 0 else _quiet() as progress:
            agree(chosen, device)
            yield progress
    finally:
        torch.set_num_threads(before)


@contextmanager
def _group(ranks: Ranks, device: torch.device, store: Store | None) -> Iterator[None]:
    if ranks.world == 1:
        yield
        return
    with process_group(ranks, device=device, timeout_s=TIMEOUT_S, store=store):
        yield


@contextmanager
def _quiet() -> Iterator[Progress]:
    yield silent


def _processes(ranks: Ranks, threads: int) -> str:
    one, single = ranks.world == 1, threads == 1
    return f"{ranks.world} process{'' if one else 'es'} of {threads} thread{'' if single else 's'}"
