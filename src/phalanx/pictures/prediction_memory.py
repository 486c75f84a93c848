"""The panel of a prediction's memory: of one rank a row per part, of several pipeline ranks a bar per rank. The memory
of the device is a dashed line."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from phalanx.cost.breakdown import MOMENTS
from phalanx.cost.prediction import Prediction
from phalanx.cost.rank_memory import PARTS
from phalanx.pictures.elements import COLOURS, NEUTRAL, box, fill_of, rule, text, ticks
from phalanx.units import gib

_LEFT, _RIGHT = 540, 1056  # edges of the panel in pixels
_ROWS, _ROWS_WIDTH, _ROW = 644, 300, 21  # left edge and width of the rows of one rank, and from row to row
_BARS, _BARS_WIDTH, _BARS_HEIGHT = 588, 280, 240
_LEGEND = 884
_TIER = 34  # pixels from a tier of memory to the next

_COLOURS: dict[str, str] = dict(zip(PARTS, (*(COLOURS[n] for n in (0, 4, 3, 2, 5, 6)), NEUTRAL), strict=True))
_LIMIT = COLOURS[1]
_DASHES = f"stroke='{_LIMIT}' stroke-width='2' stroke-dasharray='6 4'"
_SMALL, _END = "font-size='11'", "text-anchor='end'"


def panel(prediction: Prediction, top: float) -> tuple[list[str], float]:
    """Returns the panel whose title stands at `top`, and its lower end."""
    ranks, fullest, limit = prediction.memory, prediction.fullest, prediction.memory_limit
    where = f" on rank {ranks.index(fullest)}" if len(ranks) > 1 else ""
    fits = "fits" if prediction.fits else "does not fit"
    title = f"Memory in GiB: at most {gib(fullest.peak)}{where}, of {gib(limit)}: {fits}"
    drawn = [text(_LEFT, top - 6, title, "font-weight='600'")]
    tiers = _TIER * (len(prediction.tiers) - 1)
    if len(ranks) == 1:
        rows, bottom = _rows(prediction, top + 14)
        return [*drawn, *rows, *_tiers(prediction, bottom + 14, _LEFT)], bottom + tiers
    return [*drawn, *_bars(prediction, top), *_legend(prediction, top + 24)], top + max(_BARS_HEIGHT + 52, 250 + tiers)


def memory_fill(name: str) -> str:
    """Returns the colour of a part of the memory, as attributes."""
    return fill_of(_COLOURS[name], pale=name == "reserved")


def _rows(prediction: Prediction, top: float) -> tuple[list[str], float]:
    """Returns one row per part, each starting where the last one ends, and the peak with its interval; and the lower
    end."""
    fullest, limit, (least, most) = prediction.fullest, prediction.memory_limit, prediction.memory_spread
    scale = _ROWS_WIDTH / (1.04 * max(limit, fullest.peak * most))
    y, x, drawn = top, float(_ROWS), [f"<g class='rank'><title>{escape(str(fullest))}</title>"]
    labels: list[str] = []
    for name, size in fullest.parts():
        if size > 0:
            shown = f"{gib(size)}, {size / fullest.peak:.1%}"
            drawn.append(box(x, y, max(1.0, size * scale), 14, memory_fill(name), f"{name}: {shown}"))
            labels += [text(_ROWS - 8, y + 12, name, _END), text(_RIGHT, y + 12, shown, f"{_END} {_SMALL}")]
            y += _ROW
        x += size * scale
    drawn += ["</g>", *labels]
    drawn.append(text(_ROWS - 8, y + 12, "peak", f"{_END} font-weight='600'"))
    drawn.append(box(_ROWS, y, fullest.peak * scale, 14, f"fill='{NEUTRAL}' fill-opacity='.4'"))
    ends = [_ROWS + factor * fullest.peak * scale for factor in (least, most)]
    whisker = f"M{ends[0]:.1f},{y + 3:.1f} v8 m0,-4 H{ends[1]:.1f} m0,-4 v8"
    drawn.append(f"<path class='interval' d='{whisker}' fill='none' stroke='{NEUTRAL}' stroke-width='1.5'/>")
    drawn.append(text(_RIGHT, y + 12, f"{gib(least * fullest.peak)} to {gib(most * fullest.peak)}", f"{_END} {_SMALL}"))
    base = y + 22
    for tick in ticks(0, _ROWS_WIDTH / scale / 2**30):
        at = _ROWS + tick * 2**30 * scale
        drawn.append(rule(at, top - 4, at, base, "stroke-opacity='.2'"))
        drawn.append(text(at, base + 14, f"{tick:g}", f"text-anchor='middle' {_SMALL}"))
    at = _ROWS + limit * scale
    drawn.append(
        f"<line class='limit' x1='{at:.1f}' x2='{at:.1f}' y1='{top - 4:.1f}' y2='{base:.1f}' {_DASHES}>"
        f"<title>{escape(f'the device has {gib(limit)}')}</title></line>"
    )
    drawn.append(f"<line x1='{_LEFT - 2}' y1='{base + 32:.1f}' x2='{_LEFT + 14}' y2='{base + 32:.1f}' {_DASHES}/>")
    drawn.append(
        text(_LEFT + 20, base + 36, f"memory of the device: {gib(limit)}; peak {MOMENTS[fullest.moment]}", _SMALL)
    )
    return drawn, base + 48


def _bars(prediction: Prediction, top: float) -> Iterator[str]:
    """Yields one stacked bar per pipeline rank with their axis, and the device's memory as a line."""
    limit = prediction.memory_limit
    highest = 1.06 * max(limit, prediction.fullest.peak)
    base, right, scale = top + 14 + _BARS_HEIGHT, _BARS + _BARS_WIDTH, _BARS_HEIGHT / highest
    for tick in ticks(0, highest / 2**30):
        y = base - tick * 2**30 * scale
        yield rule(_BARS, y, right, y, "stroke-opacity='.2'")
        yield text(_BARS - 8, y + 4, f"{tick:g}", _END)
    yield from _stacks(prediction, base, scale)
    yield rule(_BARS, base, right, base)
    edge = f"y1='{base - limit * scale:.1f}' y2='{base - limit * scale:.1f}'"
    tip = escape(f"the device has {gib(limit)}")
    yield f"<line class='limit' x1='{_BARS}' x2='{right}' {edge} {_DASHES}><title>{tip}</title></line>"
    yield text(_BARS + _BARS_WIDTH / 2, base + 34, "pipeline rank", "text-anchor='middle'")


def _stacks(prediction: Prediction, base: float, scale: float) -> Iterator[str]:
    """Yields the stacked bars, from `base` upwards, `scale` pixels per byte."""
    count = len(prediction.memory)
    each = _BARS_WIDTH / count
    gap = min(20.0, each / 5)
    numbered = {int(tick) for tick in ticks(0, count, 14)}
    for rank, memory in enumerate(prediction.memory):
        x, y = _BARS + rank * each, base
        yield f"<g class='rank'><title>{escape(f'pipeline rank {rank}: {memory}')}</title>"
        for name, size in memory.parts():
            y -= size * scale
            if size > 0:
                yield box(x + gap / 2, y, each - gap, size * scale, memory_fill(name))
        yield "</g>"
        if rank in numbered:
            yield text(x + each / 2, base + 16, str(rank), "text-anchor='middle'")


def _legend(prediction: Prediction, y: float) -> Iterator[str]:
    """Yields the colours, with the figures of the fullest rank."""
    fullest, (least, most) = prediction.fullest, prediction.memory_spread
    yield text(_LEGEND, y, f"rank {prediction.memory.index(fullest)}", "font-weight='600'")
    for name, size in reversed(fullest.parts()):
        y += 20
        yield box(_LEGEND, y - 10, 12, 12, memory_fill(name))
        yield text(_LEGEND + 18, y, name)
        yield text(_RIGHT, y, gib(size), f"{_END} {_SMALL}")
    y += 20
    yield f"<line x1='{_LEGEND - 2}' y1='{y - 4:.1f}' x2='{_LEGEND + 14}' y2='{y - 4:.1f}' {_DASHES}/>"
    yield text(_LEGEND + 18, y, "limit")
    yield text(_RIGHT, y, gib(prediction.memory_limit), f"{_END} {_SMALL}")
    yield text(_LEGEND, y + 24, f"peak {MOMENTS[fullest.moment]}", _SMALL)
    yield text(_LEGEND, y + 39, f"{gib(least * fullest.peak)} to {gib(most * fullest.peak)}", _SMALL)
    yield from _tiers(prediction, y + 62, _LEGEND)


def _tiers(prediction: Prediction, y: float, left: float) -> Iterator[str]:
    """Yields for each tier beside the device, the host and the disk, its name, its figures, and how full it is, from
    `left` to the right edge."""
    for tier, (size, limit) in prediction.tiers.items():
        if tier == "device":
            continue
        short, width = tier in prediction.short_tiers, _RIGHT - left
        figures = f"{gib(size)} of {gib(limit)}" if limit else f"{gib(size)} per device"
        yield text(left, y, f"{tier}{': does not fit' if short else ''}", "font-weight='600'")
        yield text(_RIGHT, y, figures, f"{_END} {_SMALL}")
        if limit:
            yield box(left, y + 6, width, 8, fill_of(NEUTRAL, pale=True))
            fill = fill_of(_LIMIT if short else _COLOURS["optimizer"])
            yield box(left, y + 6, width * min(1.0, size / limit), 8, fill, f"{tier}: {figures} per device")
        y += _TIER
