"""Runs the whole self-test on one rank of the started group."""

from __future__ import annotations

import os
import platform
import secrets
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, astuple, dataclass, field
from html import escape
from pathlib import Path
from typing import Any

import torch
from torch._C._distributed_c10d import Store  # torch.distributed.Store, to the type stubs

from phalanx.comm.agree import gather_json, on_rank_zero
from phalanx.comm.axis import Axis
from phalanx.config.job import Job
from phalanx.config.layout import Layout
from phalanx.data.files import Progress, silent, stderr_progress
from phalanx.data.settings import vocabulary_size
from phalanx.errors import JobError
from phalanx.launch.process_group import backend_of, process_group
from phalanx.launch.ranks import HEARTBEATS, Ranks
from phalanx.launch.watchdog import heartbeat
from phalanx.launch.watchdog.diagnosis import FACTOR, Limits
from phalanx.launch.watchdog.heartbeat import Phase
from phalanx.launch.watchdog.watchdog import join
from phalanx.machine.clock import counter
from phalanx.machine.collectives import ALL, AxisChecks, check_axis
from phalanx.machine.links import PairMatrix, TimedAxis, measure_pairs, time_axis
from phalanx.machine.training import Probe, ProbeTimes, Straggler, TrainingTest, in_probe, train_briefly, trainable
from phalanx.parallel import mesh as meshes
from phalanx.parallel.mesh import AxisGeometry, Mesh
from phalanx.pictures.elements import seconds
from phalanx.pictures.heat_map import heat_map, histograms
from phalanx.pictures.page import figure, figures, html_page, list_of, section, table
from phalanx.pictures.panels import link_svg
from phalanx.train.agreement import agree_on_job
from phalanx.train.device import keep_freed_memory
from phalanx.units import counted, finite, gib

MOST_PAIRS = 200
"""Pairs in the table of the page, the slowest first."""
ETHERNET_GBS = 0.5
"""Bandwidth between hosts below which GPUs probably do not use their InfiniBand cards."""
SHOWN = 12
"""Lines of one kind that the text shows; JSON and the page have all."""
FORMATS = {
    "s": seconds,
    "GB/s": "{:.3g} GB/s".format,
    "%": "{:.0%}".format,
    "n": "{:,}".format,
    "g": "{:g}".format,
    "bytes": gib,
}
"""How a table of the page shows the numbers of a column, by its kind."""
STAGES = {
    "compute": "computes slowly. Look for other processes on its cores or device (top, nvidia-smi), a lower clock "
    "(temperature, power limit), and fewer cores or other NUMA placement than the others have",
    "arrival": "computes as fast as the others, but starts its collectives late. Look for what runs on its host "
    "between steps: monitoring, Python threads, swapping, a slow file system",
    "training": "needs more time of its own per step. Open its trace beside that of another rank (ui.perfetto.dev)",
}
"""What to do about a straggler, by the stage that found it."""


@dataclass
class DistReport:
    """Everything that the self-test found. The same on all ranks."""

    layout: Layout
    hosts: list[str]
    """The host of every rank."""
    backend: str
    device: str
    threads: int
    checks: list[AxisChecks] = field(default_factory=list)
    same_ranks: dict[str, str] = field(default_factory=dict)
    """Axes that have the same ranks as another one, which is tested for both."""
    axes: list[TimedAxis] = field(default_factory=list)
    pairs: PairMatrix | None = None
    probes: list[dict[int, ProbeTimes]] = field(default_factory=list)
    """The windows of the compute probe, each by rank."""
    stragglers: list[Straggler] = field(default_factory=list)
    """Found by the probe."""
    training: TrainingTest | None = None
    notes: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    """The duration of each part."""

    @property
    def failures(self) -> list[str]:
        """Wrong values, calls that were refused by some ranks or that training makes, and losses that differ or are not
        finite, in words."""
        found = [wrong.line() for checks in self.checks for wrong in checks.wrong]
        found += [line for checks in self.checks for line in checks.differs]
        found += self.pairs.wrong if self.pairs else []
        return found + (self.training.problems if self.training else [])

    @property
    def ok(self) -> bool:
        return not self.failures

    @property
    def probe(self) -> dict[int, ProbeTimes]:
        """Every rank's medians over the windows of the probe."""
        windows = {rank: [astuple(window[rank]) for window in self.probes] for rank in (self.probes or [{}])[0]}
        return {rank: ProbeTimes(*map(statistics.median, zip(*times, strict=True))) for rank, times in windows.items()}

    @property
    def slow_ranks(self) -> list[Straggler]:
        """The stragglers of all stages."""
        return self.stragglers + (self.training.stragglers if self.training else [])

    @property
    def slow_pairs(self) -> list[tuple[int, int, float, float]]:
        """Sender, receiver, 10⁹ bytes per second, and the median of the same kind of pair."""
        return self.pairs.slow(self.hosts) if self.pairs else []

    @property
    def every_note(self) -> list[str]:
        return self.notes + (self.training.notes if self.training else [])

    def title(self) -> str:
        threads = f", {counted(self.threads, 'thread')} each" if self.device == "cpu" else ""
        return f"{self.place()}{threads}, {self.backend} on {self.device}, layout {self.layout.line()}"

    def place(self) -> str:
        return f"{counted(len(self.hosts), 'rank')} on {counted(len(set(self.hosts)), 'host')}"

    def between(self, a: int, b: int) -> str:
        return f"{a} → {b} ({self.hosts[a]} → {self.hosts[b]})"

    def verdict(self) -> str:
        count = sum(checks.wrong_count for checks in self.checks)
        if not self.ok:
            return f"FAILED: {counted(max(count, len(self.failures)), 'problem')}; the first: {self.failures[0]}"
        slow = len({each.rank for each in self.slow_ranks})
        if slow or self.slow_pairs:
            return f"correct, but slow: {counted(slow, 'straggler')}, {counted(len(self.slow_pairs), 'slow pair')}"
        return "ok: all values correct, no stragglers, no slow pairs"

    def as_dict(self) -> dict[str, Any]:
        """Returns the document of `--json`. A figure that was not measured is null."""
        slow_pairs = [
            dict(zip(("sender", "receiver", "gbs", "median_gbs"), pair, strict=True)) for pair in self.slow_pairs
        ]
        document = {
            "ok": self.ok,
            "verdict": self.verdict(),
            "failures": self.failures,
            "world": len(self.hosts),
            "hosts": self.hosts,
            "backend": self.backend,
            "device": self.device,
            "threads": self.threads,
            "layout": self.layout.line(),
            "checks": [{**asdict(checks), "ok": checks.ok} for checks in self.checks],
            "same_ranks": self.same_ranks,
            "axes": [asdict(axis) for axis in self.axes],
            "pairs": asdict(self.pairs) if self.pairs else None,
            "slow_pairs": slow_pairs,
            "probe": [{str(rank): asdict(times) for rank, times in window.items()} for window in self.probes],
            "stragglers": [{**asdict(each), "factor": each.factor} for each in self.slow_ranks],
            "training": asdict(self.training) if self.training else None,
            "notes": self.notes,
            "advice": advice(self),
            "seconds": self.seconds,
        }
        return finite(document)

    def text(self) -> str:
        spent = sum(self.seconds.values())
        return "\n".join([self.title(), *self._lines(), f"{self.verdict()} ({spent:.1f} s)"])

    def _lines(self) -> Iterator[str]:
        for checks in self.checks:
            wrong = f"{checks.wrong_count} WRONG" if checks.wrong_count else "all correct"
            yield f"values on {checks.axis}: {checks.checked} results per rank compared exactly, {wrong}"
        yield from (f"values on {axis}: has the ranks of {other}" for axis, other in self.same_ranks.items())
        refused = sorted({f"{what}: {text}" for checks in self.checks for what, text in checks.refused.items()})
        yield from (f"not done by {self.backend}: {line}" for line in _some(refused))
        if limits := ", ".join(sorted({name for checks in self.checks for name in checks.limits})):
            yield f"limit of {self.backend}: wrong values for strided tensors in {limits}; training sends none"
        if self.axes:
            head = f"{'axis':<14} {'ranks':>5}  {'place':<17} {'latency':>10} {'bandwidth':>11}  {'barrier':>9}  "
            yield f"{head}fit error"
        for axis in self.axes:
            latency, barrier = seconds(axis.latency_us * 1e-6), seconds(axis.barrier_s)
            yield (
                f"{axis.axis:<14} {axis.ranks:>5}  {axis.place:<17} {latency:>10} {axis.gbs:>6.3g} GB/s  "
                f"{barrier:>9}  {axis.error:.0%}"
            )
        for kind, rows in (self.pairs.kinds(self.hosts) if self.pairs else {}).items():
            rate, wait = (statistics.median(row[at] for row in rows) for at in (3, 2))
            a, b, _, least = min(rows, key=lambda pair: pair[3])
            yield (
                f"pairs {kind}: {rate:.3g} GB/s, {seconds(wait * 1e-6)} in the median; "
                f"slowest {self.between(a, b)}: {least:.3g} GB/s"
            )
        if self.pairs and self.pairs.left_out:
            yield f"pairs left out: {self.pairs.left_out:,}, for which there was no time"
        if own := {rank: times.compute_s for rank, times in self.probe.items()}:
            slowest, median = max(own, key=lambda rank: own[rank]), statistics.median(own.values())
            yield (
                f"compute probe: {seconds(median)} in the median; slowest rank {slowest} ({self.hosts[slowest]}) "
                f"{own[slowest] / median:.2f} ×"
            )
        if self.training:
            yield from self.training.lines()
        yield from (f"note: {note}" for note in self.every_note)
        yield from _some(self.failures)
        slow = [each.line() for each in self.slow_ranks]
        slow += [f"{axis.axis} of ranks {line.line()}" for axis in self.axes for line in axis.slow_lines]
        slow += [
            f"pair {self.between(a, b)} is slow: {gbs:.3g} GB/s, {gbs / median:.0%} of the median"
            for a, b, gbs, median in self.slow_pairs
        ]
        yield from _some(slow)
        yield from (f"what to do: {line}" for line in advice(self))


def advice(report: DistReport) -> list[str]:
    """Returns what to look at, given the findings; nothing if there are none."""
    lines: list[str] = []
    hosts = report.hosts
    if ranks := {wrong.rank for checks in report.checks for wrong in checks.wrong}:
        one = len({hosts[rank] for rank in ranks}) == 1 and len(set(hosts)) > 1
        whose = f"only ranks of host {hosts[min(ranks)]} see" if one else f"{counted(len(ranks), 'rank')} saw"
        lines.append(
            f"{whose} wrong values: do not train there. Run again without that host; look for memory (ECC) and network "
            "errors; compare versions of driver, NCCL and torch"
        )
    for stage, hint in STAGES.items():
        if found := [each for each in report.slow_ranks if each.stage == stage]:
            lines.append(f"{', '.join(dict.fromkeys(f'rank {each.rank} ({each.host})' for each in found[:4]))}: {hint}")
    if pairs := [{hosts[a], hosts[b]} for a, b, *_ in report.slow_pairs]:
        common = ", ".join(sorted(set.intersection(*pairs)))
        if all(len(each) == 1 for each in pairs):
            lines.append(
                f"slow pairs on {f'host {common}' if common else 'several hosts'}: look for other processes on the "
                "cores and buses of these ranks, and at their placement (numactl -s, nvidia-smi topo -m)"
            )
        else:
            where = f"all slow pairs involve host {common}" if common else "the slow pairs share no host"
            lines.append(
                f"{where}: check cable, port and network interface (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME), and other "
                "traffic on the link"
            )
    return lines + [
        f"{axis.axis}: {axis.gbs:.3g} GB/s between hosts is that of Ethernet: check NCCL_SOCKET_IFNAME, and look for "
        "NET/IB in the output under NCCL_DEBUG=INFO"
        for axis in report.axes
        if report.device != "cpu" and axis.place != "one host" and axis.gbs < ETHERNET_GBS
    ]


def _some(lines: Sequence[str]) -> list[str]:
    more = len(lines) - SHOWN
    return [*lines[:SHOWN], *([f"... and {more} more (--json has all)"] if more > 0 else [])]


def page(report: DistReport) -> str:
    spent = ", ".join(f"{part} {seconds(value)}" for part, value in report.seconds.items())
    parts = {
        ("verdict", "Result"): _verdict(report),
        ("advice", "What to do"): list_of(advice(report)) if advice(report) else (),
        ("values", "Values"): _values(report),
        **_measured(report),
        ("notes", "Notes"): list_of(report.every_note) if report.every_note else (),
    }
    sections = [line for (name, head), part in parts.items() if part for line in section(name, head, part)]
    title = report.title()
    return html_page(f"Distributed self-test: {title}", title, f"time of the test: {spent}", sections)


def pictures(report: DistReport) -> dict[str, str]:
    """Returns the pictures as SVG documents, by name: those for which there is something to draw."""
    found = {}
    if report.axes:
        groups = [(axis.machine, axis.transfers) for axis in report.axes]
        names = [f"{axis.axis}, {counted(axis.ranks, 'rank')}" for axis in report.axes]
        found["speed"] = link_svg(f"Collectives of {report.backend} by axis, {report.place()}", groups, names)
    if pairs := report.pairs:
        ranks = {rank: report.hosts[rank] for rank in pairs.ranks}
        slow = [(a, b) for a, b, *_ in report.slow_pairs]
        title, waits = "Bandwidth between ranks, one way", pairs.latency_us
        found["bandwidth"] = heat_map(title, pairs.gbs, ranks, _short, unit="GB/s", slow=slow)
        found["latency"] = heat_map("Latency between ranks", waits, ranks, _short, unit="µs", more_is_better=False)
    test, names = report.training, [f"rank {rank} ({host})" for rank, host in enumerate(report.hosts)]
    if test is not None and any(test.step_s):
        rows = {name: [1e3 * each for each in values] for name, values in zip(names, test.step_s, strict=True)}
        slow_names = [names[each.rank] for each in test.stragglers]
        found["steps"] = histograms("Time of a training step", "milliseconds per step", rows, slow_names)
    return found


def _short(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def _verdict(report: DistReport) -> Iterator[str]:
    kind = "" if report.ok else " class='bad'"
    yield f"<p><b{kind}>{escape(report.verdict())}</b></p>"
    for lines in (report.failures, [each.line() for each in report.slow_ranks]):
        yield from list_of(lines) if lines else ()
    most = [(f"{sum(checks.checked for checks in report.checks):,}", "results per rank compared exactly")]
    for axis in report.axes[:3]:
        most.append((f"{axis.gbs:.3g} GB/s", f"bandwidth on {axis.axis}"))
        most.append((seconds(axis.latency_us * 1e-6), f"latency on {axis.axis}"))
    if report.training is not None and any(report.training.step_s):
        most.append((seconds(report.training.median_step_s), "per training step"))
    yield from figures(most)


def _values(report: DistReport) -> Iterator[str]:
    rows = [
        (each.axis, each.ranks, each.checked, each.wrong_count, "; ".join(map(": ".join, each.refused.items())))
        for each in report.checks
    ]
    yield from _table("axis:words, ranks, results per rank:n, wrong:n, unsupported by the backend:words", rows)
    if report.same_ranks:
        yield from list_of([f"{axis} has the ranks of {other}" for axis, other in report.same_ranks.items()])


def _measured(report: DistReport) -> dict[tuple[str, str], Iterator[str]]:
    """Returns the sections of what was measured, by name and heading."""
    drawn = pictures(report)

    def speed() -> Iterator[str]:
        heads = "axis:words, ranks, place:words, latency:s, bandwidth:GB/s, barrier:s, fit error:%, spread:%"
        rows = [
            (
                *(each.axis, each.ranks, each.place, each.latency_us * 1e-6, each.gbs, each.barrier_s),
                *(each.error, each.spread, ", ".join(map(gib, each.left_out))),
            )
            for each in report.axes
        ]
        yield from _table(f"{heads}, not measured:words", rows)
        yield from figure(drawn["speed"], "wide")
        times = [
            (axis.axis, t.collective.replace("_", "-"), t.bytes, t.seconds, t.bytes / t.seconds / 1e9)
            for axis in report.axes
            for t in axis.times
        ]
        heads = "axis:words, collective:words, bytes:bytes, time:s, bytes/s of the tensor:GB/s"
        yield from _details("every measurement", heads, times)

    def pairs(matrix: PairMatrix) -> Iterator[str]:
        yield "<div class='pair'>"
        yield from figure(drawn["bandwidth"], "wide")
        yield from figure(drawn["latency"], "wide")
        yield "</div>"
        at_once = "one pair at a time" if matrix.at_once == 1 else f"{matrix.at_once} disjoint pairs at a time"
        left_out = f"; {matrix.left_out:,} pairs were left out" if matrix.left_out else ""
        yield f"<p class='soft'>Measured {at_once}{left_out}.</p>"
        for kind, found in matrix.kinds(report.hosts).items():
            median = statistics.median(gbs for *_, gbs in found)
            yield f"<p class='soft'>Pairs {kind}: {median:.3g} GB/s in the median.</p>"
        slowest, hosts = sorted(matrix.directed(), key=lambda pair: pair[3])[:MOST_PAIRS], report.hosts
        rows = [(a, b, f"{hosts[a]} → {hosts[b]}", gbs, us * 1e-6) for a, b, us, gbs in slowest]
        yield from _details("the slowest pairs", "sender, receiver, hosts:words, bandwidth:GB/s, latency:s", rows)

    def ranks() -> Iterator[str]:
        slow = {each.rank: f"slow: {each.factor:.2f} ×" for each in report.slow_ranks}
        own = dict(enumerate(report.training.own_s if report.training else []))
        rows = [
            (rank, host, *astuple(report.probe[rank]), own.get(rank, ""), slow.get(rank, ""))
            for rank, host in enumerate(report.hosts)
        ]
        rule = f"more than {FACTOR:g} × the median of the others"
        yield f"<p class='soft'>A rank is slow if its own time is {rule}, in every window.</p>"
        heads = "rank, host:words, compute probe:s, before a collective:s, waits in it:s, own time per step:s, :words"
        yield from _table(heads, rows)

    def training(test: TrainingTest) -> Iterator[str]:
        yield from figure(drawn["steps"], "wide") if "steps" in drawn else ()
        yield "<div class='pair'><div>"
        phases = [(phase, *times) for phase, times in test.phases.items()]
        yield from _table("phase of a step:words, own:s, waiting for others:s", phases)
        facts = [f"{test.model}: {test.batch}", *test.changed, *(f"profile: {path}" for path in test.traces)]
        yield from list_of(facts)
        yield "</div><div>"
        kernels = list(map(astuple, test.kernels))
        yield from _table("operation (profile of rank 0):words, calls per step:g, own time per step:s", kernels)
        yield "</div></div>"

    found: dict[tuple[str, str], Iterator[str]] = {}
    found |= {("speed", "Collectives by size"): speed()} if report.axes else {}
    found |= {("pairs", "Pairs of ranks"): pairs(report.pairs)} if report.pairs else {}
    found |= {("ranks", "Ranks"): ranks()} if report.probes else {}
    found |= {("training", "Training"): training(report.training)} if report.training else {}
    return found


def _details(summary: str, heads: str, rows: Sequence[Sequence[Any]]) -> Iterator[str]:
    yield f"<details><summary>{summary}</summary>"
    yield from _table(heads, rows)
    yield "</details>"


def _table(heads: str, rows: Sequence[Sequence[Any]]) -> Iterator[str]:
    """Yields a table. A head may name the kind of its column: words, or one of FORMATS, by whose number a reader can
    then sort."""
    names, _, kinds = zip(*(head.partition(":") for head in heads.split(", ")), strict=True)
    cells = [
        [(FORMATS[kind](cell), cell) if kind in FORMATS and cell != "" else (str(cell), None) for kind, cell in each]
        for each in (zip(kinds, row, strict=True) for row in rows)
    ]
    return table(names, cells, words=[at for at, kind in enumerate(kinds) if kind == "words"])


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
