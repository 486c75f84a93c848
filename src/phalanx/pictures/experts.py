"""A picture of how evenly a run's experts are loaded: each expert of each layer at the end, and the worst over time
(experts.svg of a run's directory).

Drawn from the rows that training writes to metrics.jsonl. Without a background, for a light or dark page.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from phalanx.bounded import field, open_regular, parse_json
from phalanx.errors import DataError
from phalanx.pictures.elements import END, MIDDLE, SMALL, document, heading, text
from phalanx.pictures.panels import Panel, panels_svg

# White digits are legible on these colours, which are legible on white and on black.
_LESS, _EVEN, _MORE = (0x2E, 0x76, 0xE6), (0x5C, 0x62, 0x6A), (0xD2, 0x4B, 0x2A)
_TONES = 20
"""Number of colours from an even share down to the smallest, and up to the largest."""
_HEADER, _LEFT, _TOP = 52, 56, 72  # pixels above both halves, left of the map, and above it
_MAP_WIDTH, _MAP_HEIGHT, _WIDEST, _NARROWEST, _LOWEST = 480, 260, 56, 3, 6  # pixels of the map and of its cells
_SCALE_WIDTH = 8 * (2 * _TONES + 1)
_LINE_BYTES = 2**22  # of a row; longer ones are no rows


class _Cells(NamedTuple):
    """Width and height of a map's cells in pixels."""

    width: int
    height: int


def svg(name: str, metrics: Path, model: str = "") -> str:
    """Returns the picture of the run `name` of a `model` with that metrics.jsonl as an SVG document. Raises DataError
    where the file has no rows about experts."""
    rows = _rows(metrics)
    if not rows:
        raise DataError(
            f"{metrics} has no row about experts, so there is nothing to draw: they are written for models with "
            "model.moe.n_experts, every train.log_every steps"
        )
    last = rows[-1]
    shares = {layer: [load * len(row) / sum(row) for load in row] for layer, row in last["loads"].items()}
    title = f"Expert load of the run {name}{model and f' ({model})'}"
    words = (
        f"step {last['step']}: an expert of layer {last['worst_layer']} has {1 + last['max_violation']:.2f} × an even "
        f"share (max_violation {last['max_violation']:.2f}); experts without tokens: {last['idle']}"
    )
    experts = len(next(iter(shares.values())))
    # They fill the map's space but are never too small to see.
    width = max(_NARROWEST, min(_WIDEST, _MAP_WIDTH // experts))
    cells = _Cells(width, max(_LOWEST, min(_WIDEST, _MAP_HEIGHT // len(shares))))
    map_width = _LEFT + max(experts * cells.width, _SCALE_WIDTH) + 40
    height = _HEADER + max(_TOP + len(shares) * cells.height + 100, 384)
    curve = ""
    if len(rows) > 1:  # one row shows no more than the map
        points = [(row["step"], row["max_violation"]) for row in rows]
        panel = Panel("", "step", "max_violation: (largest load - mean) / mean", {"worst layer": points})
        curve = panels_svg("Worst layer over the run", [panel])
    width = max(map_width + (488 if curve else 0), 32 + 10 * len(title), 32 + 7 * len(words))
    parts = [
        heading(16, 26, title),
        text(16, 46, words),
        f"<g class='map' transform='translate(0 {_HEADER})'>",
        *_map(shares, last, cells),
        "</g>",
        f"<g transform='translate({map_width} {_HEADER})'>",
        curve + "</g>",
    ]
    return document(title, width, height, parts)


def _rows(path: Path) -> list[dict[str, Any]]:
    """Returns the rows about experts in the order of steps; of a step that was repeated after resuming, the last.
    Raises DataError for a file that cannot be read."""
    rows: list[dict[str, Any]] = []
    try:
        with open_regular(path) as file:
            for line in iter(lambda: file.readline(_LINE_BYTES), b""):
                if b'"event": "experts"' not in line or (row := _row(line)) is None:
                    continue
                while rows and rows[-1]["step"] >= row["step"]:
                    rows.pop()
                rows.append(row)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None
    return rows


def _row(line: bytes) -> dict[str, Any] | None:
    """Returns a row about experts, or None for another line: half of one, left by a trainer that was killed, or one
    that no trainer has written."""
    try:
        row = parse_json(line)
        loads = field(row, "loads", dict)
        figures = [field(row, name, int) for name in ("step", "steps", "idle", "worst_layer")]
        figures += [field(row, "max_violation", float), *(load for layer in loads.values() for load in layer)]
    except (ValueError, TypeError):
        return None
    same_experts = len({len(layer) for layer in loads.values()}) == 1
    sensible = all(isinstance(value, int | float) and 0 <= value < 1e15 for value in figures)
    return row if same_experts and sensible and all(map(any, loads.values())) else None


def _map(shares: Mapping[str, Sequence[float]], row: Mapping[str, Any], cells: _Cells) -> Iterator[str]:
    """Yields the heat map with its axes and the scale of its colours."""
    first, experts = row["step"] - row["steps"] + 1, len(next(iter(shares.values())))
    yield heading(16, 22, f"Tokens of each expert, steps {first} to {row['step']}")
    yield text(16, 42, "1 is an even share; blue experts have fewer tokens, red ones more")
    width, height = experts * cells.width, len(shares) * cells.height
    spread = _spread([share for layer in shares.values() for share in layer])
    yield f"<g transform='translate({_LEFT} {_TOP})'>"
    yield from _coloured(shares, spread, cells)
    if cells.width >= 30 and cells.height >= 16:
        for y, layer in enumerate(shares.values()):
            for x, share in enumerate(layer):
                at = (x + 0.5) * cells.width, (y + 0.5) * cells.height + 4
                yield text(*at, f"{share:.{2 if share < 10 else 1}f}", f"{MIDDLE} {SMALL} fill='#fff'")
    every = _every(30, cells.width)
    for x in range(0, experts, every):
        yield text((x + 0.5) * cells.width, height + 16, str(x), MIDDLE)
    yield text(width / 2, height + 34, "expert", MIDDLE)
    for y, layer in list(enumerate(shares))[:: _every(14, cells.height)]:
        yield text(-8, (y + 0.5) * cells.height + 4, layer, END)
    yield f"<text transform='translate({16 - _LEFT + 8} {height / 2:g}) rotate(-90)' text-anchor='middle'>layer</text>"
    yield f"<g transform='translate(0 {height + 52})'>"
    yield from _scale(spread)
    yield "</g></g>"


def _coloured(shares: Mapping[str, Sequence[float]], spread: float, cells: _Cells) -> Iterator[str]:
    """Yields all cells, those of one colour as one path."""
    paths: dict[str, list[str]] = {}
    gap = 1 if cells.width >= 12 and cells.height >= 12 else 0
    width, height = cells.width - gap, cells.height - gap
    for y, layer in enumerate(shares.values()):
        for x, share in enumerate(layer):
            box = f"M{x * cells.width} {y * cells.height}h{width}v{height}h-{width}z"
            paths.setdefault(_colour(_tone(share, spread)), []).append(box)
    for colour, boxes in paths.items():
        yield f"<path fill='{colour}' shape-rendering='crispEdges' d='{''.join(boxes)}'/>"


def _scale(spread: float) -> Iterator[str]:
    """Yields the colour scale: shares below an even one and above it have half of the width each."""
    for place in range(2 * _TONES + 1):
        colour = _colour(place - _TONES)
        yield f"<rect x='{8 * place}' width='8' height='12' fill='{colour}' shape-rendering='crispEdges'/>"
    for part in (-1, -0.5, 0, 0.5, 1):
        at = (_SCALE_WIDTH - 8) * (part + 1) / 2 + 4
        share = 1 + part * (spread if part > 0 else min(spread, 1))
        yield text(at, 28, f"{share:.3g} ×", MIDDLE)


def _spread(shares: Sequence[float]) -> float:
    """Returns the reach of the scale from 1: the first of 0.1, 0.2, 0.5, 1, 2, 5, ... that covers every share."""
    farthest = max(abs(share - 1) for share in shares)
    spread, steps = 0.1, 0
    while spread < farthest:
        steps += 1
        spread = (1, 2, 5)[steps % 3] * 10.0 ** (steps // 3 - 1)
    return spread


def _tone(share: float, spread: float) -> int:
    """Returns the place of a share's colour on the scale: from -_TONES to _TONES, 0 for an even share."""
    return round((share - 1) / (spread if share > 1 else min(spread, 1)) * _TONES)


def _colour(tone: int) -> str:
    end, part = _MORE if tone > 0 else _LESS, abs(tone) / _TONES
    mixed = (round(a + (b - a) * part) for a, b in zip(_EVEN, end, strict=True))
    return "#" + "".join(f"{channel:02x}" for channel in mixed)


def _every(pixels: int, cell: int) -> int:
    """Returns the distance of cells with a label, 1, 2, 4, 8, ..., so that labels are at least `pixels` apart."""
    every = 1
    while every * cell < pixels:
        every *= 2
    return every
