"""The metrics of a run, read back from metrics.jsonl as columns, and read on while the run goes on.

Rows that a later row takes back are dropped: a run that resumed, or went back to a checkpoint, repeats steps.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from phalanx.trackers.tracker import KEPT_ON_REWIND, ReadPosition, Row, read_lines, row_of

COLUMNS = (
    *("loss", "grad_norm", "lr", "step_time_s", "data_wait_s", "tps", "tps_total", "tflops", "mfu", "memory"),
    *("padding", "reward_margin", "reward_accuracy"),
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
