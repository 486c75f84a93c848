"""A measured step beside the predicted one as a timeline: two rows per rank, over one axis of time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from phalanx.pictures.elements import box, document, heading, rule, text, ticks
from phalanx.pictures.profile import fill
from phalanx.simulate.timeline import Span as SimulatedSpan
from phalanx.simulate.timeline import Timeline

Span = tuple[str, float, float]
"""Part of the step, its start and its duration in seconds."""

MOST_RANKS = 16
_WIDTH, _LEFT, _RIGHT, _TOP, _MARGIN = 1080, 176, 96, 84, 24  # pixels
_CELL, _PAIR = 16, 46
_NARROWEST = 0.3
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
    name = _PASSES.get(span.kind, "backward")
    yield name, span.start, span.seconds - span.exposed
    if span.exposed:
        yield "exposed", span.end - span.exposed, span.exposed


def svg(title: str, ranks: Sequence[RankRows]) -> str:
    """Draws the ranks, of many the first MOST_RANKS. Raises ValueError if none has a span."""
    ranks = ranks[:MOST_RANKS]
    longest = max(
        (start + s for rank in ranks for row in (rank.measured, rank.predicted) for _, start, s in row), default=0
    )
    if longest <= 0:
        raise ValueError("no spans to draw")
    scale = (_WIDTH - _LEFT - _RIGHT) / longest
    bottom = _TOP + _PAIR * len(ranks)
    parts = [heading(_MARGIN, 26, title), *_legend(ranks)]
    unit, name = (1e3, "ms") if longest < 10 else (1.0, "s")
    for tick in ticks(0, longest * unit, 8):
        x = _LEFT + tick / unit * scale
        parts.append(rule(x, _TOP - 6, x, bottom, "stroke-opacity='.25'"))
        parts.append(text(x, bottom + 16, f"{tick:g} {name}", "text-anchor='middle'"))
    for number, rank in enumerate(ranks):
        top = _TOP + number * _PAIR
        parts.append(text(_MARGIN, top + 12, rank.name, "font-weight='600'"))
        rows = (("measured", rank.measured), ("predicted", rank.predicted))
        for y, (label, spans) in zip((top, top + _CELL + 3), rows, strict=True):
            if spans:
                parts.append(text(_LEFT - 8, y + 12, label, "text-anchor='end'"))
                parts += _row(spans, y, scale, unit, name)
    return document(title, _WIDTH, bottom + 30, parts)


def _row(spans: Sequence[Span], y: float, scale: float, unit: float, name: str) -> Iterator[str]:
    yield "<g class='row'>"
    for part, start, seconds in spans:
        if (width := seconds * scale) >= _NARROWEST:
            tip = f"{part}: {seconds * unit:.4g} {name}"
            yield box(_LEFT + start * scale, y, width, _CELL, _colour(part), tip)
    end = max(start + seconds for _, start, seconds in spans)
    yield text(_LEFT + end * scale + 8, y + 12, f"{end * unit:.4g} {name}")
    yield "</g>"


def _colour(part: str) -> str:
    return fill("pp exposed" if part.endswith("exposed") else part)


def _legend(ranks: Sequence[RankRows]) -> Iterator[str]:
    """Yields the colour of every part that some row has."""
    names = {_kind(part) for rank in ranks for row in (rank.measured, rank.predicted) for part, _, _ in row}
    x = float(_MARGIN)
    for name in (*("forward", "recompute", "backward", "communication, exposed", "optimizer", "data"), "waiting"):
        if name in names:
            colour = fill("pp exposed") if name.startswith("communication") else fill(name)
            yield box(x, 44, 12, 12, colour)
            yield text(x + 17, 54, name)
            x += 36 + 6.6 * len(name)


def _kind(part: str) -> str:
    if part.endswith("exposed"):
        return "communication, exposed"
    return "waiting" if part.endswith("waiting") or part == "bubble" else part
