"""The report of one run as a page: a document that loads nothing and can be read without a script. Whatever a run's
files hold is text in it, never markup."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from html import escape
from typing import Any

from phalanx.config.fields import get
from phalanx.cost.breakdown import MOMENTS, duration, model_name
from phalanx.errors import PhalanxError
from phalanx.pictures import curves
from phalanx.pictures import experts as experts_picture
from phalanx.pictures import layout as layout_picture
from phalanx.pictures import profile as measured_step
from phalanx.pictures.curves import STYLE, Chart, Curve, Points
from phalanx.pictures.elements import short
from phalanx.pictures.page import bar, bars, figure, figures, html_page, list_of, section, table
from phalanx.pictures.profile import RankRows, Span, predicted_spans
from phalanx.report.figures import Expected, expected, predicted_figures, sources_of
from phalanx.report.figures import figures as measured_figures
from phalanx.report.run import RunRecord, history, number, traffic_of
from phalanx.units import counted, gib
from phalanx.units import seconds as as_time

_PLAIN = "{:.3g}".format
_CHARTS: dict[str, tuple[str, dict[str, Any]]] = {
    "kl": ("KL divergence from the reference, in nats per token", {"unit": _PLAIN, "robust": True}),
    "length": ("Tokens per completion", {"unit": _PLAIN, "from_zero": True}),
    "mtp_loss": ("Loss of the modules for further tokens", {"unit": "{:.4f}".format}),
    "reward_margin": ("Margin of the rewards", {"unit": _PLAIN, "robust": True}),
    "lr": ("Learning rate", {"unit": lambda v: f"{v:.1e}" if v else "0", "from_zero": True}),
    "grad_norm": ("Gradient norm", {"unit": _PLAIN, "robust": True}),
    "tps": ("Tokens per second and device (tps)", {"unit": "{:,.0f}".format, "from_zero": True, "robust": True}),
    "mfu": ("MFU", {"unit": lambda v: f"{v * 100:.3g}%", "from_zero": True, "robust": True, "scale": 0.01}),
    "memory": ("Peak memory of rank 0 so far", {"unit": gib, "from_zero": True, "robust": True}),
}
"""Title and axis of the charts of columns."""


def charts(records: Sequence[RunRecord]) -> Iterator[str]:
    """Yields the charts that some run has points for, as SVG documents."""
    yield from loss(records)
    alone = len(records) == 1
    for name, (title, axis) in _CHARTS.items():
        label = name.replace("_", " ")
        lines = [Curve(label if alone else each.name, each.metrics.points(name), at) for at, each in enumerate(records)]
        more: dict[str, Any] = {}
        if name == "memory":
            highest = max((y for line in lines for _, y in line.points), default=0)
            unit, word = (2.0**30, "GiB") if highest > 2**30 else (2.0**20, "MiB")
            more = {"scale": unit, "tick": lambda v, unit=unit, word=word: f"{v / unit:g} {word}"}
        yield from drawn(Chart(title, lines, **axis | more, marks=_marks(records)))
    if not alone:  # the page of a lone run has a picture of its experts
        lines = [Curve(each.name, _points(each, "experts", "max_violation"), at) for at, each in enumerate(records)]
        yield from drawn(Chart("Experts: worst layer's violation", lines, _PLAIN, from_zero=True))


def loss(records: Sequence[RunRecord], *, alone: bool = False) -> Iterator[str]:
    """Yields the chart of the loss and the validation loss, if there is a loss; of rewarded completions, whose loss
    tells nothing, that of the rewards."""
    lines: list[Curve] = []
    one = len(records) == 1
    what = "reward" if any(each.metrics.points("reward") for each in records) else "loss"
    for at, each in enumerate(records):
        lines.append(Curve(what if one else each.name, each.metrics.points(what), at))
        name = f"validation {what}" if one else f"{each.name}, validation"
        lines.append(Curve(name, _points(each, "validation", f"val_{what}"), 1 if one else at, dots=True, named=one))
    word = what.capitalize()
    title = f"{word} of {records[0].name}" if alone and one else word if one else f"{word}; dots: validation"
    yield from drawn(Chart(title, lines, "{:.4f}".format, _PLAIN, marks=_marks(records)), alone=alone)


def drawn(chart: Chart, *, alone: bool = False) -> Iterator[str]:
    """Yields the chart if it has points."""
    if any(curve.points for curve in chart.curves):
        yield curves.svg(chart, alone=alone)


def _points(record: RunRecord, event: str, name: str) -> Points:
    rows = ((row["step"], number(row.get(name))) for row in record.metrics.of(event))
    return [(step, value) for step, value in rows if value is not None]


def _marks(records: Sequence[RunRecord]) -> dict[float, str]:
    """Returns the steps from which a lone run went on, and those in which its guard found something."""
    found: dict[float, str] = {}
    for row in records[0].metrics.events if len(records) == 1 else ():
        if row["event"] == "start" and row["step"]:
            found[row["step"]] = f"step {row['step']}: went on"
        elif row["event"] == "guard":
            found[row["step"]] = f"step {row['step']}: guard: {row.get('text')}"
    return found


STYLE_ELEMENT = f"""<style>{STYLE}
.charts {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 400px), 1fr)); gap: 1rem; }}
.charts figure {{ padding: .4rem .6rem; min-width: 0; }}
.charts svg {{ width: 100%; }}
figure.wide svg {{ width: 100%; min-width: 760px; }}
.state {{ display: inline-block; padding: 0 .6rem; border-radius: 1rem; background: var(--card); }}
.state.failed, .state.interrupted {{ color: var(--bad); }}
details summary {{ cursor: pointer; color: var(--soft); }}
footer {{ margin-top: 3rem; color: var(--soft); font-size: .85rem; }}
</style>"""
"""Style of the pages of runs, added to that of every page."""


def html(record: RunRecord, prediction: Expected) -> str:
    """Returns the page of one run."""
    return html_page(
        f"Run {record.name}", record.name, subtitle(record), [STYLE_ELEMENT, *body(record, prediction), foot()]
    )


def of_run(record: RunRecord) -> str:
    """Returns the page of one run beside its prediction."""
    return html(record, expected(record))


def foot() -> str:
    """Returns the line under a page."""
    return f"<footer>phalanx report, {_moment(time.time())}</footer>"


def subtitle(record: RunRecord) -> str:
    """Returns the run in a line: its model, layout, steps and state."""
    words = []
    if record.loaded:
        job = record.loaded.job
        words.append(model_name(job.model))
        words += [job.layout.line(), job.train.precision]
    total = f" of {record.total:,}" if record.total else ""
    words.append(f"step {record.metrics.last_step:,}{total}")
    words.append(record.state)
    return " · ".join(words)


def body(record: RunRecord, prediction: Expected, prefix: str = "") -> Iterator[str]:
    """Yields the sections about one run; `prefix` keeps their names apart on a page of several."""
    if record.state in ("failed", "interrupted"):
        words = "The run failed" if record.state == "failed" else "The run was interrupted and has not gone on"
        yield f"<p class='bad'>{words}: see Checkpoints, interruptions, restarts below.</p>"
    if record.notes:
        yield from list_of(record.notes)
    yield from figures(_cards(record))
    if pictures := list(charts([record])):
        yield from section(f"{prefix}curves", "Curves", chart_grid(pictures))
    if sources := sources_of(record):
        yield from section(f"{prefix}sources", "Sources", source_table(sources))
    yield from section(f"{prefix}step", "The step: predicted beside measured", step_section(record, prediction))
    yield from section(f"{prefix}memory", "Memory", _memory(record, prediction))
    yield from section(f"{prefix}traffic", "Traffic", _traffic(record, prediction))
    job = record.loaded.job if record.loaded else None
    if record.metrics.last("experts") is not None:
        with suppress(PhalanxError):
            model = model_name(job.model) if job else ""
            drawn = experts_picture.svg(record.name, record.path / "metrics.jsonl", model)
            yield from section(f"{prefix}experts", "Experts", figure(drawn, "wide"))
    if job and prediction.vocab:
        with suppress(PhalanxError, ValueError, ZeroDivisionError):
            drawn = layout_picture.svg(job, prediction.vocab)
            yield from section(f"{prefix}layout", "Layout", figure(drawn, "wide"))
    yield from section(f"{prefix}history", "Checkpoints, interruptions, restarts", _history(record))
    yield from section(f"{prefix}environment", "Environment", _environment(record))


def chart_grid(pictures: Iterable[str]) -> Iterator[str]:
    """Yields charts in columns, as many as the window has room for."""
    yield "<div class='charts'>"
    for picture in pictures:
        yield from figure(picture, "chart")
    yield "</div>"


def _cards(record: RunRecord) -> Iterator[tuple[str, str]]:
    """Yields the most important figures with their labels."""
    found = measured_figures(record)
    total, best, loss = found["steps"], found["best_val_loss"], found["val_loss"]
    yield f"{found['step']:,}" + (f" of {total:,}" if total else ""), f"steps: {record.state}"
    peak = f" of {found['peak_flops'] / 1e12:,.3g} TFLOP/s" if found["peak_flops"] else ""
    cards = {
        "loss": ("{:.4f}".format, "loss"),
        "val_loss": ("{:.4f}".format, "validation loss" + (f", best {best:.4f}" if best and best < loss else "")),
        "tps": ("{:,.0f}".format, "tps: tokens/s per device"),
        "tps_total": ("{:,.0f}".format, "tps_total: all devices"),
        "mfu": ("{:.1%}".format, f"MFU{peak} per device"),
        "padding": ("{:.1%}".format, "padding, which throughput does not count"),
        "step_time_s": (duration, "step, median"),
        "memory_bytes": (gib, "peak memory, rank 0"),
        "tokens": (short, "tokens"),
        "seconds": (as_time, "in steps"),
    }
    for name, (shown, label) in cards.items():
        if found[name] is not None and (found[name] or name not in ("padding", "tokens", "seconds")):
            yield shown(found[name]), label


def source_table(sources: list[dict[str, Any]]) -> Iterator[str]:
    """Yields the sources as a table of the page."""
    forms = {"weight": "{:.2%}", "tokens": "{:,.0f}", "share": "{:.2%}", "epochs": "{:.2f}", "val_loss": "{:.4f}"}
    heads = ("source", "weight", "tokens", "share of tokens", "epochs", "validation loss")
    rows = [
        [
            (source["path"], None),
            *(("–" if (value := source[name]) is None else form.format(value), value) for name, form in forms.items()),
        ]
        for source in sources
    ]
    yield from table(heads, rows, words=(0,))


def _memory(record: RunRecord, prediction: Expected) -> Iterator[str]:
    """Yields the predicted memory of the fullest pipeline rank by part, and the measured peak."""
    measured = max(record.metrics.values("memory"), default=None)
    if not prediction.memory:
        yield f"<p class='soft'>Not predicted: {escape(prediction.reason)}</p>"
        if measured is not None:
            yield f"<p>Measured peak of rank 0: {gib(measured)}.</p>"
        return
    fullest = max(prediction.memory, key=lambda rank: rank.peak)
    rank = f", pipeline rank {prediction.memory.index(fullest)}" if len(prediction.memory) > 1 else ""
    words = f"Predicted peak {gib(fullest.peak)} ({MOMENTS[fullest.moment]}{rank})"
    if prediction.prediction and prediction.prediction.memory_limit:
        words += f" of {gib(prediction.prediction.memory_limit)} per device"
    if measured is not None:
        words += f"; measured peak of rank 0: {gib(measured)}"
    yield f"<p>{escape(words)}.</p>"
    if (record.metrics.last("start") or {}).get("device") == "cpu":
        yield (
            "<p class='soft'>On a CPU the measured figure is of the whole process, with Python, torch and the C "
            "library; the prediction is of tensors.</p>"
        )
    rows = ([name, gib(size), bar(size / fullest.peak)] for name, size in fullest.parts() if size)
    yield from bars(rows, ("words", "count", "track"))


def _traffic(record: RunRecord, prediction: Expected) -> Iterator[str]:
    """Yields the bytes that rank 0 sends per step, by axis and collective, measured beside predicted."""
    measured = traffic_of(record.metrics.last("traffic"))
    pairs = sorted({(axis, c) for table in (measured, prediction.traffic) for axis, by in table.items() for c in by})
    if not pairs:
        yield "<p class='soft'>Nothing is sent, or the run has not ended yet: it is counted at the end.</p>"
        return
    yield "<p class='soft'>Bytes that rank 0 sends per step.</p>"
    rows = []
    for axis, collective in pairs:
        mine, theirs = (t.get(axis, {}).get(collective) for t in (measured, prediction.traffic))
        cells = [("–", None) if v is None else (gib(v), v) for v in (theirs, mine)]
        rows.append([(axis, None), (collective.replace("_", "-"), None), *cells, (_ratio(mine, theirs), None)])
    yield from table(("axis", "collective", "predicted", "measured", "ratio"), rows, words=(0, 1))


def _ratio(measured: float | None, predicted: float | None) -> str:
    if measured is None or not predicted:
        return ""
    return "equal" if round(measured) == round(predicted) else f"{measured / predicted:.3f}"


def _history(record: RunRecord) -> Iterator[str]:
    if record.checkpoints:
        newest, size = record.checkpoints[-1], sum(each.bytes for each in record.checkpoints)
        yield (
            f"<p>{counted(len(record.checkpoints), 'checkpoint')} on disk, {gib(size)}; the newest is of step "
            f"{newest.step:,}. {counted(record.attempts, 'attempt')}.</p>"
        )
    else:
        yield f"<p>No checkpoint on disk. {counted(record.attempts, 'attempt')}.</p>"
    rows = [
        [(_moment(when), when), (f"{step:,}", step), (kind, None), (words, None)]
        for when, step, kind, words in reversed(history(record))
    ]
    if rows:
        yield from table(("when", "step", "event", ""), rows, words=(2, 3))


def _moment(when: float) -> str:
    """Formats seconds since the epoch; nothing for what is no time."""
    if not 0 < when < 1e11:
        return ""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(when))


def _environment(record: RunRecord) -> Iterator[str]:
    rows = [[(name, None), (value, None)] for name, value in _flat(record.environment)]
    if rows:
        yield from table(("", ""), rows, words=(0, 1))
    if record.commands:
        yield "<p class='soft'>Commands</p>"
        yield f"<pre class='wrap'>{escape(chr(10).join(record.commands[-20:]))}</pre>"
    if record.loaded:
        own = [
            f"{path}: {value}  # {origin}"
            for path, origin in record.loaded.origins.items()
            if origin != "default" and (value := get(record.loaded.job, path)) is not None
        ]
        yield "<details><summary>The job's own values</summary>"
        yield f"<pre class='wrap'>{escape(chr(10).join(own))}</pre></details>"


def _flat(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yields names and values of env.json; lists and objects inside are joined."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name} ")
        elif value not in (None, "", []):
            yield f"{prefix}{name}", str(value)


# The step: profiled ranks beside the simulated ones where steps were profiled, otherwise figures of whole steps beside
# the predicted ones.
_NAMED = 3
"""Differences that are named, the largest first."""
_LEAST = 0.02
"""Smallest difference that is named, as a share of the step."""
_MOST_SPANS = 1000  # of a rank


def step_section(record: RunRecord, prediction: Expected) -> Iterator[str]:
    """Yields the figures of a step, predicted beside measured, and the timeline of a profiled step."""
    if prediction.prediction is None:
        yield f"<p class='soft'>Not predicted: {escape(prediction.reason)}</p>"
    else:
        yield f"<p class='soft'>Predicted on {escape(prediction.cluster)}.</p>"
    yield from _whole(record, prediction)
    profile = record.profile or {}
    parts = _compared(profile)
    if parts:
        yield from list_of(list(differences(parts)))
    ranks = list(_rows(profile, prediction))
    if any(rank.measured or rank.predicted for rank in ranks):
        steps = profile.get("steps")
        last = steps[-1] if isinstance(steps, list) and steps and isinstance(steps[-1], int) else None
        both = ", measured and predicted" if any(rank.predicted for rank in ranks) else ", measured"
        title = "The predicted step" if last is None else f"Step {last} of each rank{both}"
        if record.loaded:
            title += f": {model_name(record.loaded.job.model)}"
            title += f", on {prediction.cluster}" if prediction.cluster else ""
        yield from figure(measured_step.measured_svg(title, ranks), "wide")
    if not profile:
        yield (
            "<p class='soft'>No step was profiled. <code>train.profile.steps=10,12</code> measures where the time of "
            "those steps goes on every rank.</p>"
        )


_FORMATS = {
    "step_time_s": ("step time", duration),
    "tps": ("tps (per device)", lambda v: f"{v:,.0f}"),
    "tps_total": ("tps_total (all devices)", lambda v: f"{v:,.0f}"),
    "tflops": ("TFLOP/s per device", lambda v: f"{v:,.3g}"),
    "mfu": ("MFU", lambda v: f"{v:.1%}"),
    "memory_bytes": ("peak memory", gib),
    "bubble": ("bubble", lambda v: f"{v:.1%}"),
    "data_wait_s": ("waiting for data", duration),
}


def _whole(record: RunRecord, prediction: Expected) -> Iterator[str]:
    measured = measured_figures(record)
    predicted = predicted_figures(prediction, measured["padding"]) or {}
    measured["bubble"] = _bubble(record.profile or {})
    rows = []
    for name, (label, shown) in _FORMATS.items():
        mine, theirs = measured.get(name), predicted.get(name)
        if mine is None and theirs is None:
            continue
        ratio = f"{mine / theirs:.2f}" if mine is not None and theirs else ""
        cells = [("–" if value is None else shown(value), value) for value in (theirs, mine)]
        rows.append([(label, None), *cells, (ratio, None)])
    yield from table(("", "predicted", "measured", "ratio"), rows, words=(0,))
    if measured["peak_source"]:
        flops = measured["peak_flops"]
        peak = (f"{flops / 1e12:,.3g} TFLOP/s per device, " if flops else "") + measured["peak_source"]
        yield f"<p class='soft'>The measured MFU divides by {escape(peak)}.</p>"


def _bubble(profile: dict[str, Any]) -> float | None:
    """Returns the bubble of the profiled rank that is compared, by the project's one definition."""
    from phalanx.schedule.timing import bubble_fraction

    parts = {name: seconds for name, _, seconds in _compared(profile)}
    step, idle = parts.get("step", 0.0), parts.get("bubble", 0.0)
    return bubble_fraction(idle, step) if 0 < idle < step else None


def _compared(profile: dict[str, Any]) -> list[tuple[str, float, float]]:
    """Returns name, predicted and measured seconds of each part of a profile's comparison."""
    beside = profile.get("compared")
    found = list[tuple[str, float, float]]()
    for part in beside.get("parts", []) if isinstance(beside, dict) else []:
        if isinstance(part, dict):
            predicted, measured = (number(part.get(name)) for name in ("predicted_s", "measured_s"))
            if predicted is not None and measured is not None:
                found.append((str(part.get("name")), predicted, measured))
    return found


def differences(parts: Sequence[tuple[str, float, float]]) -> Iterator[str]:
    """Yields sentences about the parts whose measured time differs most from the predicted one."""
    whole = {name: (predicted, measured) for name, predicted, measured in parts}
    predicted, measured = whole.get("step", (0.0, 0.0))
    if not predicted or not measured:
        return
    verb = "longer" if measured > predicted else "shorter"
    yield (
        f"The profiled step takes {duration(measured)}, {duration(abs(measured - predicted))} {verb} than the "
        f"predicted {duration(predicted)} ({measured / predicted:.2f} ×)."
    )
    others = sorted((part for part in parts if part[0] != "step"), key=lambda part: -abs(part[2] - part[1]))
    for name, theirs, mine in others[:_NAMED]:
        if abs(mine - theirs) < _LEAST * measured:
            return
        verb = "longer" if mine > theirs else "shorter"
        more = "which is not predicted"
        if theirs:
            more = f"{duration(abs(mine - theirs))} {verb} than predicted ({mine / theirs:.2f} ×)"
        yield f"{name} takes {duration(mine)}, {more}."


def _rows(profile: dict[str, Any], prediction: Expected) -> Iterator[RankRows]:
    """Yields the measured ranks with the simulated pipeline rank beside each; without a profile the simulated ones."""
    timeline = prediction.timeline
    ranks = profile.get("ranks")
    measured = [each for each in ranks if isinstance(each, dict)] if isinstance(ranks, list) else []
    shown = [(each, spans) for each in measured if (spans := _spans(each))]
    if not shown and timeline:
        for rank in range(timeline.schedule.ranks):
            yield RankRows(f"pipeline rank {rank}", [], predicted_spans(timeline, rank))
    for each, spans in shown:
        coordinates = each.get("coordinates")
        stage = coordinates.get("pp", 0) if isinstance(coordinates, dict) else 0
        known = timeline is not None and isinstance(stage, int) and 0 <= stage < timeline.schedule.ranks
        predicted = predicted_spans(timeline, stage) if timeline is not None and known else []
        yield RankRows(f"rank {each.get('rank')}", spans, predicted)


def _spans(rank: dict[str, Any]) -> list[Span]:
    """Returns the spans of a rank of a profile; what does not look like one is left out."""
    found: list[Span] = []
    spans = rank.get("spans")
    for span in spans[:_MOST_SPANS] if isinstance(spans, list) else []:
        if isinstance(span, list) and len(span) == 3:
            start, seconds = number(span[1]), number(span[2])
            if start is not None and seconds is not None and start >= 0 and 0 <= seconds < 1e6:
                found.append((str(span[0]), start, seconds))
    return found
