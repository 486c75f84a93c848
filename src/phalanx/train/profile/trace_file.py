"""A rank's trace for Perfetto: torch's events of the profiled steps, and beside them our own ranges. Imports no torch.

Our rows come first: steps, phases, passes, layers, and what the rank waits for; collectives in flight are asynchronous
events, one track per axis and collective.
"""

from __future__ import annotations

import gzip
import io
import json
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
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
    with open_regular(path) as file, gzip.GzipFile(fileobj=io.BufferedReader(file)) as unpacked:
        content = unpacked.read(most + 1)
    return content if len(content) <= most else None


DEVICE_NUMBERS = {"cpu": 0, "cuda": 1, "xpu": 12}
"""torch's numbers of types of devices, in a trace (c10/core/DeviceType.h)."""
MOST_TENSORS = 30
"""Largest tensors that are listed."""


@dataclass(frozen=True)
class LiveTensor:
    """One tensor, or several of the same kind."""

    part: str
    """parameters, gradients, optimizer, activations, backward, communication or other."""
    name: str
    bytes: int
    count: int = 1


@dataclass(frozen=True)
class Range:
    """The activity of a rank from `start` to `end`, in nanoseconds; the innermost range names an allocation."""

    part: str
    name: str
    start: int
    end: int


def at_peak(
    events: Iterable[Mapping[str, Any]],
    clock: TraceClock,
    held: Sequence[LiveTensor],
    ranges: Sequence[Range],
    device_type: int,
) -> dict[str, Any]:
    """Returns the peak of memory in the profiled steps: {peak_bytes, held_bytes, parts {part: bytes}, tensors}.

    Args:
        events: the trace's, with the instants that are called [memory].
        clock: the trace's.
        held: the tensors that are there from step to step; allocations come on top of them.
        ranges: what the rank did.
        device_type: one of DEVICE_NUMBERS, of the device whose memory is meant.
    """
    moments = []
    operations = []
    for event in events:
        args = event.get("args") or {}
        if event.get("name") == "[memory]" and args.get("Device Type") == device_type:
            moments.append((float(event["ts"]), int(args["Bytes"]), int(args["Addr"])))
        elif event.get("cat") == "cpu_op":
            operations.append((float(event["ts"]), float(event["ts"]) + float(event.get("dur", 0)), event["name"]))
    moments.sort()
    peak = _live_at_peak(moments)
    found = _grouped([*held, *_named(peak, clock, ranges, operations)])
    parts: defaultdict[str, int] = defaultdict(int)
    for tensor in found:
        parts[tensor.part] += tensor.bytes
    before = sum(tensor.bytes for tensor in held)
    return {
        "peak_bytes": before + sum(size for _, size in peak),
        "held_bytes": before,
        "parts": dict(sorted(parts.items(), key=lambda item: -item[1])),
        "tensors": [asdict(tensor) for tensor in found[:MOST_TENSORS]],
    }


def _live_at_peak(moments: Sequence[tuple[float, int, int]]) -> list[tuple[float, int]]:
    """Returns time and bytes of the allocations that are alive when most is. `moments` are times, bytes (negative: a
    tensor is freed) and addresses."""
    live: dict[int, tuple[float, int]] = {}
    now = most = last = 0
    for place, (_, size, address) in enumerate(moments, 1):
        if size > 0:
            live[address] = 0.0, size
            now += size
        elif live.pop(address, None) is not None:  # what was there before the first step is not counted here
            now += size
        if now > most:
            most, last = now, place
    live.clear()
    for ts, size, address in moments[:last]:
        if size > 0:
            live[address] = ts, size
        else:
            live.pop(address, None)
    return list(live.values())


def _named(
    allocations: Iterable[tuple[float, int]],
    clock: TraceClock,
    ranges: Sequence[Range],
    operations: list[tuple[float, float, str]],
) -> list[LiveTensor]:
    operations.sort()
    starts = [start for start, _, _ in operations]
    found = []
    for ts, size in allocations:
        at = clock.ns(ts)
        around = [each for each in ranges if each.start <= at <= each.end]
        inner = min(around, key=lambda each: each.end - each.start, default=Range("other", "other", at, at))
        place, operation = bisect_right(starts, ts) - 1, ""
        for _ in range(64):  # the innermost operation is the last that began before and has not ended
            if place < 0:
                break
            if operations[place][1] >= ts:
                operation = operations[place][2]
                break
            place -= 1
        found.append(LiveTensor(inner.part, f"{inner.name}: {operation}" if operation else inner.name, size))
    return found


def _grouped(tensors: Iterable[LiveTensor]) -> list[LiveTensor]:
    """Returns the tensors with those of one name added up, the largest first."""
    groups: defaultdict[tuple[str, str], list[int]] = defaultdict(list)
    for tensor in tensors:
        groups[tensor.part, tensor.name].append(tensor.bytes)
    grouped = [LiveTensor(part, name, sum(sizes), len(sizes)) for (part, name), sizes in groups.items()]
    return sorted(grouped, key=lambda tensor: -tensor.bytes)
