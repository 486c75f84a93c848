"""Pictures of measured steps: where each rank's time went, predicted beside measured part by part (a profile), and a
step's timeline with two rows per rank over one axis of time, measured and predicted."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby
from typing import Any

from phalanx.pictures import elements
from phalanx.pictures.elements import (
    BOLD,
    COLOURS,
    DASHES,
    END,
    MIDDLE,
    NEUTRAL,
    ON_CELL,
    SMALL,
    Scale,
    across,
    box,
    document,
    fill_of,
    group,
    heading,
    text,
    ticks,
)
from phalanx.pictures.prediction import time_fill
from phalanx.simulate.timeline import Span as SimulatedSpan
from phalanx.simulate.timeline import Timeline
from phalanx.units import gib

_WIDTH, _MARGIN, _LEFT, _BARS = 1080, 24, 130, 800  # pixels
_ROW, _HALF = 24, 11
_MOST_RANKS = 32
_SHOWN = 2e-3  # smallest share of a step that is drawn with its name


def svg(profile: Mapping[str, Any]) -> str:
    """Draws the document of a profile (docs/guides/profile.md): a bar per rank, and two bars per part of a step if it
    has a prediction."""
    first, last = profile["steps"]
    device = f"{len(profile['ranks'])} × {profile['device']}" if profile.get("device") else ""
    subject = ", ".join(filter(None, [str(profile.get("model") or ""), device, str(profile["layout"])]))
    title = f"Profile of {f'step {first}' if first == last else f'steps {first} to {last}'}: {subject}"
    ranks = profile["ranks"][:_MOST_RANKS]
    names = dict.fromkeys(name for row in ranks for name, spent in row["shares"]["parts"].items() if spent > 0)
    exposed = [name for name in names if name.endswith("exposed")]  # one axis after the other is paler
    fills = {name: fill(name, exposed.index(name) if name in exposed else 0) for name in names}
    shown = [
        name
        for name in names
        if any(row["shares"]["parts"].get(name, 0) > _SHOWN * row["shares"]["step"] for row in ranks)
    ]
    drawn = [heading(_MARGIN, 26, title), *_keys(((fills[name], name) for name in shown), 46), *_ranks(ranks, fills)]
    bottom = 74.0 + _ROW * len(ranks) + 36
    if beside := profile.get("compared"):
        rows = [part for part in beside["parts"] if max(part["predicted_s"], part["measured_s"]) > 0]
        drawn += _compared(beside, rows, bottom + 34)
        bottom += 62 + 2 * (_HALF + 6) * len(rows)
    return document(title, _WIDTH, bottom + 8, drawn)


def fill(name: str, shade: int = 0) -> str:
    """Returns the colour of a part, as attributes; `shade` tells the axes of exposed communication apart."""
    own = {"backward": COLOURS[5], "recompute": COLOURS[4], "data": COLOURS[6], "other": COLOURS[7]}
    if name.endswith("waiting") or name == "bubble":
        return fill_of(NEUTRAL, pale=True)
    colour = f"fill='{own[name]}'" if name in own else time_fill(name)
    return f"{colour} fill-opacity='{0.6**shade:.2f}'" if shade else colour


def _keys(entries: Iterable[tuple[str, str]], y: float) -> Iterator[str]:
    """Yields the legend: colours with their names."""
    x = float(_MARGIN)
    for colour, name in entries:
        yield box(x, y - 10, 12, 12, colour)
        yield text(x + 17, y, name)
        x += 34 + 6.6 * len(name)


def _ranks(ranks: list[Mapping[str, Any]], fills: Mapping[str, str]) -> Iterator[str]:
    """Yields one bar per rank with a scale in milliseconds."""
    top, longest = 74.0, max(row["shares"]["step"] for row in ranks)
    scale, base = _BARS / longest, top + _ROW * len(ranks)
    marks = [(tick, f"{tick:g} ms") for tick in ticks(0, longest * 1e3)]
    yield from across(Scale(0, longest * 1e3, _LEFT, _LEFT + _BARS), marks, top, base)
    for number, row in enumerate(ranks):
        y, x = top + _ROW * number, float(_LEFT)
        yield "<g class='rank'>"
        yield text(_LEFT - 8, y + 15, f"rank {row['rank']}", END)
        for name, spent in row["shares"]["parts"].items():
            if spent > 0:
                yield box(x, y + 3, spent * scale, _ROW - 6, fills[name], f"{name}: {_ms(spent)}")
                x += spent * scale
        yield text(x + 8, y + 15, _ms(row["shares"]["step"]), SMALL)
        yield "</g>"


def _compared(beside: Mapping[str, Any], rows: list[Mapping[str, Any]], top: float) -> Iterator[str]:
    """Yields for each part its predicted bar, pale, above the measured one, and the ratio."""
    words = f"Predicted (pale) and measured, rank {beside['rank']}, cluster {beside['cluster']}"
    yield text(_MARGIN, top, words, BOLD)
    longest = max(max(part["predicted_s"], part["measured_s"]) for part in rows)
    scale, y = (_BARS - 190) / longest, top + 14
    for part in rows:
        name = part["name"]
        whole = name == "step"
        colour = f"fill='{NEUTRAL}'" if whole or name in ("bubble", "waiting") else fill(name)
        ratio = "" if part["ratio"] is None else f", ratio {part['ratio']:.2f}"
        both = f"{_ms(part['predicted_s'])} predicted, {_ms(part['measured_s'])} measured{ratio}"
        bars = [part[f"{which}_s"] * scale for which in ("predicted", "measured")]
        yield from group(
            "part",
            [
                text(_LEFT - 8, y + 15, name, f"{END} {BOLD}" if whole else END),
                box(_LEFT, y, max(0.5, bars[0]), _HALF, f"{colour} fill-opacity='.4'", both),
                box(_LEFT, y + _HALF + 1, max(0.5, bars[1]), _HALF, colour, both),
                text(_LEFT + max(bars) + 8, y + 15, both, SMALL),
            ],
        )
        y += 2 * (_HALF + 6)


def _ms(seconds: float) -> str:
    milliseconds = seconds * 1e3
    return f"{milliseconds:,.1f} ms" if milliseconds >= 10 else f"{milliseconds:.2g} ms"


Span = tuple[str, float, float]
"""Part of the step, its start and its duration in seconds."""

MOST_RANKS = 16
_NARROWEST = 0.3  # pixels
_PASSES = {"F": "forward", "optimizer": "optimizer"}


@dataclass(frozen=True)
class RankRows:
    """One rank: what it did, and what it was predicted to do."""

    name: str
    measured: Sequence[Span]
    predicted: Sequence[Span]


def predicted_spans(timeline: Timeline, rank: int) -> list[Span]:
    """Returns the spans of a simulated pipeline rank by the parts of a measured step; between passes it is idle."""
    found: list[Span] = []
    end = 0.0
    each = timeline.seconds / timeline.schedule.steps
    for span in timeline.device[rank]:
        if span.start >= each:
            break
        if span.start > end:
            found.append(("bubble", end, span.start - end))
        found += _passes(span)
        end = span.end
    return [*found, ("bubble", end, each - end)] if each > end else found


def _passes(span: SimulatedSpan) -> Iterator[Span]:
    yield _PASSES.get(span.kind, "backward"), span.start, span.seconds - span.exposed
    if span.exposed:
        yield "exposed", span.end - span.exposed, span.exposed


def measured_svg(title: str, ranks: Sequence[RankRows]) -> str:
    """Draws the ranks, of many the first MOST_RANKS. Raises ValueError if none has a span."""
    left, right, top, cell, pair = 176, 96, 84, 16, 46
    ranks = ranks[:MOST_RANKS]
    spans = [span for rank in ranks for row in (rank.measured, rank.predicted) for span in row]
    longest = max((start + seconds for _, start, seconds in spans), default=0)
    if longest <= 0:
        raise ValueError("no spans to draw")
    unit, name = (1e3, "ms") if longest < 10 else (1.0, "s")
    scale = Scale(0, longest * unit, left, _WIDTH - right)
    marks = [(tick, f"{tick:g} {name}") for tick in ticks(0, longest * unit, 8)]
    kinds = {_kind(part) for part, _, _ in spans}
    order = (*("forward", "recompute", "backward", "communication, exposed", "optimizer", "data"), "waiting")
    parts = [
        heading(_MARGIN, 26, title),
        *_keys(((fill(_part(kind)), kind) for kind in order if kind in kinds), 54),
        *across(scale, marks, top, top + pair * len(ranks)),
    ]
    for number, rank in enumerate(ranks):
        y = top + number * pair
        parts.append(text(_MARGIN, y + 12, rank.name, BOLD))
        for label, row in (("measured", rank.measured), ("predicted", rank.predicted)):
            if row:
                parts += [text(left - 8, y + 12, label, END), *group("row", _row(row, y, cell, scale, unit, name))]
            y += cell + 3
    return document(title, _WIDTH, top + pair * len(ranks) + 30, parts)


def _row(row: Sequence[Span], y: float, cell: int, scale: Scale, unit: float, name: str) -> Iterator[str]:
    for part, start, seconds in row:
        x = scale(start * unit)
        if (width := scale((start + seconds) * unit) - x) >= _NARROWEST:
            yield box(x, y, width, cell, fill(_part(part)), f"{part}: {seconds * unit:.4g} {name}")
    end = max(start + seconds for _, start, seconds in row) * unit
    yield text(scale(end) + 8, y + 12, f"{end:.4g} {name}")


def _kind(part: str) -> str:
    if part.endswith("exposed"):
        return "communication, exposed"
    return "waiting" if part.endswith("waiting") or part == "bubble" else part


def _part(name: str) -> str:
    """Returns a part with the colour of `name`: all exposed communication has that of one axis."""
    return "pp exposed" if name.endswith("exposed") else name


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
