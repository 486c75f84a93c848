"""Pictures of a measured machine and its fit: dots are measurements, lines are the cost model. Axes are logarithmic.
There is no background, for light and dark pages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from html import escape
from math import ceil, floor, log, log2, log10
from typing import NamedTuple

from phalanx.config.cluster import Cluster
from phalanx.cost import fit
from phalanx.cost.fit import AttentionTiming, FitRow, ProductTiming, StreamTiming, Transfer
from phalanx.pictures.elements import COLOURS, NEUTRAL, document, heading, text

_WIDTH, _HEIGHT = 320, 200  # pixels of a panel's plot
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 20, 32, 48  # margins around it; the top one without the legend
_HEADER = 60
_LINE = 15  # pixels of a line of the legend
_LABELS = 5  # approximate number of labels on an axis
_CURVE = 6  # points of the curve per measured size


class Series(NamedTuple):
    """Measured and modelled points (x, y), in the order of x."""

    measured: list[tuple[float, float]]
    fitted: list[tuple[float, float]]


@dataclass(frozen=True)
class FitPanel:
    """One pair of axes."""

    title: str
    x: str
    y: str
    series: dict[str, Series]
    binary: bool = True
    """Whether x counts bytes or tokens, in powers of two."""


def device_svg(
    title: str,
    products: Sequence[ProductTiming],
    attentions: Sequence[AttentionTiming],
    streams: Sequence[StreamTiming],
    rows: Sequence[FitRow],
) -> str:
    """Draws one device: rates of products by size, of attention by length, of streams by bytes. `rows` are
    fit.device_rows of the same measurements, in the same order."""
    fits = iter(rows)
    rates, attention, memory = {}, {}, {}
    for p in products:
        _add_rate(rates, p.family, p.flops, p.flops / 1e12, next(fits))
    for a in attentions:
        _add_rate(attention, "backward" if a.backward else "forward", a.length, a.flops / 1e12, next(fits))
    for s in streams:
        _add_rate(memory, s.kernel, s.moved, s.moved / 1e9, next(fits))
    memory = {name: series for name, series in memory.items() if len(series.measured) > 1}
    families = list(rates.items())
    pairs = [dict(families[at : at + 2]) for at in range(0, len(families), 2)]  # more lines would hide each other
    return _svg(
        title,
        [
            *(FitPanel("Products (m × n × k)", "FLOPs of a product", "TFLOP/s", two, binary=False) for two in pairs),
            FitPanel("Attention, causal", "tokens", "TFLOP/s", attention),
            FitPanel("Streams", "bytes read and written", "GB/s", memory),
        ],
        columns=3,
    )


def link_svg(
    title: str, groups: Sequence[tuple[Cluster, Sequence[Transfer]]], names: Sequence[str] | None = None
) -> str:
    """Draws collectives, one row each: time by bytes, and bytes per second sent per rank; one line per group, with the
    fitted machine. `names` are those of the groups, by default their sizes."""
    times: dict[str, dict[str, Series]] = {}
    buses: dict[str, dict[str, Series]] = {}
    for number, (machine, transfers) in enumerate(groups):
        for t in transfers:
            size = f"{t.group.ranks} ranks" + (" on as many nodes" if t.group.stride > 1 else "")
            name = names[number] if names else size
            time = times.setdefault(t.collective, {}).setdefault(name, Series([], []))
            bus = buses.setdefault(t.collective, {}).setdefault(name, Series([], []))
            before = time.measured[-1][0] if time.measured else t.payload
            time.measured.append((t.payload, t.seconds * 1e6))
            bus.measured.append((t.payload, t.bus / 1e9))
            for payload in _between(before, t.payload):
                there = fit.predicted(machine, replace(t, payload=payload))
                time.fitted.append((payload, there.seconds * 1e6))
                bus.fitted.append((payload, there.bus / 1e9))
    panels = []
    for collective, time in times.items():
        name = collective.replace("_", "-")
        panels.append(FitPanel(name, "bytes", "microseconds", time))
        panels.append(FitPanel(f"{name}, sent per rank", "bytes", "GB/s", buses[collective]))
    return _svg(title, panels, columns=2)


def _between(start: float, end: int) -> list[int]:
    """Returns sizes after `start` up to `end`, close enough to each other for a curve."""
    return [round(start * (end / start) ** (step / _CURVE)) for step in range(1, _CURVE + 1)] if end > start else [end]


def _add_rate(found: dict[str, Series], name: str, x: float, work: float, row: FitRow) -> None:
    series = found.setdefault(name, Series([], []))
    series.measured.append((x, work / row.measured))
    series.fitted.append((x, work / row.fitted))


def _svg(title: str, panels: Sequence[FitPanel], columns: int) -> str:
    """Draws panels in rows of `columns`."""
    panels = [panel for panel in panels if panel.series]
    top = _TOP + _LINE * max((len(panel.series) + 1) // 2 for panel in panels)
    across, down = _LEFT + _WIDTH + _RIGHT, top + _HEIGHT + _BOTTOM
    width, height = across * min(columns, len(panels)), _HEADER + down * ceil(len(panels) / columns)
    parts = [
        heading(16, 24, title),
        f"<circle cx='20' cy='42' r='3.5' fill='{NEUTRAL}'/>",
        text(30, 46, "measured"),
        f"<line x1='104' y1='42' x2='128' y2='42' stroke='{NEUTRAL}' stroke-width='2'/>",
        text(134, 46, "fitted"),
    ]
    for number, panel in enumerate(panels):
        x, y = number % columns * across + _LEFT, _HEADER + number // columns * down + top
        parts.append(f"<g class='panel' transform='translate({x} {y})'>")
        parts += [*_panel(panel, 16 - top), "</g>"]
    return document(title, width, height, parts)


def _panel(panel: FitPanel, title_at: float) -> Iterator[str]:
    points = [point for line in panel.series.values() for point in (*line.measured, *line.fitted)]
    xs, ys = _span(x for x, _ in points), _span(y for _, y in points)
    yield text(_WIDTH / 2, title_at, panel.title, "text-anchor='middle' font-weight='600'")
    for number, (name, colour) in enumerate(zip(panel.series, COLOURS, strict=False)):
        at, down = number % 2 * _WIDTH / 2, title_at + _LINE * (number // 2 + 1) + 3
        yield f"<circle cx='{at + 5:g}' cy='{down - 4:g}' r='3.5' fill='{colour}'/>"
        yield text(at + 14, down, name, "font-size='11'")
    for x in _ticks(*xs, binary=panel.binary):
        at = _place(x, xs) * _WIDTH
        yield f"<path d='M{at:.1f} 0V{_HEIGHT}' stroke='{NEUTRAL}' stroke-opacity='.2'/>"
        yield text(at, _HEIGHT + 16, _binary(x) if panel.binary else _short(x), "text-anchor='middle'")
    for y in _ticks(*ys, binary=False):
        at = _HEIGHT - _place(y, ys) * _HEIGHT
        yield f"<path d='M0 {at:.1f}H{_WIDTH}' stroke='{NEUTRAL}' stroke-opacity='.2'/>"
        yield text(-6, at + 4, _short(y), "text-anchor='end'")
    yield text(_WIDTH / 2, _HEIGHT + 36, panel.x, "text-anchor='middle'")
    middle = f"{16 - _LEFT} {_HEIGHT / 2:g}"
    yield f"<text transform='translate({middle}) rotate(-90)' text-anchor='middle'>{escape(panel.y)}</text>"
    for line, colour in zip(panel.series.values(), COLOURS, strict=False):
        at = [(_place(x, xs) * _WIDTH, _HEIGHT - _place(y, ys) * _HEIGHT) for x, y in line.fitted]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in at)
        yield f"<polyline points='{path}' fill='none' stroke='{colour}' stroke-width='2' stroke-opacity='.75'/>"
        for x, y in line.measured:
            place = f"cx='{_place(x, xs) * _WIDTH:.1f}' cy='{_HEIGHT - _place(y, ys) * _HEIGHT:.1f}'"
            yield f"<circle class='measured' {place} r='3.5' fill='{colour}'/>"


def _span(values: Iterable[float]) -> tuple[float, float]:
    """Returns the range of a logarithmic axis, with a margin at both ends."""
    found = list(values)
    low, high = min(found), max(found)
    room = max((high / low) ** 0.05, 1.02)
    return low / room, high * room


def _place(value: float, span: tuple[float, float]) -> float:
    return log(value / span[0]) / log(span[1] / span[0])


def _ticks(low: float, high: float, *, binary: bool) -> list[float]:
    """Returns labelled values: powers of two or ten, not too many; over a short range also multiples of them."""
    if binary:
        first, last = ceil(log2(low) - 1e-9), floor(log2(high) + 1e-9)
        every = max(1, ceil((last - first + 1) / _LABELS))
        return [2.0**power for power in range(first, last + 1, every)]
    first, last = floor(log10(low)), ceil(log10(high))
    factors = (1,) if high > 100 * low else (1, 2, 5) if high > 8 * low else (1, 1.5, 2, 3, 4, 5, 6, 8)
    every = max(1, ceil((last - first) / _LABELS)) if len(factors) == 1 else 1
    found = [factor * 10.0**power for power in range(first, last + 1, every) for factor in factors]
    return [value for value in found if low <= value <= high]


def _short(value: float) -> str:
    """Formats 1000000000 as 1G, and 0.02 as it is."""
    for power, letter in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= power * (1 - 1e-9):
            return f"{value / power:.3g}{letter}"
    return f"{value:.3g}"


def _binary(value: float) -> str:
    """Formats 65536 as 64Ki."""
    for power, letters in ((2**30, "Gi"), (2**20, "Mi"), (2**10, "Ki")):
        if value >= power:
            return f"{value / power:g}{letters}"
    return f"{value:g}"
