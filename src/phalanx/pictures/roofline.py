"""The roofline of a block as a picture: one dot per operator under a device's roof, and a table of their bounds."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from html import escape
from itertools import combinations
from math import ceil, floor, hypot, log10

from phalanx.cost import roofline
from phalanx.cost.roofline import OperatorPoint, Roof
from phalanx.cost.spec import StepSpec
from phalanx.pictures.elements import COLOURS, NEUTRAL, rule, text

Area = tuple[float, float, float, float]
"""Left, upper, right and lower edge."""

_MARGIN, _LEFT, _WIDE, _TABLE = (
    24,
    76,
    436,
    548,
)  # pixels; the last three: left edge and width of the plot, left edge of the table
_COLUMNS = {"time": 190, "FLOP/byte": 264, "TFLOP/s": 328, "collectives": 408}
_COLUMN = 110  # pixels of the plot's right part for labels
_LETTER = 6.6  # pixels of a letter of size 11, generously
_VERDICTS = {"compute": COLOURS[0], "memory": COLOURS[2], "launch": COLOURS[7], "communication": COLOURS[1]}


def draw(spec: StepSpec, top: float) -> tuple[list[str], float]:
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
        f"kernels of the framework reach, {_rates(real)}, with the ridge at {_number(real.ridge)} FLOP/byte.",
        "A number that a memory-bound operation reads or writes counts as one FLOP. Collectives: those right before "
        "and after an operator, if fully exposed; where they take longer, the operator is bound by communication.",
    ]
    if others:
        words.append(f"Thin: in {', '.join(others)}, in which the prediction has some of the operators.")
    drawn = [
        text(_MARGIN, top - 6, f"Roofline of a block, forward, on one {device.name} ({kind})", "font-weight='600'"),
        *_plot(found, paper, real, list(others.values()), (_LEFT, top + 20, _LEFT + _WIDE, top + 20 + height)),
        *_table(found, top + 24),
    ]
    y = top + height + 78.0
    for line in (line for sentence in words for line in textwrap.wrap(sentence, 150)):
        drawn.append(text(_MARGIN, y, line, "font-size='11'"))
        y += 15
    return drawn, y + 4


def seconds(value: float) -> str:
    """Formats a time in a suitable unit, to three digits."""
    unit, size = next(((u, s) for u, s in (("s", 1.0), ("ms", 1e-3)) if value >= 0.9995 * s), ("µs", 1e-6))
    return f"{_number(value / size)} {unit}"


def _plot(found: Sequence[OperatorPoint], paper: Roof, real: Roof, others: Sequence[Roof], box: Area) -> Iterator[str]:
    left, top, right, bottom = box
    rates = [p.flops_per_s for p in found]
    xs = _span([*(p.intensity for p in found), paper.ridge], 1.5)
    xs = xs[0], xs[0] + (xs[1] - xs[0]) * (right - left) / (right - left - _COLUMN)
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
    ridge = f"ridge {_number(paper.ridge)} FLOP/byte"
    yield f"<circle class='ridge' cx='{x:.1f}' cy='{y:.1f}' r='3' fill='{NEUTRAL}'/>"
    yield text(x - 8, y - 3, ridge, "text-anchor='end' font-size='11' font-weight='600'")
    yield from _dots(found, [place(p.intensity, p.flops_per_s) for p in found], box, flat)


def _dots(
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
        words = f"{point.name}: {_number(point.intensity)} FLOP/byte, {_number(point.flops_per_s / 1e12)} TFLOP/s"
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


def _table(found: Sequence[OperatorPoint], top: float) -> Iterator[str]:
    """Yields one row per operator: its time, its position, and its bound."""
    bound = _TABLE + 422
    yield text(_TABLE + 14, top, "operator", "font-weight='600'")
    for name, x in _COLUMNS.items():
        yield text(_TABLE + x, top, name, "text-anchor='end' font-weight='600'")
    yield text(bound, top, "bound by", "font-weight='600'")
    for number, point in enumerate(found):
        y = top + 20 + 16 * number
        waits = seconds(point.communication) if point.communication else "–"
        values = (seconds(point.seconds), _number(point.intensity), _number(point.flops_per_s / 1e12), waits)
        yield f"<circle cx='{_TABLE + 4}' cy='{y - 4:.1f}' r='4.5' fill='{_VERDICTS[point.verdict]}'/>"
        yield text(_TABLE + 14, y, point.name, "font-size='11'")
        for value, x in zip(values, _COLUMNS.values(), strict=True):
            yield text(_TABLE + x, y, value, "text-anchor='end' font-size='11'")
        yield text(bound, y, point.verdict, "font-size='11'")


def _span(values: Sequence[float], beyond: float) -> tuple[float, float]:
    """Returns the decimal logarithms of an axis's ends: a little below the least, a factor above the greatest."""
    return log10(min(values) / 2.5), log10(max(values) * beyond)


def _rates(roof: Roof) -> str:
    return f"{_number(roof.peak / 1e12)} TFLOP/s and {roof.bandwidth / 1e12:,.2f} TB/s"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 99.95 else f"{value:.3g}"
