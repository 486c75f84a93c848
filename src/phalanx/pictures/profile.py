"""The picture of a profile: where each rank's step went, and predicted beside measured, part by part."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from phalanx.pictures.elements import COLOURS, NEUTRAL, box, document, heading, rule, text, ticks
from phalanx.pictures.prediction import time_fill
from phalanx.simulate.timeline import Span as SimulatedSpan
from phalanx.simulate.timeline import Timeline

_WIDTH, _MARGIN, _LEFT, _BARS = 1080, 24, 130, 800  # pixels
_ROW, _HALF = 24, 11
_MOST_RANKS = 32
_SHOWN = 2e-3  # smallest share of a step that is drawn with its name
_PALE = f"fill='{NEUTRAL}' fill-opacity='.25' stroke='{NEUTRAL}' stroke-width='.5'"


def svg(profile: Mapping[str, Any]) -> str:
    """Draws the document of a profile (docs/guides/profile.md): a bar per rank, and two bars per part of a step if it
    has a prediction."""
    first, last = profile["steps"]
    steps = f"step {first}" if first == last else f"steps {first} to {last}"
    title = f"Profile of {steps}: {', '.join(_subject(profile))}"
    ranks = profile["ranks"][:_MOST_RANKS]
    top = 62.0
    drawn = [heading(_MARGIN, 26, title), *_legend(ranks, 46.0)]
    top, bars = 74.0, list(_ranks(ranks, 74.0))
    drawn += bars
    bottom = top + _ROW * len(ranks) + 36
    if beside := profile.get("compared"):
        rows = [part for part in beside["parts"] if max(part["predicted_s"], part["measured_s"]) > 0]
        drawn += _compared(beside, rows, bottom + 34)
        bottom += 62 + 2 * (_HALF + 6) * len(rows)
    return document(title, _WIDTH, bottom + 8, drawn)


def _subject(profile: Mapping[str, Any]) -> Iterator[str]:
    """Yields the model and the devices, as far as the document names them, and the layout."""
    if model := profile.get("model"):
        yield str(model)
    if device := profile.get("device"):
        yield f"{len(profile['ranks'])} × {device}"
    yield str(profile["layout"])


def fill(name: str, shade: int = 0) -> str:
    """Returns the colour of a part, as attributes; `shade` tells the axes of exposed communication apart."""
    own = {"backward": COLOURS[5], "recompute": COLOURS[4], "data": COLOURS[6], "other": COLOURS[7]}
    if name.endswith("waiting") or name == "bubble":
        return _PALE
    colour = f"fill='{own[name]}'" if name in own else time_fill(name)
    return f"{colour} fill-opacity='{0.6**shade:.2f}'" if shade else colour


def _fills(names: list[str]) -> dict[str, str]:
    """Returns the colour of each part; the exposed communication of one axis after the other is paler."""
    exposed = [name for name in names if name.endswith("exposed")]
    return {name: fill(name, exposed.index(name) if name in exposed else 0) for name in names}


def _names(ranks: list[Mapping[str, Any]]) -> list[str]:
    """Returns the parts that some rank has, in order."""
    return list(dict.fromkeys(name for row in ranks for name, seconds in row["shares"]["parts"].items() if seconds > 0))


def _is_visible(name: str, ranks: list[Mapping[str, Any]]) -> bool:
    return any(row["shares"]["parts"].get(name, 0) > _SHOWN * row["shares"]["step"] for row in ranks)


def _legend(ranks: list[Mapping[str, Any]], y: float) -> Iterator[str]:
    x = float(_MARGIN)
    for name, colour in _fills(_names(ranks)).items():
        if not _is_visible(name, ranks):
            continue
        yield box(x, y - 10, 12, 12, colour)
        yield text(x + 17, y, name)
        x += 34 + 6.6 * len(name)


def _ranks(ranks: list[Mapping[str, Any]], top: float) -> Iterator[str]:
    """Yields one bar per rank with a scale in milliseconds."""
    longest, fills = max(row["shares"]["step"] for row in ranks), _fills(_names(ranks))
    scale, base = _BARS / longest, top + _ROW * len(ranks)
    for tick in ticks(0, longest * 1e3):
        x = _LEFT + tick * 1e-3 * scale
        yield rule(x, top, x, base, "stroke-opacity='.2'")
        yield text(x, base + 16, f"{tick:g} ms", "text-anchor='middle'")
    for number, row in enumerate(ranks):
        y, x = top + _ROW * number, float(_LEFT)
        yield "<g class='rank'>"
        yield text(_LEFT - 8, y + 15, f"rank {row['rank']}", _END)
        for name, seconds in row["shares"]["parts"].items():
            if seconds > 0:
                yield box(x, y + 3, seconds * scale, _ROW - 6, fills[name], f"{name}: {_ms(seconds)}")
                x += seconds * scale
        yield text(x + 8, y + 15, _ms(row["shares"]["step"]), "font-size='11'")
        yield "</g>"


_END = "text-anchor='end'"


def _compared(beside: Mapping[str, Any], rows: list[Mapping[str, Any]], top: float) -> Iterator[str]:
    """Yields for each part its predicted bar, pale, above the measured one, and the ratio."""
    words = f"Predicted (pale) and measured, rank {beside['rank']}, cluster {beside['cluster']}"
    yield text(_MARGIN, top, words, "font-weight='600'")
    longest = max(max(part["predicted_s"], part["measured_s"]) for part in rows)
    scale, y = (_BARS - 190) / longest, top + 14
    for part in rows:
        name = part["name"]
        whole = name == "step"
        colour = f"fill='{NEUTRAL}'" if whole or name in ("bubble", "waiting") else fill(name)
        ratio = "" if part["ratio"] is None else f", ratio {part['ratio']:.2f}"
        both = f"{_ms(part['predicted_s'])} predicted, {_ms(part['measured_s'])} measured{ratio}"
        yield "<g class='part'>"
        yield text(_LEFT - 8, y + 15, name, f"{_END} font-weight='600'" if whole else _END)
        yield box(_LEFT, y, max(0.5, part["predicted_s"] * scale), _HALF, f"{colour} fill-opacity='.4'", both)
        yield box(_LEFT, y + _HALF + 1, max(0.5, part["measured_s"] * scale), _HALF, colour, both)
        end = _LEFT + max(part["predicted_s"], part["measured_s"]) * scale
        yield text(end + 8, y + 15, both, "font-size='11'")
        yield "</g>"
        y += 2 * (_HALF + 6)


def _ms(seconds: float) -> str:
    milliseconds = seconds * 1e3
    return f"{milliseconds:,.1f} ms" if milliseconds >= 10 else f"{milliseconds:.2g} ms"


Span = tuple[str, float, float]
"""Part of the step, its start and its duration in seconds."""

MOST_RANKS = 16
_STEP_WIDTH, _STEP_LEFT, _RIGHT, _TOP, _STEP_MARGIN = 1080, 176, 96, 84, 24  # pixels
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


def measured_svg(title: str, ranks: Sequence[RankRows]) -> str:
    """Draws the ranks, of many the first MOST_RANKS. Raises ValueError if none has a span."""
    ranks = ranks[:MOST_RANKS]
    longest = max(
        (start + s for rank in ranks for row in (rank.measured, rank.predicted) for _, start, s in row), default=0
    )
    if longest <= 0:
        raise ValueError("no spans to draw")
    scale = (_STEP_WIDTH - _STEP_LEFT - _RIGHT) / longest
    bottom = _TOP + _PAIR * len(ranks)
    parts = [heading(_STEP_MARGIN, 26, title), *_step_legend(ranks)]
    unit, name = (1e3, "ms") if longest < 10 else (1.0, "s")
    for tick in ticks(0, longest * unit, 8):
        x = _STEP_LEFT + tick / unit * scale
        parts.append(rule(x, _TOP - 6, x, bottom, "stroke-opacity='.25'"))
        parts.append(text(x, bottom + 16, f"{tick:g} {name}", "text-anchor='middle'"))
    for number, rank in enumerate(ranks):
        top = _TOP + number * _PAIR
        parts.append(text(_STEP_MARGIN, top + 12, rank.name, "font-weight='600'"))
        rows = (("measured", rank.measured), ("predicted", rank.predicted))
        for y, (label, spans) in zip((top, top + _CELL + 3), rows, strict=True):
            if spans:
                parts.append(text(_STEP_LEFT - 8, y + 12, label, "text-anchor='end'"))
                parts += _row(spans, y, scale, unit, name)
    return document(title, _STEP_WIDTH, bottom + 30, parts)


def _row(spans: Sequence[Span], y: float, scale: float, unit: float, name: str) -> Iterator[str]:
    yield "<g class='row'>"
    for part, start, seconds in spans:
        if (width := seconds * scale) >= _NARROWEST:
            tip = f"{part}: {seconds * unit:.4g} {name}"
            yield box(_STEP_LEFT + start * scale, y, width, _CELL, _colour(part), tip)
    end = max(start + seconds for _, start, seconds in spans)
    yield text(_STEP_LEFT + end * scale + 8, y + 12, f"{end * unit:.4g} {name}")
    yield "</g>"


def _colour(part: str) -> str:
    return fill("pp exposed" if part.endswith("exposed") else part)


def _step_legend(ranks: Sequence[RankRows]) -> Iterator[str]:
    """Yields the colour of every part that some row has."""
    names = {_kind(part) for rank in ranks for row in (rank.measured, rank.predicted) for part, _, _ in row}
    x = float(_STEP_MARGIN)
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
