"""Pictures of a prediction: time of a step by part, memory of each pipeline rank by part, and the roofline of a block
(`phalanx predict JOB --svg FILE`). There is no background, and colours have middle lightness, for light and dark
pages."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from html import escape
from itertools import combinations
from math import ceil, floor, hypot, log10

from phalanx.config.job import Job
from phalanx.cost import roofline
from phalanx.cost.breakdown import MOMENTS, subject
from phalanx.cost.memory.rank_memory import PARTS
from phalanx.cost.predict import predict
from phalanx.cost.prediction import Prediction
from phalanx.cost.roofline import OperatorPoint, Roof
from phalanx.cost.spec import StepSpec
from phalanx.partition.recompute import Mode, RecomputeRun
from phalanx.pictures.canvas import Panel, panels_svg
from phalanx.pictures.elements import (
    COLOURS,
    NEUTRAL,
    box,
    digits,
    document,
    fill_of,
    heading,
    rule,
    seconds,
    text,
    ticks,
)
from phalanx.units import gib

_MIXED: tuple[tuple[Mode, Mode], ...] = (
    ("none", "products"),
    ("none", "full"),
    ("products", "full"),
    ("none", "selective"),
)
"""The modes of a line: of the last layers, and of the first."""
_PLACES = 8
"""Parts into which a line divides the layers."""


def recompute_svg(job: Job, spec: StepSpec) -> str:
    """Returns the picture of a job's recomputation, whatever its own is, as an SVG document."""
    layers = spec.model.n_layers
    numbers = sorted({round(layers * place / _PLACES) for place in range(_PLACES + 1)})
    costs: dict[str, list[tuple[float, float]]] = {}
    needs: dict[str, list[tuple[float, float]]] = {}
    for rest, first in _MIXED:
        name = f"{rest} to {first}"
        costs[name], needs[name] = [], []
        for number in numbers:
            runs = [RecomputeRun(number, first), RecomputeRun(layers - number, rest)]
            cut = "+".join(str(run) for run in runs if run.layers)
            found = predict(replace(spec, layout=replace(spec.layout, recompute="none", recompute_cut=cut)))
            memory = found.fullest.peak / 2**30
            costs[name].append((memory, found.step_time_s))
            needs[name].append((number, memory))
    device = spec.cluster.accelerator.memory_gib
    title = subject(job, spec.layout.world) + (f", {device:g} GiB each" if device else "")
    memory = "memory of the fullest rank, GiB"
    ends = {name: line[-1] for name, line in costs.items()}
    return panels_svg(
        title,
        [
            Panel("a line goes from one mode to another", memory, "time of a step, s", costs, ends),
            Panel("first layers with the second mode", "layers", memory, needs),
        ],
    )


Area = tuple[float, float, float, float]
"""Left, upper, right and lower edge."""

_PLOT, _WIDE, _TABLE = (
    76,
    436,
    548,
)  # pixels; the last three: left edge and width of the plot, left edge of the table
_COLUMNS = {"time": 190, "FLOP/byte": 264, "TFLOP/s": 328, "collectives": 408}
_LABELS = 110  # pixels of the plot's right part for labels
_LETTER = 6.6  # pixels of a letter of size 11, generously
_VERDICTS = {"compute": COLOURS[0], "memory": COLOURS[2], "launch": COLOURS[7], "communication": COLOURS[1]}


def roofline_panel(spec: StepSpec, top: float) -> tuple[list[str], float]:
    """Draws the roofline of the last block on a device, with a table of its operators; also returns where they end."""
    found = roofline.points(spec)
    device, kind = spec.cluster.accelerator, spec.products
    slowdown = roofline.block_slowdown(spec)
    paper, real = roofline.data_sheet(device, kind), roofline.reached(device, kind, slowdown)
    others = {p.products: roofline.reached(device, p.products, slowdown) for p in found if p.products != kind}
    height = max(300, 16 * len(found) + 8)
    words = [
        f"Dashed: the data sheet, {_rates(paper)}, with the ridge where they meet. Solid: what the best products and "
        "streaming "
        f"kernels of the framework reach, {_rates(real)}, with the ridge at {digits(real.ridge)} FLOP/byte.",
        "A number that a memory-bound operation reads or writes counts as one FLOP. Collectives: those right before "
        "and after an operator, if fully exposed; where they take longer, the operator is bound by communication.",
    ]
    if others:
        words.append(f"Thin: in {', '.join(others)}, in which the prediction has some of the operators.")
    drawn = [
        text(_MARGIN, top - 6, f"Roofline of a block, forward, on one {device.name} ({kind})", "font-weight='600'"),
        *_roofs(found, paper, real, list(others.values()), (_PLOT, top + 20, _PLOT + _WIDE, top + 20 + height)),
        *_bounds(found, top + 24),
    ]
    y = top + height + 78.0
    for line in (line for sentence in words for line in textwrap.wrap(sentence, 150)):
        drawn.append(text(_MARGIN, y, line, "font-size='11'"))
        y += 15
    return drawn, y + 4


def _roofs(found: Sequence[OperatorPoint], paper: Roof, real: Roof, others: Sequence[Roof], box: Area) -> Iterator[str]:
    left, top, right, bottom = box
    rates = [p.flops_per_s for p in found]
    xs = _span([*(p.intensity for p in found), paper.ridge], 1.5)
    xs = xs[0], xs[0] + (xs[1] - xs[0]) * (right - left) / (right - left - _LABELS)
    ys = _span([*rates, *(paper.peak, real.peak), *(roof.peak for roof in others)], 3)

    def place(intensity: float, rate: float) -> tuple[float, float]:
        across, up = (log10(intensity) - xs[0]) / (xs[1] - xs[0]), (log10(rate) - ys[0]) / (ys[1] - ys[0])
        return left + across * (right - left), bottom - up * (bottom - top)

    for power in range(ceil(xs[0]), floor(xs[1]) + 1):
        x, _ = place(10.0**power, 1.0)
        yield rule(x, top, x, bottom, "stroke-opacity='.2'")
        yield text(x, bottom + 16, f"{10.0**power:,.15g}", "text-anchor='middle'")
    for power in range(ceil(ys[0]), floor(ys[1]) + 1):
        _, y = place(1.0, 10.0**power)
        yield rule(left, y, right, y, "stroke-opacity='.2'")
        yield text(left - 6, y + 4, f"{10.0 ** (power - 12):,.15g}", "text-anchor='end'")
    yield text((left + right) / 2, bottom + 34, "FLOPs per byte of memory traffic", "text-anchor='middle'")
    middle = f"transform='translate({_MARGIN + 6} {(top + bottom) / 2:.1f}) rotate(-90)' text-anchor='middle'"
    yield f"<text {middle}>TFLOP/s</text>"
    styles = [(paper, "stroke-dasharray='5 4'"), (real, "stroke-width='2'"), *((roof, "") for roof in others)]
    for roof, style in styles:
        start = max(10.0 ** xs[0], 10.0 ** ys[0] / roof.bandwidth)
        corners = [place(at, roof.at(at)) for at in (start, roof.ridge, 10.0 ** xs[1])]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in corners)
        yield f"<polyline class='roof' points='{path}' fill='none' stroke='{NEUTRAL}' {style}/>"
    flat = max(place(1.0, roof.peak)[1] for roof in (real, *others))
    x, y = place(paper.ridge, paper.peak)
    ridge = f"ridge {digits(paper.ridge)} FLOP/byte"
    yield f"<circle class='ridge' cx='{x:.1f}' cy='{y:.1f}' r='3' fill='{NEUTRAL}'/>"
    yield text(x - 8, y - 3, ridge, "text-anchor='end' font-size='11' font-weight='600'")
    yield from _operators(found, [place(p.intensity, p.flops_per_s) for p in found], box, flat)


def _operators(
    found: Sequence[OperatorPoint], places: Sequence[tuple[float, float]], box: Area, roof: float
) -> Iterator[str]:
    """Yields one dot per operator. Memory-bound operations have similar intensities: their names stand beside the dots,
    and close ones share a place; all others' stand in a column at the right edge, below the flat `roof`."""
    first = min(x for x, _ in places) + 5
    column = [(x, y, point.name) for point, (x, y) in zip(found, places, strict=True) if x > first]
    edge = box[2] - max((_LETTER * len(name) for _, _, name in column), default=0.0)
    slots = [roof + 20 + 14 * number for number in range(len(column))]
    for (x, y, name), slot in zip(_uncrossed(column, edge, slots), slots, strict=True):
        yield rule(x, y, edge - 3, slot, "stroke-opacity='.5'")
        yield text(edge, slot + 4, name, "font-size='11' class='label'")
    beside: dict[tuple[float, float], list[str]] = {}
    for point, (x, y) in zip(found, places, strict=True):
        if x <= first:
            near = next(((left, up) for left, up in beside if abs(y - up) < 14), (x, y))
            beside.setdefault(near, []).append(point.name)
    for (x, y), names in beside.items():
        label = ", ".join(names) if len(names) < 4 else f"{', '.join(names[:2])} and {len(names) - 2} more"
        yield text(x + 8, y + 4, label, "font-size='11' class='label'")
    for point, (x, y) in zip(found, places, strict=True):
        words = f"{point.name}: {digits(point.intensity)} FLOP/byte, {digits(point.flops_per_s / 1e12)} TFLOP/s"
        yield (
            f"<circle class='operator' cx='{x:.1f}' cy='{y:.1f}' r='4.5' fill='{_VERDICTS[point.verdict]}'>"
            f"<title>{escape(words)}</title></circle>"
        )


def _uncrossed(
    dots: Sequence[tuple[float, float, str]], edge: float, slots: Sequence[float]
) -> list[tuple[float, float, str]]:
    """Returns the dots in the order of their labels' places at x = `edge`, so that no two lines to them cross: two
    crossing lines are longer than the two that join the same ends the other way."""
    order = sorted(dots, key=lambda dot: -dot[0])

    def length(dot: tuple[float, float, str], slot: float) -> float:
        return hypot(edge - dot[0], slot - dot[1])

    shorter = True
    while shorter:
        shorter = False
        for one, other in combinations(range(len(order)), 2):
            straight = length(order[one], slots[one]) + length(order[other], slots[other])
            if length(order[other], slots[one]) + length(order[one], slots[other]) < straight - 1e-6:
                order[one], order[other] = order[other], order[one]
                shorter = True
    return order


def _bounds(found: Sequence[OperatorPoint], top: float) -> Iterator[str]:
    """Yields one row per operator: its time, its position, and its bound."""
    bound = _TABLE + 422
    yield text(_TABLE + 14, top, "operator", "font-weight='600'")
    for name, x in _COLUMNS.items():
        yield text(_TABLE + x, top, name, "text-anchor='end' font-weight='600'")
    yield text(bound, top, "bound by", "font-weight='600'")
    for number, point in enumerate(found):
        y = top + 20 + 16 * number
        waits = seconds(point.communication) if point.communication else "–"
        values = (seconds(point.seconds), digits(point.intensity), digits(point.flops_per_s / 1e12), waits)
        yield f"<circle cx='{_TABLE + 4}' cy='{y - 4:.1f}' r='4.5' fill='{_VERDICTS[point.verdict]}'/>"
        yield text(_TABLE + 14, y, point.name, "font-size='11'")
        for value, x in zip(values, _COLUMNS.values(), strict=True):
            yield text(_TABLE + x, y, value, "text-anchor='end' font-size='11'")
        yield text(bound, y, point.verdict, "font-size='11'")


def _span(values: Sequence[float], beyond: float) -> tuple[float, float]:
    """Returns the decimal logarithms of an axis's ends: a little below the least, a factor above the greatest."""
    return log10(min(values) / 2.5), log10(max(values) * beyond)


def _rates(roof: Roof) -> str:
    return f"{digits(roof.peak / 1e12)} TFLOP/s and {roof.bandwidth / 1e12:,.2f} TB/s"


_LEFT, _RIGHT = 540, 1056  # edges of the panel in pixels
_ROWS, _ROWS_WIDTH, _ROW = 644, 300, 21  # left edge and width of the rows of one rank, and from row to row
_BARS, _BARS_WIDTH, _BARS_HEIGHT = 588, 280, 240
_LEGEND = 884
_TIER = 34  # pixels from a tier of memory to the next

_COLOURS: dict[str, str] = dict(zip(PARTS, (*(COLOURS[n] for n in (0, 4, 3, 2, 5, 6)), NEUTRAL), strict=True))
_LIMIT = COLOURS[1]
_DASHES = f"stroke='{_LIMIT}' stroke-width='2' stroke-dasharray='6 4'"
_SMALL, _END = "font-size='11'", "text-anchor='end'"


def _memory(prediction: Prediction, top: float) -> tuple[list[str], float]:
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


_WIDTH, _MARGIN, _LINE = 1080, 24, 17  # pixels
_TIME, _TIME_WIDTH = 164, 236  # pixels: left edge of the bars of time, and width up to the interval's end

_TIME_COLOURS = {"memory-bound": COLOURS[2], "recompute": COLOURS[4], "host": COLOURS[7], "optimizer": COLOURS[3]}
_EXPOSED = COLOURS[1]
_SHOWN = 5e-4  # smallest share of the step that is drawn: a smaller one would be 0.0 %


def svg(spec: StepSpec, prediction: Prediction) -> str:
    """Draws time by part, memory by part and pipeline rank, and the roofline of a block, as an SVG document."""
    title = subject(spec, spec.layout.world)
    caption = list(_caption(spec, prediction))
    top = 40 + _LINE * len(caption) + 34
    time, lower = _time(prediction, top)
    memory, bottom = _memory(prediction, top)
    bottom = max(lower, bottom)
    block, height = roofline_panel(spec, bottom + 36)
    parts = [
        heading(_MARGIN, 26, title),
        *(text(_MARGIN, 48 + _LINE * number, line) for number, line in enumerate(caption)),
        *_group("time", time),
        *_group("memory", memory),
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
        return fill_of(NEUTRAL, pale=True)
    return fill_of(_EXPOSED if name.endswith("exposed") else _TIME_COLOURS.get(name, COLOURS[0]))


def _group(name: str, parts: Iterable[str]) -> Iterator[str]:
    yield f"<g class='{name}'>"
    yield from parts
    yield "</g>"
