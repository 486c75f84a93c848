"""Pictures of a prediction: time of a step by part, memory of each pipeline rank by part, the roofline of a block
(`phalanx predict JOB --svg FILE`), and every mode of recomputation (`--picture recompute`)."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import replace
from html import escape
from itertools import combinations
from math import hypot, log10

from phalanx.config.job import Job
from phalanx.cost import roofline
from phalanx.cost.breakdown import MOMENTS, subject
from phalanx.cost.prediction import Prediction, predict
from phalanx.cost.rank_memory import PARTS
from phalanx.cost.roofline import OperatorPoint, Roof
from phalanx.cost.spec import StepSpec
from phalanx.partition.derived import Mode, RecomputeRun
from phalanx.pictures.elements import (
    BOLD,
    COLOURS,
    DASHES,
    END,
    LETTER,
    LIMIT,
    MIDDLE,
    NEUTRAL,
    SMALL,
    Scale,
    across,
    axes,
    box,
    circle,
    digits,
    document,
    fill_of,
    group,
    heading,
    interval,
    limit_line,
    log_ticks,
    polyline,
    rule,
    seconds,
    text,
    ticks,
    upwards,
)
from phalanx.pictures.page import figure, figures, html_page
from phalanx.pictures.panels import Panel, panels_svg
from phalanx.units import counted, gib

_WIDTH, _MARGIN, _LINE = 1080, 24, 17  # pixels
_TIME_COLOURS = {"memory-bound": COLOURS[2], "recompute": COLOURS[4], "host": COLOURS[7], "optimizer": COLOURS[3]}
_MEMORY_COLOURS: dict[str, str] = dict(zip(PARTS, (*(COLOURS[n] for n in (0, 4, 3, 2, 5, 6)), NEUTRAL), strict=True))
_VERDICTS = {"compute": COLOURS[0], "memory": COLOURS[2], "launch": COLOURS[7], "communication": COLOURS[1]}
_SHOWN = 5e-4  # smallest share of the step that is drawn: a smaller one would be 0.0 %
_PALE = f"fill='{NEUTRAL}' fill-opacity='.4'"


def svg(spec: StepSpec, prediction: Prediction) -> str:
    """Draws time by part, memory by part and pipeline rank, and the roofline of a block, as an SVG document."""
    title = subject(spec, spec.layout.world)
    caption = [
        *textwrap.wrap(spec.layout.line().replace(",", ", "), 140, break_on_hyphens=False),
        f"{spec.batch.equation()}; tps {prediction.tokens_per_s_per_device:,.0f}, tps_total "
        f"{prediction.tokens_per_s:,.0f}, {prediction.tflops_per_device:,.1f} TFLOP/s per device",
        f"MFU {prediction.mfu:.1%}, HFU {prediction.hfu:.1%}, bubble {prediction.bubble:.1%} of the rest of the step",
    ]
    top = 40 + _LINE * len(caption) + 34
    time, lower = _time(prediction, top)
    memory, bottom = _memory(prediction, top)
    block, height = _roofline(spec, max(lower, bottom) + 36)
    parts = [
        heading(_MARGIN, 26, title),
        *(text(_MARGIN, 48 + _LINE * number, line) for number, line in enumerate(caption)),
        *group("time", time),
        *group("memory", memory),
        *group("roofline", block),
    ]
    return document(title, _WIDTH, height, parts)


def page(prediction: Prediction) -> str:
    """Returns a prediction as a page: the figures, and the pictures of time and memory."""
    low, high = (seconds(factor * prediction.step_time_s) for factor in prediction.spread)
    (time, left), (memory, right) = _time(prediction, 20), _memory(prediction, 20)
    drawn = document("Time and memory", _WIDTH, max(left, right) + 12, [*group("time", time), *group("memory", memory)])
    shown = {
        seconds(prediction.step_time_s): f"per step; {low} to {high}",
        f"{prediction.tokens_per_s_per_device:,.0f}": "tps: tokens/s per device",
        f"{prediction.mfu:.1%}": "MFU",
        gib(prediction.fullest.peak): f"of {gib(prediction.memory_limit)}: "
        + ("fits" if prediction.fits else "does not fit"),
    }
    parts = [*figures(shown.items()), *figure(drawn, "map")]
    return html_page("Prediction", "One step, predicted", counted(prediction.devices, "device"), parts)


def _time(prediction: Prediction, top: float) -> tuple[list[str], float]:
    """Returns one row per part, each starting where the last one ends, the whole with its interval; the lower end."""
    left, width = 164, 236  # of the bars, up to the interval's end
    step, (low, high) = prediction.step_time_s, prediction.spread
    scale = width / (step * max(1.0, high))
    drawn = [text(_MARGIN, top - 6, f"Time of a step: {seconds(step)}", BOLD)]
    y, x = top + 14.0, float(left)
    for name, spent in prediction.parts.items():
        if spent >= _SHOWN * step:
            shown = f"{seconds(spent)}, {spent / step:.1%}"
            drawn.append(text(left - 8, y + 12, name, END))
            drawn.append(box(x, y, max(1.0, spent * scale), 14, time_fill(name), f"{name}: {shown}"))
            drawn.append(text(x + spent * scale + 8, y + 12, shown, SMALL))
            y += 21
        x += spent * scale
    ends = [left + factor * step * scale for factor in (low, high)]
    drawn += [
        text(left - 8, y + 12, "step", f"{END} {BOLD}"),
        box(left, y, step * scale, 14, _PALE, f"step: {seconds(step)}"),
        interval(ends[0], ends[1], y + 7),
        text(ends[1] + 8, y + 12, f"{seconds(low * step)} to {seconds(high * step)}", SMALL),
    ]
    words = (
        "Exposed: communication that nothing hides. The line, and the range of memory: between them lie eight of ten "
        "published steps, measured relative to predicted."
    )
    lines, bottom = _small_print(words, _MARGIN, y + 38, 74)
    return [*drawn, *lines], bottom


def _small_print(words: str, x: float, y: float, letters: int) -> tuple[list[str], float]:
    lines = textwrap.wrap(words, letters)
    return [text(x, y + 15 * number, line, SMALL) for number, line in enumerate(lines)], y + 15 * len(lines)


def time_fill(name: str) -> str:
    """Returns the colour of a part of a step's time, as attributes."""
    if name == "bubble":
        return fill_of(NEUTRAL, pale=True)
    return fill_of(COLOURS[1] if name.endswith("exposed") else _TIME_COLOURS.get(name, COLOURS[0]))


# Memory: of one rank a row per part, of several pipeline ranks a bar per rank; the device's memory is a dashed line.
_LEFT, _RIGHT = 540, 1056  # edges of the panel in pixels
_ROWS, _ROWS_WIDTH = 644, 300  # left edge and width of the rows of one rank
_BARS, _BARS_WIDTH, _BARS_HEIGHT = 588, 280, 240
_LEGEND = 884
_TIER = 34  # pixels from a tier of memory to the next


def memory_fill(name: str) -> str:
    """Returns the colour of a part of the memory, as attributes."""
    return fill_of(_MEMORY_COLOURS[name], pale=name == "reserved")


def _memory(prediction: Prediction, top: float) -> tuple[list[str], float]:
    """Returns the panel whose title stands at `top`, and its lower end."""
    ranks, fullest, limit = prediction.memory, prediction.fullest, prediction.memory_limit
    where = f" on rank {ranks.index(fullest)}" if len(ranks) > 1 else ""
    fits = "fits" if prediction.fits else "does not fit"
    title = f"Memory in GiB: at most {gib(fullest.peak)}{where}, of {gib(limit)}: {fits}"
    drawn = [text(_LEFT, top - 6, title, BOLD)]
    tiers = _TIER * (len(prediction.tiers) - 1)
    if len(ranks) == 1:
        rows, bottom = _rows(prediction, top + 14)
        return [*drawn, *rows, *_tiers(prediction, bottom + 14, _LEFT)], bottom + tiers
    return [*drawn, *_bars(prediction, top), *_legend(prediction, top + 24)], top + max(_BARS_HEIGHT + 52, 250 + tiers)


def _rows(prediction: Prediction, top: float) -> tuple[list[str], float]:
    """Returns one row per part, each starting where the last one ends, and the peak with its interval; and the lower
    end."""
    fullest, limit, (least, most) = prediction.fullest, prediction.memory_limit, prediction.memory_spread
    scale = Scale(0, 1.04 * max(limit, fullest.peak * most), _ROWS, _ROWS + _ROWS_WIDTH)
    y, sum_before, drawn = top, 0, [f"<g class='rank'><title>{escape(str(fullest))}</title>"]
    labels: list[str] = []
    for name, size in fullest.parts():
        if size > 0:
            shown = f"{gib(size)}, {size / fullest.peak:.1%}"
            width = max(1.0, scale(size) - _ROWS)
            drawn.append(box(scale(sum_before), y, width, 14, memory_fill(name), f"{name}: {shown}"))
            labels += [text(_ROWS - 8, y + 12, name, END), text(_RIGHT, y + 12, shown, f"{END} {SMALL}")]
            y += 21
        sum_before += size
    base = y + 22
    drawn += [
        "</g>",
        *labels,
        text(_ROWS - 8, y + 12, "peak", f"{END} {BOLD}"),
        box(_ROWS, y, scale(fullest.peak) - _ROWS, 14, _PALE),
        interval(scale(least * fullest.peak), scale(most * fullest.peak), y + 7),
        text(_RIGHT, y + 12, f"{gib(least * fullest.peak)} to {gib(most * fullest.peak)}", f"{END} {SMALL}"),
    ]
    marks = [(tick * 2**30, f"{tick:g}") for tick in ticks(0, scale.high / 2**30)]
    drawn += [
        *across(scale, marks, top - 4, base, f"{MIDDLE} {SMALL}"),
        limit_line(scale(limit), top - 4, scale(limit), base, f"the device has {gib(limit)}"),
        f"<line x1='{_LEFT - 2}' y1='{base + 32:.1f}' x2='{_LEFT + 14}' y2='{base + 32:.1f}' {DASHES}/>",
        text(_LEFT + 20, base + 36, f"memory of the device: {gib(limit)}; peak {MOMENTS[fullest.moment]}", SMALL),
    ]
    return drawn, base + 48


def _bars(prediction: Prediction, top: float) -> Iterator[str]:
    """Yields one stacked bar per pipeline rank with their axis, and the device's memory as a line."""
    limit, base, right = prediction.memory_limit, top + 14 + _BARS_HEIGHT, _BARS + _BARS_WIDTH
    scale = Scale(0, 1.06 * max(limit, prediction.fullest.peak), base, base - _BARS_HEIGHT)
    yield from upwards(scale, [(tick * 2**30, f"{tick:g}") for tick in ticks(0, scale.high / 2**30)], _BARS, right)
    each = _BARS_WIDTH / len(prediction.memory)
    gap = min(20.0, each / 5)
    numbered = {int(tick) for tick in ticks(0, len(prediction.memory), 14)}
    for rank, memory in enumerate(prediction.memory):
        x, whole = _BARS + rank * each, 0
        yield f"<g class='rank'><title>{escape(f'pipeline rank {rank}: {memory}')}</title>"
        for name, size in memory.parts():
            whole += size
            if size > 0:
                yield box(x + gap / 2, scale(whole), each - gap, base - scale(size), memory_fill(name))
        yield "</g>"
        if rank in numbered:
            yield text(x + each / 2, base + 16, str(rank), MIDDLE)
    yield rule(_BARS, base, right, base)
    yield limit_line(_BARS, scale(limit), right, scale(limit), f"the device has {gib(limit)}")
    yield text(_BARS + _BARS_WIDTH / 2, base + 34, "pipeline rank", MIDDLE)


def _legend(prediction: Prediction, y: float) -> Iterator[str]:
    """Yields the colours, with the figures of the fullest rank."""
    fullest, (least, most) = prediction.fullest, prediction.memory_spread
    yield text(_LEGEND, y, f"rank {prediction.memory.index(fullest)}", BOLD)
    for name, size in reversed(fullest.parts()):
        y += 20
        yield box(_LEGEND, y - 10, 12, 12, memory_fill(name))
        yield text(_LEGEND + 18, y, name)
        yield text(_RIGHT, y, gib(size), f"{END} {SMALL}")
    y += 20
    yield f"<line x1='{_LEGEND - 2}' y1='{y - 4:.1f}' x2='{_LEGEND + 14}' y2='{y - 4:.1f}' {DASHES}/>"
    yield text(_LEGEND + 18, y, "limit")
    yield text(_RIGHT, y, gib(prediction.memory_limit), f"{END} {SMALL}")
    yield text(_LEGEND, y + 24, f"peak {MOMENTS[fullest.moment]}", SMALL)
    yield text(_LEGEND, y + 39, f"{gib(least * fullest.peak)} to {gib(most * fullest.peak)}", SMALL)
    yield from _tiers(prediction, y + 62, _LEGEND)


def _tiers(prediction: Prediction, y: float, left: float) -> Iterator[str]:
    """Yields for each tier beside the device, the host and the disk, its name, its figures, and how full it is, from
    `left` to the right edge."""
    for tier, (size, limit) in prediction.tiers.items():
        if tier == "device":
            continue
        short, width = tier in prediction.short_tiers, _RIGHT - left
        figures = f"{gib(size)} of {gib(limit)}" if limit else f"{gib(size)} per device"
        yield text(left, y, f"{tier}{': does not fit' if short else ''}", BOLD)
        yield text(_RIGHT, y, figures, f"{END} {SMALL}")
        if limit:
            fill = fill_of(LIMIT if short else _MEMORY_COLOURS["optimizer"])
            yield box(left, y + 6, width, 8, fill_of(NEUTRAL, pale=True))
            yield box(left, y + 6, width * min(1.0, size / limit), 8, fill, f"{tier}: {figures} per device")
        y += _TIER


# The roofline: one dot per operator of the last block under the device's roof, and a table of their bounds.
_PLOT, _WIDE, _TABLE = 76, 436, 548  # left edge and width of the plot, left edge of the table
_COLUMNS = {"time": 190, "FLOP/byte": 264, "TFLOP/s": 328, "collectives": 408}


def _roofline(spec: StepSpec, top: float) -> tuple[list[str], float]:
    """Returns the roofline of the last block on a device, with a table of its operators; and where they end."""
    found = roofline.points(spec)
    device, kind = spec.cluster.accelerator, spec.products
    slowdown = roofline.block_slowdown(spec)
    paper, real = roofline.data_sheet(device, kind), roofline.reached(device, kind, slowdown)
    others = {p.products: roofline.reached(device, p.products, slowdown) for p in found if p.products != kind}
    height = max(300, 16 * len(found) + 8)
    sheet, reached = (
        f"{digits(roof.peak / 1e12)} TFLOP/s and {roof.bandwidth / 1e12:,.2f} TB/s" for roof in (paper, real)
    )
    words = [
        f"Dashed: the data sheet, {sheet}, with the ridge where they meet. Solid: what the best products and streaming "
        f"kernels of the framework reach, {reached}, with the ridge at {digits(real.ridge)} FLOP/byte.",
        "A number that a memory-bound operation reads or writes counts as one FLOP. Collectives: those right before "
        "and after an operator, if fully exposed; where they take longer, the operator is bound by communication.",
    ]
    if others:
        words.append(f"Thin: in {', '.join(others)}, in which the prediction has some of the operators.")
    drawn = [
        text(_MARGIN, top - 6, f"Roofline of a block, forward, on one {device.name} ({kind})", BOLD),
        *_roofs(found, paper, real, list(others.values()), top + 20, top + 20 + height),
        *_bounds(found, top + 24),
    ]
    y = top + height + 78.0
    for sentence in words:
        lines, y = _small_print(sentence, _MARGIN, y, 150)
        drawn += lines
    return drawn, y + 4


def _roofs(
    found: Sequence[OperatorPoint], paper: Roof, real: Roof, others: Sequence[Roof], top: float, bottom: float
) -> Iterator[str]:
    intensities, rates = [*(p.intensity for p in found), paper.ridge], [p.flops_per_s for p in found]
    low, high = log10(min(intensities) / 2.5), log10(max(intensities) * 1.5)
    high = low + (high - low) * _WIDE / (_WIDE - 110)  # the right part is for labels
    x = Scale(10**low, 10**high, _PLOT, _PLOT + _WIDE, log=True)
    peaks = [*rates, *(roof.peak for roof in (paper, real, *others))]
    y = Scale(min(peaks) / 2.5, max(peaks) * 3, bottom, top, log=True)
    powers = [(value, f"{value:,.15g}") for value in log_ticks(x.low, x.high, 20, (1,))]
    rates_marks = [(value, f"{value / 1e12:,.15g}") for value in log_ticks(y.low, y.high, 20, (1,))]
    yield from axes(x, y, powers, rates_marks, "FLOPs per byte of memory traffic", "TFLOP/s")
    styles = [(paper, "stroke-dasharray='5 4'"), (real, "stroke-width='2'"), *((roof, "") for roof in others)]
    for roof, style in styles:
        start = max(x.low, y.low / roof.bandwidth)
        corners = [(x(at), y(roof.at(at))) for at in (start, roof.ridge, x.high)]
        yield polyline(corners, f"class='roof' stroke='{NEUTRAL}' {style}")
    ridge = f"ridge {digits(paper.ridge)} FLOP/byte"
    yield circle(x(paper.ridge), y(paper.peak), 3, f"class='ridge' fill='{NEUTRAL}'")
    yield text(x(paper.ridge) - 8, y(paper.peak) - 3, ridge, f"{END} {SMALL} {BOLD}")
    places = [(x(p.intensity), y(p.flops_per_s)) for p in found]
    yield from _operators(found, places, x.end, max(y(roof.peak) for roof in (real, *others)))


def _operators(
    found: Sequence[OperatorPoint], places: Sequence[tuple[float, float]], right: float, roof: float
) -> Iterator[str]:
    """Yields one dot per operator. Memory-bound operations have similar intensities: their names stand beside the dots,
    and close ones share a place; all others' stand in a column at the `right` edge, below the flat `roof`."""
    first = min(x for x, _ in places) + 5
    column = [(x, y, point.name) for point, (x, y) in zip(found, places, strict=True) if x > first]
    edge = right - max((LETTER * len(name) for _, _, name in column), default=0.0)
    slots = [roof + 20 + 14 * number for number in range(len(column))]
    for (x, y, name), slot in zip(_uncrossed(column, edge, slots), slots, strict=True):
        yield rule(x, y, edge - 3, slot, "stroke-opacity='.5'")
        yield text(edge, slot + 4, name, f"{SMALL} class='label'")
    beside: dict[tuple[float, float], list[str]] = {}
    for point, (x, y) in zip(found, places, strict=True):
        if x <= first:
            near = next(((left, up) for left, up in beside if abs(y - up) < 14), (x, y))
            beside.setdefault(near, []).append(point.name)
    for (x, y), names in beside.items():
        label = ", ".join(names) if len(names) < 4 else f"{', '.join(names[:2])} and {len(names) - 2} more"
        yield text(x + 8, y + 4, label, f"{SMALL} class='label'")
    for point, (x, y) in zip(found, places, strict=True):
        words = f"{point.name}: {digits(point.intensity)} FLOP/byte, {digits(point.flops_per_s / 1e12)} TFLOP/s"
        yield circle(x, y, 4.5, f"class='operator' fill='{_VERDICTS[point.verdict]}'", words)


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
    yield text(_TABLE + 14, top, "operator", BOLD)
    for name, x in _COLUMNS.items():
        yield text(_TABLE + x, top, name, f"{END} {BOLD}")
    yield text(bound, top, "bound by", BOLD)
    for number, point in enumerate(found):
        y = top + 20 + 16 * number
        waits = seconds(point.communication) if point.communication else "–"
        values = (seconds(point.seconds), digits(point.intensity), digits(point.flops_per_s / 1e12), waits)
        yield circle(_TABLE + 4, y - 4, 4.5, f"fill='{_VERDICTS[point.verdict]}'")
        yield text(_TABLE + 14, y, point.name, SMALL)
        for value, x in zip(values, _COLUMNS.values(), strict=True):
            yield text(_TABLE + x, y, value, f"{END} {SMALL}")
        yield text(bound, y, point.verdict, SMALL)


_MIXED: tuple[tuple[Mode, Mode], ...] = (
    ("none", "products"),
    ("none", "full"),
    ("products", "mlp"),
    ("mlp", "full"),
    ("none", "selective"),
)
"""The modes of a line of the picture of recomputation: of the last layers, and of the first."""
_PLACES = 8
"""Parts into which a line divides the layers."""


def recompute_svg(job: Job, spec: StepSpec) -> str:
    """Returns the picture of a job's recomputation, whatever its own is, as an SVG document: time of a step against
    memory of the fullest rank, and memory against layers, for every mode and mixtures of two of them."""
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
