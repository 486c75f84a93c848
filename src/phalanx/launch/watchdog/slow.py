"""Names ranks that compute more slowly than those that do the same work, from their heartbeats."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

from phalanx.launch.watchdog.reader import RankRecord

FACTOR = 1.3
"""Own seconds per step, relative to the median of the other ranks, from which on a rank is slow."""
WINDOW_STEPS, WINDOW_S = 10, 10.0
"""A window ends when every rank has done so many steps and so many seconds have passed."""
WINDOWS = 2
"""Number of windows in a row in which a rank must be slow."""
REPEAT_S = 600.0
"""Seconds until the same rank is named again."""


@dataclass(frozen=True)
class SlowRank:
    """A rank that was slow in WINDOWS windows."""

    rank: int
    step: int
    own_s: float
    """Seconds per step that it spends itself: not waiting for other ranks."""
    median_s: float
    """The median of the other ranks that do the same work."""

    @property
    def factor(self) -> float:
        """Its own seconds relative to the others'."""
        return self.own_s / self.median_s


def median_if_slow(rank: int, own: Mapping[int, float], work: Mapping[int, int]) -> float | None:
    """Returns the median of the other ranks' own seconds, among those with equal `work`, if `rank` needs more than
    FACTOR times as long; else None."""
    others = [own[other] for other in own if other != rank and work[other] == work[rank]]
    slow = bool(others) and own[rank] > FACTOR * median(others)
    return median(others) if slow else None


class SlowRanks:
    """Watches the ranks' own seconds per step."""

    def __init__(self) -> None:
        self._began: tuple[float, dict[int, RankRecord]] | None = None
        self._times: dict[int, int] = {}
        self._named: dict[int, float] = {}

    def update(self, records: Mapping[int, RankRecord], now: float) -> list[SlowRank]:
        """Takes the ranks' records at time `now`, in seconds. Returns the ranks to be named."""
        if not all(record.trained for record in records.values()):
            self._began = None
            return []
        if self._began is None or self._began[1].keys() != records.keys():
            self._began = now, dict(records)
            return []
        since, before = self._began
        steps = {rank: records[rank].step - before[rank].step for rank in records}
        if now - since < WINDOW_S or min(steps.values(), default=0) < WINDOW_STEPS:
            return []
        self._began = now, dict(records)
        own = {rank: (records[rank].own_s - before[rank].own_s) / steps[rank] for rank in records}
        return [found for rank in records if (found := self._judge(rank, own, records, now))]

    def _judge(
        self, rank: int, own: Mapping[int, float], records: Mapping[int, RankRecord], now: float
    ) -> SlowRank | None:
        usual = median_if_slow(rank, own, {other: record.work for other, record in records.items()})
        self._times[rank] = self._times.get(rank, 0) + 1 if usual is not None else 0
        if usual is None or self._times[rank] < WINDOWS or now - self._named.get(rank, -REPEAT_S) < REPEAT_S:
            return None
        self._named[rank] = now
        return SlowRank(rank, records[rank].step, own[rank], usual)
