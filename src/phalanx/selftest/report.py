"""The result of the distributed self-test: as text, as JSON, and what to do about what it found."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from phalanx.config.layout import Layout
from phalanx.launch.watchdog.slow import FACTOR
from phalanx.pictures.elements import seconds
from phalanx.selftest.check import AxisChecks
from phalanx.selftest.pairs import PairMatrix
from phalanx.selftest.stragglers import ProbeTimes, Straggler
from phalanx.selftest.timing import TimedAxis
from phalanx.selftest.training import TrainingTest
from phalanx.units import counted

ETHERNET_GBS = 0.5
"""Bandwidth between hosts below which GPUs probably do not use their InfiniBand cards."""
SHOWN = 12
"""Lines of one kind that the text shows; JSON and the page have all."""


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
    def world(self) -> int:
        return len(self.hosts)

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
        return {
            rank: ProbeTimes(
                *(
                    statistics.median(getattr(window[rank], each.name) for window in self.probes)
                    for each in fields(ProbeTimes)
                )
            )
            for rank in (self.probes[0] if self.probes else ())
        }

    @property
    def slow_ranks(self) -> list[Straggler]:
        """The stragglers of all stages."""
        return self.stragglers + (self.training.stragglers if self.training else [])

    @property
    def slow_pairs(self) -> list[tuple[int, int, float, float]]:
        """Sender, receiver, 10⁹ bytes per second, and the median of the same kind of pair."""
        return self.pairs.slow(self.hosts) if self.pairs else []

    def title(self) -> str:
        """Returns the ranks, hosts, backend and layout in a line."""
        hosts = counted(len(set(self.hosts)), "host")
        ranks = counted(self.world, "rank")
        threads = f", {counted(self.threads, 'thread')} each" if self.device == "cpu" else ""
        return f"{ranks} on {hosts}{threads}, {self.backend} on {self.device}, layout {self.layout.line()}"

    def verdict(self) -> str:
        """Returns the outcome in a line."""
        count = sum(checks.wrong_count for checks in self.checks)
        if not self.ok:
            return f"FAILED: {counted(max(count, len(self.failures)), 'problem')}; the first: {self.failures[0]}"
        slow = len({each.rank for each in self.slow_ranks})
        if slow or self.slow_pairs:
            return f"correct, but slow: {counted(slow, 'straggler')}, {counted(len(self.slow_pairs), 'slow pair')}"
        return "ok: all values correct, no stragglers, no slow pairs"

    def text(self) -> str:
        """Returns the summary for a terminal."""
        parts = [
            [self.title()],
            list(self._checks()),
            list(self._axes()),
            list(self._pairs()),
            list(self._probe()),
            list(self._training()),
            [f"note: {note}" for note in self.notes + (self.training.notes if self.training else [])],
            [*_some(self.failures), *self._slow_lines()],
            [f"what to do: {line}" for line in advice(self)],
        ]
        spent = sum(self.seconds.values())
        return "\n".join([line for part in parts for line in part] + [f"{self.verdict()} ({spent:.1f} s)"])

    def as_dict(self) -> dict[str, Any]:
        """Returns the document of `--json`. A figure that was not measured is null."""
        document = {
            "ok": self.ok,
            "verdict": self.verdict(),
            "failures": self.failures,
            "world": self.world,
            "hosts": self.hosts,
            "backend": self.backend,
            "device": self.device,
            "threads": self.threads,
            "layout": self.layout.line(),
            "checks": [{**asdict(checks), "ok": checks.ok} for checks in self.checks],
            "same_ranks": self.same_ranks,
            "axes": [asdict(axis) for axis in self.axes],
            "pairs": asdict(self.pairs) if self.pairs else None,
            "slow_pairs": [
                {"sender": a, "receiver": b, "gbs": gbs, "median_gbs": median} for a, b, gbs, median in self.slow_pairs
            ],
            "probe": [{str(rank): asdict(times) for rank, times in window.items()} for window in self.probes],
            "stragglers": [{**asdict(each), "factor": each.factor} for each in self.slow_ranks],
            "training": asdict(self.training) if self.training else None,
            "notes": self.notes,
            "advice": advice(self),
            "seconds": self.seconds,
        }
        return finite(document)

    def _checks(self) -> Iterator[str]:
        for checks in self.checks:
            wrong = f"{checks.wrong_count} WRONG" if checks.wrong_count else "all correct"
            yield f"values on {checks.axis}: {checks.checked} results per rank compared exactly, {wrong}"
        for axis, other in self.same_ranks.items():
            yield f"values on {axis}: has the ranks of {other}"
        refused = sorted({f"{what}: {text}" for checks in self.checks for what, text in checks.refused.items()})
        yield from (f"not done by {self.backend}: {line}" for line in _some(refused))
        if limits := sorted({name for checks in self.checks for name in checks.limits}):
            yield (
                f"limit of {self.backend}: wrong values for strided tensors in {', '.join(limits)}; training sends none"
            )

    def _axes(self) -> Iterator[str]:
        if not self.axes:
            return
        yield f"{'axis':<14} {'ranks':>5}  {'place':<17} {'latency':>10} {'bandwidth':>11}  {'barrier':>9}  fit error"
        for axis in self.axes:
            latency, barrier = seconds(axis.latency_us * 1e-6), seconds(axis.barrier_s)
            yield (
                f"{axis.axis:<14} {axis.ranks:>5}  {axis.place:<17} {latency:>10} {axis.gbs:>6.3g} GB/s  "
                f"{barrier:>9}  {axis.error:.0%}"
            )

    def _pairs(self) -> Iterator[str]:
        if self.pairs is None:
            return
        for kind, figures in pair_kinds(self).items():
            rate = statistics.median(gbs for *_, gbs in figures)
            latency = seconds(statistics.median(us for _, _, us, _ in figures) * 1e-6)
            a, b, _, least = min(figures, key=lambda pair: pair[3])
            yield (
                f"pairs {kind}: {rate:.3g} GB/s, {latency} in the median; "
                f"slowest {a} → {b} ({self.hosts[a]} → {self.hosts[b]}): {least:.3g} GB/s"
            )
        if self.pairs.left_out:
            yield f"pairs left out: {self.pairs.left_out:,}, for which there was no time"

    def _probe(self) -> Iterator[str]:
        if not self.probes:
            return
        own = {rank: times.compute_s for rank, times in self.probe.items()}
        slowest = max(own, key=lambda rank: own[rank])
        median = statistics.median(own.values())
        yield (
            f"compute probe: {seconds(median)} in the median; slowest rank {slowest} ({self.hosts[slowest]}) "
            f"{own[slowest] / median:.2f} ×"
        )

    def _training(self) -> Iterator[str]:
        test = self.training
        if test is None:
            return
        losses = [loss for loss in test.losses if math.isfinite(loss)]
        loss = f", loss {losses[0]:.4f} → {losses[-1]:.4f}" if losses else ""
        same = "" if test.problems else ", the same on all ranks"
        yield (
            f"training: {counted(test.steps, 'step')} of {test.model} ({test.batch}), "
            f"{seconds(test.median_step_s)} per step{loss}{same}"
        )
        if test.phases:
            parts = [f"{phase} {seconds(own)}" for phase, (own, _) in test.phases.items()]
            waits = sum(waited for _, waited in test.phases.values())
            yield f"  per step: {', '.join(parts)}, waiting for other ranks {seconds(waits)}"
        if test.changed:
            yield f"  trained with {', '.join(test.changed)}: steps of their own are needed here"
        if test.traces:
            yield f"  profile: {test.traces[0]}{f' and {len(test.traces) - 1} more' if len(test.traces) > 1 else ''}"

    def _slow_lines(self) -> list[str]:
        lines = [each.line() for each in self.slow_ranks]
        for axis in self.axes:
            lines += [
                f"{axis.axis} of ranks {_few(line.ranks)} is slow: {seconds(line.seconds)} for the largest all-reduce, "
                f"{line.seconds / line.median_s:.2f} × the median of the other lines"
                for line in axis.slow_lines
            ]
        lines += [
            f"pair {a} → {b} ({self.hosts[a]} → {self.hosts[b]}) is slow: {gbs:.3g} GB/s, {gbs / median:.0%} of the "
            "median"
            for a, b, gbs, median in self.slow_pairs
        ]
        return _some(lines)


def pair_kinds(report: DistReport) -> dict[str, list[tuple[int, int, float, float]]]:
    """Returns the measured pairs on one host and between hosts."""
    kinds: dict[str, list[tuple[int, int, float, float]]] = {}
    for pair in report.pairs.directed() if report.pairs else ():
        same = report.hosts[pair[0]] == report.hosts[pair[1]]
        kinds.setdefault("on one host" if same else "between hosts", []).append(pair)
    return kinds


def advice(report: DistReport) -> list[str]:
    """Returns what to look at, given the findings; nothing if there are none."""
    lines: list[str] = []
    ranks = {rank for checks in report.checks for rank in {wrong.rank for wrong in checks.wrong}}
    if any(checks.wrong for checks in report.checks):
        one = len({report.hosts[rank] for rank in ranks}) == 1 and len(set(report.hosts)) > 1
        whose = f"only ranks of host {report.hosts[min(ranks)]} see" if one else f"{counted(len(ranks), 'rank')} saw"
        lines.append(
            f"{whose} wrong values: do not train there. Run again without that host; look for memory (ECC) and network "
            "errors; compare versions of driver, NCCL and torch"
        )
    stages = {stage: [each for each in report.slow_ranks if each.stage == stage] for stage in STAGES}
    for stage, hint in STAGES.items():
        if found := stages[stage]:
            who = ", ".join(dict.fromkeys(f"rank {each.rank} ({each.host})" for each in found[:4]))
            lines.append(f"{who}: {hint}")
    if report.slow_pairs:
        lines.append(_pair_advice(report))
    ethernet = [axis for axis in report.axes if axis.place != "one host" and axis.gbs < ETHERNET_GBS]
    lines += [
        f"{axis.axis}: {axis.gbs:.3g} GB/s between hosts is that of Ethernet: check NCCL_SOCKET_IFNAME, and look for "
        "NET/IB in the output under NCCL_DEBUG=INFO"
        for axis in (ethernet if report.device == "cuda" else [])
    ]
    return lines


STAGES = {
    "compute": "computes slowly. Look for other processes on its cores or device (top, nvidia-smi), a lower clock "
    "(temperature, power limit), and fewer cores or other NUMA placement than the others have",
    "arrival": "computes as fast as the others, but starts its collectives late. Look for what runs on its host "
    "between steps: monitoring, Python threads, swapping, a slow file system",
    "training": "needs more time of its own per step. Open its trace beside that of another rank (ui.perfetto.dev)",
}


def _pair_advice(report: DistReport) -> str:
    """Returns what the slow pairs have in common: a host, if it is in all of them."""
    pairs = [{report.hosts[a], report.hosts[b]} for a, b, *_ in report.slow_pairs]
    common = ", ".join(sorted(set.intersection(*pairs)))
    if all(len(hosts) == 1 for hosts in pairs):
        return (
            f"slow pairs on {f'host {common}' if common else 'several hosts'}: look for other processes on the cores "
            "and buses of these ranks, and at their placement (numactl -s, nvidia-smi topo -m)"
        )
    where = f"all slow pairs involve host {common}" if common else "the slow pairs share no host"
    return (
        f"{where}: check cable, port and network interface (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME), and other traffic "
        "on the link"
    )


def finite(value: Any) -> Any:
    """Returns the value with NaN and infinity, which JSON lacks, as None."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def factor_words() -> str:
    """Returns the rule by which a rank is slow, for pages."""
    return f"more than {FACTOR:g} × the median of the others"


def _some(lines: Sequence[str]) -> list[str]:
    more = len(lines) - SHOWN
    return [*lines[:SHOWN], *([f"... and {more} more (--json has all)"] if more > 0 else [])]


def _few(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (", …" if len(ranks) > 8 else "")
