"""The charts of one or several runs over their steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from phalanx.pictures import curves
from phalanx.pictures.curves import Chart, Curve, Points
from phalanx.report.run import RunRecord, number
from phalanx.units import gib

_PLAIN = "{:.3g}".format
_CHARTS: dict[str, tuple[str, dict[str, Any]]] = {
    "kl": ("KL divergence from the reference, in nats per token", {"unit": _PLAIN, "robust": True}),
    "length": ("Tokens per completion", {"unit": _PLAIN, "from_zero": True}),
    "mtp_loss": ("Loss of the modules for further tokens", {"unit": "{:.4f}".format}),
    "reward_margin": ("Margin of the rewards", {"unit": _PLAIN, "robust": True}),
    "lr": ("Learning rate", {"unit": lambda v: f"{v:.1e}" if v else "0", "from_zero": True}),
    "grad_norm": ("Gradient norm", {"unit": _PLAIN, "robust": True}),
    "tps": ("Tokens per second and device (tps)", {"unit": "{:,.0f}".format, "from_zero": True, "robust": True}),
    "mfu": ("MFU", {"unit": lambda v: f"{v * 100:.3g}%", "from_zero": True, "robust": True, "scale": 0.01}),
    "memory": ("Peak memory of rank 0 so far", {"unit": gib, "from_zero": True, "robust": True}),
}
"""Title and axis of the charts of columns."""


def charts(records: Sequence[RunRecord]) -> Iterator[str]:
    """Yields the charts that some run has points for, as SVG documents."""
    yield from loss(records)
    alone = len(records) == 1
    for name, (title, axis) in _CHARTS.items():
        label = name.replace("_", " ")
        lines = [Curve(label if alone else each.name, each.metrics.points(name), at) for at, each in enumerate(records)]
        more: dict[str, Any] = {}
        if name == "memory":
            highest = max((y for line in lines for _, y in line.points), default=0)
            unit, word = (2.0**30, "GiB") if highest > 2**30 else (2.0**20, "MiB")
            more = {"scale": unit, "tick": lambda v, unit=unit, word=word: f"{v / unit:g} {word}"}
        yield from drawn(Chart(title, lines, **axis | more, marks=_marks(records)))
    if not alone:  # the page of a lone run has a picture of its experts
        lines = [Curve(each.name, _points(each, "experts", "max_violation"), at) for at, each in enumerate(records)]
        yield from drawn(Chart("Experts: worst layer's violation", lines, _PLAIN, from_zero=True))


def loss(records: Sequence[RunRecord], *, alone: bool = False) -> Iterator[str]:
    """Yields the chart of the loss and the validation loss, if there is a loss; of rewarded completions, whose loss
    tells nothing, that of the rewards."""
    lines: list[Curve] = []
    one = len(records) == 1
    what = "reward" if any(each.metrics.points("reward") for each in records) else "loss"
    for at, each in enumerate(records):
        lines.append(Curve(what if one else each.name, each.metrics.points(what), at))
        name = f"validation {what}" if one else f"{each.name}, validation"
        lines.append(Curve(name, _points(each, "validation", f"val_{what}"), 1 if one else at, dots=True, named=one))
    word = what.capitalize()
    title = f"{word} of {records[0].name}" if alone and one else word if one else f"{word}; dots: validation"
    yield from drawn(Chart(title, lines, "{:.4f}".format, _PLAIN, marks=_marks(records)), alone=alone)


def drawn(chart: Chart, *, alone: bool = False) -> Iterator[str]:
    """Yields the chart if it has points."""
    if any(curve.points for curve in chart.curves):
        yield curves.svg(chart, alone=alone)


def _points(record: RunRecord, event: str, name: str) -> Points:
    rows = ((row["step"], number(row.get(name))) for row in record.metrics.of(event))
    return [(step, value) for step, value in rows if value is not None]


def _marks(records: Sequence[RunRecord]) -> dict[float, str]:
    """Returns the steps from which a lone run went on, and those in which its guard found something."""
    found: dict[float, str] = {}
    for row in records[0].metrics.events if len(records) == 1 else ():
        if row["event"] == "start" and row["step"]:
            found[row["step"]] = f"step {row['step']}: went on"
        elif row["event"] == "guard":
            found[row["step"]] = f"step {row['step']}: guard: {row.get('text')}"
    return found
