"""How long a rank of this run may be silent: by the longest step, save and validation that its ranks have taken so far.

A pure function of the records and a clock that the caller reads, so that tests need not wait.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass

from phalanx.launch.watchdog.layout import Phase
from phalanx.launch.watchdog.reader import RankRecord

LEAST_S = 20.0
"""Shortest limit."""
STEPS = 5.0
"""The limit in steps, of the longest one so far."""
RARE = 2.0
"""The limit in the longest save, validation or first step (with its compilation) so far."""
RARE_PHASES = frozenset({Phase.SAVE, Phase.VALIDATION})
"""Phases that are no part of a step. The first of its kind may take any time."""


@dataclass
class _Seen:
    """The state of a rank at the last look."""

    phase: Phase
    phase_began: float
    step: int
    since: float
    """When the step count came to this value."""
    rare_s: float = 0.0
    """Seconds of RARE_PHASES since then."""


class Pace:
    """The pace of the ranks of one attempt on this machine."""

    def __init__(self) -> None:
        self._seen: dict[int, _Seen] = {}
        self.step_s = self.first_step_s = 0.0
        """Longest step, and longest first step, so far."""
        self.rare_s: dict[Phase, float] = {}
        """Longest time in each of RARE_PHASES so far."""

    def update(self, records: Iterable[RankRecord], now: float) -> None:
        """Takes a look at the ranks at `now`, in seconds of the clock of their records."""
        for record in records:
            if not record.first_step:
                continue
            seen = self._seen.get(record.rank)
            if seen is None:
                self._seen[record.rank] = _Seen(record.phase, record.phase_began, record.step, now)
                continue
            if record.phase_began != seen.phase_began:
                if seen.phase in RARE_PHASES:
                    took = record.phase_began - seen.phase_began
                    self.rare_s[seen.phase] = max(took, self.rare_s.get(seen.phase, 0.0))
                    seen.rare_s += took
                seen.phase, seen.phase_began = record.phase, record.phase_began
            if record.step > seen.step:
                took = max(0.0, now - seen.since - seen.rare_s)
                if seen.step < record.first_step:
                    self.first_step_s = max(self.first_step_s, took)
                else:  # at a look each second, many short steps may have been taken
                    self.step_s = max(self.step_s, took / (record.step - seen.step))
                seen.step, seen.since, seen.rare_s = record.step, now, 0.0

    def limit_s(self, record: RankRecord, most_s: float, load: float) -> float:
        """Returns the seconds that a rank which has done a step may be silent, at most `most_s`. `load` is the number
        of processes that want each core: they take turns."""
        if record.phase in RARE_PHASES and record.phase not in self.rare_s:
            return most_s
        rare = max([self.first_step_s, *self.rare_s.values()])
        return min(most_s, max(LEAST_S, STEPS * self.step_s, RARE * rare) * max(1.0, load))


def load_per_core() -> float:
    """Returns how many processes want each core of this machine: now, or over the last minute if that is more."""
    try:
        with open("/proc/loadavg", encoding="ascii") as file:
            minute, _, _, running, _ = file.read().split()
    except (OSError, ValueError):
        return 1.0
    return max(float(minute), float(running.partition("/")[0])) / (os.cpu_count() or 1)
