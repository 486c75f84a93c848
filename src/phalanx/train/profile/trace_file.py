"""A rank's trace for Perfetto: torch's events of the profiled steps, and beside them our own ranges. Imports no torch.

Our rows come first: steps, phases, passes, layers, and what the rank waits for; collectives in flight are asynchronous
events, one track per axis and collective.
"""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from phalanx.bounded import open_regular
from phalanx.schedule.trace import Event, TraceRow, row_events

MOST_BYTES = 128 * 2**20
"""Most bytes of one rank's trace before compression, and of all traces that are merged: about a million events, which
take ten times as much memory while they are handled."""
_PIDS = 1000
"""Processes of a rank in a merged trace: its CPU threads, and its devices."""

Document = dict[str, Any]
NamedRange = tuple[str, int, int, Mapping[str, Any]]
"""A range: its name, start and end in nanoseconds, and its arguments."""


class TraceClock:
    """Converts nanoseconds of the monotonic clock to a trace's microseconds."""

    def __init__(self, document: Mapping[str, Any], unix_minus_monotonic: int):
        self.shift = unix_minus_monotonic - int(document.get("baseTimeNanoseconds", 0))

    def us(self, ns: int) -> float:
        return (ns + self.shift) / 1000

    def ns(self, us: float) -> int:
        return round(us * 1000) - self.shift


def of_steps(events: Iterable[Document], steps: Sequence[tuple[float, float]]) -> list[Document]:
    """Returns the events that touch one of the steps, given in microseconds, and those without a time."""
    kept = []
    for event in events:
        start = event.get("ts")
        if event.get("ph") == "M":
            kept.append(event)
        elif isinstance(start, (int, float)) and not isinstance(event.get("pid"), str):
            end = start + event.get("dur", 0)
            if any(start < last and end >= first for first, last in steps):
                kept.append(event)
    return kept


def own_rows(rows: Mapping[str, Sequence[NamedRange]], clock: TraceClock) -> list[TraceRow]:
    """Returns rows of ranges (name, start and end in nanoseconds, arguments), by their names."""
    return [
        TraceRow(
            name, [Event(what, name, clock.us(start), clock.us(end), dict(args)) for what, start, end, args in each]
        )
        for name, each in rows.items()
    ]


def in_flight(calls: Sequence[NamedRange], clock: TraceClock, pid: int) -> Iterator[Document]:
    """Yields asynchronous events: several of a name may be in flight."""
    for number, (name, start, end, args) in enumerate(calls):
        words = {"name": name, "cat": "in flight", "id2": {"local": f"{pid}.{number}"}, "pid": pid, "tid": 0}
        yield {**words, "ph": "b", "ts": round(clock.us(start), 3), "args": dict(args)}
        yield {**words, "ph": "e", "ts": round(clock.us(end), 3)}


def completed(
    document: Document,
    rank: int,
    title: str,
    rows: Sequence[TraceRow],
    flights: Sequence[NamedRange],
    clock: TraceClock,
    steps: Sequence[tuple[float, float]],
) -> Document:
    """Returns torch's document with its events of the steps and our own. Processes get numbers that are the rank's
    alone, so that traces can be merged, and flows identifiers of their own."""
    events = of_steps(document.get("traceEvents", []), steps)
    used = dict.fromkeys(e["pid"] for e in events if e.get("ph") == "X" and isinstance(e.get("pid"), int))
    home = next((e["pid"] for e in events if e.get("cat") == "cpu_op"), next(iter(used), 0))
    numbers = {pid: rank * _PIDS + n for n, pid in enumerate([home, *(pid for pid in used if pid != home)])}
    kept: list[Document] = []
    for event in events:
        if event.get("pid") not in numbers:
            continue
        if event.get("name") in ("process_name", "process_sort_index", "process_labels") and event["pid"] == home:
            continue
        flow = {"id": event["id"] * 4096 + rank % 4096} if "id" in event else {}
        kept.append({**event, **flow, "pid": numbers[event["pid"]]})
    pid = rank * _PIDS
    named = [
        {"name": "process_name", "ph": "M", "pid": pid, "args": {"name": title}},
        {"name": "process_sort_index", "ph": "M", "pid": pid, "args": {"sort_index": pid}},
    ]
    own = [*named, *row_events(rows, pid, 1), *in_flight(flights, clock, pid)]
    return {**document, "traceEvents": [*own, *kept]}


def merged(paths: Sequence[Path]) -> tuple[bytes, list[str]]:
    """Returns one trace of all files, each rank with processes of its own, and a note on those that did not fit in.
    All hosts' clocks count as equal. Raises OSError and ValueError."""
    events: list[Document] = []
    notes, left, first = [], MOST_BYTES, {}
    for path in paths:
        content = _unpacked(path, left)
        if content is None:
            notes.append(f"{path.name} is not in the merged trace, which would have more than {MOST_BYTES >> 20} MiB")
            continue
        left -= len(content)
        document = json.loads(content)
        first = first or {k: v for k, v in document.items() if k != "traceEvents"}
        shift = (int(document.get("baseTimeNanoseconds", 0)) - int(first.get("baseTimeNanoseconds", 0))) / 1000
        for event in document["traceEvents"]:
            if "ts" in event:
                event["ts"] += shift
            events.append(event)
    first.pop("distributedInfo", None)  # of one rank
    return json.dumps({**first, "traceEvents": events}).encode(), notes


def _unpacked(path: Path, most: int) -> bytes | None:
    with open_regular(path) as file, gzip.GzipFile(fileobj=io.BufferedReader(file)) as unpacked:  # pyright: ignore[reportArgumentType]
        content = unpacked.read(most + 1)
    return content if len(content) <= most else None
