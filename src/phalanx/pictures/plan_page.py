"""The plan as one self-contained HTML page: it loads nothing, can be read without scripts, and follows the reader's
light or dark preference."""

from __future__ import annotations

import math
import shlex
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from html import escape
from math import ceil, floor, log10
from typing import Any, NamedTuple

import yaml

from phalanx.config.fields import short_names
from phalanx.config.layout import Layout
from phalanx.cost.breakdown import duration
from phalanx.pictures.elements import COLOURS, NEUTRAL, box, document, heading, rule, seconds, text, ticks
from phalanx.pictures.page import figure, figures, html_page, list_of, section
from phalanx.pictures.prediction import memory_fill, time_fill
from phalanx.plan.plan import Candidate, Plan, SpacePoint
from phalanx.plan.report.advice import shortfall
from phalanx.plan.report.report import (
    COLUMNS,
    batch,
    cells,
    differing,
    effort,
    headline,
    largest_first,
    short_line,
    slower,
    verdict,
)
from phalanx.units import counted, gib

_WIDTH, _LEFT, _RIGHT, _TOP = 600, 8, 524, 34  # pixels; the bars end at _RIGHT, with their values beside them
_ROW, _BAR = 40, 15  # pixels from row to row, and of a bar's height
_LETTER = 6.6  # pixels of a letter of size 11, generously
_LIMIT = COLOURS[1]


class _LayoutRow(NamedTuple):
    """One bar: its label, its parts in order, and the text at its end."""

    label: str
    parts: list[tuple[str, float]]
    whole: str
    mark: float = 0.0
    """Position of a mark; 0: none."""


def time_picture(layouts: Sequence[Candidate]) -> str:
    """Draws the parts of a step's time, one bar per layout, with a mark at the simulated time, as an SVG document."""
    rows = [
        _LayoutRow(_label(rank, each), each.prediction.parts.items(), seconds(each.seconds), each.seconds)
        for rank, each in enumerate(layouts, 1)
    ]
    foot = "The parts are predicted; the upright mark is the simulated time."
    return _stacked("Time of a step by part, in seconds", rows, 1.0, time_fill, seconds, 0.0, foot)


def memory_picture(layouts: Sequence[Candidate]) -> str:
    """Draws the memory of the fullest rank by part, one bar per layout, and the device's memory, as an SVG document."""
    rows = [
        _LayoutRow(
            _label(rank, each) + _beside(each),
            [*each.prediction.fullest.parts()],
            gib(each.prediction.fullest.peak),
        )
        for rank, each in enumerate(layouts, 1)
    ]
    limit = layouts[0].prediction.memory_limit
    foot = f"Peak of the fullest rank; the dashed line is the memory of a device, {gib(limit)}."
    return _stacked("Memory of a device by part, in GiB", rows, 2.0**30, memory_fill, gib, limit, foot)


def _beside(candidate: Candidate) -> str:
    """Returns what is in the tiers of memory beside the device, in words."""
    tiers = candidate.prediction.tiers.items()
    return "".join(f"; {tier}: {gib(most)}" for tier, (most, _) in tiers if tier != "device")


def shorten(words: str, letters: int) -> str:
    """Truncates a longer text."""
    return words if len(words) <= letters else words[: letters - 1] + "…"


def _label(rank: int, candidate: Candidate) -> str:
    return f"{rank}  {short_line(candidate.layout)}"


def _stacked(
    title: str,
    rows: Sequence[_LayoutRow],
    unit: float,
    fill: Callable[[str], str],
    shown: Callable[[float], str],
    limit: float,
    foot: str,
) -> str:
    """Rows of stacked bars over one axis in `unit`, with a line at `limit` unless it is 0."""
    longest = max([limit, *(max(row.mark, sum(size for _, size in row.parts)) for row in rows)])
    scale = (_RIGHT - _LEFT) / (1.02 * longest)
    bottom = _TOP + len(rows) * _ROW + 4
    parts = [text(_LEFT, 18, title, "font-size='14' font-weight='600'")]
    for tick in ticks(0, longest / unit):
        x = _LEFT + tick * unit * scale
        parts.append(rule(x, _TOP, x, bottom, "stroke-opacity='.2'"))
        parts.append(text(x, bottom + 15, f"{tick:g}", f"text-anchor='{'middle' if tick else 'start'}'"))
    for number, row in enumerate(rows):
        parts.append(f"<g class='row'>{''.join(_stack(row, _TOP + number * _ROW, scale, fill, shown))}</g>")
    if limit:
        x = _LEFT + limit * scale
        dashes = f"stroke='{_LIMIT}' stroke-width='2' stroke-dasharray='6 4'"
        for number in range(len(rows)):  # at the bars only: it must not strike labels out
            y = _TOP + number * _ROW + 16
            parts.append(f"<line class='limit' x1='{x:.1f}' x2='{x:.1f}' y1='{y}' y2='{y + _BAR + 4}' {dashes}/>")
    keys, y = _keys(rows, fill, longest, bottom + 38)
    parts += [*keys, text(_LEFT, y + 22, foot, "font-size='11'")]
    return document(title, _WIDTH, y + 34, parts)


def _stack(
    row: _LayoutRow, top: float, scale: float, fill: Callable[[str], str], shown: Callable[[float], str]
) -> Iterator[str]:
    """Yields the label, the text at the end, and below them the bar."""
    room = int((_WIDTH - 2 * _LEFT) / _LETTER)
    yield f"<title>{escape(row.label)}</title>"
    yield text(_LEFT, top + 13, shorten(row.label, room), "font-size='11'")
    yield text(_RIGHT + 8, top + 30, row.whole, "font-size='11' font-weight='600'")
    x, whole = float(_LEFT), sum(size for _, size in row.parts)
    for name, size in row.parts:
        if size > 0:
            yield box(x, top + 18, size * scale, _BAR, fill(name), f"{name}: {shown(size)}, {size / whole:.1%}")
        x += size * scale
    if row.mark:
        x = _LEFT + row.mark * scale
        yield rule(x, top + 15, x, top + 21 + _BAR, "class='mark' stroke-width='2.5'")


def _keys(rows: Sequence[_LayoutRow], fill: Callable[[str], str], longest: float, y: float) -> tuple[list[str], float]:
    """Returns the colours of all visible parts, in lines; and the lower end."""
    seen = {_kind(name) for row in rows for name, size in row.parts if size > 1e-3 * longest}
    drawn, x = [], float(_LEFT)
    for name in dict.fromkeys(_kind(name) for row in rows for name, _ in row.parts):
        if name not in seen:
            continue
        width = 32 + 7.2 * len(name)
        if x + width > _WIDTH:
            x, y = float(_LEFT), y + 20
        drawn += [box(x, y - 10, 12, 12, fill(name)), text(x + 17, y, name)]
        x += width
    return drawn, y


def _kind(name: str) -> str:
    """Returns the legend entry of a part: communication on all axes shares one colour."""
    return "communication exposed" if name.endswith(" exposed") else name


_MAP_WIDTH, _MAP_HEIGHT = 1160, 520  # pixels
_MAP_LEFT, _MAP_RIGHT, _MAP_TOP, _MAP_BOTTOM = 64, 850, 60, 460  # edges of the plot
_LEGEND, _LETTERS = 876, 40  # left edge, and letters per line
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
    across, up = _scale(xs, _MAP_LEFT, _MAP_RIGHT), _scale(ys, _MAP_BOTTOM, _MAP_TOP)
    colours = _colours(points)
    title, words = headline(plan), f"{len(points):,} of {plan.searched:,} layouts"
    if hidden := len(plan.points) - len(points):
        words += f"; {counted(hidden, 'other')} of the sample need more than {gib(top)}"
    return document(
        title,
        _MAP_WIDTH,
        _MAP_HEIGHT,
        [
            heading(_MAP_LEFT, 24, title),
            text(_MAP_LEFT, 44, words),
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
        yield rule(across(tick), _MAP_TOP, across(tick), _MAP_BOTTOM, "stroke-opacity='.2'")
        yield text(across(tick), _MAP_BOTTOM + 17, seconds(tick), "text-anchor='middle'")
    for tick in log_ticks(ys[0] / 2**30, ys[1] / 2**30):
        y = up(tick * 2**30)
        yield rule(_MAP_LEFT, y, _MAP_RIGHT, y, "stroke-opacity='.2'")
        yield text(_MAP_LEFT - 8, y + 4, f"{tick:g}", "text-anchor='end'")
    yield text((_MAP_LEFT + _MAP_RIGHT) / 2, _MAP_BOTTOM + 40, "time of a step", "text-anchor='middle'")
    middle = f"transform='translate(18 {(_MAP_TOP + _MAP_BOTTOM) / 2:.0f}) rotate(-90)'"
    yield f"<text {middle} text-anchor='middle'>memory of the fullest device, GiB</text>"


def _limit(limit: float, up: Scale) -> Iterator[str]:
    dashes = f"stroke='{_LIMIT}' stroke-width='2' stroke-dasharray='6 4'"
    yield f"<line class='limit' x1='{_MAP_LEFT}' x2='{_MAP_RIGHT}' y1='{up(limit):.1f}' y2='{up(limit):.1f}' {dashes}/>"


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
    y = _MAP_TOP + 12
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


_DRAWN = 10  # layouts in the pictures of time and memory
_EXPLAINED = {
    "accum × micro": "accumulation × micro-batch: micro-batches per step and data rank, and sequences in each",
    "step": "simulated time of an optimizer step",
    "tps": "tokens per second and device",
    "tps_total": "tokens per second on all devices together",
    "MFU": "model FLOPs, attention counted in full, over the data sheet's peak",
    "memory": "of the fullest rank at its fullest moment, and its share of what the device has",
    "bubble": "time in which the busiest pipeline rank waits for others, over the rest of the step",
}


def html(plan: Plan, timeline_svg: str | None = None) -> str:
    """Returns the page. `timeline_svg` is the picture of the best layout's step (phalanx.simulate), an SVG document."""
    title = f"Plan: {headline(plan)}"
    layouts = plan.best[:_DRAWN] or ([plan.nearest] if plan.nearest else [])
    sections = [
        *(_chosen(plan.best[0]) if plan.best else _nothing(plan)),
        *(section("best", "The best layouts", _table(plan.best)) if plan.best else []),
        *(section("parts", "Where time and memory go", _parts(layouts)) if layouts else []),
        *(section("why", "Why" if plan.best else "More devices", list_of(plan.notes)) if plan.notes else []),
        *(section("instead", "Alternatives", _alternatives(plan)) if plan.alternatives else []),
        *(section("timeline", "The step of the best, simulated", figure(timeline_svg, "wide")) if timeline_svg else []),
        *(section("space", "The space", figure(space_picture(plan), "map")) if layouts or plan.points else []),
        *(section("rejected", "Rejected", _rejected(plan)) if plan.rejected else []),
    ]
    return html_page(title, headline(plan), f"{batch(plan)}; {effort(plan)}", sections)


def job_section(layout: Layout) -> str:
    """Returns the layout section for a job file (YAML)."""
    return yaml.safe_dump({"layout": differing(layout)}, sort_keys=False, allow_unicode=True, width=1000)


def command(layout: Layout) -> str:
    """Returns the command that trains in that layout; JOB stands for the job file."""
    known = short_names()
    words = [
        f"{name if known.get(name) == f'layout.{name}' else f'layout.{name}'}={_word(value)}"
        for name, value in differing(layout).items()
    ]
    return " ".join(["phalanx train JOB", *(shlex.quote(word) for word in words)])


def _word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _chosen(first: Candidate) -> Iterator[str]:
    """Yields the best layout: its line, its figures, and the command that runs it."""
    prediction = first.prediction
    low, high = (duration(factor * first.seconds) for factor in prediction.spread)
    share = prediction.fullest.peak / prediction.memory_limit
    most_important = {
        duration(first.seconds): f"per step; {low} to {high}",
        f"{first.tokens_per_s_per_device:,.0f}": "tps: tokens/s per device",
        f"{first.mfu:.1%}": "MFU",
        gib(prediction.fullest.peak): f"of a device's {gib(prediction.memory_limit)}, {share:.0%}",
        f"{prediction.bubble:.1%}": "bubble",
    }
    for tier, (size, limit) in prediction.tiers.items():
        if tier != "device":
            most_important[gib(size)] = f"of {tier} memory per device" + (f", {gib(limit)} there" if limit else "")
    yield "<section id='chosen'>"
    yield f"<p class='layout'><code>{_breakable(first.layout.line())}</code></p>"
    yield f"<p class='soft'>{escape(first.spec.batch.equation())}</p>"
    yield from figures(most_important.items())
    yield "<div class='pair'>"
    yield f"<div><span class='soft'>in the job file</span><pre>{escape(job_section(first.layout))}</pre></div>"
    yield "<div><span class='soft'>on the command line</span>"
    yield f"<pre class='wrap'>{escape(command(first.layout))}</pre></div>"
    yield "</div>"
    yield "</section>"


def _nothing(plan: Plan) -> Iterator[str]:
    """Yields the excess of the layout that needs the least memory, and changes that help."""
    yield "<section id='chosen'>"
    if plan.nearest is None:
        yield "<p class='bad'><b>No layout is legal.</b></p>"
    else:
        yield "<p><b class='bad'>No layout fits.</b> The one that needs least:</p>"
        yield f"<p class='layout'><code>{_breakable(plan.nearest.layout.line())}</code></p>"
        yield f"<pre class='wrap'>{escape(shortfall(plan.nearest.spec))}</pre>"
    yield "</section>"


def _table(best: Sequence[Candidate]) -> Iterator[str]:
    """Yields the best layouts, one row each, in sortable columns."""
    yield "<div class='scroll'><table class='sorts'><thead><tr><th data-sort>#</th>"
    for name in COLUMNS:
        words = " class='words'" if name == "layout" else ""
        tip = f" title='{escape(_EXPLAINED[name])}'" if name in _EXPLAINED else ""
        yield f"<th data-sort{words}{tip}>{escape(name)}</th>"
    yield "</tr></thead><tbody>"
    for rank, each in enumerate(best, 1):
        layout, *others = cells(each)
        values = [
            each.spec.batch.accumulation,
            each.seconds,
            each.tokens_per_s_per_device,
            each.tokens_per_s,
            each.mfu,
            each.prediction.fullest.peak,
            each.prediction.bubble,
        ]
        yield f"<tr{' class=first' if rank == 1 else ''}><td>{rank}</td>"
        yield f"<td class='words'><code>{_breakable(layout)}</code></td>"
        for cell, value in zip(others, values, strict=True):
            yield f"<td data-value='{value:.9g}'>{escape(cell)}</td>"
        yield "</tr>"
    yield "</tbody></table></div>"


def _parts(layouts: Sequence[Candidate]) -> Iterator[str]:
    yield "<div class='pair'>"
    yield from figure(time_picture(layouts), "bars")
    yield from figure(memory_picture(layouts), "bars")
    yield "</div>"


def _alternatives(plan: Plan) -> Iterator[str]:
    """Yields one row per alternative, with a bar as long as its step relative to the slowest."""
    factors = [slower(each, plan) for each in plan.alternatives]
    longest = max([1.0, *(factor for factor in factors if factor)])
    yield "<div class='scroll'><table class='stacks'><thead><tr><th class='words'>layout</th><th>step</th>"
    yield "<th>against the best</th><th></th><th class='words'>why</th></tr></thead><tbody>"
    if plan.best:
        yield "<tr class='first'><td class='words'>the plan</td>"
        yield f"<td>{duration(plan.best[0].seconds)}</td><td>1.00 ×</td>"
        yield f"<td class='track'>{_bar(1 / longest, 'bar best')}</td><td class='words'></td></tr>"
    for each, factor in zip(plan.alternatives, factors, strict=True):
        time, compared = verdict(each, plan)
        line = escape(each.candidate.layout.line() if each.candidate else "")
        bar = _bar(factor / longest, "bar") if factor else ""
        yield f"<tr><td class='words' title='{line}'>{escape(each.name)}</td><td>{escape(time)}</td>"
        yield f"<td{'' if factor else ' class=bad'}>{escape(compared)}</td><td class='track'>{bar}</td>"
        yield f"<td class='words'>{escape(each.why)}</td></tr>"
    yield "</tbody></table></div>"


def _rejected(plan: Plan) -> Iterator[str]:
    """Yields one row per reason, with a bar as long as its count relative to the largest."""
    reasons = largest_first(plan.rejected)
    most = max(1, reasons[0][1])
    yield "<div class='scroll'><table class='stacks'><tbody>"
    for reason, count in reasons:
        yield f"<tr><td class='count'>{count:,}</td><td class='track'>{_bar(count / most, 'bar')}</td>"
        yield f"<td class='words'>{escape(reason)}</td></tr>"
    yield "</tbody></table></div>"


def _bar(share: float, kind: str) -> str:
    return f"<span class='{kind}' style='width:{100 * share:.1f}%'></span>"


def _breakable(line: str) -> str:
    """Returns a layout's line with possible breaks after its commas."""
    return escape(line).replace(",", ",<wbr>")
