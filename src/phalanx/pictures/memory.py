"""A picture of a rank's memory over the changes of it: what lies on what, the phases below, and the fullest moment."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from itertools import groupby

from phalanx.pictures import elements
from phalanx.pictures.elements import COLOURS, DASHES, MIDDLE, NEUTRAL, ON_CELL, SMALL
from phalanx.units import gib

WIDTH, LEFT, TOP, PLOT, BAND = 880, 64, 76, 260, 18
COLUMNS = 400
"""Most places along the picture; of the changes at one place the fullest is drawn."""

Moments = Sequence[tuple[Mapping[str, int], str]]
"""After each change of memory, in order: bytes by part, and the phase."""


def memory_svg(title: str, moments: Moments, limit: float = 0.0, beside: str = "") -> str:
    """Returns an SVG document of the memory after each change, parts stacked in the order of their names' mapping;
    `limit` is the bytes of the device, if they are known, `beside` a line below the title. Raises ValueError without
    moments."""
    if not moments:
        raise ValueError("no moment to draw")
    step = max(1, -(-len(moments) // COLUMNS))
    drawn = [max(moments[at : at + step], key=_total) for at in range(0, len(moments), step)]
    places = range(len(drawn))
    most = max(map(_total, drawn))
    shows_limit = 0 < limit <= 3 * most
    x = elements.Scale(0, max(1, len(drawn) - 1), LEFT, WIDTH - 24)
    y = elements.Scale(0, 1.08 * max(most, limit if shows_limit else 0), TOP + PLOT, TOP)
    unit = next(power for power in (2**40, 2**30, 2**20, 2**10, 1) if y.high >= power)
    marks = [(mark * unit, gib(round(mark * unit))) for mark in elements.ticks(0, y.high / unit)]
    parts = [
        elements.heading(LEFT, 20, title),
        elements.text(LEFT, 37, beside, SMALL),
        *elements.axes(x, y, [], marks, "", ""),
        *_legend(drawn),
    ]
    base = [0.0] * len(drawn)
    for number, name in enumerate(_names(drawn)):
        above = [low + moment[name] for low, (moment, _) in zip(base, drawn, strict=True)]
        edge = [(x(at), y(above[at])) for at in places] + [(x(at), y(base[at])) for at in reversed(places)]
        path = " ".join(f"{a:.1f},{b:.1f}" for a, b in edge)
        tip = f"{name}: at most {gib(max(moment[name] for moment, _ in drawn))}"
        parts.append(f"<polygon points='{path}' fill='{COLOURS[number]}'><title>{escape(tip)}</title></polygon>")
        base = above
    fullest = max(places, key=lambda at: _total(drawn[at]))
    parts.append(elements.circle(x(fullest), y(most), 4, f"fill='none' stroke='{NEUTRAL}' stroke-width='2'"))
    anchor = "text-anchor='end'" if fullest > len(drawn) / 2 else ""
    parts.append(elements.text(x(fullest) + (-8 if anchor else 8), y(most) - 6, f"{gib(round(most))}", anchor))
    if shows_limit:
        parts.append(f"<line x1='{LEFT}' x2='{WIDTH - 24}' y1='{y(limit):.1f}' y2='{y(limit):.1f}' {DASHES}/>")
        parts.append(elements.text(LEFT + 6, y(limit) - 5, f"the device has {gib(round(limit))}", SMALL))
    parts += _phases(drawn, x, TOP + PLOT + 6)
    parts.append(elements.text((LEFT + WIDTH) / 2, TOP + PLOT + BAND + 28, "changes of memory, in order", MIDDLE))
    return elements.document(title, WIDTH, TOP + PLOT + BAND + 44, parts)


def _total(moment: tuple[Mapping[str, int], str]) -> int:
    return sum(moment[0].values())


def _names(drawn: Moments) -> list[str]:
    return [name for name in drawn[0][0] if any(moment[name] for moment, _ in drawn)]


def _legend(drawn: Moments) -> Iterator[str]:
    at = float(LEFT)
    for number, name in enumerate(_names(drawn)):
        yield elements.box(at, 46, 12, 12, elements.fill_of(COLOURS[number]))
        yield elements.text(at + 18, 56, name)
        at += 40 + 7 * len(name)


def _phases(drawn: Moments, x: elements.Scale, top: float) -> Iterator[str]:
    """Yields a band per phase."""
    at = 0
    for phase, run in groupby(drawn, key=lambda moment: moment[1]):
        length = len(list(run))
        start, end = x(max(0.0, at - 0.5)), x(min(at + length - 0.5, len(drawn) - 1))
        yield elements.box(
            start, top, max(0.8, end - start), BAND, f"fill='{NEUTRAL}' fill-opacity='{0.45 if at % 2 else 0.3}'", phase
        )
        if (room := int((end - start) / 6.6)) >= min(len(phase), 8):
            yield elements.text(
                (start + end) / 2, top + 13, elements.shortened(phase, room), f"{MIDDLE} {SMALL} {ON_CELL}"
            )
        at += length
