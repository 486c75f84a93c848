"""A tracker: what a run's metrics, files and end are sent to; and what of metrics.jsonl it gets: each step once, in
order, also after a resume.

A tracker's place in the file is kept beside what it recorded, so that the next attempt goes on where this one ended.
A run that resumed from a checkpoint, or went back to it, repeats steps. Trackers that can take steps back do so. The
others keep the first version of a step, unless the tracker reads both versions at once.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from phalanx.bounded import field as field_of
from phalanx.bounded import open_regular, parse_json, read_json
from phalanx.data.files import write_atomic


@dataclass(frozen=True)
class TrackedRun:
    """The run that a tracker records, as it knows it when it opens."""

    name: str
    directory: Path
    """The run directory."""
    folder: Path
    """The tracker's own folder in it, which exists."""
    job: Mapping[str, Any]
    """The resolved job, as nested plain values."""
    layout: str
    """The layout in one line."""
    facts: Mapping[str, Any]
    """Host, versions and so on, as in env.json; without secrets."""
    step: int | None = None
    """The last step that the tracker has; None for a run that it does not know. Steps after it may come again."""
    notes: dict[str, str] = field(default_factory=dict)
    """Values that the tracker finds again after a resume, such as an id; they are kept in the run directory."""

    def hyperparameters(self) -> dict[str, Any]:
        """Returns every value of the job by its dotted path, and the layout's line."""
        return {**flat(self.job, "."), "layout": self.layout}


class Tracker:
    """The base of trackers. What a method raises drops the tracker, and never stops the run."""

    can_rewind = False
    """Whether steps can be taken back (`rewind`). Otherwise a step that the run repeats is not sent again."""

    def log(self, step: int, values: Mapping[str, float], time: float) -> None:
        """Records the values of a row of metrics.jsonl after optimizer step `step`, by names such as "train/loss".
        `time` is in seconds since the epoch."""
        raise NotImplementedError

    def rewind(self, step: int) -> None:
        """Takes back everything after `step`: the run resumed from there, and will log those steps again."""

    def file(self, path: Path) -> None:
        """Keeps a file of the run: the job, or a picture."""

    def flush(self) -> None:
        """Returns when what was logged so far can no longer be lost with this process."""

    def close(self, status: str) -> None:
        """Ends the attempt: "finished", "stopped" (it can be resumed), "failed", or "killed"."""


def flat(values: Mapping[str, Any], separator: str) -> dict[str, Any]:
    """Returns the leaves of nested mappings, by their paths."""
    return dict(_leaves(values, "", separator))


def _leaves(values: Mapping[str, Any], prefix: str, separator: str) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}{separator}", separator)
        else:
            yield f"{prefix}{name}", value


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
            kept = [
                ({**each, "step": after} if _step(each) > after else each)
                for each in kept
                if each["event"] in KEPT_ON_REWIND or _step(each) <= after
            ]
        kept.append(row)
    return kept


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
