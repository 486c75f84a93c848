"""The largest tensors at the peak of memory: from the profiler's record of allocations, and what was there before.

Imports no torch. An allocation is named after what the rank did when it made it: the pass and layer, and the innermost
operation of torch.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from phalanx.train.profile.trace_file import TraceClock

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
        device_type: torch's number of the device whose memory is meant: 0 a CPU, 1 CUDA.
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
