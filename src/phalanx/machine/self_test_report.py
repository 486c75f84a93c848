"""The result of the distributed self-test: as text, as JSON, as a page, and what to do about what it found."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, astuple, dataclass, field
from typing import Any

from phalanx.config.layout import Layout
from phalanx.launch.watchdog.diagnosis import FACTOR
from phalanx.machine.collectives import AxisChecks
from phalanx.machine.links import TimedAxis
from phalanx.machine.pairs import PairMatrix
from phalanx.machine.stragglers import ProbeTimes, Straggler
from phalanx.machine.training import TrainingTest
from phalanx.pictures.elements import seconds
from phalanx.pictures.heat_map import heat_map, histograms
from phalanx.pictures.page import figure, figures, html_page, list_of, section, table
from phalanx.pictures.panels import link_svg
from phalanx.units import counted, gib

MOST_PAIRS = 200
"""Pairs in the table, the slowest first."""


def page(report: DistReport) -> str:
    """Returns the page."""
    drawn = pictures(report)
    notes = report.notes + (report.training.notes if report.training else [])
    title = f"Distributed self-test: {report.title()}"
    sections = [
        *section("verdict", "Result", _verdict(report)),
        *(section("advice", "What to do", list_of(advice(report))) if advice(report) else []),
        *section("values", "Values", _values(report)),
        *(section("speed", "Collectives by size", _speed(report, drawn)) if report.axes else []),
        *(section("pairs", "Pairs of ranks", _pairs(report, report.pairs, drawn)) if report.pairs else []),
        *(section("ranks", "Ranks", _ranks(report)) if report.probes else []),
        *(section("training", "Training", _training(report, drawn)) if report.training else []),
        *(section("notes", "Notes", list_of(notes)) if notes else []),
    ]
    spent = ", ".join(f"{part} {seconds(value)}" for part, value in report.seconds.items())
    return html_page(title, report.title(), f"time of the test: {spent}", sections)


def pictures(report: DistReport) -> dict[str, str]:
    """Returns the pictures as SVG documents, by name: those for which there is something to draw."""
    found = {}
    if report.axes:
        groups = [(axis.machine, axis.transfers) for axis in report.axes]
        names = [f"{axis.axis}, {counted(axis.ranks, 'rank')}" for axis in report.axes]
        where = f"{counted(report.world, 'rank')} on {counted(len(set(report.hosts)), 'host')}"
        found["speed"] = link_svg(f"Collectives of {report.backend} by axis, {where}", groups, names)
    if report.pairs:
        ranks = {rank: report.hosts[rank] for rank in report.pairs.ranks}
        slow = [(a, b) for a, b, *_ in report.slow_pairs]
        rates, waits = report.pairs.gbs, report.pairs.latency_us
        found["bandwidth"] = heat_map("Bandwidth between ranks, one way", rates, ranks, _short, unit="GB/s", slow=slow)
        found["latency"] = heat_map("Latency between ranks", waits, ranks, _short, unit="µs", more_is_better=False)
    test = report.training
    if test is not None and any(test.step_s):
        rows = {_name(report, rank): [1e3 * value for value in values] for rank, values in enumerate(test.step_s)}
        slow_names = [_name(report, each.rank) for each in test.stragglers]
        found["steps"] = histograms("Time of a training step", "milliseconds per step", rows, slow_names)
    return found


def _verdict(report: DistReport) -> Iterator[str]:
    from html import escape

    kind = "" if report.ok else " class='bad'"
    yield f"<p><b{kind}>{escape(report.verdict())}</b></p>"
    if report.failures:
        yield from list_of(report.failures)
    if report.slow_ranks:
        yield from list_of([each.line() for each in report.slow_ranks])
    compared = sum(checks.checked for checks in report.checks)
    most = [(f"{compared:,}", "results per rank compared exactly")]
    for axis in report.axes[:3]:
        most.append((f"{axis.gbs:.3g} GB/s", f"bandwidth on {axis.axis}"))
        most.append((seconds(axis.latency_us * 1e-6), f"latency on {axis.axis}"))
    if report.training is not None and any(report.training.step_s):
        most.append((seconds(report.training.median_step_s), "per training step"))
    yield from figures(most)


def _values(report: DistReport) -> Iterator[str]:
    yield from _table(
        "axis, ranks, results per rank, wrong, unsupported by the backend",
        [
            (
                *(checks.axis, checks.ranks, _count(checks.checked), _count(checks.wrong_count)),
                "; ".join(f"{what}: {text}" for what, text in checks.refused.items()),
            )
            for checks in report.checks
        ],
        words=(0, 4),
    )
    if report.same_ranks:
        yield from list_of([f"{axis} has the ranks of {other}" for axis, other in report.same_ranks.items()])


def _speed(report: DistReport, drawn: dict[str, str]) -> Iterator[str]:
    yield from _table(
        "axis, ranks, place, latency, bandwidth, barrier, fit error, spread, not measured",
        [
            (
                *(axis.axis, axis.ranks, axis.place, _time(axis.latency_us * 1e-6), _rate(axis.gbs)),
                *(_time(axis.barrier_s), _share(axis.error), _share(axis.spread)),
                ", ".join(gib(size) for size in axis.left_out),
            )
            for axis in report.axes
        ],
        words=(0, 2, 8),
    )
    yield from figure(drawn["speed"], "wide")
    yield "<details><summary>every measurement</summary>"
    yield from _table(
        "axis, collective, bytes, time, bytes/s of the tensor",
        [
            (
                *(axis.axis, time.collective.replace("_", "-"), (gib(time.bytes), time.bytes), _time(time.seconds)),
                _rate(time.bytes / time.seconds / 1e9),
            )
            for axis in report.axes
            for time in axis.times
        ],
        words=(0, 1),
    )
    yield "</details>"


def _pairs(report: DistReport, matrix: PairMatrix, drawn: dict[str, str]) -> Iterator[str]:
    yield "<div class='pair'>"
    yield from figure(drawn["bandwidth"], "wide")
    yield from figure(drawn["latency"], "wide")
    yield "</div>"
    at_once = "one pair at a time" if matrix.at_once == 1 else f"{matrix.at_once} disjoint pairs at a time"
    left_out = f"; {matrix.left_out:,} pairs were left out" if matrix.left_out else ""
    yield f"<p class='soft'>Measured {at_once}{left_out}.</p>"
    for kind, found in pair_kinds(report).items():
        median = statistics.median(gbs for *_, gbs in found)
        yield f"<p class='soft'>Pairs {kind}: {median:.3g} GB/s in the median.</p>"
    slowest = sorted(matrix.directed(), key=lambda pair: pair[3])[:MOST_PAIRS]
    yield "<details><summary>the slowest pairs</summary>"
    yield from _table(
        "sender, receiver, hosts, bandwidth, latency",
        [(a, b, f"{report.hosts[a]} → {report.hosts[b]}", _rate(gbs), _time(us * 1e-6)) for a, b, us, gbs in slowest],
        words=(2,),
    )
    yield "</details>"


def _ranks(report: DistReport) -> Iterator[str]:
    slow = {each.rank: each for each in report.slow_ranks}
    own = report.training.own_s if report.training else []
    rows, probe = [], report.probe
    for rank, host in enumerate(report.hosts):
        waits = (_time(value) for value in astuple(probe[rank]))
        mark = f"slow: {slow[rank].factor:.2f} ×" if rank in slow else ""
        rows.append((rank, host, *waits, _time(own[rank]) if own else "", mark))
    yield f"<p class='soft'>A rank is slow if its own time is {factor_words()}, in every window.</p>"
    heads = "rank, host, compute probe, before a collective, waits in it, own time per step, "
    yield from _table(heads, rows, words=(1, 6))


def _training(report: DistReport, drawn: dict[str, str]) -> Iterator[str]:
    test = report.training
    assert test is not None, "there is a section only then"
    if "steps" in drawn:
        yield from figure(drawn["steps"], "wide")
    yield "<div class='pair'><div>"
    phases = [(phase, _time(own), _time(waited)) for phase, (own, waited) in test.phases.items()]
    yield from _table("phase of a step, own, waiting for others", phases, words=(0,))
    yield from list_of([f"{test.model}: {test.batch}", *test.changed, *(f"profile: {path}" for path in test.traces)])
    yield "</div><div>"
    kernels = [(kernel.name, (f"{kernel.calls:g}", kernel.calls), _time(kernel.seconds)) for kernel in test.kernels]
    yield from _table("operation (profile of rank 0), calls per step, own time per step", kernels, words=(0,))
    yield "</div></div>"


Cell = tuple[str, float]
"""A text, and the number by which a reader can sort the column."""


def _table(heads: str, rows: Sequence[Sequence[Cell | str | int]], words: tuple[int, ...]) -> Iterator[str]:
    """Yields a table. A cell without a number to sort by is its text alone; `words` are the columns of words."""
    cells = [[cell if isinstance(cell, tuple) else (str(cell), None) for cell in row] for row in rows]
    return table(heads.split(", "), cells, words=words)


def _time(value: float) -> Cell:
    return seconds(value), value


def _rate(gbs: float) -> Cell:
    return f"{gbs:.3g} GB/s", gbs


def _share(value: float) -> Cell:
    return f"{value:.0%}", value


def _count(value: int) -> Cell:
    return f"{value:,}", value


def _name(report: DistReport, rank: int) -> str:
    return f"rank {rank} ({report.hosts[rank]})"


def _short(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"


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
                *map(statistics.median, zip(*(astuple(window[rank]) for window in self.probes), strict=True))
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
        for kind, rows in pair_kinds(self).items():
            rate = statistics.median(gbs for *_, gbs in rows)
            latency = seconds(statistics.median(us for _, _, us, _ in rows) * 1e-6)
            a, b, _, least = min(rows, key=lambda pair: pair[3])
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
