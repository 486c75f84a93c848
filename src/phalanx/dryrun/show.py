"""Files about a rehearsed rank: a picture of its memory, and trace events."""

from __future__ import annotations

import json
from itertools import groupby
from typing import Any

from phalanx.config.job import Job
from phalanx.cost.breakdown import subject
from phalanx.dryrun.rehearse import RankRehearsal
from phalanx.pictures.profile import memory_svg


def picture(found: RankRehearsal, job: Job, limit: float) -> str:
    """Returns an SVG document of a rank's memory over its rehearsal."""
    about = subject(job, job.layout.processes)
    title = f"{about}: memory of rank {found.rank}"
    return memory_svg(title, [(moment.parts, moment.phase) for moment in found.timeline], limit, job.layout.line())


def trace(found: RankRehearsal) -> str:
    """Returns trace events as JSON: phases and calls as slices, the memory of each part as a counter. Their times are
    those of the rehearsal; only their order is that of the program."""
    if not found.timeline:
        return '{"traceEvents": []}\n'
    zero = found.timeline[0].at
    events: list[dict[str, Any]] = []
    for phase, run in groupby(found.timeline, key=lambda moment: moment.phase):
        moments = list(run)
        events.append(_slice("phases", phase, moments[0].at - zero, moments[-1].at - moments[0].at))
        events += [
            {"ph": "C", "pid": 0, "name": "memory", "ts": (moment.at - zero) / 1e3, "args": moment.parts}
            for moment in moments
        ]
    for call in found.calls:
        name = f"{call.axis} {call.collective} {call.bytes:,} bytes"
        events.append(_slice("calls", name, call.start - zero, max(0, call.done - call.start)))
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": events}) + "\n"


def _slice(row: str, name: str, start: int, length: int) -> dict[str, Any]:
    return {"ph": "X", "pid": 0, "tid": row, "name": name, "ts": start / 1e3, "dur": length / 1e3}
