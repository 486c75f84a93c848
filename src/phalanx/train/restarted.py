"""The report of a run that the launcher has started again, and the progress that the launcher reads of a run."""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from pathlib import Path

from phalanx.bounded import field, parse_json, read_tail
from phalanx.launch.ranks import RESTARTED
from phalanx.train.recorder import Recorder

_TAIL_BYTES = 1 << 16  # of metrics.jsonl; a row has a few hundred, one about experts some thousands


def report_restart(recorder: Recorder, resumed: int) -> None:
    """Records the restart of this attempt, which continued from step `resumed`, now that its first step is done: the
    failure before it, and the seconds from there to here. Does nothing in an attempt that follows no failure."""
    if facts := os.environ.pop(RESTARTED, ""):
        found = json.loads(facts)
        recorder.restart(resumed, found["attempt"], found["reason"], time.time() - found["time"])


def newest_step(metrics: Path) -> tuple[int, float] | None:
    """Returns the newest step that metrics.jsonl reports, and when it was done, in seconds since the epoch; None if it
    reports none in its last rows."""
    try:
        lines = read_tail(metrics, _TAIL_BYTES).splitlines()
    except OSError:
        return None
    for line in reversed(lines):
        if line.startswith(b'{"event": "step"'):
            with suppress(ValueError):  # half a line, left by a rank that was killed
                row = parse_json(line)
                return field(row, "step", int), field(row, "time", float)
    return None
