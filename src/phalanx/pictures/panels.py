"""Line plots side by side: lines over one pair of axes each, and pictures of a measured machine beside its fit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil, floor, log2

from phalanx.config.cluster import Cluster
from phalanx.cost import fit
from phalanx.cost.fit import AttentionTiming, FitRow, ProductTiming, StreamTiming, Transfer
from phalanx.pictures import elements
from phalanx.pictures.elements import BOLD, MIDDLE, NEUTRAL

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Panel:
    """One pair of axes with its lines."""

    title: str
    x: str
    """Quantity on the x axis, with its unit."""
    y: str
    lines: Mapping[str, Points]
    """Points (x, y) in order, by name."""
    marks: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """A point that a dot marks, by the name of its line."""
    dots: Mapping[str, Points] = field(default_factory=dict)
    """Measurements beside a line, by its name."""
    log: int = 0
    """Base of the labels at a logarithmic x axis, 2 or 10; 0: both axes are linear."""
    x_marks: Sequence[tuple[float, str]] = ()
    """Labels at a linear x axis in place of round numbers."""


def panels_svg(title: str, panels: Sequence[Panel]) -> str:
    """Returns the panels side by side under one legend, as an SVG document. The same name has the same colour in every
    panel, and linear panels of the same quantity have the same y axis. Raises ValueError for an empty panel."""
    width, height, left, right, top, bottom = 400, 260, 64, 24, 72, 52
    names = dict.fromkeys(name for panel in panels for name in panel.lines)
    colours = {name: elements.COLOURS[number % len(elements.COLOURS)] for number, name in enumerate(names)}
    parts, at = [elements.heading(16, 22, title)], 16.0
    for name, colour in colours.items():
        parts.append(f"<line x1='{at:g}' y1='38' x2='{at + 18:g}' y2='38' stroke='{colour}' stroke-width='3'/>")
        parts.append(elements.text(at + 24, 42, name))
        at += 44 + 7 * len(name)
    for number, panel in enumerate(panels):
        parts.append(f"<g class='panel' transform='translate({number * (left + width + right) + left} {top})'>")
        beside = [each for each in panels if each.y == panel.y and not (each.log or panel.log)]
        parts += [*_plot(panel, width, height, -12, colours, beside), "</g>"]
    return elements.document(title, (left + width + right) * len(panels), top + height + bottom, parts)


def _points(panel: Panel) -> list[tuple[float, float]]:
    return [point for lines in (panel.lines, panel.dots) for line in lines.values() for point in line]


def _plot(
    panel: Panel,
    width: int,
    height: int,
    title_at: float,
    colours: Mapping[str, str],
    same_y: Sequence[Panel] = (),
) -> Iterator[str]:
    points = _points(panel)
    if not points:
        raise ValueError(f"panel {panel.title!r} has no points")
    x = elements.Scale.over([x for x, _ in points], 0, width, panel.log > 0)
    y = elements.Scale.over([y for each in same_y or [panel] for _, y in _points(each)], height, 0, panel.log > 0)
    yield elements.text(width / 2, title_at, panel.title, f"{MIDDLE} {BOLD}")
    if panel.log:
        x_marks = [(value, elements.binary(value)) for value in _powers_of_two(x)] if panel.log == 2 else _log_marks(x)
        yield from elements.axes(x, y, x_marks, _log_marks(y), panel.x, panel.y)
    else:
        x_marks, y_marks = (
            [(value, f"{value:g}") for value in elements.ticks(scale.low, scale.high)] for scale in (x, y)
        )
        yield from elements.axes(x, y, panel.x_marks or x_marks, y_marks, panel.x, panel.y)
    pale = " stroke-opacity='.75'" if panel.dots else ""
    for name, line in panel.lines.items():
        yield elements.polyline([(x(a), y(b)) for a, b in line], f"stroke='{colours[name]}' stroke-width='2'{pale}")
        for a, b in panel.dots.get(name, ()):
            yield elements.circle(x(a), y(b), 3.5, f"fill='{colours[name]}' class='measured'")
    for name, (a, b) in panel.marks.items():
        yield elements.circle(x(a), y(b), 4, f"fill='{colours[name]}'")


def _log_marks(scale: elements.Scale) -> list[tuple[float, str]]:
    return [(value, elements.short(value)) for value in elements.log_ticks(scale.low, scale.high, 6)]


def _powers_of_two(scale: elements.Scale, most: int = 5) -> list[float]:
    first, last = ceil(log2(scale.low) - 1e-9), floor(log2(scale.high) + 1e-9)
    return [2.0**power for power in range(first, last + 1, max(1, ceil((last - first + 1) / most)))]


def device_svg(
    title: str,
    products: Sequence[ProductTiming],
    attentions: Sequence[AttentionTiming],
    streams: Sequence[StreamTiming],
    rows: Sequence[FitRow],
) -> str:
    """Draws one device: rates of products by size, of attention by length, of streams by bytes. `rows` are
    fit.device_rows of the same measurements, in the same order."""
    rates, attention, memory = _Fit(), _Fit(), _Fit()
    fits = iter(rows)
    for p in products:
        rates.add_rate(p.family, p.flops, p.flops / 1e12, next(fits))
    for a in attentions:
        attention.add_rate("backward" if a.backward else "forward", a.length, a.flops / 1e12, next(fits))
    for s in streams:
        memory.add_rate(s.kernel, s.moved, s.moved / 1e9, next(fits))
    lines = [name for name, points in memory.measured.items() if len(points) > 1]
    families = list(rates.measured)  # two to a panel: more lines would hide each other
    return _fit_svg(
        title,
        [
            *(
                rates.panel("Products (m × n × k)", "FLOPs of a product", "TFLOP/s", families[at : at + 2], log=10)
                for at in range(0, len(families), 2)
            ),
            attention.panel("Attention, causal", "tokens", "TFLOP/s"),
            memory.panel("Streams", "bytes read and written", "GB/s", lines),
        ],
        columns=3,
    )


def link_svg(
    title: str, groups: Sequence[tuple[Cluster, Sequence[Transfer]]], names: Sequence[str] | None = None
) -> str:
    """Draws collectives, one row each: time by bytes, and bytes per second sent per rank; one line per group, with the
    fitted machine. `names` are those of the groups, by default their sizes."""
    found: dict[str, tuple[_Fit, _Fit]] = {}
    for number, (machine, transfers) in enumerate(groups):
        for t in transfers:
            size = f"{t.group.ranks} ranks" + (" on as many nodes" if t.group.stride > 1 else "")
            name = names[number] if names else size
            times, buses = found.setdefault(t.collective, (_Fit(), _Fit()))
            before = times.add(name, t.payload, t.seconds * 1e6)
            buses.add(name, t.payload, t.bus / 1e9)
            steps = [step / 6 for step in range(1, 7)] if t.payload > before else [1]  # close enough for a curve
            for payload in (round(before * (t.payload / before) ** step) for step in steps):
                there = fit.predicted(machine, replace(t, payload=payload))
                times.fitted[name].append((payload, there.seconds * 1e6))
                buses.fitted[name].append((payload, there.bus / 1e9))
    panels = []
    for collective, (times, buses) in found.items():
        name = collective.replace("_", "-")
        panels.append(times.panel(name, "bytes", "microseconds"))
        panels.append(buses.panel(f"{name}, sent per rank", "bytes", "GB/s"))
    return _fit_svg(title, panels, columns=2)


class _Fit:
    """Measured and fitted points (x, y) of the lines of a panel, in the order of x."""

    def __init__(self) -> None:
        self.measured: dict[str, list[tuple[float, float]]] = {}
        self.fitted: dict[str, list[tuple[float, float]]] = {}

    def add(self, name: str, x: float, y: float) -> float:
        """Appends a measurement; returns the x of the one before it on the same line, or its own."""
        line, _ = self.measured.setdefault(name, []), self.fitted.setdefault(name, [])
        line.append((x, y))
        return line[-2:][0][0]

    def add_rate(self, name: str, x: float, work: float, row: FitRow) -> None:
        self.add(name, x, work / row.measured)
        self.fitted[name].append((x, work / row.fitted))

    def panel(self, title: str, x: str, y: str, names: Sequence[str] | None = None, log: int = 2) -> Panel:
        names = list(self.fitted) if names is None else names
        lines, dots = ({name: points[name] for name in names} for points in (self.fitted, self.measured))
        return Panel(title, x, y, lines, dots=dots, log=log)


def _fit_svg(title: str, panels: Sequence[Panel], columns: int) -> str:
    """Draws panels in rows of `columns`, each with its own legend above it: dots are measured, lines the cost model."""
    width, height, left, right, header, line = 320, 200, 64, 20, 60, 15
    panels = [panel for panel in panels if panel.lines]
    top = 32 + line * max((len(panel.lines) + 1) // 2 for panel in panels)
    wide, high = left + width + right, top + height + 48
    parts = [
        elements.heading(16, 24, title),
        elements.circle(20, 42, 3.5, f"fill='{NEUTRAL}'"),
        elements.text(30, 46, "measured"),
        f"<line x1='104' y1='42' x2='128' y2='42' stroke='{NEUTRAL}' stroke-width='2'/>",
        elements.text(134, 46, "fitted"),
    ]
    for number, panel in enumerate(panels):
        x, y = number % columns * wide + left, header + number // columns * high + top
        colours = dict(zip(panel.lines, elements.COLOURS, strict=False))
        parts += [f"<g class='panel' transform='translate({x} {y})'>", *_plot(panel, width, height, 16 - top, colours)]
        for place, (name, colour) in enumerate(colours.items()):
            at, down = place % 2 * width / 2, 16 - top + line * (place // 2 + 1) + 3
            parts += [
                elements.circle(at + 5, down - 4, 3.5, f"fill='{colour}'"),
                elements.text(at + 14, down, name, elements.SMALL),
            ]
        parts.append("</g>")
    return elements.document(
        title, wide * min(columns, len(panels)), header + high * ceil(len(panels) / columns), parts
    )
