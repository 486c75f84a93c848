"""Times every collective of an axis over a range of sizes, and fits latency and bandwidth (alpha and beta) to them.

All lines of the axis communicate at the same time, as in training. Calls take turns, and each is the median of several
rounds (calibrate/clock.py); the fit is that of `phalanx bench comm`.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, get_args

import torch
import torch.distributed as dist

from phalanx.blocks.operator import Collective
from phalanx.calibrate.clock import WINDOW, Clock
from phalanx.calibrate.comm import call_of
from phalanx.comm import blocking
from phalanx.comm.axis import Axis
from phalanx.config.cluster import Cluster
from phalanx.cost.communication import RankGroup
from phalanx.cost.fit import COLLECTIVES, Transfer, fit_link, link_rows, median_error
from phalanx.launch.watchdog.slow import FACTOR
from phalanx.parallel.mesh import AxisGeometry
from phalanx.selftest.calls import ALL, root

SIZES = {True: [2**10, 2**16, 2**20, 2**22], False: [2**10, 2**13, 2**16, 2**18, 2**20, 2**22, 2**24]}
"""Bytes of the whole tensor, by --quick."""
FEWEST_SIZES = 3
UNFITTED = ("broadcast", "reduce", "scatter", "gather")
"""Collectives that are timed beside those that a link is fitted to."""
MIN_REPEAT_S = 0.002
"""Shortest repeat of a call, in seconds."""


@dataclass(frozen=True)
class CallTime:
    """Seconds of one collective over a tensor of so many bytes: the slowest rank's."""

    collective: str
    bytes: int
    seconds: float


@dataclass(frozen=True)
class SlowLine:
    """A line of an axis whose collectives take longer than those of the others, which ran at the same time."""

    ranks: list[int]
    seconds: float
    median_s: float


@dataclass(frozen=True)
class TimedAxis:
    """One axis: its times and the link fitted to them."""

    axis: str
    ranks: int
    stride: int
    place: str
    """Where the ranks of a line are: "one host", "one rank per host", or "several hosts"."""
    latency_us: float
    """Alpha: microseconds of a message."""
    gbs: float
    """Beta: 10⁹ bytes per second and rank, one way, that large messages reach."""
    error: float
    """Median relative error of the fit."""
    spread: float
    """Median spread of the rounds, (slowest - fastest) / median."""
    times: list[CallTime]
    barrier_s: float
    left_out: list[int] = field(default_factory=list)
    """Bytes that were not measured, since the link is too slow for them."""
    slow_lines: list[SlowLine] = field(default_factory=list)

    @property
    def machine(self) -> Cluster:
        """A cluster with the fitted link."""
        return _cluster(self.ranks, self.place, self.latency_us, self.gbs)

    @property
    def transfers(self) -> list[Transfer]:
        """The times that the cost model has a formula for."""
        known = get_args(Collective)
        group = RankGroup(self.ranks)
        return [Transfer(t.collective, t.bytes, group, t.seconds) for t in self.times if t.collective in known]  # pyright: ignore[reportArgumentType]


def time_axis(
    axis: Axis,
    name: str,
    geometry: AxisGeometry,
    hosts: Sequence[str],
    device: torch.device,
    *,
    quick: bool,
    budget_s: float,
    tick: Callable[[int, int], None],
) -> TimedAxis:
    """Measures one axis. All ranks of the world call it; returns the same on each.

    Args:
        axis: this rank's line.
        geometry: the axis among all ranks, whose `hosts` are those of each rank.
        budget_s: seconds for the whole; sizes that would take longer are left out.
        tick: called with the number of calls measured, and their total.
    """
    sizes, left_out = _affordable(axis, SIZES[quick], device, budget_s)
    calls = [(collective, size) for size in sizes for collective in (*COLLECTIVES, *UNFITTED)]
    make = {
        (name, size): call_of(name, axis, size, device) if name in COLLECTIVES else _other(name, axis, size, device)
        for name, size in calls
    }
    done, total = 0, (len(calls) + 1) * WINDOW

    def count() -> None:
        nonlocal done
        done += 1
        tick(done, total)

    clock = Clock(device, repeats=1, min_repeat_s=MIN_REPEAT_S)
    timings = clock.measure([*make.values(), lambda: _barrier(axis)], count)
    times = [CallTime(*call, max(by_rank)) for call, by_rank in zip(calls, timings.seconds, strict=False)]
    place = place_of(geometry, hosts)
    fitted = [
        Transfer(t.collective, t.bytes, RankGroup(axis.size), t.seconds)  # pyright: ignore[reportArgumentType]
        for t in times
        if t.collective in COLLECTIVES
    ]
    per_node = 1 if place == "one rank per host" else axis.size
    link = fit_link(fitted, per_node)
    found = TimedAxis(
        axis=name,
        ranks=axis.size,
        stride=geometry.stride,
        place=place,
        latency_us=link.latency_us,
        gbs=link.gbs,
        error=0.0,
        spread=timings.spread,
        times=times,
        barrier_s=max(timings.seconds[-1]),
        left_out=left_out,
        slow_lines=_slow_lines(geometry, dict(zip(calls, timings.seconds, strict=False)), sizes[-1]),
    )
    return replace(found, error=median_error(link_rows(found.machine, fitted)))


def lines_of(geometry: AxisGeometry, world: int) -> list[list[int]]:
    """Returns the ranks of every line of an axis."""
    firsts = [rank for rank in range(world) if geometry.place(rank) == 0]
    return [[first + place * geometry.stride for place in range(geometry.size)] for first in firsts]


def place_of(geometry: AxisGeometry, hosts: Sequence[str]) -> str:
    """Returns where the ranks of the axis's lines are (TimedAxis.place)."""
    counts = {len({hosts[rank] for rank in line}) for line in lines_of(geometry, len(hosts))}
    if counts == {1}:
        return "one host"
    return "one rank per host" if counts == {geometry.size} else "several hosts"


def _cluster(ranks: int, place: str, latency_us: float, gbs: float) -> Cluster:
    from phalanx.config.cluster import Link

    link = Link(gbs=gbs, latency_us=latency_us, reached=1.0)
    return Cluster(devices_per_node=1 if place == "one rank per host" else ranks, intra=link, inter=link)


def _affordable(axis: Axis, sizes: Sequence[int], device: torch.device, budget_s: float) -> tuple[list[int], list[int]]:
    """Returns the sizes that can be measured within the budget, at least the first few, and the others."""
    probe = 2**18
    call = call_of("all_reduce", axis, probe, device)
    call()
    seconds = torch.tensor([Clock(device, 1, 0.0).measure([call]).seconds[0]], dtype=torch.float64).max()
    blocking.all_reduce(seconds, dist.ReduceOp.MAX)
    per_byte = seconds.item() / probe
    repeats = (WINDOW + 2) * (len(COLLECTIVES) + len(UNFITTED))
    spent, kept = 0.0, []
    for size in sizes:
        spent += repeats * (per_byte * size + 2 * MIN_REPEAT_S)
        if len(kept) >= FEWEST_SIZES and spent > budget_s:
            break
        kept.append(size)
    return kept, list(sizes[len(kept) :])


def _other(name: str, axis: Axis, size: int, device: torch.device) -> Callable[[], Any]:
    """Returns one of the calls that no link is fitted to, over `size` bytes."""
    collective = next(each for each in ALL if each.name == name)
    if axis.gloo and not collective.of_axis:
        device = torch.device("cpu")
    n = max(1, size // 4 // axis.size)
    whole, part = torch.zeros(n * axis.size, device=device), torch.zeros(n, device=device)
    if name == "scatter":
        x, out = (whole if axis.rank == root(axis.size) else whole[:0]), part
    elif name == "gather":
        x, out = part, whole
    else:
        x = out = whole
    return lambda: collective.make(axis, x, out)


def _barrier(axis: Axis) -> None:
    record = axis.calls.begin("barrier", torch.empty(0), waits=True)
    dist.barrier(axis.group)
    if record is not None:
        record.done()


def _slow_lines(
    geometry: AxisGeometry, seconds: Mapping[tuple[str, int], Sequence[float]], size: int
) -> list[SlowLine]:
    """Returns the lines whose largest all-reduce and all-gather take FACTOR times as long as the median of the
    others."""
    lines = lines_of(geometry, len(next(iter(seconds.values()))))
    if len(lines) < 2:
        return []
    names = ("all_reduce", "all_gather")
    taken = [[max(seconds[name, size][rank] for rank in line) for line in lines] for name in names]
    found = []
    for number, line in enumerate(lines):
        medians = [statistics.median(by_line[:number] + by_line[number + 1 :]) for by_line in taken]
        if all(by_line[number] > FACTOR * median for by_line, median in zip(taken, medians, strict=True)):
            found.append(SlowLine(line, taken[0][number], medians[0]))
    return found
