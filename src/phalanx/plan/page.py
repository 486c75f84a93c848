"""A plan as text, and the changes of a layout's settings that make it fit in memory."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from math import gcd
from typing import Any

from phalanx.config.layout import Layout
from phalanx.cost.breakdown import MOMENTS, document, duration, memory_lines, subject, time_lines
from phalanx.cost.job_spec import stages
from phalanx.cost.prediction import Prediction, Verdict, predict
from phalanx.cost.spec import StepSpec
from phalanx.errors import JobError
from phalanx.partition.derived import MODES, PARTS, legal_modes, solve, tier_of
from phalanx.plan.plan import Alternative, Candidate, Plan
from phalanx.techniques.memory import CHEAPEST_FIRST, can_offload
from phalanx.units import figure, gib, seconds

MOST_CHANGES = 5
"""Most settings that are changed together if none alone suffices, before parts leave the device."""
OFFLOAD = "layout.offload="
MICRO_BATCH = "layout.micro_batch="

FOLDER = "DIR"
"""Stands for a folder that the user chooses."""


@dataclass(frozen=True)
class Advice:
    """One change and its effect."""

    change: str
    peak: int
    """Bytes on the fullest rank, as a prediction of the changed layout shows them."""
    needed: int
    """Of these what it cannot do without; the allocator gives the rest back where the device is full."""
    fits: bool
    verdict: Verdict
    step_time_s: float

    @classmethod
    def of(cls, change: str, after: Prediction) -> Advice:
        """Returns a change with the prediction after it."""
        return cls(change, after.fullest.peak, int(after.fullest.needed), after.fits, after.verdict, after.step_time_s)


def advice(spec: StepSpec) -> list[Advice]:
    """Returns single changes that make the layout fit: a smaller micro-batch, then the others, fastest first. If there
    is none, combines several: each time the one that needs the least memory, until it fits or nothing helps. World size
    and global batch stay the same."""
    found = list(_tried_changes(spec))
    fitting = sorted((change for change, _ in found if change.fits), key=lambda change: change.step_time_s)
    smaller = _smaller_micro_batch(spec)
    if smaller:  # the nearest change: the same devices compute the same, in more pieces
        fitting = [smaller, *(change for change in fitting if not change.change.startswith(MICRO_BATCH))]
    if fitting or not found:
        return fitting
    changes: dict[str, str] = {}
    while True:
        tried = list(_tried_changes(spec))
        # Leaving the device costs more time than sharding or recomputing: it comes last.
        stays = [each for each in tried if not each[0].change.startswith(OFFLOAD) and len(changes) < MOST_CHANGES]
        best, after = min(stays or tried, key=lambda each: each[0].peak, default=(None, spec))
        if best is None or len(changes) >= MOST_CHANGES + len(PARTS):
            break
        changes |= dict(word.split("=", 1) for word in best.change.split())
        spec = after
        found = [(replace(best, change=" ".join(map("=".join, changes.items()))), after)]
        if best.fits:
            break
    return [change for change, _ in found[:1]]


def _smaller_micro_batch(spec: StepSpec) -> Advice | None:
    """Returns the largest smaller micro-batch with which the layout fits, if possible not tightly, or None."""
    size, tight = spec.batch.micro_batch, None
    while (size := size // 2) >= 1:
        layout = replace(spec.layout, micro_batch=size, accumulation=0)
        try:
            change, changed = _changed(spec, f"{MICRO_BATCH}{size}", layout)
            after = predict(changed)
        except (JobError, ValueError):
            continue
        if after.verdict == "fits":
            return Advice.of(change, after)
        if after.fits and tight is None:
            tight = Advice.of(change, after)
    return tight


def _tried_changes(spec: StepSpec) -> Iterator[tuple[Advice, StepSpec]]:
    """Yields every single change that reduces memory."""
    now = predict(spec).fullest.needed
    for words, layout in _changes(spec):
        try:
            change, changed = _changed(spec, words, layout)
            after = predict(changed)
        except (JobError, ValueError):
            continue
        if after.fullest.needed < now:
            yield Advice.of(change, after), changed


def _changed(spec: StepSpec, words: str, layout: Layout) -> tuple[str, StepSpec]:
    """Returns the spec with another layout, and the words that make it of the job: `words`, and whatever else differs,
    so that the job's own micro-batch or accumulation does not make it another batch."""
    batch = solve(spec.batch.global_batch, layout)
    if spec.layout.accumulation or (spec.layout.micro_batch and spec.batch.accumulation == 1):
        layout = replace(layout, accumulation=batch.accumulation)
    said = {word.partition("=")[0] for word in words.split()}
    rest = [
        f"layout.{field.name}={value}"
        for field in fields(layout)
        if (value := getattr(layout, field.name)) != getattr(spec.layout, field.name)
        and f"layout.{field.name}" not in said
        and (field.name, value) != ("accumulation", spec.batch.accumulation)
    ]
    changed = replace(spec, layout=layout, batch=batch, stages=stages(spec.model, layout))
    return " ".join([words, *rest]), changed


def _changes(spec: StepSpec) -> Iterator[tuple[str, Layout]]:
    layout, model = spec.layout, spec.model
    for recompute in legal_modes(layout.tiles)[1:]:
        if MODES.index(layout.mode) < MODES.index(recompute):
            yield f"layout.recompute={recompute}", replace(layout, recompute=recompute)
    if spec.batch.micro_batch > 1:
        half = spec.batch.micro_batch // 2
        yield f"{MICRO_BATCH}{half}", replace(layout, micro_batch=half, accumulation=0)
    for zero in (1, 2, 3):
        if layout.dp_shard > 1 and zero > layout.zero and layout.pp == 1:
            yield f"layout.zero={zero}", replace(layout, zero=zero)
    if layout.zero > 1 and layout.shard_ranks > 1 and spec.batch.accumulation > 1 and layout.accumulate == "local":
        yield "layout.accumulate=sharded", replace(layout, accumulate="sharded")
    if layout.dp_replicate > 1:
        ranks = layout.dp_replicate * layout.dp_shard
        change = f"layout.dp_replicate=1 layout.dp_shard={ranks}"
        yield change, replace(layout, dp_replicate=1, dp_shard=ranks)
    for part in CHEAPEST_FIRST:
        offloaded = can_offload(part, layout, spec.optimizer, spec.cluster)
        if not offloaded:
            continue
        files = _in_files(spec, offloaded)
        if files and "host" in predict(replace(spec, layout=offloaded)).short_tiers:
            yield f"layout.offload={files.offload} layout.offload_to={FOLDER}", files
        else:
            yield f"layout.offload={offloaded.offload}", offloaded
    if layout.tp > 1 and not layout.sp:
        yield "layout.sp=true", replace(layout, sp=True)
    if not layout.loss_chunk:
        yield "layout.loss_chunk=auto", replace(layout, loss_chunk="auto")
    open_micro: dict[str, Any] = {"micro_batch": min(1, layout.micro_batch), "accumulation": 0}
    for axis, legal in (("tp", model.n_heads % (2 * layout.tp) == 0), ("pp", model.n_layers >= 2 * layout.pp)):
        for data in ("dp_shard", "dp_replicate"):
            ranks = getattr(layout, data)
            if legal and ranks % 2 == 0:
                wider, fewer = 2 * getattr(layout, axis), ranks // 2
                moved = replace(layout, **{axis: wider, data: fewer}, **open_micro)
                zero = min(moved.zero, 2) if axis == "pp" else moved.zero
                ep = gcd(layout.ep_shard, moved.shard_ranks) * (moved.tp if moved.folds else 1)
                moved = replace(moved, zero=zero, ep=ep)  # pyrefly: ignore[bad-argument-type]
                yield f"layout.{axis}={wider} layout.{data}={fewer}", moved
                break


def _in_files(spec: StepSpec, layout: Layout) -> Layout | None:
    """Returns a layout whose offloaded optimizer has its state in files instead of host memory; None if it has already,
    or if nothing is known about the disks."""
    if tier_of(layout, "optimizer") != "host" or not spec.cluster.host.disk_gbs:
        return None
    return replace(layout, offload_to=FOLDER)


def shortfall(spec: StepSpec) -> str:
    """Describes a layout that does not fit: the excess, the moment, the largest part, and changes that help."""
    prediction = predict(spec)
    fullest = prediction.fullest
    if prediction.short_tiers:
        tier = prediction.short_tiers[0]
        most, limit = prediction.tiers[tier]
        text = (
            f"does not fit: offloaded state of {gib(most)} per device exceeds {gib(limit)} of the {tier}; shard it "
            "over more devices (layout.dp_shard), or offload less"
        )
        if files := tier == "host" and _in_files(spec, spec.layout):
            after = predict(replace(spec, layout=files))
            if after.fits:
                host, disk = (gib(after.tiers[tier][0]) for tier in ("host", "disk"))
                text += (
                    f"\n  fits with layout.offload_to={FOLDER}, a folder on a local disk: {host} of host memory and "
                    f"{disk} of disk, {figure(after.step_time_s)} s per step"
                )
        return text
    over = fullest.needed - prediction.memory_limit
    largest, size = max(fullest.parts(), key=lambda part: part[1])
    rank = prediction.memory.index(fullest)
    where = f", pipeline rank {rank}" if spec.layout.pp > 1 else ""
    text = (
        f"does not fit: peak memory {gib(fullest.needed)} ({MOMENTS[fullest.moment]}{where}) exceeds the "
        f"{gib(prediction.memory_limit)} of {spec.cluster.accelerator.name} by {gib(over)}; the largest part is "
        f"{largest}, {gib(size)}"
    )
    lines = []
    for change in advice(spec)[:4]:
        known = {"fits": "fits with", "tight": "fits, but tightly, with"}
        verdict = known.get(change.verdict, "still does not fit; the least memory has")
        size = f"{gib(change.needed)} and up to {gib(change.peak)}" if change.verdict == "tight" else gib(change.peak)
        lines.append(f"  {verdict} {change.change}: {size}, {figure(change.step_time_s)} s per step")
    return "\n".join([text, *(lines or ["  no change of the settings helps: use more devices, or a smaller model"])])


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
    best = {**differing(plan.best[0].layout), "line": plan.best[0].layout.line()} if plan.best else None
    nearest = plan.nearest
    return {
        "best": best,
        "fastest": _candidate(plan.fastest) if plan.fastest else None,
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
    if any(each.rehearsed is not None for each in best):
        seen = ("rehearsed", *("" if each.rehearsed is None else gib(each.rehearsed) for each in best))
        rows = [(*row, cell) for row, cell in zip(rows, seen, strict=True)]
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


def _candidate(candidate: Candidate) -> dict[str, Any]:
    return {
        "layout": differing(candidate.layout),
        "line": candidate.layout.line(),
        "prediction": document(candidate.prediction),
        "simulated_step_time_s": candidate.seconds,
        "rehearsed_bytes": candidate.rehearsed,
    }
