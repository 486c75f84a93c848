"""Measures collectives among the started ranks, by bytes, in groups of every power of two and of all ranks.

Inside a node all groups of a size communicate at once, as tensor-parallel groups do. Between nodes a group has one rank
per node, and every rank of a node is in one, so that they share its network cards. A Link's bandwidth is defined
accordingly: per device, one way, while all devices send.

The clock measures independent rounds of repeats until they agree. A round warms up, then repeats the calls in turns and
takes each one's median. Disturbances by other programs last for seconds, so they spoil all repeats of a round alike;
only another round reveals them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count as counting
from math import ceil
from typing import Any, Literal

import torch
import torch.distributed as dist

from phalanx.comm.axis import Axis
from phalanx.config.calibration import STABLE_SPREAD, FitQuality, relative_spread
from phalanx.config.cluster import Cluster, Link
from phalanx.cost.communication import Collective, RankGroup
from phalanx.cost.fit import FitRow, Transfer, fit_link, link_rows, median_error
from phalanx.data.files import Progress
from phalanx.errors import JobError
from phalanx.launch.ranks import Ranks
from phalanx.train.device import keep_freed_memory

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
            if max(_all_ranks(self.now() - deadline)) >= 0:
                break
        assert best is not None, "WINDOW rounds were measured"
        return Timings(best.seconds, best.spreads, len(rounds))

    def _calls_per_repeat(self, call: Callable[[], Any]) -> int:
        self._repeat(call, 1)
        once = max(_all_ranks(self._repeat(call, 1)))
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
            dist.barrier()
        synchronize(self.device)
        began = self.now()
        for _ in range(count):
            call()
        synchronize(self.device)
        return (self.now() - began) / count


def synchronize(device: torch.device) -> None:
    """Waits until the device has done what was started on it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


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
    dist.all_reduce(values)  # a CPU tensor goes over gloo, also beside NCCL
    return values.tolist()


SIZES = {True: [2**10, 2**16, 2**20, 2**23], False: [2**10 * 4**step for step in range(9)]}
"""Bytes of the whole tensor, by --quick: 1 KiB to 8 MiB, or to 64 MiB. Small ones are latency-bound, large ones
bandwidth-bound."""

Place = Literal["intra", "inter"]


@dataclass(frozen=True)
class Partition:
    """Disjoint groups of equal size that communicate at the same time."""

    place: Place
    group: RankGroup
    members: list[list[int]]
    """Ranks of each group; ranks in none of them wait."""


@dataclass(frozen=True)
class Fitted:
    """A Link fitted to the collectives in groups of one size."""

    place: Place
    group: RankGroup
    machine: Cluster
    """A cluster with this link for both classes."""
    transfers: list[Transfer]
    spread: float = 0.0
    """Median spread of the collectives' rounds (calibrate/comm.py)."""
    rounds: int = 0
    """The most rounds of any collective."""

    @property
    def link(self) -> Link:
        return self.machine.intra

    @property
    def rows(self) -> list[FitRow]:
        return link_rows(self.machine, self.transfers)

    @property
    def quality(self) -> FitQuality:
        return FitQuality(median_error(self.rows), self.spread, self.rounds)


def partitions(world: int, per_node: int) -> list[Partition]:
    """Returns groups of 2, 4, 8, … and all ranks of a node, then groups of 2, 4, 8, … and all nodes with one rank per
    node. Rank 0 is in a group of each."""
    nodes = world // per_node
    partitions = []
    for n in _sizes(per_node):
        starts = [node * per_node + at for node in range(nodes) for at in range(0, per_node - n + 1, n)]
        partitions.append(Partition("intra", RankGroup(n), [list(range(start, start + n)) for start in starts]))
    for n in _sizes(nodes):
        starts = [node * per_node + place for place in range(per_node) for node in range(0, nodes - n + 1, n)]
        members = [list(range(start, start + n * per_node, per_node)) for start in starts]
        partitions.append(Partition("inter", RankGroup(n, per_node), members))
    return partitions


def per_node_of(ranks: Ranks) -> int:
    """Returns the ranks per node. Raises JobError where there is one rank, or where nodes differ or are not known."""
    if ranks.world < 2:
        raise JobError("bench comm needs at least two ranks; there is one: --nproc-per-node 2")
    if ranks.local_world is None:
        raise JobError(
            f"{ranks.source} does not say how many of the {ranks.world} ranks are on a node; start them with torchrun"
        )
    if ranks.world % ranks.local_world:
        raise JobError(
            f"{ranks.world} ranks with {ranks.local_world} on this node: bench comm needs the same number on every node"
        )
    return ranks.local_world


def measure(
    ranks: Ranks, device: torch.device, collectives: Sequence[Collective], quick: bool, progress: Progress
) -> list[Fitted]:
    """Measures every collective in every group and fits a link to each group size.

    Must be called on all ranks of a process group; returns the same on each."""
    keep_freed_memory()
    clock = Clock.for_device(device, quick)
    clock = replace(clock, budget_s=clock.budget_s / len(collectives))
    parts = partitions(ranks.world, per_node_of(ranks))
    total = len(parts) * len(collectives) * len(SIZES[quick]) * WINDOW * clock.repeats
    fits: list[Fitted] = []
    done = 0

    def tick() -> None:
        nonlocal done
        done += 1
        progress(f"measuring collectives on {ranks.world} ranks", done, total)

    for part in parts:
        axis = _axis(part, ranks.rank)
        transfers: list[Transfer] = []
        measured: list[Timings] = []
        for name in collectives:

            def tell(spread: float, name: str = name) -> None:
                text = f"{name}: rounds differ by {spread:.0%}; measuring again for {clock.budget_s:.2g} s at most"
                progress(text, 0, 0)

            timings = clock.measure([call_of(name, axis, size, device) for size in SIZES[quick]], tick, tell)
            measured.append(timings)
            for size, seconds in zip(SIZES[quick], timings.seconds, strict=True):
                transfers.append(Transfer(name, size, part.group, max(seconds)))
        fits.append(_fit(part, transfers, measured, per_node_of(ranks)))
    return fits


def chosen(fits: Sequence[Fitted], place: Place) -> Fitted | None:
    """Returns the fit that the cluster gets: that of the largest groups, in which all devices send."""
    return max((one for one in fits if one.place == place), key=lambda one: one.group.ranks, default=None)


def _sizes(most: int) -> Iterator[int]:
    n = 2
    while n < most:
        yield n
        n *= 2
    if most > 1:
        yield most


def _fit(part: Partition, transfers: list[Transfer], measured: Sequence[Timings], per_node: int) -> Fitted:
    link = fit_link(transfers, per_node)
    machine = Cluster(devices_per_node=per_node, intra=link, inter=link)
    spread = statistics.median(spread for one in measured for spread in one.spreads)
    return Fitted(part.place, part.group, machine, transfers, spread, max(one.rounds for one in measured))


def _axis(part: Partition, rank: int) -> Axis:
    """Returns the axis of this rank's group, or one of size 1 where it is in none. Must be called on every rank, since
    every rank has to create every group."""
    mine = Axis("bench")
    for members in part.members:
        group = dist.new_group(members)
        if rank in members:
            assert isinstance(group, dist.ProcessGroup), "a member gets the group itself"
            mine = Axis("bench", len(members), members.index(rank), group)
    return mine


def call_of(name: Collective, axis: Axis, size: int, device: torch.device) -> Callable[[], Any]:
    """Returns one collective over `size` bytes through the calls that training makes; nothing on an axis of size 1.
    `send` is a message to the next rank while the previous one sends too, as in ring attention and a full pipeline."""
    n = size // 4 // axis.size * axis.size
    whole, other = torch.zeros(n, device=device), torch.zeros(n, device=device)
    part = other[: n // axis.size]
    if axis.size == 1:
        return lambda: None
    calls: dict[Collective, Callable[[], Any]] = {
        "all_reduce": lambda: axis.all_reduce(whole).wait(),
        "all_gather": lambda: axis.all_gather(whole, part).wait(),
        "reduce_scatter": lambda: axis.reduce_scatter(part, whole).wait(),
        "all_to_all": lambda: axis.all_to_all(other, whole).wait(),
        "send": lambda: axis.rotate(other, whole).wait(),
    }
    return calls[name]
