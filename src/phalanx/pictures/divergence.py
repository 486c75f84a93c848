"""Draws where a layout parts from one process: modules down, ranks across, one panel per direction of a step."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from phalanx.pictures import elements
from phalanx.pictures.elements import BOLD, END, MIDDLE, SMALL

MOST_ROWS = 60
"""Modules that are drawn: of more, those around the first that differs."""
_LEFT, _TOP, _ROW, _PANEL_GAP, _FOOT = 240, 118, 16, 28, 34
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
    start = max(0, min(at - MOST_ROWS // 2, len(modules) - MOST_ROWS))
    shown = modules[start : start + MOST_ROWS]
    ranks = len(next(iter(table[next(iter(table))].values()), ()))
    cell = max(6.0, min(34.0, 320 / max(1, ranks)))
    panel = cell * ranks
    bottom = _TOP + len(shown) * _ROW
    parts = [elements.heading(16, 24, title)]
    parts += [
        elements.text(16, 42 + 15 * line, elements.shortened(each, 120), SMALL) for line, each in enumerate(words)
    ]
    parts.append(elements.text(_LEFT - 10, _TOP - 6, "rank", f"{END} {SMALL}"))
    for number, (direction, of_module) in enumerate(table.items()):
        left = _LEFT + number * (panel + _PANEL_GAP)
        parts.append(
            elements.text(left + panel / 2, _TOP - 22, {"forward": "output", "backward": "gradient"}[direction], MIDDLE)
        )
        parts += _ranks(ranks, left, cell)
        for row, module in enumerate(shown):
            y = _TOP + row * _ROW
            parts += _cells(module, direction, of_module[module], left, y, cell, tolerance)
            if [direction, module] == [*first]:
                frame = "fill='none' stroke='currentColor' stroke-width='2' class='first'"
                parts.append(elements.box(left - 2, y, panel + 4, _ROW, frame, f"the first that differs: {module}"))
    for row, module in enumerate(shown):
        style = f"{END} {SMALL} {BOLD}" if module == first[1] else f"{END} {SMALL}"
        parts.append(elements.text(_LEFT - 10, _TOP + row * _ROW + 12, elements.shortened(module, 34), style))
    left_out = f"; {len(modules) - len(shown)} modules are not drawn" if len(shown) < len(modules) else ""
    legend = f"green: equal; red: differs, deeper the more; a frame: the first that differs{left_out}"
    parts.append(elements.text(16, bottom + 22, legend, SMALL))
    width = max(
        _LEFT + len(table) * (panel + _PANEL_GAP),
        24 + elements.LETTER * max(len(legend), *(min(120, len(each)) for each in words)),
    )
    return elements.document(title, width, bottom + _FOOT, parts)


def _ranks(ranks: int, left: float, cell: float) -> Iterator[str]:
    every = max(1, math.ceil(18 / cell))  # so that numbers do not touch
    for rank in range(0, ranks, every):
        yield elements.text(left + (rank + 0.5) * cell, _TOP - 6, str(rank), f"{MIDDLE} {SMALL}")


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
