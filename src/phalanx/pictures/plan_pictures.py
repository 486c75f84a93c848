"""Bars of several layouts: the time of a step by part, the memory of the fullest rank by part. There is no background,
and colours have middle lightness, for light and dark pages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from html import escape
from typing import NamedTuple

from phalanx.pictures.elements import COLOURS, box, document, rule, text, ticks
from phalanx.pictures.prediction import time_fill
from phalanx.pictures.prediction_memory import memory_fill
from phalanx.pictures.roofline import seconds
from phalanx.plan.page import short_line
from phalanx.plan.plan import Candidate
from phalanx.units import gib

_WIDTH, _LEFT, _RIGHT, _TOP = 600, 8, 524, 34  # pixels; the bars end at _RIGHT, with their values beside them
_ROW, _BAR = 40, 15  # pixels from row to row, and of a bar's height
_LETTER = 6.6  # pixels of a letter of size 11, generously
_LIMIT = COLOURS[1]


class _LayoutRow(NamedTuple):
    """One bar: its label, its parts in order, and the text at its end."""

    label: str
    parts: list[tuple[str, float]]
    whole: str
    mark: float = 0.0
    """Position of a mark; 0: none."""


def time_picture(layouts: Sequence[Candidate]) -> str:
    """Draws the parts of a step's time, one bar per layout, with a mark at the simulated time, as an SVG document."""
    rows = [
        _LayoutRow(_label(rank, each), each.prediction.parts.items(), seconds(each.seconds), each.seconds)
        for rank, each in enumerate(layouts, 1)
    ]
    foot = "The parts are predicted; the upright mark is the simulated time."
    return _stacked("Time of a step by part, in seconds", rows, 1.0, time_fill, seconds, 0.0, foot)


def memory_picture(layouts: Sequence[Candidate]) -> str:
    """Draws the memory of the fullest rank by part, one bar per layout, and the device's memory, as an SVG document."""
    rows = [
        _LayoutRow(
            _label(rank, each) + _beside(each),
            [*each.prediction.fullest.parts()],
            gib(each.prediction.fullest.peak),
        )
        for rank, each in enumerate(layouts, 1)
    ]
    limit = layouts[0].prediction.memory_limit
    foot = f"Peak of the fullest rank; the dashed line is the memory of a device, {gib(limit)}."
    return _stacked("Memory of a device by part, in GiB", rows, 2.0**30, memory_fill, gib, limit, foot)


def _beside(candidate: Candidate) -> str:
    """Returns what is in the tiers of memory beside the device, in words."""
    tiers = candidate.prediction.tiers.items()
    return "".join(f"; {tier}: {gib(most)}" for tier, (most, _) in tiers if tier != "device")


def shorten(words: str, letters: int) -> str:
    """Truncates a longer text."""
    return words if len(words) <= letters else words[: letters - 1] + "…"


def _label(rank: int, candidate: Candidate) -> str:
    return f"{rank}  {short_line(candidate.layout)}"


def _stacked(
    title: str,
    rows: Sequence[_LayoutRow],
    unit: float,
    fill: Callable[[str], str],
    shown: Callable[[float], str],
    limit: float,
    foot: str,
) -> str:
    """Rows of stacked bars over one axis in `unit`, with a line at `limit` unless it is 0."""
    longest = max([limit, *(max(row.mark, sum(size for _, size in row.parts)) for row in rows)])
    scale = (_RIGHT - _LEFT) / (1.02 * longest)
    bottom = _TOP + len(rows) * _ROW + 4
    parts = [text(_LEFT, 18, title, "font-size='14' font-weight='600'")]
    for tick in ticks(0, longest / unit):
        x = _LEFT + tick * unit * scale
        parts.append(rule(x, _TOP, x, bottom, "stroke-opacity='.2'"))
        parts.append(text(x, bottom + 15, f"{tick:g}", f"text-anchor='{'middle' if tick else 'start'}'"))
    for number, row in enumerate(rows):
        parts.append(f"<g class='row'>{''.join(_bar(row, _TOP + number * _ROW, scale, fill, shown))}</g>")
    if limit:
        x = _LEFT + limit * scale
        dashes = f"stroke='{_LIMIT}' stroke-width='2' stroke-dasharray='6 4'"
        for number in range(len(rows)):  # at the bars only: it must not strike labels out
            y = _TOP + number * _ROW + 16
            parts.append(f"<line class='limit' x1='{x:.1f}' x2='{x:.1f}' y1='{y}' y2='{y + _BAR + 4}' {dashes}/>")
    keys, y = _keys(rows, fill, longest, bottom + 38)
    parts += [*keys, text(_LEFT, y + 22, foot, "font-size='11'")]
    return document(title, _WIDTH, y + 34, parts)


def _bar(
    row: _LayoutRow, top: float, scale: float, fill: Callable[[str], str], shown: Callable[[float], str]
) -> Iterator[str]:
    """Yields the label, the text at the end, and below them the bar."""
    room = int((_WIDTH - 2 * _LEFT) / _LETTER)
    yield f"<title>{escape(row.label)}</title>"
    yield text(_LEFT, top + 13, shorten(row.label, room), "font-size='11'")
    yield text(_RIGHT + 8, top + 30, row.whole, "font-size='11' font-weight='600'")
    x, whole = float(_LEFT), sum(size for _, size in row.parts)
    for name, size in row.parts:
        if size > 0:
            yield box(x, top + 18, size * scale, _BAR, fill(name), f"{name}: {shown(size)}, {size / whole:.1%}")
        x += size * scale
    if row.mark:
        x = _LEFT + row.mark * scale
        yield rule(x, top + 15, x, top + 21 + _BAR, "class='mark' stroke-width='2.5'")


def _keys(rows: Sequence[_LayoutRow], fill: Callable[[str], str], longest: float, y: float) -> tuple[list[str], float]:
    """Returns the colours of all visible parts, in lines; and the lower end."""
    seen = {_kind(name) for row in rows for name, size in row.parts if size > 1e-3 * longest}
    drawn, x = [], float(_LEFT)
    for name in dict.fromkeys(_kind(name) for row in rows for name, _ in row.parts):
        if name not in seen:
            continue
        width = 32 + 7.2 * len(name)
        if x + width > _WIDTH:
            x, y = float(_LEFT), y + 20
        drawn += [box(x, y - 10, 12, 12, fill(name)), text(x + 17, y, name)]
        x += width
    return drawn, y


def _kind(name: str) -> str:
    """Returns the legend entry of a part: communication on all axes shares one colour."""
    return "communication exposed" if name.endswith(" exposed") else name
