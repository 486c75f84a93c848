"""The plan as one self-contained HTML page: it loads nothing, can be read without scripts, and follows the reader's
light or dark preference."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from html import escape
from typing import Any

import yaml

from phalanx.config.fields import short_names
from phalanx.config.layout import Layout
from phalanx.cost.breakdown import duration
from phalanx.pictures.page import figure, figures, html_page, list_of, section
from phalanx.pictures.plan_pictures import memory_picture, time_picture
from phalanx.pictures.space import space_picture
from phalanx.plan.page import (
    COLUMNS,
    batch,
    cells,
    differing,
    effort,
    headline,
    largest_first,
    shortfall,
    slower,
    verdict,
)
from phalanx.plan.plan import Candidate, Plan
from phalanx.units import gib

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
