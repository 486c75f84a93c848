"""A square matrix of ranks as a heat map: strong cells are fast pairs, pale ones slow. There is no background, for
light and dark pages."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence

from phalanx.pictures.elements import COLOURS, NEUTRAL, ON_CELL, box, document, heading, rule, text, ticks

MOST_ROWS = 64
"""Ranks that are drawn; of more, these are spread evenly."""
NUMBERED_ROWS = 10
"""Ranks up to which the cells have their numbers."""
_SIDE, _LEFT, _TOP, _RIGHT, _BOTTOM = 460, 96, 98, 24, 74
_LEAST_RANGE = 2.0
"""Largest over smallest value of the scale, at least: small differences must not look like large ones."""
_FAINT = 0.1
_LEGEND = 160
_LETTER = 6.2  # pixels of a letter of size 11


def heat_map(
    title: str,
    values: Sequence[Sequence[float]],
    ranks: Mapping[int, str],
    shown: Callable[[float], str],
    *,
    unit: str,
    slow: Sequence[tuple[int, int]] = (),
    more_is_better: bool = True,
) -> str:
    """Returns the matrix as an SVG document.

    Args:
        values: rows are senders, columns receivers; NaN where nothing was measured. The colour is logarithmic.
        ranks: the rank of every row and column, with its host; lines divide hosts.
        shown: formats a value for a cell.
        unit: of the values.
        slow: pairs that get a red frame.
    """
    places, hosts = drawn_places(len(values)), list(ranks.values())
    names = list(ranks)
    known = [values[a][b] for a in places for b in places if values[a][b] > 0]
    low, high = (min(known), max(known)) if known else (1.0, 1.0)
    if more_is_better:
        low = min(low, high / _LEAST_RANGE)
    else:
        high = max(high, low * _LEAST_RANGE)
    cell = _SIDE / len(places)
    parts = [heading(16, 24, title), *_legend(low, high, shown, unit, more_is_better)]
    for row, a in enumerate(places):
        for column, b in enumerate(places):
            value = values[a][b]
            if not value > 0:
                continue
            depth = _depth(value, low, high, more_is_better)
            style = f"fill='{COLOURS[0]}' fill-opacity='{depth:.2f}' class='cell'"
            x, y = _LEFT + column * cell, _TOP + row * cell
            tip = f"{names[a]} → {names[b]} ({hosts[a]} → {hosts[b]}): {shown(value)} {unit}"
            parts.append(box(x + 0.5, y + 0.5, cell - 1, cell - 1, style, tip))
            if len(places) <= NUMBERED_ROWS:
                place = f"text-anchor='middle' font-size='11' font-weight='600' {ON_CELL}"
                parts.append(text(x + cell / 2, y + cell / 2 + 4, shown(value), place))
    rows = {names[place]: row for row, place in enumerate(places)}
    for a, b in slow:
        if a in rows and b in rows:
            x, y = _LEFT + rows[b] * cell, _TOP + rows[a] * cell
            frame = f"fill='none' stroke='{COLOURS[1]}' stroke-width='2' class='slow'"
            parts.append(box(x + 1, y + 1, cell - 2, cell - 2, frame))
    parts += _labels([(names[place], hosts[place]) for place in places], cell)
    return document(title, _LEFT + _SIDE + _RIGHT, _TOP + _SIDE + _BOTTOM, parts)


def drawn_places(count: int) -> list[int]:
    """Returns the rows that are drawn: all, or MOST_ROWS spread evenly."""
    if count <= MOST_ROWS:
        return list(range(count))
    return [number * count // MOST_ROWS for number in range(MOST_ROWS)]


def _depth(value: float, low: float, high: float, more_is_better: bool) -> float:
    """Returns the opacity of a cell: 1 for the best value."""
    share = math.log(value / low) / math.log(high / low)
    return _FAINT + (1 - _FAINT) * (share if more_is_better else 1 - share)


def _legend(low: float, high: float, shown: Callable[[float], str], unit: str, more_is_better: bool) -> Iterator[str]:
    steps = 32
    worst, best = (low, high) if more_is_better else (high, low)
    left = _LEFT + len(shown(worst)) * _LETTER + 6
    for step in range(steps):
        depth = _FAINT + (1 - _FAINT) * step / (steps - 1)
        style = f"fill='{COLOURS[0]}' fill-opacity='{depth:.2f}'"
        yield box(left + step * _LEGEND / steps, 38, _LEGEND / steps, 10, style)
    yield text(left - 6, 47, shown(worst), "text-anchor='end' font-size='11'")
    yield text(left + _LEGEND + 6, 47, f"{shown(best)} {unit}", "font-size='11'")


def _labels(rows: Sequence[tuple[int, str]], cell: float) -> Iterator[str]:
    """Yields ranks at both axes, and hosts with lines between them."""
    every = max(1, math.ceil(18 / cell))  # so that numbers do not touch
    for at, (rank, host) in enumerate(rows):
        middle = (at + 0.5) * cell
        if at % every == 0:
            yield text(_LEFT + middle, _TOP - 6, str(rank), "text-anchor='middle' font-size='11'")
            yield text(_LEFT - 6, _TOP + middle + 4, str(rank), "text-anchor='end' font-size='11'")
        if at and rows[at - 1][1] != host:
            yield rule(_LEFT + at * cell, _TOP, _LEFT + at * cell, _TOP + _SIDE)
            yield rule(_LEFT, _TOP + at * cell, _LEFT + _SIDE, _TOP + at * cell)
    yield text(_LEFT, _TOP - 22, "receiver", "font-size='11'")
    yield text(20, _TOP + 10, "sender", "font-size='11'")
    for first, last in _runs([host for _, host in rows]):
        width = (last - first + 1) * cell
        letters = int(width / _LETTER)
        name = rows[first][1]
        if letters >= 4:
            shortened = name if len(name) <= letters else f"{name[: letters - 1]}…"
            middle = _LEFT + first * cell + width / 2
            yield text(middle, _TOP + _SIDE + 18, shortened, "text-anchor='middle' font-size='11'")
    note = "a stronger colour is better; a red frame marks a slow pair"
    yield text(_LEFT, _TOP + _SIDE + 44, note, "font-size='11'")


def _runs(names: Sequence[str]) -> Iterator[tuple[int, int]]:
    """Yields first and last place of every run of equal names."""
    first = 0
    for at in range(1, len(names) + 1):
        if at == len(names) or names[at] != names[first]:
            yield first, at - 1
            first = at


MOST_HISTOGRAMS = 32
"""Ranks that are drawn: of more, the slowest by their medians."""
_BINS = 40
_NAMES, _WIDTH, _MEDIANS, _HEAD, _ROW, _BAR, _FOOT = 190, 520, 84, 60, 30, 22, 56
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
    bottom = _HEAD + len(shown) * _ROW
    for value in ticks(*span):
        x = _NAMES + _place(value, span) * _WIDTH
        parts.append(rule(x, _HEAD, x, bottom, "stroke-opacity='.2'"))
        parts.append(text(x, bottom + 18, f"{value:g}", "text-anchor='middle'"))
    parts.append(text(_NAMES + _WIDTH / 2, bottom + 40, unit, "text-anchor='middle'"))
    for number, (name, values) in enumerate(shown.items()):
        colour = COLOURS[1] if name in marked else COLOURS[0]
        parts += _row(_HEAD + number * _ROW, name, values, span, colour)
    return document(title, _NAMES + _WIDTH + _MEDIANS, bottom + _FOOT, parts)


def _shown(rows: Mapping[str, Sequence[float]]) -> dict[str, Sequence[float]]:
    """Returns the rows to draw, in their order."""
    slowest = sorted((name for name in rows if rows[name]), key=lambda name: -statistics.median(rows[name]))[
        :MOST_HISTOGRAMS
    ]
    return {name: values for name, values in rows.items() if name in slowest}


def _row(top: float, name: str, values: Sequence[float], span: tuple[float, float], colour: str) -> Iterator[str]:
    counts = [0] * _BINS
    for value in values:
        counts[min(_BINS - 1, max(0, int(_place(value, span) * _BINS)))] += 1
    most, width, foot = max(counts), _WIDTH / _BINS, top + _ROW - 4
    label = name if len(name) <= _LETTERS else f"{name[: _LETTERS - 1]}…"
    yield text(_NAMES - 8, foot - 4, label, "text-anchor='end'")
    yield rule(_NAMES, foot, _NAMES + _WIDTH, foot, "stroke-opacity='.4'")
    for at, count in enumerate(counts):
        if count:
            height = _BAR * count / most
            tip = f"{name}: {count} of {len(values)}"
            yield box(_NAMES + at * width, foot - height, width - 1, height, f"fill='{colour}'", tip)
    median = statistics.median(values)
    x = _NAMES + min(1.0, max(0.0, _place(median, span))) * _WIDTH
    mark = f"M{x:.1f} {foot - _BAR - 2:.1f}V{foot + 2:.1f}"
    yield f"<path class='median' d='{mark}' stroke='{NEUTRAL}' stroke-width='2'/>"
    yield text(_NAMES + _WIDTH + 8, foot - 4, f"{median:.3g}")


def _place(value: float, span: tuple[float, float]) -> float:
    return (value - span[0]) / (span[1] - span[0])
