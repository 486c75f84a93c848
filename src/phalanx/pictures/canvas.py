"""Line plots as SVG. They have no background and colours of middle lightness, for light and dark pages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

from phalanx.pictures.elements import COLOURS, document, heading, rule, text, ticks

_WIDTH, _HEIGHT = 400, 260  # pixels of a panel's plot
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 24, 72, 52


@dataclass(frozen=True)
class Panel:
    """One pair of axes with its lines."""

    title: str
    x: str
    """Quantity on the x axis, with its unit."""
    y: str
    lines: Mapping[str, Sequence[tuple[float, float]]]
    """Points (x, y) in order, by name. The same name has the same colour in every panel."""
    marks: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """A point that a dot marks, by the name of its line."""


def panels_svg(title: str, panels: Sequence[Panel]) -> str:
    """Returns the panels side by side under one legend, as an SVG document. Raises ValueError for an empty panel."""
    names = list(dict.fromkeys(name for panel in panels for name in panel.lines))
    each = _LEFT + _WIDTH + _RIGHT
    width, height = each * len(panels), _TOP + _HEIGHT + _BOTTOM
    parts = [heading(16, 22, title)]
    at = 16.0
    for name, colour in zip(names, _colours(names), strict=True):
        parts.append(f"<line x1='{at:g}' y1='38' x2='{at + 18:g}' y2='38' stroke='{colour}' stroke-width='3'/>")
        parts.append(text(at + 24, 42, name))
        at += 44 + 7 * len(name)
    colours = dict(zip(names, _colours(names), strict=True))
    for number, panel in enumerate(panels):
        parts.append(f"<g class='panel' transform='translate({number * each + _LEFT} {_TOP})'>")
        parts += [*_panel(panel, colours), "</g>"]
    return document(title, width, height, parts)


def _panel(panel: Panel, colours: dict[str, str]) -> list[str]:
    points = [point for line in panel.lines.values() for point in line]
    if not points:
        raise ValueError(f"panel {panel.title!r} has no points")
    xs, ys = _span([x for x, _ in points]), _span([y for _, y in points])
    parts = [text(_WIDTH / 2, -12, panel.title, "text-anchor='middle' font-weight='600'")]
    for x in ticks(*xs):
        at = _place(x, xs) * _WIDTH
        parts.append(rule(at, 0, at, _HEIGHT, "stroke-opacity='.2'"))
        parts.append(text(at, _HEIGHT + 16, f"{x:g}", "text-anchor='middle'"))
    for y in ticks(*ys):
        at = _HEIGHT - _place(y, ys) * _HEIGHT
        parts.append(rule(0, at, _WIDTH, at, "stroke-opacity='.2'"))
        parts.append(text(-6, at + 4, f"{y:g}", "text-anchor='end'"))
    parts.append(text(_WIDTH / 2, _HEIGHT + 38, panel.x, "text-anchor='middle'"))
    middle = f"{-_LEFT + 18} {_HEIGHT / 2:g}"
    parts.append(f"<text transform='translate({middle}) rotate(-90)' text-anchor='middle'>{escape(panel.y)}</text>")
    for name, line in panel.lines.items():
        path = " ".join(f"{_place(x, xs) * _WIDTH:.1f},{_HEIGHT - _place(y, ys) * _HEIGHT:.1f}" for x, y in line)
        parts.append(f"<polyline points='{path}' fill='none' stroke='{colours[name]}' stroke-width='2'/>")
    for name, (x, y) in panel.marks.items():
        at = f"cx='{_place(x, xs) * _WIDTH:.1f}' cy='{_HEIGHT - _place(y, ys) * _HEIGHT:.1f}'"
        parts.append(f"<circle {at} r='4' fill='{colours[name]}'/>")
    return parts


def _colours(names: Sequence[str]) -> list[str]:
    return [COLOURS[number % len(COLOURS)] for number in range(len(names))]


def _span(values: Sequence[float]) -> tuple[float, float]:
    """Returns the range of an axis, which is never empty."""
    low, high = min(values), max(values)
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def _place(value: float, span: tuple[float, float]) -> float:
    return (value - span[0]) / (span[1] - span[0])
