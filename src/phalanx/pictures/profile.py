"""The picture of a profile: where each rank's step went, and predicted beside measured, part by part."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from phalanx.pictures.elements import COLOURS, NEUTRAL, box, document, heading, rule, text, ticks
from phalanx.pictures.prediction import time_fill

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
