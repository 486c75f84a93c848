"""One run as its directory shows it: job, metrics, environment, checkpoints, attempts and profile.

Only files are read, and none of them is trusted: what cannot be read is a note, and the rest is shown.
"""

from __future__ import annotations

import math
import os
import re
import time
from array import array
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from phalanx.bounded import read_json, read_tail, read_text
from phalanx.check.load import LoadedJob, load_file
from phalanx.errors import NotFoundError, PhalanxError
from phalanx.nearest import no_run
from phalanx.notebook import ShownInNotebooks
from phalanx.trackers.tracker import KEPT_ON_REWIND, ReadPosition, Row, read_lines, row_of

COLUMNS = (
    *("loss", "grad_norm", "lr", "step_time_s", "data_wait_s", "tps", "tps_total", "tflops", "mfu", "memory"),
    *("padding", "mtp_loss", "reward_margin", "reward_accuracy", "reward", "kl", "length"),
)
"""The figures of a step that are kept."""
HISTORY = KEPT_ON_REWIND | {"end", "slow_rank"}
"""Events that stay when a run goes back: they tell of it."""
MOST_EVENTS = 20_000
"""Rows besides steps that are kept; of more, the newest."""
_MOST_STEP = 10**12
_LARGEST = 1e300


@dataclass
class Metrics:
    """The rows of a run's metrics.jsonl so far."""

    steps: array[int] = field(default_factory=lambda: array("q"))
    """The numbers of the steps, ascending."""
    times: array[float] = field(default_factory=lambda: array("d"))
    """When each was done, in seconds since the epoch."""
    columns: dict[str, array[float]] = field(default_factory=lambda: {name: array("d") for name in COLUMNS})
    """A value per step, NaN where its row has none."""
    source_tokens: dict[str, float] = field(default_factory=dict)
    """Tokens of each source of a mixture up to the newest step, by path."""
    events: list[Row] = field(default_factory=list)
    """All other rows, in order; each has an `event`, and `step` and `time` as numbers."""
    place: ReadPosition = field(default_factory=ReadPosition)
    lines: int = 0
    """Lines so far."""
    no_rows: int = 0
    """Lines that are no rows, which are left out."""
    first_no_row: int = 0
    """The number of the first of them, from 1."""

    def read(self, path: Path) -> bool:
        """Reads what has been added to a file, which may be missing or damaged: lines that are no rows are skipped.
        Returns whether there was something new. Raises OSError if it cannot be read."""
        with suppress(FileNotFoundError):
            if path.stat().st_size < self.place.offset:  # another file took its place
                vars(self).update(vars(Metrics()))
        found = False
        while True:
            before = self.place.offset
            for line in read_lines(path, self.place):
                self.lines += 1
                if not line.strip() or ((row := row_of(line)) is not None and self._add(row)):
                    continue
                self.no_rows += 1
                self.first_no_row = self.first_no_row or self.lines
            if self.place.offset == before:
                return found
            found = True

    def _add(self, row: Row) -> bool:
        """Adds a row. Returns whether it is one: a step has a number."""
        step = row.get("step")
        if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step < _MOST_STEP:
            step = self.steps[-1] if self.steps else 0
            if row["event"] == "step":
                return False
        row = {**row, "step": step, "time": number(row.get("time")) or 0.0}
        if row["event"] in ("step", "start"):
            self._take_back(step - (row["event"] == "step"))
        if row["event"] == "step":
            self._add_step(row)
        else:
            self.events.append(row)
            if len(self.events) > MOST_EVENTS:
                del self.events[: MOST_EVENTS // 2]
        return True

    def _add_step(self, row: Row) -> None:
        if "tps_per_device" in row:  # of an older version, whose tps is of the whole job
            row = {**row, "tps": row["tps_per_device"], "tps_total": row.get("tps")}
        self.source_tokens = numbers_of(row.get("source_tokens")) or self.source_tokens
        self.steps.append(row["step"])
        self.times.append(row["time"])
        for name, column in self.columns.items():
            value = number(row.get(name))
            column.append(math.nan if value is None else value)

    def _take_back(self, after: int) -> None:
        """Drops what lies after a step from which the run goes on."""
        kept = bisect_left(self.steps, after + 1)
        if kept < len(self.steps):
            for column in (self.steps, self.times, *self.columns.values()):
                del column[kept:]
            self.events = [row for row in self.events if row["event"] in HISTORY or row["step"] <= after]

    @property
    def last_step(self) -> int:
        """The newest step, 0 before the first."""
        return self.steps[-1] if self.steps else 0

    @property
    def newest(self) -> float:
        """When the newest row was written, in seconds since the epoch; 0 without rows."""
        ends = [*self.times[-1:], *(row["time"] for row in self.events[-1:])]
        return max(ends, default=0.0)

    def points(self, name: str) -> list[tuple[float, float]]:
        """Returns (step, value) of a column, where there is one."""
        return [(x, y) for x, y in zip(self.steps, self.columns[name], strict=True) if not math.isnan(y)]

    def values(self, name: str, last: int = 0) -> list[float]:
        """Returns the values of a column, or only its `last` ones."""
        return [value for value in self.columns[name][-last:] if not math.isnan(value)]

    def of(self, event: str) -> Iterator[Row]:
        """Yields the rows of an event."""
        return (row for row in self.events if row["event"] == event)

    def last(self, event: str) -> Row | None:
        """Returns the newest row of an event."""
        return next((row for row in reversed(self.events) if row["event"] == event), None)


def number(value: Any) -> float | None:
    """Returns a finite number, or None for whatever else stands in a row."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) and abs(value) < _LARGEST else None


def numbers_of(value: Any) -> dict[str, float]:
    """Returns the finite numbers of an object by name; nothing of what is none."""
    pairs = value.items() if isinstance(value, dict) else ()
    return {str(name): found for name, each in pairs if (found := number(each)) is not None}


def traffic_of(row: Mapping[str, Any] | None) -> dict[str, dict[str, float]]:
    """Returns the bytes that rank 0 sent per step by axis and collective, of a row of the event traffic; what does not
    look like it is left out."""
    found: dict[str, dict[str, float]] = {}
    table = row.get("traffic_bytes") if row else None
    for axis, by in table.items() if isinstance(table, dict) else ():
        for collective, sent in by.items() if isinstance(by, dict) else ():
            if (count := number(sent)) is not None and count >= 0:
                found.setdefault(str(axis), {})[str(collective)] = count
    return found


def middle(values: Sequence[float]) -> float | None:
    """Returns the median, None without values."""
    ordered = sorted(values)
    half = len(ordered) // 2
    if not ordered:
        return None
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


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
class RunRecord(ShownInNotebooks):
    """Everything that the files of a run say."""

    page, height = "phalanx.report.page:of_run", 900

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
    try:
        record.metrics.read(record.path / "metrics.jsonl")
    except OSError as error:
        record.notes.append(f"metrics.jsonl cannot be read: {error.strerror or error}")
    if count := record.metrics.no_rows:
        which = f"line {record.metrics.first_no_row} is no row of metrics and is"
        if count > 1:
            which = f"{count} lines are no rows of metrics, the first is line {record.metrics.first_no_row}; they are"
        record.notes.append(f"metrics.jsonl: {which} left out")
    read_job(record)
    with suppress(OSError, ValueError):
        found = read_json(path / "env.json", _MOST_BYTES)
        record.environment = found if isinstance(found, dict) else {}
    with suppress(OSError, ValueError):
        record.commands = read_text(path / "command.txt", _MOST_BYTES).splitlines()
    record.checkpoints = list(_checkpoints(path / "checkpoints"))
    folder = path / "logs"
    names: list[str] = []
    with suppress(OSError):
        names = [name for name in os.listdir(folder) if _ATTEMPT.fullmatch(name)]
    hangs = {}
    for name in names:
        with suppress(OSError):
            text = read_tail(folder / name / "hang.txt", _MOST_BYTES).decode(errors="replace")
            hangs[name] = text.partition("\n")[0]
    record.attempts, record.hangs = len(names), hangs
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


def numbers(values: Any) -> str:
    """Formats a list of a row."""
    return ", ".join(map(str, values[:16])) if isinstance(values, list) else ""


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
        case "replicas":
            changes = (f"{each} {named}" for each in ("lost", "joined") if (named := numbers(row.get(each))))
            return f"{', '.join(changes)}; there are {numbers(row.get('members'))}"
        case "guard":
            return str(row.get("text"))
        case "slow_rank":
            return f"rank {row.get('rank')} on {row.get('host')}: {row.get('factor')} × the median"
        case "checkpoint":
            return str(row.get("name"))
        case _:
            return ""
