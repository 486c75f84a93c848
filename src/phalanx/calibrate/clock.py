"""How long something takes: medians of repeats after a warm-up, on all ranks at once."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

import torch
import torch.distributed as dist

MOST_CALLS = 20_000
"""In one repeat."""


@dataclass(frozen=True)
class Clock:
    """Measures on one rank; ranks that are in a process group have to measure the same things in the same order."""

    device: torch.device
    repeats: int
    least_s: float
    """Shortest repeat: a call that takes less is made several times in it."""

    @staticmethod
    def of(device: torch.device, quick: bool) -> Clock:
        return Clock(device, *((3, 0.004) if quick else (7, 0.02)))

    def turns(self, calls: Sequence[Callable[[], Any]], tick: Callable[[], None] = lambda: None) -> list[list[float]]:
        """Of each call the median over the repeats, on every rank, by rank. The calls take turns, so that a machine
        whose speed wanders is the same for all. `tick` is called after every repeat of a call."""
        counts: list[int] = []
        for call in calls:
            self._repeat(call, 1)
            once = max(_everyone(self._repeat(call, 1)))
            counts.append(max(1, min(MOST_CALLS, ceil(self.least_s / once))))
        found: list[list[float]] = [[] for _ in calls]
        for _ in range(self.repeats):
            for times, call, count in zip(found, calls, counts, strict=True):
                times.append(self._repeat(call, count))
                tick()
        return [_everyone(statistics.median(times)) for times in found]

    def _repeat(self, call: Callable[[], Any], count: int) -> float:
        """Seconds of a call in `count` of them, begun by all ranks together."""
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.barrier()
        self._wait()
        began = time.perf_counter()
        for _ in range(count):
            call()
        self._wait()
        return (time.perf_counter() - began) / count

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _everyone(value: float) -> list[float]:
    """Every rank's value, by rank."""
    if not dist.is_initialized():
        return [value]
    values = torch.zeros(dist.get_world_size(), dtype=torch.float64)
    values[dist.get_rank()] = value
    dist.all_reduce(values)  # a tensor on the CPU: gloo's, also beside NCCL
    return values.tolist()
