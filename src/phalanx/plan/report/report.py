"""The output of `phalanx plan`: the text for a terminal, and the document of `--json` (docs/guides/plan.md)."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from phalanx.config.layout import Layout
from phalanx.cost.breakdown import document, duration, memory_lines, subject, time_lines
from phalanx.plan.plan import Alternative, Candidate, Plan
from phalanx.plan.report.advice import advice, shortfall
from phalanx.units import gib, seconds

WIDTH = 120
"""Width of the text in columns, unless a terminal has fewer."""
_NARROWEST = 30
"""Columns that a layout needs beside its figures; with fewer it has lines of its own above them."""
COLUMNS = ("layout", "micro-batches", "step", "tps", "tps_total", "MFU", "memory", "bubble")
"""Columns of the table of the best layouts."""


def text(plan: Plan, width: int = WIDTH) -> str:
    """Formats the plan for a terminal of `width` columns. Lines that are facts of their own may be longer."""
    lines = [f"{headline(plan)}, {batch(plan)}", ""]
    if plan.best:
        lines += [*_best(plan.best, width), "", *_where(plan.best[0])]
    else:
        lines += _nothing(plan)
    for heading, part in (
        ("why" if plan.best else "more devices", _notes(plan, width)),
        ("alternatives", _alternatives(plan, width)),
        ("rejected", _rejected(plan, width)),
    ):
        if part := list(part):
            lines += ["", f"{heading}:", *part]
    return "\n".join([*lines, "", effort(plan)])


def as_json(plan: Plan) -> dict[str, Any]:
    """Returns the document of `--json`."""
    best = _layout(plan.best[0].layout) if plan.best else None
    nearest = plan.nearest
    return {
        "best": best,
        "candidates": [_candidate(each) for each in plan.best],
        "nearest": {**_candidate(nearest), "advice": [vars(one) for one in advice(nearest.spec)]} if nearest else None,
        "alternatives": [
            {
                "name": each.name,
                "why": each.why,
                "slower": slower(each, plan),
                "candidate": _candidate(each.candidate) if each.candidate else None,
            }
            for each in plan.alternatives
        ],
        "rejected": plan.rejected,
        "searched": plan.searched,
        "seconds": plan.seconds,
        "notes": list(plan.notes),
    }


def headline(plan: Plan) -> str:
    """Names the model and the machine: "llama3-70b on 64 × h100-80gb (dgx-h100:8)"."""
    asked = plan.request
    shown = [*plan.best, *([plan.nearest] if plan.nearest else [])]
    return subject(asked, shown[0].prediction.devices if shown else asked.cluster.devices or asked.layout.world)


def batch(plan: Plan) -> str:
    """Formats the global batch."""
    size, length = plan.request.batch.global_batch, plan.request.model.seq_len
    return f"global batch {size:,} × {length:,} tokens"


def effort(plan: Plan) -> str:
    """Formats the number of layouts and the seconds of the search."""
    return f"searched {plan.searched:,} layouts in {seconds(plan.seconds)}"


def short_line(layout: Layout) -> str:
    """Formats the layout without the fields of the batch equation."""
    return replace(layout, micro_batch=0, accumulation=0).line()


def differing(layout: Layout) -> dict[str, Any]:
    """Returns the fields of a layout that differ from the default, by name."""
    default = Layout()
    return {name: value for name, value in vars(layout).items() if value != getattr(default, name)}


def cells(candidate: Candidate) -> tuple[str, ...]:
    """Returns the table row of a candidate, by `COLUMNS`."""
    prediction, equation = candidate.prediction, candidate.spec.batch
    return (
        short_line(candidate.layout),
        f"{equation.accumulation} × {equation.micro_batch}",
        duration(candidate.seconds),
        f"{candidate.tokens_per_s_per_device:,.0f}",
        f"{candidate.tokens_per_s:,.0f}",
        f"{candidate.mfu:.1%}",
        f"{gib(prediction.fullest.peak)} {prediction.fullest.peak / prediction.memory_limit:4.0%}",
        f"{prediction.bubble:.1%}",
    )


def slower(alternative: Alternative, plan: Plan) -> float | None:
    """Returns its step time over that of the best; None if one of the two does not run."""
    candidate = alternative.candidate
    if not plan.best or candidate is None or not candidate.prediction.fits:
        return None
    return candidate.seconds / plan.best[0].seconds


def verdict(alternative: Alternative, plan: Plan) -> tuple[str, str]:
    """Formats its step time, and the comparison with the best."""
    candidate, factor = alternative.candidate, slower(alternative, plan)
    if candidate is None:
        return "", "not legal"
    if not candidate.prediction.fits:
        return duration(candidate.seconds), f"needs {gib(candidate.prediction.fullest.needed)}"
    return duration(candidate.seconds), "" if factor is None else f"{factor:.2f} ×"


def largest_first(rejected: dict[str, int]) -> list[tuple[str, int]]:
    """Sorts reasons by count, the most frequent first."""
    return sorted(rejected.items(), key=lambda item: -item[1])


def _best(best: Sequence[Candidate], width: int) -> Iterator[str]:
    """Yields the table of the best layouts. A layout that is too long for its column continues on the next line; on a
    narrow terminal it stands above its figures."""
    rows = [("", *COLUMNS)]
    rows += [(str(rank), *cells(each)) for rank, each in enumerate(best, 1)]
    rank, layout, *figures = (max(len(row[column]) for row in rows) for column in range(len(rows[0])))
    margin, rest = rank + 2, sum(figures) + 2 * len(figures)
    stacked = width - margin - rest < _NARROWEST
    layout = min(layout, width - margin - (0 if stacked else rest))
    for number, row in enumerate(rows):
        first, *more = (f"{line:<{layout}}" for line in _wrapped_line(row[1], layout))
        others = "".join(f"  {cell:>{wide}}" for cell, wide in zip(row[2:], figures, strict=True))
        if stacked:
            more.append(others)
        yield f"{row[0]:>{rank}}  {first}{'' if stacked else others}".rstrip()
        yield from (f"{'':{margin}}{line}".rstrip() for line in more)
        if number == 0:
            yield "─" * min(width, margin + (max(layout, rest) if stacked else layout + rest))


def _wrapped_line(line: str, width: int) -> list[str]:
    """Returns a layout's line as several, broken after commas."""
    parts = textwrap.wrap(line.replace(",", ", "), width + 1, break_on_hyphens=False, break_long_words=False)
    return [part.replace(", ", ",") for part in parts]


def _where(first: Candidate) -> list[str]:
    """Returns the time and the memory of the best layout."""
    prediction = first.prediction
    low, high = (duration(factor * first.seconds) for factor in prediction.spread)
    return [
        f"best layout: {first.layout.line()}",
        first.spec.batch.equation(),
        f"step time: {duration(first.seconds)} simulated ({low} to {high}), "
        f"{duration(prediction.step_time_s)} predicted, of which:",
        *time_lines(prediction),
        "",
        *memory_lines(prediction),
    ]


def _nothing(plan: Plan) -> list[str]:
    """Returns the lines that explain that no layout fits."""
    if plan.nearest is None:
        return ["no layout is legal"]
    return [
        f"no layout fits; the one that needs the least memory is {plan.nearest.layout.line()}",
        shortfall(plan.nearest.spec),
        "",
        *memory_lines(plan.nearest.prediction),
    ]


def _notes(plan: Plan, width: int) -> Iterator[str]:
    for note in plan.notes:
        yield textwrap.fill(note, width, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False)


def _alternatives(plan: Plan, width: int) -> Iterator[str]:
    """Yields the alternatives with time, factor over the best, and why they lose: beside them, or below where the
    terminal is narrow."""
    rows = [(each.name, *verdict(each, plan), _reason(each)) for each in plan.alternatives]
    if not rows:
        return
    name, time, factor = (max(len(row[column]) for row in rows) for column in range(3))
    name = min(name, 40)
    indent = name + time + factor + 8
    stacked = width - indent < _NARROWEST
    for row in rows:
        first, *names = textwrap.wrap(row[0], name)
        why, *more = [""] if stacked else _cut(row[3], width - indent)
        yield f"  {first:<{name}}  {row[1]:>{time}}  {row[2]:>{factor}}  {why}".rstrip()
        for number in range(max(len(names), len(more))):
            left = names[number] if number < len(names) else ""
            right = more[number] if number < len(more) else ""
            yield f"  {left:<{indent - 2}}{right}".rstrip()
        if stacked:
            yield from (f"    {line}" for line in _cut(row[3], width - 4))


def _cut(why: str, width: int) -> list[str]:
    return textwrap.wrap(why, width, break_on_hyphens=False, break_long_words=False) or [""]


def _reason(each: Alternative) -> str:
    """Returns an alternative's layout, and why it loses."""
    line = short_line(replace(each.candidate.layout, pp_cut="")).replace(",", " ") if each.candidate else ""
    return f"{line}: {each.why}" if line else each.why


def _rejected(plan: Plan, width: int) -> Iterator[str]:
    for reason, count in largest_first(plan.rejected):
        yield textwrap.fill(f"{count:>9,}  {reason}", width, subsequent_indent=" " * 11, break_on_hyphens=False)


def _layout(layout: Layout) -> dict[str, Any]:
    return {**differing(layout), "line": layout.line()}


def _candidate(candidate: Candidate) -> dict[str, Any]:
    return {
        "layout": differing(candidate.layout),
        "line": candidate.layout.line(),
        "prediction": document(candidate.prediction),
        "simulated_step_time_s": candidate.seconds,
    }
