"""The map of the search space: one dot per layout, time of a step to the right, memory of a device upwards. There is no
background, and colours have middle lightness, for light and dark pages."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from html import escape
from math import ceil, floor, log10

from phalanx.pictures.elements import COLOURS, NEUTRAL, document, heading, rule, text, ticks
from phalanx.pictures.plan_pictures import shorten
from phalanx.pictures.roofline import seconds
from phalanx.plan.page import headline
from phalanx.plan.plan import Plan, SpacePoint
from phalanx.units import counted, gib

_WIDTH, _HEIGHT = 1160, 520  # pixels
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 850, 60, 460  # edges of the plot
_LEGEND, _LETTERS = 876, 40  # left edge, and letters per line
_LIMIT = COLOURS[1]
_OTHERS = "others"
ABOVE = 2.0
"""Bytes per memory of a device up to which the map goes: layouts that need far more would push those that fit into a
corner."""
_ROUND = (1, 2, 5)

Scale = Callable[[float], float]


def space_picture(plan: Plan) -> str:
    """Draws every point of the plan, hollow if it does not fit, coloured by family; the best layout and the
    alternatives are marked. Returns an SVG document. Raises ValueError if the plan has neither points nor layouts."""
    marked = [*plan.best[:1], *([plan.nearest] if plan.nearest else [])]
    others = [each.candidate for each in plan.alternatives if each.candidate]
    weighed = [(each.seconds, float(each.prediction.fullest.peak)) for each in (*marked, *others)]
    places = [*((point.seconds, point.peak) for point in plan.points), *weighed]
    if not places:
        raise ValueError("the plan has no layouts to draw")
    limit = plan.request.cluster.accelerator.memory_gib * 2**30
    top = ABOVE * limit if limit and plan.best else math.inf
    points = [point for point in plan.points if point.peak <= top]
    places = [(x, y) for x, y in places if y <= top] or places
    xs, ys = _span([x for x, _ in places]), _span([*([limit] if limit else []), *(y for _, y in places)])
    across, up = _scale(xs, _LEFT, _RIGHT), _scale(ys, _BOTTOM, _TOP)
    colours = _colours(points)
    title, words = headline(plan), f"{len(points):,} of {plan.searched:,} layouts"
    if hidden := len(plan.points) - len(points):
        words += f"; {counted(hidden, 'other')} of the sample need more than {gib(top)}"
    return document(
        title,
        _WIDTH,
        _HEIGHT,
        [
            heading(_LEFT, 24, title),
            text(_LEFT, 44, words),
            *_axes(xs, ys, across, up),
            *(_limit(limit, up) if limit else []),
            # Layouts that fit are drawn over those that do not.
            *(_dot(point, across, up, colours) for point in sorted(points, key=lambda each: each.fits)),
            *_marks(plan, across, up, top),
            *_legend(plan, colours),
        ],
    )


def _axes(xs: tuple[float, float], ys: tuple[float, float], across: Scale, up: Scale) -> Iterator[str]:
    for tick in log_ticks(*xs):
        yield rule(across(tick), _TOP, across(tick), _BOTTOM, "stroke-opacity='.2'")
        yield text(across(tick), _BOTTOM + 17, seconds(tick), "text-anchor='middle'")
    for tick in log_ticks(ys[0] / 2**30, ys[1] / 2**30):
        y = up(tick * 2**30)
        yield rule(_LEFT, y, _RIGHT, y, "stroke-opacity='.2'")
        yield text(_LEFT - 8, y + 4, f"{tick:g}", "text-anchor='end'")
    yield text((_LEFT + _RIGHT) / 2, _BOTTOM + 40, "time of a step", "text-anchor='middle'")
    middle = f"transform='translate(18 {(_TOP + _BOTTOM) / 2:.0f}) rotate(-90)'"
    yield f"<text {middle} text-anchor='middle'>memory of the fullest device, GiB</text>"


def _limit(limit: float, up: Scale) -> Iterator[str]:
    dashes = f"stroke='{_LIMIT}' stroke-width='2' stroke-dasharray='6 4'"
    yield f"<line class='limit' x1='{_LEFT}' x2='{_RIGHT}' y1='{up(limit):.1f}' y2='{up(limit):.1f}' {dashes}/>"


def _dot(point: SpacePoint, across: Scale, up: Scale, colours: dict[str, str]) -> str:
    colour = colours.get(point.family, colours.get(_OTHERS, NEUTRAL))
    style = (
        f"fill='{colour}' fill-opacity='.75'" if point.fits else f"fill='none' stroke='{colour}' stroke-opacity='.8'"
    )
    fits = "" if point.fits else ", does not fit"
    tip = f"{point.line}\n{point.family}: {seconds(point.seconds)} per step, {gib(point.peak)}{fits}"
    place = f"cx='{across(point.seconds):.1f}' cy='{up(point.peak):.1f}'"
    return f"<circle class='point' {place} r='4' {style}><title>{escape(tip)}</title></circle>"


def _marks(plan: Plan, across: Scale, up: Scale, top: float) -> Iterator[str]:
    """Yields a ring around the best layout, or the one that needs least memory, and diamonds for alternatives."""
    for each in plan.alternatives:
        if each.candidate and each.candidate.prediction.fullest.peak <= top:
            tip = f"{each.name}\n{each.candidate.layout.line()}\n{each.why}"
            yield _diamond(across(each.candidate.seconds), up(each.candidate.prediction.fullest.peak), tip)
    for best in plan.best[:1] or ([plan.nearest] if plan.nearest else []):
        x, y = across(best.seconds), up(best.prediction.fullest.peak)
        word = "best" if plan.best else "needs least"
        yield _ring(x, y, f"{word}: {best.layout.line()}")
        yield text(x, y - 14, word, "font-weight='600' text-anchor='middle'")


def _ring(x: float, y: float, tip: str = "") -> str:
    circle = f"<circle class='ring' cx='{x:.1f}' cy='{y:.1f}' r='8' fill='none' stroke='{NEUTRAL}' stroke-width='2.5'"
    return f"{circle}><title>{escape(tip)}</title></circle>"


def _diamond(x: float, y: float, tip: str = "") -> str:
    path = f"<path class='diamond' d='M{x:.1f},{y - 8:.1f} l8,8 l-8,8 l-8,-8 z' fill='none' stroke='{NEUTRAL}'"
    return f"{path} stroke-width='1.5'><title>{escape(tip)}</title></path>"


def _legend(plan: Plan, colours: dict[str, str]) -> Iterator[str]:
    y = _TOP + 12
    for family, colour in colours.items():
        yield f"<circle cx='{_LEGEND + 6}' cy='{y - 4}' r='4' fill='{colour}'/>"
        yield text(_LEGEND + 20, y, shorten(family, _LETTERS))
        y += 20
    y += 10
    yield f"<circle cx='{_LEGEND + 6}' cy='{y - 4}' r='4' fill='none' stroke='{NEUTRAL}'/>"
    yield text(_LEGEND + 20, y, "hollow: does not fit")
    if plan.best:
        y += 22
        yield _ring(_LEGEND + 6, y - 4)
        yield text(_LEGEND + 20, y, "the best")
    if any(each.candidate for each in plan.alternatives):
        y += 22
        yield _diamond(_LEGEND + 6, y - 4)
        yield text(_LEGEND + 20, y, "usual choices")
    y += 22
    dashes = f"stroke='{_LIMIT}' stroke-width='2' stroke-dasharray='6 4'"
    yield f"<line x1='{_LEGEND - 2}' y1='{y - 4}' x2='{_LEGEND + 14}' y2='{y - 4}' {dashes}/>"
    yield text(_LEGEND + 20, y, f"memory per device: {gib(plan.request.cluster.accelerator.memory_gib * 2**30)}")


def _colours(points: Sequence[SpacePoint]) -> dict[str, str]:
    """Returns a colour per family, most frequent first; families beyond the number of colours are `others`."""
    families = [family for family, _ in Counter(point.family for point in points).most_common()]
    named = [family for family in families if family != _OTHERS]
    found: dict[str, str] = dict(zip(named, COLOURS, strict=False))
    return found if len(found) == len(families) else {**found, _OTHERS: NEUTRAL}


def log_ticks(low: float, high: float) -> list[float]:
    """Returns round numbers for a logarithmic axis: 1, 2 and 5 times powers of ten, fewer if those are too many, and
    linear ones if they are too few."""
    powers = range(floor(log10(low)) - 1, ceil(log10(high)) + 1)
    found = [factor * 10.0**power for power in powers for factor in _ROUND if low <= factor * 10.0**power <= high]
    if len(found) > 10:
        return [tick for tick in found if abs(log10(tick) - round(log10(tick))) < 1e-9]
    return found if len(found) > 2 else ticks(low, high, 7)


def _span(values: Sequence[float]) -> tuple[float, float]:
    """Returns the range of a logarithmic axis, with a margin at both ends."""
    low, high = min(values), max(values)
    room = max(1.12, (high / low) ** 0.06)
    return low / room, high * room


def _scale(span: tuple[float, float], start: float, end: float) -> Scale:
    """Returns the function from a value to pixels, logarithmically."""
    low, high = log10(span[0]), log10(span[1])
    return lambda value: start + (log10(value) - low) / (high - low) * (end - start)
