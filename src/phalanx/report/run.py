"""One run as its directory shows it: job, metrics, environment, checkpoints, attempts and profile.

Only files are read, and none of them is trusted: what cannot be read is a note, and the rest is shown.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from phalanx.bounded import read_json, read_tail, read_text
from phalanx.check.load import LoadedJob, load_file
from phalanx.errors import NotFoundError, PhalanxError
from phalanx.nearest import no_run
from phalanx.report.metrics import Metrics, Row

MOST_HISTORY = 200
"""Rows of a run's history that are shown; of more, the newest."""
_STEP_DIRECTORY = re.compile(r"step-(\d{1,12})")
_ATTEMPT = re.compile(r"attempt_(\d{1,6})")
_ALIVE_S = 20.0  # a trainer renews .lock every 5 s
_MOST_BYTES = 2**22  # of env.json and the tails of other files


@dataclass(frozen=True)
class CheckpointFiles:
    """A checkpoint's directory."""

    step: int
    bytes: int
    time: float
    """When it was renamed into place, in seconds since the epoch."""


@dataclass
class RunRecord:
    """Everything that the files of a run say."""

    path: Path
    """The run's directory."""
    metrics: Metrics = field(default_factory=Metrics)
    """The rows of metrics.jsonl."""
    loaded: LoadedJob | None = None
    """The job (`loaded.job`) with the origin of each value; None if config.yaml cannot be read."""
    environment: dict[str, Any] = field(default_factory=dict)
    """The contents of env.json: versions, machine, environment variables."""
    commands: list[str] = field(default_factory=list)
    checkpoints: list[CheckpointFiles] = field(default_factory=list)
    """The complete checkpoints, oldest first, each with `step`, `bytes` and `time`."""
    attempts: int = 0
    """Number of times its ranks were started."""
    hangs: dict[str, str] = field(default_factory=dict)
    """The watchdog's headline by attempt."""
    profile: dict[str, Any] | None = None
    notes: list[str] = field(default_factory=list)
    """Files that could not be read, with the reason."""
    alive: bool = False
    """A trainer holds the directory."""
    apart: str = ""
    """What tells the run from others of the same name on one page."""

    @property
    def name(self) -> str:
        """The run's name, which is that of its directory."""
        return f"{self.path.resolve().name}{self.apart and f' ({self.apart})'}"

    @property
    def total(self) -> int | None:
        """The job's number of steps."""
        return self.loaded.job.train.steps if self.loaded else None

    @property
    def state(self) -> str:
        """The state of the run in one word: running, finished, stopped, failed, interrupted or empty."""
        around = (row for row in reversed(self.metrics.events) if row["event"] in ("start", "end"))
        newest = next(around, None)
        if newest is None and not self.metrics.steps:
            return "running" if self.alive else "empty"
        if newest is not None and newest["event"] == "end":
            status = newest.get("status")
            if not (self.alive and status == "failed"):  # otherwise its launcher starts it again
                return status if status in ("finished", "stopped", "failed") else "finished"
        if self.alive:
            return "running"
        # Runs of older versions have no row at the end.
        return "finished" if self.total and self.metrics.last_step >= self.total else "interrupted"


def read_run(path: Path) -> RunRecord:
    """Returns the record of a run's directory. Raises DataError if it is not one."""
    require_run(path)
    record = RunRecord(path)
    _read_metrics(record)
    read_job(record)
    with suppress(OSError, ValueError):
        found = read_json(path / "env.json", _MOST_BYTES)
        record.environment = found if isinstance(found, dict) else {}
    with suppress(OSError, ValueError):
        record.commands = read_text(path / "command.txt", _MOST_BYTES).splitlines()
    record.checkpoints = list(_checkpoints(path / "checkpoints"))
    record.attempts, record.hangs = _attempts(path / "logs")
    record.profile = _profile(record)
    record.alive = is_alive(path)
    return record


def require_run(path: Path) -> None:
    """Raises NotFoundError if a folder is no run's directory; names the nearest one."""
    if (path / "config.yaml").is_file() or (path / "metrics.jsonl").is_file():
        return
    raise NotFoundError(no_run(path, "neither config.yaml nor metrics.jsonl"))


def is_alive(path: Path) -> bool:
    """Returns whether a trainer holds the directory: it renews the time of .lock."""
    with suppress(OSError):
        lock = path / ".lock"
        return lock.stat().st_size > 0 and time.time() - lock.stat().st_mtime < _ALIVE_S
    return False


def _read_metrics(record: RunRecord) -> None:
    try:
        record.metrics.read(record.path / "metrics.jsonl")
    except OSError as error:
        record.notes.append(f"metrics.jsonl cannot be read: {error.strerror or error}")
    if count := record.metrics.no_rows:
        which = f"line {record.metrics.first_no_row} is no row of metrics and is"
        if count > 1:
            which = f"{count} lines are no rows of metrics, the first is line {record.metrics.first_no_row}; they are"
        record.notes.append(f"metrics.jsonl: {which} left out")


def read_job(record: RunRecord) -> None:
    """Reads config.yaml into a record, or notes why it cannot be read."""
    path = record.path / "config.yaml"
    try:
        record.loaded = load_file(path)
    except (PhalanxError, OSError, ValueError) as error:
        record.notes.append(f"config.yaml cannot be read: {error}")


def _checkpoints(folder: Path) -> Iterator[CheckpointFiles]:
    """Yields the complete checkpoints in a folder, oldest first."""
    found = []
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            match = _STEP_DIRECTORY.fullmatch(entry.name)
            if match and os.path.isfile(f"{entry.path}/manifest.json"):
                with os.scandir(entry.path) as files:
                    size = sum(file.stat(follow_symlinks=False).st_size for file in files)
                found.append(CheckpointFiles(int(match[1]), size, entry.stat().st_mtime))
    yield from sorted(found, key=lambda each: each.step)


def _attempts(folder: Path) -> tuple[int, dict[str, str]]:
    """Returns the number of attempts, and the first line of the watchdog's report of those that hung."""
    names: list[str] = []
    with suppress(OSError):
        names = [name for name in os.listdir(folder) if _ATTEMPT.fullmatch(name)]
    hangs = {}
    for name in names:
        with suppress(OSError):
            text = read_tail(folder / name / "hang.txt", _MOST_BYTES).decode(errors="replace")
            hangs[name] = text.partition("\n")[0]
    return len(names), hangs


def _profile(record: RunRecord) -> dict[str, Any] | None:
    """Returns the document of the run's profile, if it has one."""
    try:
        found = read_json(record.path / "traces" / "profile.json")
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        record.notes.append(f"traces/profile.json cannot be read: {error}")
        return None
    return found if isinstance(found, dict) else None


def history(record: RunRecord) -> list[tuple[float, int, str, str]]:
    """Returns what happened beside the steps, in order: time, step, kind and a sentence."""
    found: list[tuple[float, int, str, str]] = []
    open_start: Row | None = None
    last_time = 0.0
    for row in record.metrics.events:
        if row["event"] == "start" and open_start is not None:
            found.append((last_time, row["step"], "interrupted", "the attempt ended without a word"))
        if row["event"] in ("start", "end"):
            open_start = row if row["event"] == "start" else None
        last_time = row["time"]
        if sentence := _sentence(row):
            found.append((row["time"], row["step"], str(row["event"]).replace("_", " "), sentence))
    known = {step for _, step, kind, _ in found if kind == "checkpoint"}
    older = (each for each in record.checkpoints if each.step not in known)  # of versions without such rows
    found += [(each.time, each.step, "checkpoint", f"step-{each.step:06d}") for each in older]
    found += [(0.0, 0, "hang", f"{attempt}: {words}") for attempt, words in record.hangs.items()]
    return sorted(found, key=lambda entry: (entry[0] or 1e18, entry[1]))[-MOST_HISTORY:]


def _sentence(row: Row) -> str:
    match row["event"]:
        case "start":
            layout = row.get("layout")
            words = "began" if row["step"] == 0 else f"went on from step {row['step']}"
            return f"{words}, {layout}" if layout else words
        case "end":
            return " ".join(str(row[name]) for name in ("status", "reason") if row.get(name))
        case "restart":
            return f"attempt {row.get('attempt')}: {row.get('reason')}"
        case "guard":
            return str(row.get("text"))
        case "slow_rank":
            return f"rank {row.get('rank')} on {row.get('host')}: {row.get('factor')} × the median"
        case "checkpoint":
            return str(row.get("name"))
        case _:
            return ""
