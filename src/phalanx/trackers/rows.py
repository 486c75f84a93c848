"""Follows metrics.jsonl, and decides what of it a tracker gets: each step once, in order, also after a resume.

A tracker's place in the file is kept beside what it recorded, so that the next attempt goes on where this one ended.
A run that resumed from a checkpoint, or went back to it, repeats steps. Trackers that can take steps back do so. The
others keep the first version of a step, unless the tracker reads both versions at once.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from phalanx.bounded import field as field_of
from phalanx.bounded import open_regular, parse_json, read_json
from phalanx.data.files import write_atomic
from phalanx.trackers.tracker import Tracker, flat

Row = dict[str, Any]

KEPT_ON_REWIND = {"start", "restart", "guard"}
"""Events that stay when a run goes back: they tell of it."""
PREFIXES = {"step": "train"}
"""The first part of a value's name, where it is not the event of its row."""
BATCH_BYTES = 1 << 20
"""Most bytes of the file that are read, sent and flushed at once."""


@dataclass
class ReadPosition:
    """How far a tracker has come. Kept in its folder as JSON."""

    offset: int = 0
    """Bytes of metrics.jsonl that are done."""
    sent: dict[str, int] = field(default_factory=dict)
    """The last step sent, by event."""
    notes: dict[str, str] = field(default_factory=dict)
    """The tracker's own notes, such as the id of its run."""

    @property
    def step(self) -> int | None:
        """The last step sent."""
        return self.sent.get("step")

    @classmethod
    def read(cls, path: Path) -> ReadPosition:
        """Returns the place that a file holds; the beginning if there is none, or it is damaged."""
        with suppress(OSError, ValueError):
            found = read_json(path)
            sent = {str(event): int(step) for event, step in field_of(found, "sent", dict).items()}
            notes = {str(name): str(note) for name, note in field_of(found, "notes", dict).items()}
            return cls(field_of(found, "offset", int), sent, notes)
        return cls()

    def write(self, path: Path) -> None:
        """Keeps the place in a file."""
        write_atomic(path, json.dumps(asdict(self)).encode())


def place_of(directory: Path, tracker: str) -> Path:
    """Returns the file in a run directory that keeps how far a tracker has come."""
    return directory / "trackers" / tracker / "place.json"


def is_behind(directory: Path, tracker: str) -> bool:
    """Returns whether metrics.jsonl of a run has more than a tracker."""
    metrics = directory / "metrics.jsonl"
    return metrics.is_file() and ReadPosition.read(place_of(directory, tracker)).offset < metrics.stat().st_size


def read_rows(path: Path, place: ReadPosition) -> list[Row]:
    """Returns the rows of metrics.jsonl after `place`, at most BATCH_BYTES of whole lines, and moves the place. Lines
    that are no rows are skipped."""
    return [row for line in read_lines(path, place) if (row := row_of(line)) is not None]


def read_lines(path: Path, place: ReadPosition) -> list[bytes]:
    """Returns the lines of metrics.jsonl after `place`, at most BATCH_BYTES of whole ones, and moves the place."""
    try:
        with open_regular(path) as file:
            if place.offset > os.fstat(file.fileno()).st_size:
                place.offset = 0  # another file took its place
            file.seek(place.offset)
            content = file.read(BATCH_BYTES)
    except FileNotFoundError:
        return []
    end = content.rfind(b"\n") + 1
    if not end and len(content) == BATCH_BYTES:
        end = len(content)  # no row is so long: the lines of its parts are skipped
    place.offset += end
    return content[:end].splitlines()


def row_of(line: bytes) -> Row | None:
    """Returns the row of a line, or None if it is none."""
    with suppress(ValueError):
        row = parse_json(line)
        if isinstance(row, dict) and isinstance(row.get("event"), str):
            return row
    return None


def without_superseded(rows: Sequence[Row]) -> list[Row]:
    """Returns the rows without those that a later row of them takes back: the run went on from an earlier step. Rows
    that last come with that step instead."""
    kept: list[Row] = []
    for row in rows:
        if (after := _resumes_after(row)) is not None:
            kept = [_until(each, after) for each in kept if each["event"] in KEPT_ON_REWIND or _step(each) <= after]
        kept.append(row)
    return kept


def _until(row: Row, after: int) -> Row:
    return {**row, "step": after} if _step(row) > after else row


def _resumes_after(row: Row) -> int | None:
    """Returns the step before that of a row, if the row tells where the run is: what came after it is void."""
    before = {"start": 0, "step": 1}.get(row["event"])
    return None if before is None else _step(row) - before


def _step(row: Row) -> int:
    return row["step"] if isinstance(row.get("step"), int) else 0


def send(tracker: Tracker, rows: Iterable[Row], place: ReadPosition) -> None:
    """Logs rows in order, each step once, and notes in `place` what was sent."""
    for row in without_superseded([*rows]):
        event, step, after = row["event"], _step(row), _resumes_after(row)
        if tracker.can_rewind and after is not None and after < place.sent.get("step", 0):
            tracker.rewind(after)
            place.sent = {each: min(sent, after) for each, sent in place.sent.items()}
        if event in KEPT_ON_REWIND:
            step = step if tracker.can_rewind else max(step, *place.sent.values(), 0)
        elif step <= place.sent.get(event, -1):
            continue
        place.sent[event] = step
        tracker.log(step, values_of(row), time_of(row))


def values_of(row: Mapping[str, Any]) -> dict[str, float]:
    """Returns the numbers of a row by name: "train/loss", "validation/val_loss", "traffic/traffic_bytes/tp/…"."""
    prefix = PREFIXES.get(row["event"], row["event"])
    return {
        f"{prefix}/{name}": value
        for name, value in flat(row, "/").items()
        if name not in ("step", "time") and isinstance(value, int | float) and not isinstance(value, bool)
    }


def time_of(row: Mapping[str, Any]) -> float:
    """Returns when a row was written, in seconds since the epoch."""
    time = row.get("time")
    return float(time) if isinstance(time, int | float) else 0.0
