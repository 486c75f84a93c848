"""The self-test as one self-contained HTML page with plots and tables."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from phalanx.pictures.elements import seconds
from phalanx.pictures.heat_map import heat_map, histograms
from phalanx.pictures.page import figure, figures, html_page, list_of, section, table
from phalanx.pictures.panels import link_svg
from phalanx.selftest.pairs import PairMatrix
from phalanx.selftest.report import DistReport, advice, factor_words, pair_kinds
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
    heads = ("axis", "ranks", "results per rank", "wrong", "not done by the backend")
    yield from table(
        heads,
        [
            (
                (checks.axis, None),
                (str(checks.ranks), None),
                (f"{checks.checked:,}", checks.checked),
                (f"{checks.wrong_count:,}", checks.wrong_count),
                ("; ".join(f"{what}: {text}" for what, text in checks.refused.items()), None),
            )
            for checks in report.checks
        ],
        words=(0, 4),
    )
    if report.same_ranks:
        yield from list_of([f"{axis} has the ranks of {other}" for axis, other in report.same_ranks.items()])


def _speed(report: DistReport, drawn: dict[str, str]) -> Iterator[str]:
    heads = ("axis", "ranks", "place", "latency", "bandwidth", "barrier", "fit error", "spread", "not measured")
    yield from table(
        heads,
        [
            (
                (axis.axis, None),
                (str(axis.ranks), None),
                (axis.place, None),
                (seconds(axis.latency_us * 1e-6), axis.latency_us),
                (f"{axis.gbs:.3g} GB/s", axis.gbs),
                (seconds(axis.barrier_s), axis.barrier_s),
                (f"{axis.error:.0%}", axis.error),
                (f"{axis.spread:.0%}", axis.spread),
                (", ".join(gib(size) for size in axis.left_out), None),
            )
            for axis in report.axes
        ],
        words=(0, 2, 8),
    )
    yield from figure(drawn["speed"], "wide")
    yield "<details><summary>every measurement</summary>"
    yield from table(
        ("axis", "collective", "bytes", "time", "bytes/s of the tensor"),
        [
            (
                (axis.axis, None),
                (time.collective.replace("_", "-"), None),
                (gib(time.bytes), time.bytes),
                (seconds(time.seconds), time.seconds),
                (f"{time.bytes / time.seconds / 1e9:.3g} GB/s", time.bytes / time.seconds),
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
    yield from table(
        ("sender", "receiver", "hosts", "bandwidth", "latency"),
        [
            (
                (str(a), None),
                (str(b), None),
                (f"{report.hosts[a]} → {report.hosts[b]}", None),
                (f"{gbs:.3g} GB/s", gbs),
                (seconds(us * 1e-6), us),
            )
            for a, b, us, gbs in slowest
        ],
        words=(2,),
    )
    yield "</details>"


def _ranks(report: DistReport) -> Iterator[str]:
    slow = {each.rank: each for each in report.slow_ranks}
    own = report.training.own_s if report.training else []
    heads = ("rank", "host", "compute probe", "before a collective", "waits in it", "own time per step", "")
    rows, probe = [], report.probe
    for rank, host in enumerate(report.hosts):
        times = probe[rank]
        rows.append(
            (
                (str(rank), None),
                (host, None),
                (seconds(times.compute_s), times.compute_s),
                (seconds(times.arrival_s), times.arrival_s),
                (seconds(times.wait_s), times.wait_s),
                (seconds(own[rank]), own[rank]) if own else ("", None),
                (f"slow: {slow[rank].factor:.2f} ×" if rank in slow else "", None),
            )
        )
    yield f"<p class='soft'>A rank is slow if its own time is {factor_words()}, in every window.</p>"
    yield from table(heads, rows, words=(1, 6))


def _training(report: DistReport, drawn: dict[str, str]) -> Iterator[str]:
    test = report.training
    assert test is not None, "there is a section only then"
    if "steps" in drawn:
        yield from figure(drawn["steps"], "wide")
    yield "<div class='pair'><div>"
    yield from table(
        ("phase of a step", "own", "waiting for others"),
        [
            ((phase, None), (seconds(own), own), (seconds(waited), waited))
            for phase, (own, waited) in test.phases.items()
        ],
        words=(0,),
    )
    yield from list_of([f"{test.model}: {test.batch}", *test.changed, *(f"profile: {path}" for path in test.traces)])
    yield "</div><div>"
    yield from table(
        ("operation (profile of rank 0)", "calls per step", "own time per step"),
        [
            ((kernel.name, None), (f"{kernel.calls:g}", kernel.calls), (seconds(kernel.seconds), kernel.seconds))
            for kernel in test.kernels
        ],
        words=(0,),
    )
    yield "</div></div>"


def _name(report: DistReport, rank: int) -> str:
    return f"rank {rank} ({report.hosts[rank]})"


def _short(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"
