"""The plan as one self-contained HTML page, with bars of the best layouts and the map of the search space."""

from __future__ import annotations

import math
import shlex
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape
from typing import NamedTuple

import yaml

from phalanx.config.fields import short_names
from phalanx.config.layout import Layout
from phalanx.cost.breakdown import duration
from phalanx.pictures import elements
from phalanx.pictures.elements import BOLD, DASHES, MIDDLE, NEUTRAL, SMALL, seconds
from phalanx.pictures.page import Html, bar, bars, figure, figures, html_page, list_of, section, table
from phalanx.pictures.prediction import memory_fill, time_fill
from phalanx.plan.page import (
    COLUMNS,
    batch,
    cells,
    differing,
    effort,
    headline,
    largest_first,
    short_line,
    shortfall,
    slower,
    verdict,
)
from phalanx.plan.plan import Candidate, Plan, SpacePoint
from phalanx.units import counted, gib
from phalanx.units import duration as precise

_DRAWN = 10  # layouts in the pictures of time and memory
_EXPLAINED = {
    "accum × micro": "accumulation × micro-batch: micro-batches per step and data rank, and sequences in each",
    "step": "simulated time of an optimizer step",
    "tps": "tokens per second and device",
    "tps_total": "tokens per second on all devices together",
    "MFU": "model FLOPs, attention counted in full, over the data sheet's peak",
    "memory": "of the fullest rank at its fullest moment, and its share of what the device has",
    "bubble": "time in which the busiest pipeline rank waits for others, over the rest of the step",
    "rehearsed": "memory that the fullest rank needs, by a run of the real program without hardware",
}


def html(plan: Plan, timeline_svg: str | None = None) -> str:
    """Returns the page. `timeline_svg` is the picture of the best layout's step (phalanx.simulate), an SVG document."""
    layouts = plan.best[:_DRAWN] or ([plan.nearest] if plan.nearest else [])
    sections = [
        "<section id='chosen'>",
        *(_chosen(plan.best[0]) if plan.best else _nothing(plan)),
        "</section>",
        *(section("best", "The best layouts", _table(plan.best)) if plan.best else []),
        *(section("parts", "Where time and memory go", _parts(layouts)) if layouts else []),
        *(section("why", "Why" if plan.best else "More devices", list_of(plan.notes)) if plan.notes else []),
        *(section("instead", "Alternatives", _alternatives(plan)) if plan.alternatives else []),
        *(section("timeline", "The step of the best, simulated", figure(timeline_svg, "wide")) if timeline_svg else []),
        *(section("space", "The space", figure(space_picture(plan), "map")) if layouts or plan.points else []),
        *(section("rejected", "Rejected", _rejected(plan)) if plan.rejected else []),
    ]
    return html_page(f"Plan: {headline(plan)}", headline(plan), f"{batch(plan)}; {effort(plan)}", sections)


def job_section(layout: Layout) -> str:
    """Returns the layout section for a job file (YAML)."""
    return yaml.safe_dump({"layout": differing(layout)}, sort_keys=False, allow_unicode=True, width=1000)


def command(layout: Layout) -> str:
    """Returns the command that trains in that layout; JOB stands for the job file."""
    known, words = short_names(), ["phalanx train JOB"]
    for name, value in differing(layout).items():
        path = name if known.get(name) == f"layout.{name}" else f"layout.{name}"
        words.append(shlex.quote(f"{path}={str(value).lower() if isinstance(value, bool) else value}"))
    return " ".join(words)


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
    yield f"<p class='layout'>{_code(first.layout.line())}</p>"
    yield f"<p class='soft'>{escape(first.spec.batch.equation())}</p>"
    yield from figures(most_important.items())
    yield f"<p class='soft'>Interval: {escape(prediction.sure)}.</p>"
    yield "<div class='pair'>"
    yield f"<div><span class='soft'>in the job file</span><pre>{escape(job_section(first.layout))}</pre></div>"
    yield "<div><span class='soft'>on the command line</span>"
    yield f"<pre class='wrap'>{escape(command(first.layout))}</pre></div>"
    yield "</div>"


def _nothing(plan: Plan) -> Iterator[str]:
    """Yields the excess of the layout that needs the least memory, and changes that help."""
    if plan.nearest is None:
        yield "<p class='bad'><b>No layout is legal.</b></p>"
    else:
        yield "<p><b class='bad'>No layout fits.</b> The one that needs least:</p>"
        yield f"<p class='layout'>{_code(plan.nearest.layout.line())}</p>"
        yield f"<pre class='wrap'>{escape(shortfall(plan.nearest.spec))}</pre>"


def _code(line: str) -> Html:
    """Returns a layout's line with possible breaks after its commas."""
    return Html(f"<code>{escape(line).replace(',', ',<wbr>')}</code>")


def _table(best: Sequence[Candidate]) -> Iterator[str]:
    """Yields the best layouts, one row each, in sortable columns."""
    rows, rehearsed = [], any(each.rehearsed is not None for each in best)
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
        if rehearsed:
            others.append("" if each.rehearsed is None else gib(each.rehearsed))
            values.append(each.rehearsed or 0)
        rows.append([(str(rank), None), (_code(layout), None), *zip(others, values, strict=True)])
    columns = (*COLUMNS, "rehearsed") if rehearsed else COLUMNS
    yield from table(("#", *columns), rows, words=(1,), tips=_EXPLAINED, first=True)


def _parts(layouts: Sequence[Candidate]) -> Iterator[str]:
    yield "<div class='pair'>"
    yield from figure(time_picture(layouts), "bars")
    yield from figure(memory_picture(layouts), "bars")
    yield "</div>"


def _alternatives(plan: Plan) -> Iterator[str]:
    """Yields one row per alternative, with a bar as long as its step relative to the slowest."""
    factors = [slower(each, plan) for each in plan.alternatives]
    longest = max([1.0, *(factor for factor in factors if factor)])
    rows = (
        [["the plan", duration(plan.best[0].seconds), "1.00 ×", bar(1 / longest, best=True), ""]] if plan.best else []
    )
    for each, factor in zip(plan.alternatives, factors, strict=True):
        time, compared = verdict(each, plan)
        line = escape(each.candidate.layout.line() if each.candidate else "")
        name = Html(f"<span title='{line}'>{escape(each.name)}</span>")
        against = compared if factor else Html(f"<span class='bad'>{escape(compared)}</span>")
        rows.append([name, time, against, bar(factor / longest) if factor else "", each.why])
    heads = ("layout", "step", "against the best", "", "why")
    yield from bars(rows, ("words", "", "", "track", "words"), heads, first=bool(plan.best))


def _rejected(plan: Plan) -> Iterator[str]:
    """Yields one row per reason, with a bar as long as its count relative to the largest."""
    reasons = largest_first(plan.rejected)
    most = max(1, reasons[0][1])
    rows = ([f"{count:,}", bar(count / most), reason] for reason, count in reasons)
    yield from bars(rows, ("count", "track", "words"))


# Bars of several layouts: the time of a step by part, the memory of the fullest rank by part.
_WIDTH, _LEFT, _RIGHT, _TOP = 600, 8, 524, 34  # pixels; the bars end at _RIGHT, with their values beside them
_ROW, _BAR = 40, 15  # pixels from row to row, and of a bar's height


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
        _LayoutRow(_label(rank, each), [*each.prediction.parts.items()], seconds(each.seconds), each.seconds)
        for rank, each in enumerate(layouts, 1)
    ]
    foot = "The parts are predicted; the upright mark is the simulated time."
    return _stacked("Time of a step by part, in seconds", rows, 1.0, time_fill, seconds, 0.0, foot)


def parts_picture(title: str, plans: Mapping[str, Mapping[str, float]]) -> str:
    """Draws the parts of a step's time, given in seconds, one bar per plan in milliseconds, as an SVG document."""
    rows = [_LayoutRow(name, [*parts.items()], precise(sum(parts.values()))) for name, parts in plans.items()]
    return _stacked(title, rows, 1e-3, time_fill, precise, 0.0, "Predicted, without overlap.")


def memory_picture(layouts: Sequence[Candidate]) -> str:
    """Draws the memory of the fullest rank by part, one bar per layout, and the device's memory, as an SVG document."""
    rows = []
    for rank, each in enumerate(layouts, 1):
        tiers = [(tier, most) for tier, (most, _) in each.prediction.tiers.items() if tier != "device"]
        label = _label(rank, each) + "".join(f"; {tier}: {gib(most)}" for tier, most in tiers)
        rows.append(_LayoutRow(label, [*each.prediction.fullest.parts()], gib(each.prediction.fullest.peak)))
    limit = layouts[0].prediction.memory_limit
    foot = f"Peak of the fullest rank; the dashed line is the memory of a device, {gib(limit)}."
    return _stacked("Memory of a device by part, in GiB", rows, 2.0**30, memory_fill, gib, limit, foot)


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
    scale = elements.Scale(0, 1.02 * longest, _LEFT, _RIGHT)
    bottom = _TOP + len(rows) * _ROW + 4
    parts = [elements.text(_LEFT, 18, title, f"font-size='14' {BOLD}")]
    for tick in elements.ticks(0, longest / unit):
        x = scale(tick * unit)
        parts.append(elements.rule(x, _TOP, x, bottom, "stroke-opacity='.2'"))
        parts.append(elements.text(x, bottom + 15, f"{tick:g}", f"text-anchor='{'middle' if tick else 'start'}'"))
    for number, row in enumerate(rows):
        parts += elements.group("row", _stack(row, _TOP + number * _ROW, scale, fill, shown))
    if limit:
        for number in range(len(rows)):  # at the bars only: it must not strike labels out
            y = _TOP + number * _ROW + 16
            parts.append(elements.limit_line(scale(limit), y, scale(limit), y + _BAR + 4))
    keys, y = _keys(rows, fill, longest, bottom + 38)
    parts += [*keys, elements.text(_LEFT, y + 22, foot, SMALL)]
    return elements.document(title, _WIDTH, y + 34, parts)


def _stack(
    row: _LayoutRow, top: float, scale: elements.Scale, fill: Callable[[str], str], shown: Callable[[float], str]
) -> Iterator[str]:
    """Yields the label, the text at the end, and below them the bar."""
    yield f"<title>{escape(row.label)}</title>"
    yield elements.text(
        _LEFT, top + 13, elements.shortened(row.label, int((_WIDTH - 2 * _LEFT) / elements.LETTER)), SMALL
    )
    yield elements.text(_RIGHT + 8, top + 30, row.whole, f"{SMALL} {BOLD}")
    done, whole = 0.0, sum(size for _, size in row.parts)
    for name, size in row.parts:
        if size > 0:
            width = scale(size) - _LEFT
            yield elements.box(
                scale(done), top + 18, width, _BAR, fill(name), f"{name}: {shown(size)}, {size / whole:.1%}"
            )
        done += size
    if row.mark:
        yield elements.rule(
            scale(row.mark), top + 15, scale(row.mark), top + 21 + _BAR, "class='mark' stroke-width='2.5'"
        )


def _keys(rows: Sequence[_LayoutRow], fill: Callable[[str], str], longest: float, y: float) -> tuple[list[str], float]:
    """Returns the colours of all visible parts, in lines; and the lower end. Communication on all axes shares one."""
    kinds: dict[str, bool] = {}
    for name, size in (part for row in rows for part in row.parts):
        kind = "communication exposed" if name.endswith(" exposed") else name
        kinds[kind] = kinds.get(kind, False) or size > 1e-3 * longest
    drawn, x = [], float(_LEFT)
    for name in (kind for kind, is_seen in kinds.items() if is_seen):
        width = 32 + 7.2 * len(name)
        if x + width > _WIDTH:
            x, y = float(_LEFT), y + 20
        drawn += [elements.box(x, y - 10, 12, 12, fill(name)), elements.text(x + 17, y, name)]
        x += width
    return drawn, y


# The map of the search space: one dot per layout, time of a step to the right, memory of a device upwards.
_OTHERS = "others"
ABOVE = 2.0
"""Bytes per memory of a device up to which the map goes: layouts that need far more would push those that fit into a
corner."""


def space_picture(plan: Plan) -> str:
    """Draws every point of the plan, hollow if it does not fit, coloured by family; the best layout and the
    alternatives are marked. Returns an SVG document. Raises ValueError if the plan has neither points nor layouts."""
    width, height, left, right, top, bottom = 1160, 520, 64, 850, 60, 460  # pixels, and edges of the plot
    marked = [*plan.best[:1], *([plan.nearest] if plan.nearest else [])]
    others = [each.candidate for each in plan.alternatives if each.candidate]
    weighed = [(each.seconds, float(each.prediction.fullest.peak)) for each in (*marked, *others)]
    places = [*((point.seconds, point.peak) for point in plan.points), *weighed]
    if not places:
        raise ValueError("the plan has no layouts to draw")
    limit = plan.request.cluster.accelerator.memory_gib * 2**30
    most = ABOVE * limit if limit and plan.best else math.inf
    points = [point for point in plan.points if point.peak <= most]
    places = [(x, y) for x, y in places if y <= most] or places
    x = elements.Scale.over([x for x, _ in places], left, right, log=True)
    y = elements.Scale.over([*([limit] if limit else []), *(y for _, y in places)], bottom, top, log=True)
    x_marks = [(tick, seconds(tick)) for tick in elements.log_ticks(x.low, x.high)]
    y_marks = [(tick * 2**30, f"{tick:g}") for tick in elements.log_ticks(y.low / 2**30, y.high / 2**30)]
    families = [family for family, _ in Counter(point.family for point in points).most_common()]
    named = [family for family in families if family != _OTHERS]
    found: dict[str, str] = dict(zip(named, elements.COLOURS, strict=False))
    colours = found if len(found) == len(families) else {**found, _OTHERS: NEUTRAL}
    title, words = headline(plan), f"{len(points):,} of {plan.searched:,} layouts"
    if hidden := len(plan.points) - len(points):
        words += f"; {counted(hidden, 'other')} of the sample need more than {gib(most)}"
    parts = [
        elements.heading(left, 24, title),
        elements.text(left, 44, words),
        *elements.axes(x, y, x_marks, y_marks, "time of a step", "memory of the fullest device, GiB"),
        *([elements.limit_line(left, y(limit), right, y(limit))] if limit else []),
        # Layouts that fit are drawn over those that do not.
        *(_dot(point, x, y, colours) for point in sorted(points, key=lambda each: each.fits)),
        *_marks(plan, x, y, most),
        *_legend(plan, colours),
    ]
    return elements.document(title, width, height, parts)


def _dot(point: SpacePoint, x: elements.Scale, y: elements.Scale, colours: dict[str, str]) -> str:
    colour = colours.get(point.family, colours.get(_OTHERS, NEUTRAL))
    full, hollow = f"fill='{colour}' fill-opacity='.75'", f"fill='none' stroke='{colour}' stroke-opacity='.8'"
    fits = "" if point.fits else ", does not fit"
    tip = f"{point.line}\n{point.family}: {seconds(point.seconds)} per step, {gib(point.peak)}{fits}"
    return elements.circle(x(point.seconds), y(point.peak), 4, f"class='point' {full if point.fits else hollow}", tip)


def _marks(plan: Plan, x: elements.Scale, y: elements.Scale, most: float) -> Iterator[str]:
    """Yields a ring around the best layout, or the one that needs least memory, and diamonds for alternatives."""
    for each in plan.alternatives:
        if each.candidate and each.candidate.prediction.fullest.peak <= most:
            tip = f"{each.name}\n{each.candidate.layout.line()}\n{each.why}"
            yield _diamond(x(each.candidate.seconds), y(each.candidate.prediction.fullest.peak), tip)
    for best in plan.best[:1] or ([plan.nearest] if plan.nearest else []):
        at, up = x(best.seconds), y(best.prediction.fullest.peak)
        word = "best" if plan.best else "needs least"
        yield elements.circle(at, up, 8, _RING, f"{word}: {best.layout.line()}")
        yield elements.text(at, up - 14, word, f"{BOLD} {MIDDLE}")


_RING = f"class='ring' fill='none' stroke='{NEUTRAL}' stroke-width='2.5'"


def _diamond(x: float, y: float, tip: str = "") -> str:
    path = f"<path class='diamond' d='M{x:.1f},{y - 8:.1f} l8,8 l-8,8 l-8,-8 z' fill='none' stroke='{NEUTRAL}'"
    return f"{path} stroke-width='1.5'><title>{escape(tip)}</title></path>"


def _legend(plan: Plan, colours: dict[str, str]) -> Iterator[str]:
    left, y = 876, 72
    for family, colour in colours.items():
        yield elements.circle(left + 6, y - 4, 4, f"fill='{colour}'")
        yield elements.text(left + 20, y, elements.shortened(family, 40))
        y += 20
    y += 10
    yield elements.circle(left + 6, y - 4, 4, f"fill='none' stroke='{NEUTRAL}'")
    yield elements.text(left + 20, y, "hollow: does not fit")
    if plan.best:
        y += 22
        yield elements.circle(left + 6, y - 4, 8, _RING)
        yield elements.text(left + 20, y, "the best")
    if any(each.candidate for each in plan.alternatives):
        y += 22
        yield _diamond(left + 6, y - 4)
        yield elements.text(left + 20, y, "usual choices")
    y += 22
    yield f"<line x1='{left - 2}' y1='{y - 4}' x2='{left + 14}' y2='{y - 4}' {DASHES}/>"
    yield elements.text(left + 20, y, f"memory per device: {gib(plan.request.cluster.accelerator.memory_gib * 2**30)}")
