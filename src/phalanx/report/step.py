"""The part of the report about a step: profiled ranks beside the simulated ones where steps were profiled, otherwise
the figures of whole steps beside the predicted ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from typing import Any

from phalanx.cost.breakdown import duration, model_name
from phalanx.pictures import measured_step
from phalanx.pictures.measured_step import RankRows, Span, predicted_spans
from phalanx.pictures.page import figure, list_of, table
from phalanx.report.expected import Expected
from phalanx.report.figures import figures, predicted_figures
from phalanx.report.metrics import number
from phalanx.report.run import RunRecord
from phalanx.units import gib

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
        title = f"{title}{_subject(record, prediction)}"
        yield from figure(measured_step.svg(title, ranks), "wide")
    if not profile:
        yield (
            "<p class='soft'>No step was profiled. <code>train.profile.steps=10,12</code> measures where the time of "
            "those steps goes on every rank.</p>"
        )


def _subject(record: RunRecord, prediction: Expected) -> str:
    """Returns the model, and the machine that the prediction is for, as far as they are known."""
    model = f": {model_name(record.loaded.job.model)}" if record.loaded else ""
    return model + (f", on {prediction.cluster}" if model and prediction.cluster else "")


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
    measured = figures(record)
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
        yield f"<p class='soft'>The measured MFU divides by {escape(_peak(measured))}.</p>"


def _peak(measured: dict[str, Any]) -> str:
    flops = measured["peak_flops"]
    shown = f"{flops / 1e12:,.3g} TFLOP/s per device, " if flops else ""
    return f"{shown}{measured['peak_source']}"


def _bubble(profile: dict[str, Any]) -> float | None:
    """Returns the bubble of the profiled rank that is compared, by the project's one definition."""
    from phalanx.schedule.timing import bubble_fraction

    parts = {name: seconds for name, _, seconds in _compared(profile)}
    step, idle = parts.get("step", 0.0), parts.get("bubble", 0.0)
    return bubble_fraction(idle, step) if 0 < idle < step else None


def _compared(profile: dict[str, Any]) -> list[tuple[str, float, float]]:
    """Returns name, predicted and measured seconds of each part of a profile's comparison."""
    beside = profile.get("compared")
    found = []
    for part in beside.get("parts", []) if isinstance(beside, dict) else []:
        if isinstance(part, dict):
            seconds = [number(part.get(name)) for name in ("predicted_s", "measured_s")]
            if None not in seconds:
                found.append((str(part.get("name")), *seconds))
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
