"""Pictures of measurements of ranks: pairs as a heat map, strong cells fast and pale ones slow, and a histogram per
rank over one axis of time."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby

from phalanx.pictures import elements
from phalanx.pictures.elements import BOLD, COLOURS, END, MIDDLE, NEUTRAL, ON_CELL, SMALL

MOST_ROWS = 64
"""Ranks that are drawn; of more, these are spread evenly."""
NUMBERED_ROWS = 10
"""Ranks up to which the cells have their numbers."""
_SIDE, _LEFT, _TOP, _RIGHT, _BOTTOM = 460, 96, 98, 24, 74
_LEAST_RANGE = 2.0
"""Largest over smallest value of the scale, at least: small differences must not look like large ones."""
_FAINT = 0.1
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
    parts = [elements.heading(16, 24, title), *_legend(low, high, shown, unit, more_is_better)]
    for row, a in enumerate(places):
        for column, b in enumerate(places):
            value = values[a][b]
            if not value > 0:
                continue
            share = math.log(value / low) / math.log(high / low)
            depth = _FAINT + (1 - _FAINT) * (share if more_is_better else 1 - share)  # 1 for the best value
            style = f"fill='{COLOURS[0]}' fill-opacity='{depth:.2f}' class='cell'"
            x, y = _LEFT + column * cell, _TOP + row * cell
            tip = f"{names[a]} → {names[b]} ({hosts[a]} → {hosts[b]}): {shown(value)} {unit}"
            parts.append(elements.box(x + 0.5, y + 0.5, cell - 1, cell - 1, style, tip))
            if len(places) <= NUMBERED_ROWS:
                place = f"{MIDDLE} {SMALL} {BOLD} {ON_CELL}"
                parts.append(elements.text(x + cell / 2, y + cell / 2 + 4, shown(value), place))
    rows = {names[place]: row for row, place in enumerate(places)}
    for a, b in slow:
        if a in rows and b in rows:
            x, y = _LEFT + rows[b] * cell, _TOP + rows[a] * cell
            frame = f"fill='none' stroke='{COLOURS[1]}' stroke-width='2' class='slow'"
            parts.append(elements.box(x + 1, y + 1, cell - 2, cell - 2, frame))
    parts += _labels([(names[place], hosts[place]) for place in places], cell)
    return elements.document(title, _LEFT + _SIDE + _RIGHT, _TOP + _SIDE + _BOTTOM, parts)


def drawn_places(count: int) -> list[int]:
    """Returns the rows that are drawn: all, or MOST_ROWS spread evenly."""
    if count <= MOST_ROWS:
        return list(range(count))
    return [number * count // MOST_ROWS for number in range(MOST_ROWS)]


def _legend(low: float, high: float, shown: Callable[[float], str], unit: str, more_is_better: bool) -> Iterator[str]:
    steps, wide = 32, 160
    worst, best = (low, high) if more_is_better else (high, low)
    left = _LEFT + len(shown(worst)) * _LETTER + 6
    for step in range(steps):
        style = f"fill='{COLOURS[0]}' fill-opacity='{_FAINT + (1 - _FAINT) * step / (steps - 1):.2f}'"
        yield elements.box(left + step * wide / steps, 38, wide / steps, 10, style)
    yield elements.text(left - 6, 47, shown(worst), f"{END} {SMALL}")
    yield elements.text(left + wide + 6, 47, f"{shown(best)} {unit}", SMALL)


def _labels(rows: Sequence[tuple[int, str]], cell: float) -> Iterator[str]:
    """Yields ranks at both axes, and hosts with lines between them."""
    every = max(1, math.ceil(18 / cell))  # so that numbers do not touch
    for at, (rank, host) in enumerate(rows):
        middle = (at + 0.5) * cell
        if at % every == 0:
            yield elements.text(_LEFT + middle, _TOP - 6, str(rank), f"{MIDDLE} {SMALL}")
            yield elements.text(_LEFT - 6, _TOP + middle + 4, str(rank), f"{END} {SMALL}")
        if at and rows[at - 1][1] != host:
            yield elements.rule(_LEFT + at * cell, _TOP, _LEFT + at * cell, _TOP + _SIDE)
            yield elements.rule(_LEFT, _TOP + at * cell, _LEFT + _SIDE, _TOP + at * cell)
    yield elements.text(_LEFT, _TOP - 22, "receiver", SMALL)
    yield elements.text(20, _TOP + 10, "sender", SMALL)
    at = 0
    for host, run in groupby(host for _, host in rows):
        first, count = at, len([*run])
        at += count
        if (letters := int(count * cell / _LETTER)) >= 4:
            middle = _LEFT + first * cell + count * cell / 2
            yield elements.text(middle, _TOP + _SIDE + 18, elements.shortened(host, letters), f"{MIDDLE} {SMALL}")
    yield elements.text(_LEFT, _TOP + _SIDE + 44, "a stronger colour is better; a red frame marks a slow pair", SMALL)


MOST_HISTOGRAMS = 32
"""Ranks that are drawn: of more, the slowest by their medians."""


def histograms(title: str, unit: str, rows: Mapping[str, Sequence[float]], marked: Sequence[str] = ()) -> str:
    """Returns one histogram per row as an SVG document, with an upright mark at each median; rows in `marked` are red.

    The axis ends at the 99th percentile of all values, and larger ones are counted in the last bin. Raises ValueError
    without values.
    """
    left, width, right, top, each, foot = 190, 520, 84, 60, 30, 56
    every = sorted(value for values in rows.values() for value in values)
    if not every:
        raise ValueError("no values to draw")
    low, high = every[0], every[min(len(every) - 1, int(0.99 * len(every)))]
    if high <= low:
        low, high = low * 0.95 - 1e-12, high * 1.05 + 1e-12
    room = (high - low) * 0.04
    scale = elements.Scale(max(0.0, low - room), high + room, left, left + width)
    medians = {name: statistics.median(values) for name, values in rows.items() if values}
    slowest = sorted(medians, key=lambda name: -medians[name])[:MOST_HISTOGRAMS]
    shown = [name for name in rows if name in slowest]
    left_out = len(rows) - len(shown)
    note = f"{left_out} faster ranks are not drawn" if left_out else "one row per rank; the upright mark is its median"
    bottom = top + len(shown) * each
    parts = [
        elements.heading(16, 24, title),
        elements.text(16, 44, note),
        *elements.across(scale, [(tick, f"{tick:g}") for tick in elements.ticks(scale.low, scale.high)], top, bottom),
        elements.text(left + width / 2, bottom + 40, unit, MIDDLE),
    ]
    for number, name in enumerate(shown):
        colour = COLOURS[1] if name in marked else COLOURS[0]
        parts += _histogram(top + (number + 1) * each - 4, name, rows[name], medians[name], scale, colour)
    return elements.document(title, left + width + right, bottom + foot, parts)


def _histogram(
    foot: float, name: str, values: Sequence[float], median: float, scale: elements.Scale, colour: str, bins: int = 40
) -> Iterator[str]:
    counts, high = [0] * bins, 22
    for value in values:
        counts[min(bins - 1, max(0, int((value - scale.low) / (scale.high - scale.low) * bins)))] += 1
    width = (scale.end - scale.start) / bins
    yield elements.text(scale.start - 8, foot - 4, elements.shortened(name, 26), END)
    yield elements.rule(scale.start, foot, scale.end, foot, "stroke-opacity='.4'")
    for at, count in enumerate(counts):
        if count:
            height, tip = high * count / max(counts), f"{name}: {count} of {len(values)}"
            yield elements.box(scale.start + at * width, foot - height, width - 1, height, f"fill='{colour}'", tip)
    x = min(scale.end, max(scale.start, scale(median)))
    mark = f"M{x:.1f} {foot - high - 2:.1f}V{foot + 2:.1f}"
    yield f"<path class='median' d='{mark}' stroke='{NEUTRAL}' stroke-width='2'/>"
    yield elements.text(scale.end + 8, foot - 4, f"{median:.3g}")


MOST_MODULES = 60
"""Modules that are drawn: of more, those around the first that differs."""
_DIVERGENCE_LEFT, _DIVERGENCE_TOP, _ROW, _PANEL_GAP, _FOOT = 240, 118, 16, 28, 34
_EQUAL, _DIFFERENT = elements.COLOURS[2], elements.COLOURS[1]


def divergence_map(
    title: str,
    words: Sequence[str],
    table: Mapping[str, Mapping[str, Sequence[float | None]]],
    first: Sequence[str],
    tolerance: float,
) -> str:
    """Returns the relative differences of a layout as an SVG document.

    Args:
        words: lines below the title.
        table: by direction, module and rank; None where a rank has no part.
        first: direction and module of the first difference, which get a frame. Any others mark nothing.
        tolerance: the largest difference that counts as equal, which is green; larger ones are red, a deeper red for a
            larger one on a logarithmic scale up to 1.
    """
    modules = [*next(iter(table.values()))]
    at = modules.index(first[1]) if first[1] in modules else 0
    start = max(0, min(at - MOST_MODULES // 2, len(modules) - MOST_MODULES))
    shown = modules[start : start + MOST_MODULES]
    ranks = len(next(iter(table[next(iter(table))].values()), ()))
    cell = max(6.0, min(34.0, 320 / max(1, ranks)))
    panel = cell * ranks
    bottom = _DIVERGENCE_TOP + len(shown) * _ROW
    parts = [elements.heading(16, 24, title)]
    parts += [
        elements.text(16, 42 + 15 * line, elements.shortened(each, 120), SMALL) for line, each in enumerate(words)
    ]
    parts.append(elements.text(_DIVERGENCE_LEFT - 10, _DIVERGENCE_TOP - 6, "rank", f"{END} {SMALL}"))
    for number, (direction, of_module) in enumerate(table.items()):
        left = _DIVERGENCE_LEFT + number * (panel + _PANEL_GAP)
        parts.append(
            elements.text(
                left + panel / 2, _DIVERGENCE_TOP - 22, {"forward": "output", "backward": "gradient"}[direction], MIDDLE
            )
        )
        parts += _ranks(ranks, left, cell)
        for row, module in enumerate(shown):
            y = _DIVERGENCE_TOP + row * _ROW
            parts += _cells(module, direction, of_module[module], left, y, cell, tolerance)
            if [direction, module] == [*first]:
                frame = "fill='none' stroke='currentColor' stroke-width='2' class='first'"
                parts.append(elements.box(left - 2, y, panel + 4, _ROW, frame, f"the first that differs: {module}"))
    for row, module in enumerate(shown):
        style = f"{END} {SMALL} {BOLD}" if module == first[1] else f"{END} {SMALL}"
        parts.append(
            elements.text(
                _DIVERGENCE_LEFT - 10, _DIVERGENCE_TOP + row * _ROW + 12, elements.shortened(module, 34), style
            )
        )
    left_out = f"; {len(modules) - len(shown)} modules are not drawn" if len(shown) < len(modules) else ""
    legend = f"green: equal; red: differs, deeper the more; a frame: the first that differs{left_out}"
    parts.append(elements.text(16, bottom + 22, legend, SMALL))
    width = max(
        _DIVERGENCE_LEFT + len(table) * (panel + _PANEL_GAP),
        24 + elements.LETTER * max(len(legend), *(min(120, len(each)) for each in words)),
    )
    return elements.document(title, width, bottom + _FOOT, parts)


def _ranks(ranks: int, left: float, cell: float) -> Iterator[str]:
    every = max(1, math.ceil(18 / cell))  # so that numbers do not touch
    for rank in range(0, ranks, every):
        yield elements.text(left + (rank + 0.5) * cell, _DIVERGENCE_TOP - 6, str(rank), f"{MIDDLE} {SMALL}")


def _cells(
    module: str,
    direction: str,
    row: Sequence[float | None],
    left: float,
    y: float,
    cell: float,
    tolerance: float,
) -> Iterator[str]:
    for rank, rel in enumerate(row):
        if rel is None:
            continue
        share = 0.0 if rel <= tolerance else 1 - math.log(min(1.0, rel)) / math.log(tolerance)
        opacity, colour = (0.35, _EQUAL) if rel <= tolerance else (0.3 + 0.7 * share, _DIFFERENT)
        tip = f"{module}, {direction}, rank {rank}: {rel:.1e}"
        style = f"fill='{colour}' fill-opacity='{opacity:.2f}' class='cell'"
        yield elements.box(left + rank * cell + 0.5, y + 1, cell - 1, _ROW - 2, style, tip)
