"""Runs the whole self-test on one rank of the started group."""

from __future__ import annotations

import os
import platform
import secrets
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch._C._distributed_c10d import Store  # torch.distributed.Store, to the type stubs

from phalanx.comm.agree import gather_json, on_rank_zero
from phalanx.comm.axis import Axis
from phalanx.config.job import Job
from phalanx.data.files import Progress, silent, stderr_progress
from phalanx.data.settings import vocabulary_size
from phalanx.errors import JobError
from phalanx.launch.process_group import backend_of, process_group
from phalanx.launch.ranks import HEARTBEATS, Ranks
from phalanx.launch.watchdog import heartbeat
from phalanx.launch.watchdog.diagnosis import Limits
from phalanx.launch.watchdog.heartbeat import Phase
from phalanx.launch.watchdog.watchdog import join
from phalanx.machine.clock import counter
from phalanx.machine.collectives import ALL, check_axis
from phalanx.machine.links import measure_pairs, time_axis
from phalanx.machine.self_test_report import DistReport
from phalanx.machine.training import Probe, ProbeTimes, in_probe, train_briefly, trainable
from phalanx.parallel import mesh as meshes
from phalanx.parallel.mesh import AxisGeometry, Mesh
from phalanx.train.agreement import agree_on_job
from phalanx.train.device import keep_freed_memory
from phalanx.units import gib

TIMING_S = {True: 2.0, False: 8.0}
"""Seconds for the timing of all axes together, by --quick."""
PAIRS_S = {True: 1.5, False: 6.0}
"""Seconds for the matrix of pairs, by --quick."""
UNKNOWN_VOCABULARY = 256
"""Vocabulary size of the training where only the corpus, which is not read, would tell."""


@dataclass(frozen=True)
class SelfTestOptions:
    quick: bool = False
    timeout_s: float = 60.0
    """Seconds that a collective may wait for a peer; after half of them the watchdog names who hangs."""
    traces: Path | None = None
    """Folder for the profiles and the reports of hangs."""


def self_test(
    job: Job, ranks: Ranks, device: torch.device, threads: int, options: SelfTestOptions, store: Store | None = None
) -> DistReport:
    """Tests the group of `ranks`, whose store is `store` if they have met. All of them call it; returns the same on
    each.

    Raises JobError or RunError if ranks have different jobs or programs, or the layout is not that of the world.
    """
    torch.set_num_threads(threads)
    if device.type == "cpu":
        keep_freed_memory()
    progress_of_rank = stderr_progress() if ranks.rank == 0 else nullcontext(silent)
    began = time.perf_counter()
    with process_group(ranks, device=device, timeout_s=options.timeout_s, store=store), progress_of_rank as progress:
        hosts: list[str] = gather_json(platform.node())
        cores = gather_json(len(os.sched_getaffinity(0)))
        if HEARTBEATS not in os.environ and ranks.world > 1:
            token = on_rank_zero(lambda: secrets.token_hex(8))
            reports = (options.traces or Path("traces")).absolute()
            join(ranks, hosts, token, Limits.within(options.timeout_s), reports, None)
        agree_on_job(job, device)
        heartbeat.enter(Phase.TEST)
        # The training must be legal here, before anything is measured.
        mesh = meshes.build(trainable(job)[0].layout, device.type)
        report = DistReport(job.layout, hosts, backend_of(ranks, device), device.type, threads)
        report.notes += _shared_cores(hosts, cores) if device.type == "cpu" else []
        report.seconds["start"] = time.perf_counter() - began
        _test(report, job, mesh, device, options, progress)
        heartbeat.enter(Phase.END)
    heartbeat.enter(Phase.DONE)
    return report


def _test(
    report: DistReport, job: Job, mesh: Mesh, device: torch.device, options: SelfTestOptions, progress: Progress
) -> None:
    """Makes the parts of the test; several ranks look for stragglers before each of them and after the last."""
    quick, world, hosts = options.quick, mesh.axis("world"), report.hosts
    axes, report.same_ranks = axes_to_test(mesh)

    def values() -> None:
        total = (len(ALL) + 1) * len(axes)
        for number, (name, axis, _) in enumerate(axes):
            count = counter(progress, "values of collectives", total, number * (len(ALL) + 1))
            report.checks.append(check_axis(axis, name, device, count))

    def speed() -> None:
        budget_s = TIMING_S[quick] / max(1, len(axes))
        for name, axis, geometry in axes:
            place = axis, name, geometry, hosts, device
            timed = time_axis(*place, quick=quick, budget_s=budget_s, progress=progress)
            report.axes.append(timed)
            if timed.left_out:
                report.notes.append(
                    f"{name}: sizes from {gib(timed.left_out[0])} on were not timed: the link is too slow"
                )

    def pairs() -> None:
        report.pairs = measure_pairs(world, hosts, device, quick=quick, budget_s=PAIRS_S[quick], progress=progress)

    def training() -> None:
        report.training = train_briefly(
            *(job, mesh, device, on_rank_zero(lambda: _vocabulary(job)), hosts),
            quick=quick,
            traces=options.traces,
            tick=lambda done, total: progress("training", done, total),
        )

    def probe() -> None:
        assert stragglers is not None, "there are several ranks"
        times = enumerate(gather_json(asdict(stragglers.window())))
        report.probes.append({rank: ProbeTimes(**theirs) for rank, theirs in times})

    stragglers = Probe(world, device, quick) if world.size > 1 else None
    every = (probe, values, probe, speed, probe, pairs, probe, training, probe)
    for part in every if stragglers else (values, speed, training):
        began = time.perf_counter()
        part()
        name = part.__name__
        report.seconds[name] = report.seconds.get(name, 0.0) + time.perf_counter() - began
    report.stragglers = in_probe(report.probes, hosts)


def axes_to_test(mesh: Mesh) -> tuple[list[tuple[str, Axis, AxisGeometry]], dict[str, str]]:
    """Returns the axes with several ranks, with their names in layouts, and for those with the ranks of an earlier one
    that one's name. `world` is all ranks."""
    every = {**mesh.lines, "world": AxisGeometry(mesh.axis("world").size, 1)}
    shown: dict[AxisGeometry, str] = {}
    axes, same = [], {}
    for name, geometry in every.items():
        if geometry.size == 1:
            continue
        axis = mesh.axis(name)
        title = name if name in ("ring", "ulysses") else axis.name
        if geometry in shown:
            same[title] = shown[geometry]
            continue
        shown[geometry] = title
        axes.append((title, axis, geometry))
    return axes, {name: other for name, other in same.items() if name != other}


def _shared_cores(hosts: Sequence[str], cores: Sequence[int]) -> list[str]:
    """Returns a note on each host whose ranks outnumber its cores."""
    found = []
    for host, ranks in Counter(hosts).items():
        has = cores[hosts.index(host)]
        if ranks > has:
            found.append(f"{host} runs {ranks} ranks on {has} cores: they disturb each other, and times vary")
    return found


def _vocabulary(job: Job) -> int:
    try:
        return vocabulary_size(job)
    except JobError:
        return UNKNOWN_VOCABULARY
