"""A schedule as trace events for Perfetto (ui.perfetto.dev) and chrome://tracing, one row per rank."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from phalanx.schedule.schedule import Schedule
from phalanx.schedule.timing import Timing

_MICROSECONDS_PER_UNIT = 1000.0
"""Microseconds shown for one unit of time: the viewers measure in microseconds."""


class Event(NamedTuple):
    """An interval of time; the events of a row do not overlap."""

    name: str
    category: str
    start: float
    """Start in microseconds, as every time here."""
    end: float
    args: dict[str, Any]


class Arrow(NamedTuple):
    """An arrow from the event that begins at `start` in row `row` to the event that begins later, at `to_start`, in row
    `to_row`."""

    name: str
    row: int
    start: float
    to_row: int
    to_start: float


@dataclass(frozen=True)
class TraceRow:
    """One row, which the viewers call a thread."""

    name: str
    events: Iterable[Event]


def text(timing: Timing) -> str:
    """Returns the events of every action as one JSON document."""
    schedule = timing.schedule
    rows = []
    for rank, (program, starts) in enumerate(zip(schedule.programs, timing.starts, strict=True)):
        events = [
            Event(
                pass_name(schedule, *action),
                action.kind,
                start * _MICROSECONDS_PER_UNIT,
                (start + timing.costs[action.kind]) * _MICROSECONDS_PER_UNIT,
                pass_args(action.stage, action.micro, action.slice),
            )
            for action, start in zip(program, starts, strict=True)
        ]
        rows.append(TraceRow(f"rank {rank}", events))
    return document(f"pipeline {schedule.name}", rows)


def pass_name(schedule: Schedule, kind: str, stage: int, micro: int, part: int) -> str:
    """Names a pass: "F3 stage 1", or with slices "F3.0 stage 1"."""
    of_slice = f".{part}" if schedule.slices > 1 else ""
    return f"{kind}{micro}{of_slice} stage {stage}"


def pass_args(stage: int, micro: int, part: int) -> dict[str, Any]:
    return {"stage": stage, "micro_batch": micro, "slice": part}


def document(name: str, rows: Sequence[TraceRow], arrows: Iterable[Arrow] = ()) -> str:
    """Returns the rows of one process as a JSON document, in order."""
    events: list[dict[str, Any]] = [{"name": "process_name", "ph": "M", "pid": 0, "args": {"name": name}}]
    events += row_events(rows)
    for number, arrow in enumerate(arrows):
        words = {"name": arrow.name, "cat": "arrow", "id": number, "pid": 0}
        events.append({**words, "ph": "s", "tid": arrow.row, "ts": _nanosecond(arrow.start)})
        # bp "e" binds the arrow to the event that begins there, not to the next one.
        events.append({**words, "ph": "f", "bp": "e", "tid": arrow.to_row, "ts": _nanosecond(arrow.to_start)})
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": events}) + "\n"


def row_events(rows: Sequence[TraceRow], process: int = 0, first: int = 0) -> Iterator[dict[str, Any]]:
    """Yields the events of a process's rows, which the viewers show in order, the first as thread `first`."""
    for number, row in enumerate(rows, first):
        place = {"pid": process, "tid": number}
        yield {"name": "thread_name", "ph": "M", **place, "args": {"name": row.name}}
        yield {"name": "thread_sort_index", "ph": "M", **place, "args": {"sort_index": number}}
        for event in row.events:
            start, end = _nanosecond(event.start), _nanosecond(event.end)
            words = {"name": event.name, "cat": event.category, "ph": "X"}
            yield {**words, "ts": start, "dur": _nanosecond(end - start), **place, "args": event.args}


def _nanosecond(microseconds: float) -> float:
    """Rounds to nanoseconds, as the viewers do, so that rounding errors never make adjacent events overlap."""
    return round(microseconds, 3)
