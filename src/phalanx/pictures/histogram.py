"""Histograms under each other, one per rank, over one axis of time. There is no background, for light and dark
pages."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence

from phalanx.pictures.elements import COLOURS, NEUTRAL, box, document, heading, rule, text, ticks

MOST_ROWS = 32
"""Ranks that are drawn: of more, the slowest by their medians."""
_BINS = 40
_LEFT, _WIDTH, _RIGHT, _TOP, _ROW, _BAR, _BOTTOM = 190, 520, 84, 60, 30, 22, 56
_LETTERS = 26  # of a label


def histograms(title: str, unit: str, rows: Mapping[str, Sequence[float]], marked: Sequence[str] = ()) -> str:
    """Returns one histogram per row as an SVG document, with an upright mark at each median; rows in `marked` are red.

    The axis ends at the 99th percentile of all values, and larger ones are counted in the last bin. Raises ValueError
    without values.
    """
    every = sorted(value for values in rows.values() for value in values)
    if not every:
        raise ValueError("no values to draw")
    low, high = every[0], every[min(len(every) - 1, int(0.99 * len(every)))]
    if high <= low:
        low, high = low * 0.95 - 1e-12, high * 1.05 + 1e-12
    room = (high - low) * 0.04
    span = max(0.0, low - room), high + room
    shown = _shown(rows)
    left_out = len(rows) - len(shown)
    parts = [heading(16, 24, title)]
    note = f"{left_out} faster ranks are not drawn" if left_out else "one row per rank; the upright mark is its median"
    parts.append(text(16, 44, note))
    bottom = _TOP + len(shown) * _ROW
    for value in ticks(*span):
        x = _LEFT + _place(value, span) * _WIDTH
        parts.append(rule(x, _TOP, x, bottom, "stroke-opacity='.2'"))
        parts.append(text(x, bottom + 18, f"{value:g}", "text-anchor='middle'"))
    parts.append(text(_LEFT + _WIDTH / 2, bottom + 40, unit, "text-anchor='middle'"))
    for number, (name, values) in enumerate(shown.items()):
        colour = COLOURS[1] if name in marked else COLOURS[0]
        parts += _row(_TOP + number * _ROW, name, values, span, colour)
    return document(title, _LEFT + _WIDTH + _RIGHT, bottom + _BOTTOM, parts)


def _shown(rows: Mapping[str, Sequence[float]]) -> dict[str, Sequence[float]]:
    """Returns the rows to draw, in their order."""
    slowest = sorted((name for name in rows if rows[name]), key=lambda name: -statistics.median(rows[name]))[:MOST_ROWS]
    return {name: values for name, values in rows.items() if name in slowest}


def _row(top: float, name: str, values: Sequence[float], span: tuple[float, float], colour: str) -> Iterator[str]:
    counts = [0] * _BINS
    for value in values:
        counts[min(_BINS - 1, max(0, int(_place(value, span) * _BINS)))] += 1
    most, width, foot = max(counts), _WIDTH / _BINS, top + _ROW - 4
    label = name if len(name) <= _LETTERS else f"{name[: _LETTERS - 1]}…"
    yield text(_LEFT - 8, foot - 4, label, "text-anchor='end'")
    yield rule(_LEFT, foot, _LEFT + _WIDTH, foot, "stroke-opacity='.4'")
    for at, count in enumerate(counts):
        if count:
            height = _BAR * count / most
            tip = f"{name}: {count} of {len(values)}"
            yield box(_LEFT + at * width, foot - height, width - 1, height, f"fill='{colour}'", tip)
    median = statistics.median(values)
    x = _LEFT + min(1.0, max(0.0, _place(median, span))) * _WIDTH
    mark = f"M{x:.1f} {foot - _BAR - 2:.1f}V{foot + 2:.1f}"
    yield f"<path class='median' d='{mark}' stroke='{NEUTRAL}' stroke-width='2'/>"
    yield text(_LEFT + _WIDTH + 8, foot - 4, f"{median:.3g}")


def _place(value: float, span: tuple[float, float]) -> float:
    return (value - span[0]) / (span[1] - span[0])
