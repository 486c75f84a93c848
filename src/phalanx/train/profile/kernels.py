"""A rank's record by its GPU's kernels instead of its host's calls. Imports no torch. Not yet tried on a GPU.

The host runs ahead of the device, so its times say nothing about where the device's went. A kernel belongs to the pass
in which the host launched it, and a collective's kernel to the call that launched it: torch's trace connects a kernel
with its launch by a correlation number.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from phalanx.train.profile.shares import Communication, Intervals, ProfiledRank, union
from phalanx.train.profile.trace_file import TraceClock

_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHES = ("cuda_runtime", "cuda_driver")
_PARTS = ("recompute", "forward", "backward", "optimizer")


def by_kernels(record: ProfiledRank, events: Iterable[Mapping[str, Any]], clock: TraceClock) -> ProfiledRank:
    """Returns the record with kernels in the place of the host's passes and calls; the data's waits stay the host's."""
    launched: dict[int, int] = {}
    kernels: list[tuple[int, int, str, int]] = []
    for event in events:
        correlation = (event.get("args") or {}).get("correlation")
        if correlation is None or "dur" not in event:
            continue
        start = clock.ns(float(event["ts"]))
        if event.get("cat") in _LAUNCHES:
            launched[correlation] = start
        elif event.get("cat") in _ON_DEVICE:
            kernels.append((start, start + round(float(event["dur"]) * 1000), str(event["name"]), correlation))
    work: defaultdict[str, Intervals] = defaultdict(list)
    calls: list[Communication] = []
    ordered = sorted(record.calls, key=lambda call: call.start)
    starts = [call.start for call in ordered]
    for start, end, name, correlation in sorted(kernels):
        at = launched.get(correlation, start)
        if name.lower().startswith("nccl"):
            call = _call_at(ordered, starts, at)
            if call is not None:
                calls.append(replace(call, start=start, end=end, waited=start, launched=start))
                continue
        part = next((part for part in _PARTS if _contains(record.work.get(part, []), at)), "")
        if part:
            work[part].append((start, end))
    data = {"data": record.work.get("data", [])}
    parts = {part: union(spans) for part, spans in work.items()}
    return replace(record, work={**parts, **data}, calls=calls, device="cuda")


def _call_at(calls: list[Communication], starts: list[int], at: int) -> Communication | None:
    """Returns the call that the host was starting at a moment."""
    place = bisect_right(starts, at) - 1
    return calls[place] if place >= 0 and at <= calls[place].launched else None


def _contains(spans: Intervals, at: int) -> bool:
    place = bisect_right(spans, (at, 2**63)) - 1
    return place >= 0 and at <= spans[place][1]
