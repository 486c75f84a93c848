"""Curves of one or several runs over their steps as SVG, for a page and by themselves.

Text takes the colours of the page, or follows the reader's light or dark preference where there is none. Long curves
are thinned: a line through the means of neighbouring points, and around it a band from the smallest to the largest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from zlib import crc32

from phalanx.pictures.elements import COLOURS, FONT, ticks

Points = Sequence[tuple[float, float]]

WIDTH, HEIGHT = 560, 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 54, 14, 58, 34  # pixels around the plot; the upper ones with one line of the legend
_LINE = 16  # pixels of a line of the legend
_MOST_POINTS = 240  # of a line: about two pixels each
_LETTER = 6.6  # pixels, on average
_TAIL = 0.01  # share of the values at either end that may lie outside a robust axis

STYLE = """
.curves text { fill: var(--text, #1c2126); }
.curves .soft { fill: var(--soft, #5c656e); }
.curves .grid { stroke: var(--line, #d9dde2); }
.curves .mark { stroke: var(--soft, #5c656e); stroke-dasharray: 2 3; }
"""
"""The style sheet of these pictures; a page that shows them needs it."""
_ALONE = (
    "@media (prefers-color-scheme: dark) { .curves { --text: #e4e7ea; --soft: #9aa4ae; --line: #343a41; "
    "background: #14171a; } }"
)


@dataclass(frozen=True)
class Curve:
    """One line, with points (step, value) in order."""

    name: str
    points: Points
    colour: int = 0
    dots: bool = False
    """Few points, each of which is to be seen."""
    named: bool = True
    """Has an entry in the legend."""


@dataclass(frozen=True)
class Chart:
    """One pair of axes with its curves; steps to the right."""

    title: str
    curves: Sequence[Curve]
    unit: Callable[[float], str]
    """Formats a value."""
    tick: Callable[[float], str] | None = None
    """Formats a value at the axis, if that is shorter."""
    from_zero: bool = False
    robust: bool = False
    """Let single outliers leave the picture, so that the rest can be read."""
    marks: Mapping[float, str] = field(default_factory=dict)
    """Upright lines: step and what happened there."""
    scale: float = 1.0
    """The unit in which the axis has round numbers."""


def svg(chart: Chart, *, alone: bool = False) -> str:
    """Returns the chart as an SVG document; `alone`, it needs no page around it. Raises ValueError without points."""
    points = [point for curve in chart.curves for point in curve.points]
    if not points:
        raise ValueError(f"chart {chart.title!r} has no points")
    legend = _entries(chart)
    axes = _Axes(_x_span(points), _y_span(chart, points), chart.scale, _TOP + _LINE * (len(legend) - 1))
    height = axes.top + axes.height + _BOTTOM
    size = f"viewBox='0 0 {WIDTH} {height}' width='{WIDTH}' height='{height}'"
    style = f"<style>{STYLE}{_ALONE}</style>" if alone else ""
    clip = f"plot-{crc32(chart.title.encode()):08x}"
    plot = f"x='{_LEFT - 4}' y='{axes.top - 1}' width='{axes.width + 8}' height='{axes.height + 2}'"
    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' class='curves' {size} role='img' {FONT} font-size='12'>",
        f"<title>{escape(_words(chart))}</title>{style}",
        f"<clipPath id='{clip}'><rect {plot}/></clipPath>",
        f"<text x='{_LEFT}' y='18' font-size='14' font-weight='600'>{escape(chart.title)}</text>",
        *_legend(legend),
        *_grid(chart, axes),
        *_marks(chart, axes),
        f"<g clip-path='url(#{clip})'>",
        *(part for curve in chart.curves for part in _line(curve, axes)),
        "</g></svg>\n",
    ]
    return "\n".join(parts)


@dataclass(frozen=True)
class _Axes:
    xs: tuple[float, float]
    ys: tuple[float, float]
    scale: float
    top: int
    """Upper edge of the plot, below the legend."""
    width: int = WIDTH - _LEFT - _RIGHT
    height: int = HEIGHT - _TOP - _BOTTOM

    def x(self, value: float) -> float:
        return _LEFT + (value - self.xs[0]) / (self.xs[1] - self.xs[0]) * self.width

    def y(self, value: float) -> float:
        place = (value - self.ys[0]) / (self.ys[1] - self.ys[0])
        return self.top + (1 - max(-1.0, min(2.0, place))) * self.height

    def y_ticks(self) -> list[float]:
        low, high = (value / self.scale for value in self.ys)
        return [value * self.scale for value in ticks(low, high, 4)]


def _x_span(points: Points) -> tuple[float, float]:
    xs = [x for x, _ in points]
    low, high = min(xs), max(xs)
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def _y_span(chart: Chart, points: Points) -> tuple[float, float]:
    """Returns the range of the upright axis, with some room above and below."""
    ordered = sorted(y for _, y in points)
    out = int(len(ordered) * _TAIL) if chart.robust else 0
    if chart.robust and len(ordered) >= 12:
        out = max(1, out)  # the first step has its own costs
    low, high = ordered[out], ordered[-1 - out]
    if chart.from_zero:
        low = min(0.0, low)
    if high <= low:
        room = abs(high) * 0.1 or 0.5
        return low - room, high + room
    room = (high - low) * 0.06
    return low - (0 if chart.from_zero and low == 0 else room), high + room


def _words(chart: Chart) -> str:
    ends = [f"{c.name} {chart.unit(c.points[-1][1])} at step {c.points[-1][0]:,.0f}" for c in chart.curves if c.points]
    return f"{chart.title}: {', '.join(ends)}"


def _entries(chart: Chart) -> list[list[tuple[Curve, str]]]:
    """Returns the legend's lines: curves with their names and last values, as many to a line as it has room for."""
    lines: list[list[tuple[Curve, str]]] = [[]]
    x = float(_LEFT)
    for curve in chart.curves:
        if not curve.points or not curve.named:
            continue
        label = f"{_shortened(curve.name)} {chart.unit(curve.points[-1][1])}"
        width = _entry_width(label)
        if lines[-1] and x + width > WIDTH:
            lines.append([])
            x = _LEFT
        lines[-1].append((curve, label))
        x += width
    return lines


def _entry_width(label: str) -> float:
    return 34 + _LETTER * len(label)


def _legend(lines: Sequence[Sequence[tuple[Curve, str]]]) -> Iterator[str]:
    """Yields each curve's colour, name and last value under the title."""
    for number, line in enumerate(lines):
        x, y = float(_LEFT), 36 + _LINE * number
        for curve, label in line:
            colour = COLOURS[curve.colour % len(COLOURS)]
            if curve.dots:
                yield f"<circle cx='{x + 6:.1f}' cy='{y}' r='3.5' fill='{colour}'/>"
            else:
                yield f"<line x1='{x:.1f}' x2='{x + 12:.1f}' y1='{y}' y2='{y}' stroke='{colour}' stroke-width='3'/>"
            yield f"<text x='{x + 18:.1f}' y='{y + 4}' class='soft'>{escape(label)}</text>"
            x += _entry_width(label)


def _shortened(name: str, most: int = 60) -> str:
    return name if len(name) <= most else f"{name[: most - 1]}…"


def _grid(chart: Chart, axes: _Axes) -> Iterator[str]:
    below, right = axes.top + axes.height, _LEFT + axes.width
    for value in axes.y_ticks():
        y = axes.y(value)
        yield f"<line class='grid' x1='{_LEFT}' x2='{right}' y1='{y:.1f}' y2='{y:.1f}'/>"
        label = (chart.tick or chart.unit)(value)
        yield _label(_LEFT - 6, y + 4, label, "end")
    for value in ticks(*axes.xs):
        if value != int(value):
            continue  # a step is whole
        yield _label(axes.x(value), below + 16, _count(value), "middle")
    yield _label(right, below + 30, "step", "end")


def _label(x: float, y: float, words: str, anchor: str) -> str:
    return f"<text class='soft' x='{x:.1f}' y='{y:.1f}' text-anchor='{anchor}' font-size='11'>{escape(words)}</text>"


def _count(value: float) -> str:
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if letter == 'k' else size):g}{letter}"
    return f"{value:g}"


def _marks(chart: Chart, axes: _Axes) -> Iterator[str]:
    for step, words in chart.marks.items():
        if axes.xs[0] <= step <= axes.xs[1]:
            x = axes.x(step)
            yield f"<line class='mark' x1='{x:.1f}' x2='{x:.1f}' y1='{axes.top}' y2='{axes.top + axes.height}'>"
            yield f"<title>{escape(words)}</title></line>"


def _line(curve: Curve, axes: _Axes) -> Iterator[str]:
    colour = COLOURS[curve.colour % len(COLOURS)]
    if curve.dots or len(curve.points) == 1:
        path = " ".join(f"{axes.x(x):.1f},{axes.y(y):.1f}" for x, y in curve.points)
        yield f"<polyline points='{path}' fill='none' stroke='{colour}' stroke-width='1' stroke-opacity='.6'/>"
        for x, y in curve.points[-_MOST_POINTS:]:
            yield f"<circle cx='{axes.x(x):.1f}' cy='{axes.y(y):.1f}' r='3' fill='{colour}'/>"
        return
    thinned = _thinned(curve.points)
    if len(thinned) < len(curve.points):
        up = " ".join(f"{axes.x(x):.1f},{axes.y(high):.1f}" for x, _, _, high in thinned)
        down = " ".join(f"{axes.x(x):.1f},{axes.y(low):.1f}" for x, _, low, _ in reversed(thinned))
        yield f"<polygon points='{up} {down}' fill='{colour}' fill-opacity='.18'/>"
    path = " ".join(f"{axes.x(x):.1f},{axes.y(mean):.1f}" for x, mean, _, _ in thinned)
    yield f"<polyline points='{path}' fill='none' stroke='{colour}' stroke-width='1.8' stroke-linejoin='round'/>"


def _thinned(points: Points) -> list[tuple[float, float, float, float]]:
    """Returns (step, mean, smallest, largest) of at most _MOST_POINTS groups of neighbours."""
    each = math.ceil(len(points) / _MOST_POINTS)
    found = []
    for first in range(0, len(points), each):
        group = points[first : first + each]
        ys = [y for _, y in group]
        found.append((sum(x for x, _ in group) / len(group), sum(ys) / len(ys), min(ys), max(ys)))
    return found
