"""The ranks' own work, and those that are slow in all of it.

A rank's own time is what it spends without waiting for others. In a collective all ranks wait for the slowest, so only
own times tell which one it is; they need no common clock.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from phalanx.comm import blocking
from phalanx.comm.axis import Axis
from phalanx.launch.watchdog.diagnosis import median_if_slow
from phalanx.machine.clock import slowest, synchronize
from phalanx.pictures.elements import seconds

PROBE_S = 0.005
"""Seconds that the probe's matrix products should take on one rank."""
PROBE_REPEATS = {True: 8, False: 16}
"""Rounds of the probe in a window, by --quick."""
SIDE = {"cpu": 192, "cuda": 2048}
"""Side of the square matrices, by kind of device."""
MOST_PRODUCTS = 1000


@dataclass(frozen=True)
class ProbeTimes:
    """One rank's medians over one window of the probe, in seconds."""

    compute_s: float
    """The matrix products."""
    arrival_s: float
    """From the end of the products until its collective has started."""
    wait_s: float
    """Until the collective was complete: the wait for the slowest rank, and the message."""


@dataclass(frozen=True)
class Straggler:
    """A rank whose own time is more than 1.3 times the median of the others, in every window."""

    rank: int
    host: str
    stage: str
    """compute, arrival or training."""
    own_s: float
    median_s: float

    @property
    def factor(self) -> float:
        """Its own time relative to the median of the others."""
        return self.own_s / self.median_s

    def line(self) -> str:
        """Returns the sentence for the user."""
        what = {
            "compute": "in the compute probe",
            "arrival": "from a computation to its collective",
            "training": "of its own per training step",
        }[self.stage]
        return (
            f"rank {self.rank} ({self.host}) is slow: {seconds(self.own_s)} {what}, {self.factor:.2f} × the median "
            f"of the others ({seconds(self.median_s)})"
        )


class Probe:
    """Matrix products followed by a small all-reduce, as a training step in small. All ranks make one together."""

    def __init__(self, world: Axis, device: torch.device, quick: bool):
        self.world, self.device, self.repeats = world, device, PROBE_REPEATS[quick]
        side = SIDE[device.type]
        self.a, self.b = torch.ones(side, side, device=device), torch.ones(side, side, device=device)
        self.message = torch.zeros(256, device=device)
        self.products = 1
        self.compute()
        began = time.perf_counter()
        self.compute()
        wanted = PROBE_S / max(time.perf_counter() - began, 1e-6)
        self.products = int(slowest(min(MOST_PRODUCTS, max(1, round(wanted)))))

    def compute(self) -> None:
        """Computes the products, and waits for the device."""
        for _ in range(self.products):
            torch.mm(self.a, self.b)
        synchronize(self.device)

    def window(self) -> ProbeTimes:
        """Measures one window."""
        compute, arrival, wait = [], [], []
        blocking.barrier()
        for _ in range(self.repeats):
            began = time.perf_counter()
            self.compute()
            computed = time.perf_counter()
            pending = self.world.all_reduce(self.message)
            called = time.perf_counter()
            pending.wait()
            synchronize(self.device)
            compute.append(computed - began)
            arrival.append(called - computed)
            wait.append(time.perf_counter() - called)
        return ProbeTimes(*map(statistics.median, (compute, arrival, wait)))


def in_probe(windows: Sequence[Mapping[int, ProbeTimes]], hosts: Sequence[str]) -> list[Straggler]:
    """Returns the ranks that were slow in every window, each a time per rank.

    A rank that computes as fast as the others may still start its collectives late. Then the delay has to show in the
    whole of its own time, since starting a collective takes only microseconds."""
    found = slow_in_all([{rank: t.compute_s for rank, t in window.items()} for window in windows], hosts, "compute")
    named = {each.rank for each in found}
    whole = [{rank: t.compute_s + t.arrival_s for rank, t in window.items()} for window in windows]
    return found + [each for each in slow_in_all(whole, hosts, "arrival") if each.rank not in named]


def slow_in_all(
    windows: Sequence[Mapping[int, float]], hosts: Sequence[str], stage: str, work: Mapping[int, int] | None = None
) -> list[Straggler]:
    """Returns the ranks whose own seconds are FACTOR times the median of the others in every window. Only ranks with
    equal `work` are compared; without it all are."""
    found = []
    for rank in windows[-1] if windows else ():
        medians = [median_if_slow(rank, own, work or dict.fromkeys(own, 0)) for own in windows]
        if all(median is not None for median in medians):
            last = medians[-1]
            assert last is not None, "all of them are"
            found.append(Straggler(rank, hosts[rank], stage, windows[-1][rank], last))
    return found
