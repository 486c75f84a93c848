"""The charts of one or several runs over their steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from phalanx.pictures import curves
from phalanx.pictures.curves import Chart, Curve, Points
from phalanx.report.run import RunRecord, number
from phalanx.units import gib

NAMED = {
    "loss": "Loss",
    "lr": "Learning rate",
    "grad_norm": "Gradient norm",
    "tps": "Tokens per second and device (tps)",
    "mfu": "MFU",
    "memory": "Peak memory of rank 0 so far",
    "experts": "Experts: worst layer's violation",
    "reward_margin": "Margin of the rewards",
}


def charts(records: Sequence[RunRecord]) -> Iterator[str]:
    """Yields the charts that some run has points for, as SVG documents."""
    yield from loss(records)
    for name in ("reward_margin", "lr", "grad_norm", "tps", "mfu", "memory"):
        lines = [Curve(_name(records, each, name), each.metrics.points(name), at) for at, each in enumerate(records)]
        chart = Chart(NAMED[name], lines, UNITS[name], **_options(name, lines), marks=_marks(records))
        yield from drawn(chart)
    if len(records) > 1:  # the page of a lone run has a picture of its experts
        lines = [Curve(each.name, _experts(each), at) for at, each in enumerate(records)]
        yield from drawn(Chart(NAMED["experts"], lines, _plain, from_zero=True))


def loss(records: Sequence[RunRecord], *, alone: bool = False) -> Iterator[str]:
    """Yields the chart of the loss and the validation loss, if there is a loss."""
    lines: list[Curve] = []
    for at, each in enumerate(records):
        colour = at if len(records) > 1 else 0
        lines.append(Curve(_name(records, each, "loss"), each.metrics.points("loss"), colour))
        validation = _validations(each)
        name = f"{each.name}, validation" if len(records) > 1 else "validation loss"
        alone_in_it = len(records) == 1
        lines.append(Curve(name, validation, 1 if alone_in_it else colour, dots=True, named=alone_in_it))
    title = f"Loss of {records[0].name}" if alone and len(records) == 1 else NAMED["loss"]
    if len(records) > 1:
        title = f"{title}; dots: validation"
    yield from drawn(Chart(title, lines, _four, _plain, marks=_marks(records)), alone=alone)


def drawn(chart: Chart, *, alone: bool = False) -> Iterator[str]:
    """Yields the chart if it has points."""
    if any(curve.points for curve in chart.curves):
        yield curves.svg(chart, alone=alone)


def _name(records: Sequence[RunRecord], record: RunRecord, figure: str) -> str:
    return record.name if len(records) > 1 else figure.replace("_", " ")


def _validations(record: RunRecord) -> Points:
    rows = ((row["step"], number(row.get("val_loss"))) for row in record.metrics.of("validation"))
    return [(step, value) for step, value in rows if value is not None]


def _experts(record: RunRecord) -> Points:
    rows = ((row["step"], number(row.get("max_violation"))) for row in record.metrics.of("experts"))
    return [(step, value) for step, value in rows if value is not None]


def _marks(records: Sequence[RunRecord]) -> dict[float, str]:
    """Returns the steps from which a lone run went on, and those in which its guard found something."""
    if len(records) > 1:
        return {}
    found: dict[float, str] = {}
    for row in records[0].metrics.events:
        if row["event"] == "start" and row["step"]:
            found[row["step"]] = f"step {row['step']}: went on"
        elif row["event"] == "guard":
            found[row["step"]] = f"step {row['step']}: guard: {row.get('text')}"
    return found


def _options(name: str, lines: Sequence[Curve]) -> dict[str, Any]:
    options: dict[str, Any] = {"from_zero": name in ("tps", "mfu", "memory", "lr"), "robust": name != "lr"}
    if name == "memory":
        highest = max((y for line in lines for _, y in line.points), default=0)
        unit, word = (2.0**30, "GiB") if highest > 2**30 else (2.0**20, "MiB")
        options |= {"scale": unit, "tick": lambda value: f"{value / unit:g} {word}"}
    if name == "mfu":
        options |= {"scale": 0.01}
    return options


def _four(value: float) -> str:
    return f"{value:.4f}"


def _plain(value: float) -> str:
    return f"{value:.3g}"


def _whole(value: float) -> str:
    return f"{value:,.0f}"


def _percent(value: float) -> str:
    return f"{value * 100:.3g}%"


def _rate(value: float) -> str:
    return f"{value:.1e}" if value else "0"


UNITS: dict[str, Callable[[float], str]] = {
    "lr": _rate,
    "grad_norm": _plain,
    "tps": _whole,
    "mfu": _percent,
    "memory": gib,
    "reward_margin": _plain,
}
