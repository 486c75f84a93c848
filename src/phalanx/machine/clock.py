"""The clock of all measurements: calls take turns in independent rounds, which are repeated until they agree.

A round warms up, then repeats the calls in turns and takes each one's median. Disturbances by other programs last for
seconds, so they spoil all repeats of a round alike; only another round reveals them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import count as counting
from math import ceil
from typing import Any

import torch
import torch.distributed as dist

from phalanx.comm import blocking
from phalanx.config.calibration import STABLE_SPREAD, FitQuality, relative_spread
from phalanx.cost.fit import FitRow, median_error
from phalanx.data.files import Progress

MAX_CALLS = 20_000
"""Maximum number of calls per repeat."""
WINDOW = 3
"""Number of consecutive rounds that are compared and kept, and minimum number of rounds."""
QUICK_BUDGET_S, BUDGET_S = 2.0, 12.0
"""Seconds for rounds after the first WINDOW, with and without --quick. About a dozen kinds of measurement may each need
them, so that `bench compute` on a busy machine ends within half a minute more, or three minutes."""


@dataclass(frozen=True)
class Timings:
    """Seconds of several calls that took turns."""

    seconds: list[list[float]]
    """The median over the kept rounds of each call, by rank, in seconds."""
    spreads: list[float]
    """(slowest - fastest) / median of the kept rounds' means over the ranks, for each call."""
    rounds: int
    """Rounds that were measured."""

    @property
    def spread(self) -> float:
        """The median of the calls' spreads."""
        return statistics.median(self.spreads)


@dataclass(frozen=True)
class Clock:
    """Measures on one rank. Ranks of a process group must measure the same calls in the same order."""

    device: torch.device
    repeats: int
    """Repeats per call in a round."""
    min_repeat_s: float
    """Shortest repeat in seconds: a call that takes less is made several times in one."""
    budget_s: float = 0.0
    """Seconds after the first WINDOW rounds in which further ones may begin."""
    now: Callable[[], float] = time.perf_counter
    """Returns monotonic seconds."""

    @staticmethod
    def for_device(device: torch.device, quick: bool) -> Clock:
        """Returns the clock of `phalanx bench`, with or without --quick."""
        return Clock(device, *((1, 0.004, QUICK_BUDGET_S) if quick else (3, 0.02, BUDGET_S)))

    def measure(
        self,
        calls: Sequence[Callable[[], Any]],
        tick: Callable[[], None] = lambda: None,
        on_unstable: Callable[[float], None] = lambda spread: None,
    ) -> Timings:
        """Measures the calls in turns, so that a machine whose speed drifts is the same for all.

        Measures rounds until the spread over the last WINDOW of them is at most STABLE_SPREAD or the budget is spent;
        then keeps the WINDOW consecutive rounds that agree best. `tick` is called after every repeat of a call in the
        first WINDOW rounds, `on_unstable` with the spread where these do not agree. Returns the same on every rank.
        """
        counts = [self._calls_per_repeat(call) for call in calls]
        rounds: list[list[list[float]]] = []
        best: Timings | None = None
        deadline = 0.0
        for done in counting(1):
            rounds.append(self._round(calls, counts, tick if done <= WINDOW else lambda: None))
            if done < WINDOW:
                continue
            kept = _kept(rounds[-WINDOW:])
            best = kept if best is None or kept.spread < best.spread else best
            if best.spread <= STABLE_SPREAD:
                break
            if done == WINDOW:
                on_unstable(best.spread)
                deadline = self.now() + self.budget_s
            if slowest(self.now() - deadline) >= 0:
                break
        assert best is not None, "WINDOW rounds were measured"
        return Timings(best.seconds, best.spreads, len(rounds))

    def _calls_per_repeat(self, call: Callable[[], Any]) -> int:
        self._repeat(call, 1)
        once = slowest(self._repeat(call, 1))
        return max(1, min(MAX_CALLS, ceil(self.min_repeat_s / once)))

    def _round(
        self, calls: Sequence[Callable[[], Any]], counts: Sequence[int], tick: Callable[[], None]
    ) -> list[list[float]]:
        repeated: list[list[float]] = [[] for _ in calls]
        for _ in range(self.repeats):
            for times, call, count in zip(repeated, calls, counts, strict=True):
                times.append(self._repeat(call, count))
                tick()
        return [_all_ranks(statistics.median(times)) for times in repeated]

    def _repeat(self, call: Callable[[], Any], count: int) -> float:
        """Returns the seconds per call of `count` calls, which all ranks begin together."""
        if dist.is_initialized() and dist.get_world_size() > 1:
            blocking.barrier()
        synchronize(self.device)
        began = self.now()
        for _ in range(count):
            call()
        synchronize(self.device)
        return (self.now() - began) / count


def synchronize(device: torch.device) -> None:
    """Waits until the device has done what was started on it."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _kept(rounds: Sequence[list[list[float]]]) -> Timings:
    """Combines rounds, each of which has for each call the seconds by rank."""
    by_call = list(zip(*rounds, strict=True))
    seconds = [[statistics.median(times) for times in zip(*call, strict=True)] for call in by_call]
    spreads = [relative_spread([statistics.mean(by_rank) for by_rank in call]) for call in by_call]
    return Timings(seconds, spreads, len(rounds))


def _all_ranks(value: float) -> list[float]:
    if not dist.is_initialized():
        return [value]
    values = torch.zeros(dist.get_world_size(), dtype=torch.float64)
    values[dist.get_rank()] = value
    blocking.all_reduce(values)  # a CPU tensor goes over gloo, also beside NCCL
    return values.tolist()


def slowest(value: float) -> float:
    """Returns the largest value of any rank."""
    return max(_all_ranks(value))


def quality(timings: Sequence[Timings], rows: Iterable[FitRow] = ()) -> FitQuality:
    """Returns the quality of a fit to these timings, of which `rows` are the measurements beside their predictions."""
    if not timings:
        return FitQuality()
    spread = statistics.median(spread for one in timings for spread in one.spreads)
    return FitQuality(median_error(rows), spread, max(one.rounds for one in timings))


def counter(progress: Progress, what: str, total: int, done: int = 0) -> Callable[[], None]:
    """Returns a function that shows one more of `total` steps as done."""
    numbers = counting(done + 1)
    return lambda: progress(what, next(numbers), total)


def unstable(progress: Progress, what: str, budget_s: float) -> Callable[[float], None]:
    """Returns a function that says why a measurement takes longer (Clock.measure)."""
    return lambda spread: progress(
        f"{what}: rounds differ by {spread:.0%}; measuring again for {budget_s:.2g} s at most", 0, 0
    )
