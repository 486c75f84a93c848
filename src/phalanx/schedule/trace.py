"""A schedule as trace events, which Perfetto (ui.perfetto.dev) and chrome://tracing show: a row a rank."""

from __future__ import annotations

import json

from phalanx.schedule.timing import Timing

_MICROSECONDS = 1000.0
"""As which one unit of time is shown: the viewers measure in microseconds."""


def text(timing: Timing) -> str:
    """The events of every action as one JSON document."""
    events: list[dict[str, object]] = [
        {"name": "process_name", "ph": "M", "pid": 0, "args": {"name": f"pipeline {timing.schedule.name}"}}
    ]
    for rank, (program, starts) in enumerate(zip(timing.schedule.programs, timing.starts, strict=True)):
        events.append({"name": "thread_name", "ph": "M", "pid": 0, "tid": rank, "args": {"name": f"rank {rank}"}})
        events.append({"name": "thread_sort_index", "ph": "M", "pid": 0, "tid": rank, "args": {"sort_index": rank}})
        for action, start in zip(program, starts, strict=True):
            kind, stage, micro, part = action
            of_slice = f".{part}" if timing.schedule.slices > 1 else ""
            events.append(
                {
                    "name": f"{kind}{micro}{of_slice} stage {stage}",
                    "cat": kind,
                    "ph": "X",
                    "ts": start * _MICROSECONDS,
                    "dur": timing.costs[kind] * _MICROSECONDS,
                    "pid": 0,
                    "tid": rank,
                    "args": {"stage": stage, "micro_batch": micro, "slice": part},
                }
            )
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": events}) + "\n"
