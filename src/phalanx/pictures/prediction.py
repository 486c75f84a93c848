"""Pictures of a prediction: time of a step by part, memory of each pipeline rank by part, and the roofline of a block
(`phalanx predict JOB --svg FILE`). There is no background, and colours have middle lightness, for light and dark
pages."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator
from html import escape

from phalanx.cost.breakdown import MOMENTS, subject
from phalanx.cost.memory.rank_memory import PARTS
from phalanx.cost.prediction import Prediction
from phalanx.cost.spec import StepSpec
from phalanx.pictures import roofline as roofline_picture
from phalanx.pictures.elements import COLOURS, NEUTRAL, box, document, heading, rule, text, ticks
from phalanx.pictures.roofline import seconds
from phalanx.units import gib

_WIDTH, _MARGIN, _LINE = 1080, 24, 17  # pixels
_TIME, _TIME_WIDTH = 164, 210  # pixels: left edge of the bars of time, and width up to the interval's end
_MEMORY, _BARS, _BARS_WIDTH, _BARS_HEIGHT = 540, 588, 280, 240
_LEGEND, _RIGHT = 884, 1056

_TIME_COLOURS = {"memory-bound": COLOURS[2], "recompute": COLOURS[4], "host": COLOURS[7], "optimizer": COLOURS[3]}
_EXPOSED = COLOURS[1]
_MEMORY_COLOURS: dict[str, str] = dict(zip(PARTS, (*(COLOURS[n] for n in (0, 4, 3, 2, 5, 6)), NEUTRAL), strict=True))
_LIMIT = COLOURS[1]
_SHOWN = 5e-4  # smallest share of the step that is drawn: a smaller one would be 0.0 %


def svg(spec: StepSpec, prediction: Prediction) -> str:
    """Draws time by part, memory by part and pipeline rank, and the roofline of a block, as an SVG document."""
    title = subject(spec, spec.layout.world)
    caption = list(_caption(spec, prediction))
    top = 40 + _LINE * len(caption) + 34
    time, lower = _time(prediction, top)
    bottom = max(lower, top + _BARS_HEIGHT + 52)
    block, height = roofline_picture.draw(spec, bottom + 36)
    parts = [
        heading(_MARGIN, 26, title),
        *(text(_MARGIN, 48 + _LINE * number, line) for number, line in enumerate(caption)),
        *_group("time", time),
        *_group("memory", _memory(prediction, top)),
        *_group("roofline", block),
    ]
    return document(title, _WIDTH, height, parts)


def _caption(spec: StepSpec, prediction: Prediction) -> Iterator[str]:
    yield from textwrap.wrap(spec.layout.line().replace(",", ", "), 140, break_on_hyphens=False)
    yield (
        f"{spec.batch.equation()}; tps {prediction.tokens_per_s_per_device:,.0f}, tps_total "
        f"{prediction.tokens_per_s:,.0f}, {prediction.tflops_per_device:,.1f} TFLOP/s per device"
    )
    yield f"MFU {prediction.mfu:.1%}, HFU {prediction.hfu:.1%}, bubble {prediction.bubble:.1%} of the rest of the step"


def _time(prediction: Prediction, top: float) -> tuple[list[str], float]:
    """Returns one row per part, each starting where the last one ends, the whole with its interval; the lower end."""
    step, (low, high) = prediction.step_time_s, prediction.spread
    scale = _TIME_WIDTH / (step * max(1.0, high))
    drawn = [text(_MARGIN, top - 6, f"Time of a step: {seconds(step)}", "font-weight='600'")]
    y, x = top + 14.0, float(_TIME)
    for name, spent in prediction.parts.items():
        if spent >= _SHOWN * step:
            shown, width = f"{seconds(spent)}, {spent / step:.1%}", spent * scale
            drawn.append(text(_TIME - 8, y + 12, name, "text-anchor='end'"))
            drawn.append(box(x, y, max(1.0, width), 14, time_fill(name), f"{name}: {shown}"))
            drawn.append(text(x + width + 8, y + 12, shown, "font-size='11'"))
            y += 21
        x += spent * scale
    ends = [_TIME + factor * step * scale for factor in (low, high)]
    drawn.append(text(_TIME - 8, y + 12, "step", "text-anchor='end' font-weight='600'"))
    drawn.append(box(_TIME, y, step * scale, 14, f"fill='{NEUTRAL}' fill-opacity='.4'", f"step: {seconds(step)}"))
    whisker = f"M{ends[0]:.1f},{y + 3:.1f} v8 m0,-4 H{ends[1]:.1f} m0,-4 v8"
    drawn.append(f"<path class='interval' d='{whisker}' fill='none' stroke='{NEUTRAL}' stroke-width='1.5'/>")
    drawn.append(text(ends[1] + 8, y + 12, f"{seconds(low * step)} to {seconds(high * step)}", "font-size='11'"))
    y += 38
    words = (
        "Exposed: communication that nothing hides. The line, and the range of memory: between them lie eight of ten "
    )
    for line in textwrap.wrap(words + "published steps, measured relative to predicted.", 74):
        drawn.append(text(_MARGIN, y, line, "font-size='11'"))
        y += 15
    return drawn, y


def time_fill(name: str) -> str:
    """Returns the colour of a part of a step's time, as attributes."""
    if name == "bubble":
        return _fill(NEUTRAL, pale=True)
    return _fill(_EXPOSED if name.endswith("exposed") else _TIME_COLOURS.get(name, COLOURS[0]))


def _memory(prediction: Prediction, top: float) -> Iterator[str]:
    """Yields one bar per pipeline rank, the device's memory as a line, and the figures of the fullest rank."""
    ranks, fullest, limit = prediction.memory, prediction.fullest, prediction.memory_limit
    where = f" on rank {ranks.index(fullest)}" if len(ranks) > 1 else ""
    fits = "fits" if prediction.fits else "does not fit"
    title = f"Memory in GiB: at most {gib(fullest.peak)}{where}, of {gib(limit)}: {fits}"
    yield text(_MEMORY, top - 6, title, "font-weight='600'")
    highest = 1.06 * max(limit, fullest.peak)
    base, right = top + 14 + _BARS_HEIGHT, _BARS + _BARS_WIDTH
    scale = _BARS_HEIGHT / highest
    for tick in ticks(0, highest / 2**30):
        y = base - tick * 2**30 * scale
        yield rule(_BARS, y, right, y, "stroke-opacity='.2'")
        yield text(_BARS - 8, y + 4, f"{tick:g}", "text-anchor='end'")
    yield from _bars(prediction, base, scale)
    yield rule(_BARS, base, right, base)
    edge = f"y1='{base - limit * scale:.1f}' y2='{base - limit * scale:.1f}'"
    yield (
        f"<line class='limit' x1='{_BARS}' x2='{right}' {edge} stroke='{_LIMIT}' stroke-width='2' "
        f"stroke-dasharray='6 4'><title>{escape(f'the device has {gib(limit)}')}</title></line>"
    )
    yield text(_BARS + _BARS_WIDTH / 2, base + 34, "pipeline rank", "text-anchor='middle'")
    yield from _legend(prediction, top + 24)


def _bars(prediction: Prediction, base: float, scale: float) -> Iterator[str]:
    """Yields the stacked bars, from `base` upwards, `scale` pixels per byte."""
    count = len(prediction.memory)
    each = min(64.0, _BARS_WIDTH / count)
    gap = min(8.0, each / 5)
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
    several = len(prediction.memory) > 1
    heading = f"rank {prediction.memory.index(fullest)}" if several else "the device"
    yield text(_LEGEND, y, heading, "font-weight='600'")
    for name, size in reversed(fullest.parts()):
        y += 20
        yield box(_LEGEND, y - 10, 12, 12, memory_fill(name))
        yield text(_LEGEND + 18, y, name)
        yield text(_RIGHT, y, gib(size), "text-anchor='end' font-size='11'")
    y += 20
    dashes = f"stroke='{_LIMIT}' stroke-width='2' stroke-dasharray='6 4'"
    yield f"<line x1='{_LEGEND - 2}' y1='{y - 4:.1f}' x2='{_LEGEND + 14}' y2='{y - 4:.1f}' {dashes}/>"
    yield text(_LEGEND + 18, y, "limit")
    yield text(_RIGHT, y, gib(prediction.memory_limit), "text-anchor='end' font-size='11'")
    yield text(_LEGEND, y + 24, f"peak {MOMENTS[fullest.moment]}", "font-size='11'")
    yield text(_LEGEND, y + 39, f"{gib(least * fullest.peak)} to {gib(most * fullest.peak)}", "font-size='11'")
    yield from _tiers(prediction, y + 62)


def _tiers(prediction: Prediction, y: float) -> Iterator[str]:
    """Yields for each tier beside the device, the host and the disk, its name, its figures, and how full it is."""
    for tier, (size, limit) in prediction.tiers.items():
        if tier == "device":
            continue
        short, width = tier in prediction.short_tiers, _RIGHT - _LEGEND
        figures = f"{gib(size)} of {gib(limit)}" if limit else f"{gib(size)} per device"
        yield text(_LEGEND, y, f"{tier}{': does not fit' if short else ''}", "font-weight='600'")
        yield text(_RIGHT, y, figures, "text-anchor='end' font-size='11'")
        if limit:
            yield box(_LEGEND, y + 6, width, 8, _fill(NEUTRAL, pale=True))
            fill = _fill(_LIMIT if short else _MEMORY_COLOURS["optimizer"])
            yield box(_LEGEND, y + 6, width * min(1.0, size / limit), 8, fill, f"{tier}: {figures} per device")
        y += 34


def memory_fill(name: str) -> str:
    """Returns the colour of a part of the memory, as attributes."""
    return _fill(_MEMORY_COLOURS[name], pale=name == "reserved")


def _fill(colour: str, pale: bool = False) -> str:
    """Returns a colour as attributes; pale with a border for what nothing uses."""
    return f"fill='{colour}' fill-opacity='.25' stroke='{colour}' stroke-width='.5'" if pale else f"fill='{colour}'"


def _group(name: str, parts: Iterable[str]) -> Iterator[str]:
    yield f"<g class='{name}'>"
    yield from parts
    yield "</g>"
