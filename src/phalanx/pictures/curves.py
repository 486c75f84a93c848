"""Curves of one or several runs over their steps as SVG, for a page and by themselves.

Text takes the colours of the page, or follows the reader's light or dark preference where there is none. Long curves
are thinned: a line through the means of neighbouring points, and around it a band from the smallest to the largest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from zlib import crc32

from phalanx.pictures.elements import COLOURS, FONT, LETTER, Scale, circle, polyline, short, shortened, ticks

Points = Sequence[tuple[float, float]]

WIDTH, HEIGHT = 560, 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 54, 14, 58, 34  # pixels around the plot; the upper ones with one line of the legend
_LINE = 16  # pixels of a line of the legend
_MOST_POINTS = 240  # of a line: about two pixels each
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
    top = _TOP + _LINE * (len(legend) - 1)
    bottom = top + HEIGHT - _TOP - _BOTTOM
    x = Scale.over([step for step, _ in points], _LEFT, WIDTH - _RIGHT)
    y = Scale(*_y_span(chart, points), bottom, top)
    height = bottom + _BOTTOM
    size = f"viewBox='0 0 {WIDTH} {height}' width='{WIDTH}' height='{height}'"
    style = f"<style>{STYLE}{_ALONE}</style>" if alone else ""
    clip = f"plot-{crc32(chart.title.encode()):08x}"
    plot = f"x='{_LEFT - 4}' y='{top - 1}' width='{x.end - x.start + 8}' height='{bottom - top + 2}'"
    ends = [f"{c.name} {chart.unit(c.points[-1][1])} at step {c.points[-1][0]:,.0f}" for c in chart.curves if c.points]
    words = f"{chart.title}: {', '.join(ends)}"
    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' class='curves' {size} role='img' {FONT} font-size='12'>",
        f"<title>{escape(words)}</title>{style}",
        f"<clipPath id='{clip}'><rect {plot}/></clipPath>",
        f"<text x='{_LEFT}' y='18' font-size='14' font-weight='600'>{escape(chart.title)}</text>",
        *_legend(legend),
        *_grid(chart, x, y),
        f"<g clip-path='url(#{clip})'>",
        *(part for curve in chart.curves for part in _line(curve, x, y)),
        "</g></svg>\n",
    ]
    return "\n".join(parts)


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


def _entries(chart: Chart) -> list[list[tuple[Curve, str]]]:
    """Returns the legend's lines: curves with their names and last values, as many to a line as it has room for."""
    lines: list[list[tuple[Curve, str]]] = [[]]
    x = float(_LEFT)
    for curve in chart.curves:
        if not curve.points or not curve.named:
            continue
        label = f"{shortened(curve.name, 60)} {chart.unit(curve.points[-1][1])}"
        width = _entry_width(label)
        if lines[-1] and x + width > WIDTH:
            lines.append([])
            x = _LEFT
        lines[-1].append((curve, label))
        x += width
    return lines


def _entry_width(label: str) -> float:
    return 34 + LETTER * len(label)


def _legend(lines: Sequence[Sequence[tuple[Curve, str]]]) -> Iterator[str]:
    """Yields each curve's colour, name and last value under the title."""
    for number, line in enumerate(lines):
        x, y = float(_LEFT), 36 + _LINE * number
        for curve, label in line:
            colour = COLOURS[curve.colour % len(COLOURS)]
            if curve.dots:
                yield circle(x + 6, y, 3.5, f"fill='{colour}'")
            else:
                yield f"<line x1='{x:.1f}' x2='{x + 12:.1f}' y1='{y}' y2='{y}' stroke='{colour}' stroke-width='3'/>"
            yield f"<text x='{x + 18:.1f}' y='{y + 4}' class='soft'>{escape(label)}</text>"
            x += _entry_width(label)


def _grid(chart: Chart, x: Scale, y: Scale) -> Iterator[str]:
    for value in (tick * chart.scale for tick in ticks(y.low / chart.scale, y.high / chart.scale, 4)):
        yield f"<line class='grid' x1='{x.start}' x2='{x.end}' y1='{y(value):.1f}' y2='{y(value):.1f}'/>"
        yield _label(x.start - 6, y(value) + 4, (chart.tick or chart.unit)(value), "end")
    for value in ticks(x.low, x.high):
        if value == int(value):  # a step is whole
            yield _label(x(value), y.start + 16, short(value, "g") if abs(value) >= 1e4 else f"{value:g}", "middle")
    yield _label(x.end, y.start + 30, "step", "end")
    for step, words in chart.marks.items():
        if x.low <= step <= x.high:
            yield f"<line class='mark' x1='{x(step):.1f}' x2='{x(step):.1f}' y1='{y.end}' y2='{y.start}'>"
            yield f"<title>{escape(words)}</title></line>"


def _label(x: float, y: float, words: str, anchor: str) -> str:
    return f"<text class='soft' x='{x:.1f}' y='{y:.1f}' text-anchor='{anchor}' font-size='11'>{escape(words)}</text>"


def _line(curve: Curve, x: Scale, y: Scale) -> Iterator[str]:
    colour = COLOURS[curve.colour % len(COLOURS)]

    def placed(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
        return [(x(step), max(2 * y.end - y.start, min(2 * y.start - y.end, y(value)))) for step, value in points]

    if curve.dots or len(curve.points) == 1:
        yield polyline(placed(curve.points), f"stroke='{colour}' stroke-width='1' stroke-opacity='.6'")
        for point in placed(curve.points[-_MOST_POINTS:]):
            yield circle(*point, 3, f"fill='{colour}'")
        return
    each = math.ceil(len(curve.points) / _MOST_POINTS)
    groups = [curve.points[first : first + each] for first in range(0, len(curve.points), each)]
    steps = [sum(step for step, _ in group) / len(group) for group in groups]
    values = [[value for _, value in group] for group in groups]
    if each > 1:
        up = placed(zip(steps, map(max, values), strict=True))
        down = placed(zip(steps, map(min, values), strict=True))
        path = " ".join(f"{a:.1f},{b:.1f}" for a, b in (*up, *reversed(down)))
        yield f"<polygon points='{path}' fill='{colour}' fill-opacity='.18'/>"
    means = placed((step, sum(ys) / len(ys)) for step, ys in zip(steps, values, strict=True))
    yield polyline(means, f"stroke='{colour}' stroke-width='1.8' stroke-linejoin='round'")
