"""Measures collectives among the started ranks, by bytes, and fits a link to them: in groups of every power of two and
of all ranks, for `phalanx bench comm`, or on an axis of a layout, for `phalanx test-dist`.

Inside a node all groups of a size communicate at once, as tensor-parallel groups do. Between nodes a group has one rank
per node, and every rank of a node is in one, so that they share its network cards. A Link's bandwidth is defined
accordingly: per device, one way, while all devices send. All lines of an axis communicate at the same time, too.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.comm import blocking
from phalanx.comm.axis import Axis
from phalanx.config.calibration import FitQuality
from phalanx.config.cluster import Cluster, Link
from phalanx.cost.communication import Collective, RankGroup
from phalanx.cost.fit import COLLECTIVES, FitRow, Transfer, fit_link, link_rows, median_error
from phalanx.data.files import Progress
from phalanx.errors import JobError
from phalanx.launch.ranks import Ranks
from phalanx.launch.watchdog.diagnosis import FACTOR
from phalanx.machine.clock import WINDOW, Clock, Timings, counter, quality, slowest, synchronize, unstable
from phalanx.machine.collectives import barrier, call_of
from phalanx.parallel.mesh import AxisGeometry
from phalanx.pictures.elements import seconds
from phalanx.train.device import keep_freed_memory

ALONE_RANKS = 8
"""World size up to which one pair at a time is measured; with more ranks all pairs of a round communicate at once."""
MOST_ROUNDS = 64
"""Rounds that are measured, so that the time does not grow with the world: others are left out."""
PROBE_BYTES = 2**18
"""Bytes of the messages that tell how large those may be that bandwidth is measured with."""
LARGE_BYTES = {"cpu": 2**22, "cuda": 2**26, "xpu": 2**26}
"""Most bytes of these, by kind of device."""
LARGE_S = {True: 0.02, False: 0.03}
"""Seconds that one of them should take at most, by --quick."""
PINGS, REPEATS = 8, 5
SLOW_PAIR = 2.0
"""Factor below the median of its kind at which a pair of ranks is slow."""
MOST_CONFIRMED = 16
"""Pairs that look slow and are measured once more."""
FEWEST_COMPARED = 3
"""Measurements of a kind from which on one of them can be called slow; two ranks have two, one each way."""

MOST_RANKS = 512
"""Ranks of a matrix, spread evenly over a larger world."""


@dataclass(frozen=True)
class PairMatrix:
    """What every two ranks reach. Rows are senders; the diagonal and pairs that were left out are NaN."""

    ranks: list[int]
    """The rank of every row and column."""
    latency_us: list[list[float]]
    """Microseconds of a message of 8 bytes: half of the way there and back."""
    gbs: list[list[float]]
    """10⁹ bytes per second, one way."""
    at_once: int
    """Pairs that communicated at the same time."""
    left_out: int
    """Pairs of the world that were not measured."""
    wrong: list[str] = field(default_factory=list)
    """Messages that arrived with other bytes than were sent."""

    def directed(self) -> Iterator[tuple[int, int, float, float]]:
        """Yields sender, receiver, microseconds and 10⁹ bytes per second of every measured pair."""
        for a, (rates, latencies) in enumerate(zip(self.gbs, self.latency_us, strict=True)):
            for b, (gbs, latency_us) in enumerate(zip(rates, latencies, strict=True)):
                if not math.isnan(gbs):
                    yield self.ranks[a], self.ranks[b], latency_us, gbs

    def slow(self, hosts: Sequence[str]) -> list[tuple[int, int, float, float]]:
        """Returns sender, receiver, 10⁹ bytes per second and the median of its kind, for pairs that reach less than the
        median divided by SLOW_PAIR, the slowest first. Pairs on one host and pairs between hosts are compared apart;
        `hosts` has that of every rank."""
        found = []
        for pairs in (pairs for pairs in self.kinds(hosts).values() if len(pairs) >= FEWEST_COMPARED):
            median = statistics.median(gbs for *_, gbs in pairs)
            found += [(a, b, gbs, median) for a, b, _, gbs in pairs if gbs < median / SLOW_PAIR]
        return sorted(found, key=lambda pair: pair[2] / pair[3])

    def kinds(self, hosts: Sequence[str]) -> dict[str, list[tuple[int, int, float, float]]]:
        """Returns the measured pairs on one host and between hosts."""
        kinds: dict[str, list[tuple[int, int, float, float]]] = {}
        for pair in self.directed():
            same = hosts[pair[0]] == hosts[pair[1]]
            kinds.setdefault("on one host" if same else "between hosts", []).append(pair)
        return kinds


def tournament(count: int) -> list[list[int | None]]:
    """Returns the partner of each of `count` places in rounds in which every two meet once (the circle method); None
    where one rests, as one does in every round of an odd number."""
    circle = [*range(count), *([None] * (count % 2))]
    rounds: list[list[int | None]] = []
    for _ in range(len(circle) - 1 if count > 1 else 0):
        half = len(circle) // 2
        partners: list[int | None] = [None] * count
        for one, other in zip(circle[:half], circle[: -half - 1 : -1], strict=True):
            if one is not None and other is not None:
                partners[one], partners[other] = other, one
        rounds.append(partners)
        circle.insert(1, circle.pop())
    return rounds


def schedule_of(world: int) -> tuple[list[int], list[list[int | None]]]:
    """Returns the ranks of the matrix, and the rounds that are measured: the partner of each of these ranks, as places
    in that list. Pure arithmetic, at any world size."""
    count = min(world, MOST_RANKS)
    ranks = [number * world // count for number in range(count)]
    if world <= ALONE_RANKS:
        pairs = [(a, b) for a in range(count) for b in range(a + 1, count)]
        return ranks, [[{a: b, b: a}.get(place) for place in range(count)] for a, b in pairs]
    every = tournament(count)
    kept = min(len(every), MOST_ROUNDS)
    return ranks, [every[number * len(every) // kept] for number in range(kept)]


def measure_pairs(
    world: Axis, hosts: Sequence[str], device: torch.device, *, quick: bool, budget_s: float, progress: Progress
) -> PairMatrix:
    """Measures the pairs of the schedule, for `budget_s` seconds at most, and then once more those that look slow:
    another program may have disturbed them. All ranks call it; returns the same on each."""
    ranks, rounds = schedule_of(world.size)
    mine = _Messages(world, ranks, device, LARGE_S[quick])
    deadline, measured = time.monotonic() + budget_s, 0
    for number, partners in enumerate(rounds):
        mine.round(partners)
        measured += sum(partner is not None for partner in partners) // 2
        progress("pairs of ranks", number + 1, len(rounds))
        if slowest(time.monotonic() - deadline) > 0:
            break
    at_once = 1 if world.size <= ALONE_RANKS else len(ranks) // 2
    matrix = PairMatrix(ranks, *mine.matrices(), at_once, world.size * (world.size - 1) // 2 - measured)
    places = {rank: place for place, rank in enumerate(ranks)}
    for a, b in sorted({(min(a, b), max(a, b)) for a, b, *_ in matrix.slow(hosts)})[:MOST_CONFIRMED]:
        pair = {places[a]: places[b], places[b]: places[a]}
        mine.round([pair.get(place) for place in range(len(ranks))])
    wrong = [text for theirs in world.gather_json(mine.wrong) for text in theirs]
    latency_us, gbs = mine.matrices()
    return replace(matrix, latency_us=latency_us, gbs=gbs, wrong=wrong)


class _Messages:
    def __init__(self, world: Axis, ranks: Sequence[int], device: torch.device, large_s: float):
        self.world, self.ranks, self.device, self.large_s = world, ranks, device, large_s
        self.place = ranks.index(world.rank) if world.rank in ranks else None
        self.small = torch.zeros(1, dtype=torch.int64, device=device)  # 8 bytes
        most = LARGE_BYTES[device.type]
        self.large = torch.full((most,), world.rank % 251, dtype=torch.uint8, device=device)
        self.arrived = torch.zeros_like(self.large)
        self.wrong: list[str] = []
        self._best: dict[int, tuple[float, float]] = {}

    def round(self, partners: Sequence[int | None]) -> None:
        """Measures disjoint pairs at the same time, once all ranks have come: the partner of each place in the matrix.
        The better result of a pair is kept."""
        blocking.barrier()
        partner = None if self.place is None else partners[self.place]
        if partner is None or self.place is None:
            return
        latency_us, gbs = self.measure(self.ranks[partner], leads=self.place < partner)
        best_us, best_gbs = self._best.get(partner, (latency_us, gbs))
        self._best[partner] = min(latency_us, best_us), max(gbs, best_gbs)

    def matrices(self) -> tuple[list[list[float]], list[list[float]]]:
        """Returns all ranks' latencies and bandwidths, with NaN where nothing was measured."""
        figures = torch.full((2, len(self.ranks), len(self.ranks)), -1.0, dtype=torch.float64)
        for partner, results in self._best.items():
            figures[:, self.place, partner] = torch.tensor(results, dtype=torch.float64)
        blocking.all_reduce(figures, dist.ReduceOp.MAX)
        latency_us, gbs = torch.where(figures < 0, math.nan, figures).tolist()
        return latency_us, gbs

    def measure(self, peer: int, *, leads: bool) -> tuple[float, float]:
        """Returns microseconds of a small message and 10⁹ bytes per second of large ones to the peer. Both ranks call
        it, one of them `leads`."""
        latency = statistics.median([self._ping(peer, leads) for _ in range(PINGS + 1)][1:])
        # The first messages may connect the pair.
        probe = [self._both_ways(PROBE_BYTES, peer, leads) for _ in range(2)][-1]
        wanted = int(PROBE_BYTES * self.large_s / probe)
        self.small.fill_(max(PROBE_BYTES, min(self.large.numel(), wanted)))
        self._message(self.small, peer, leads)  # the number of bytes of the one that leads
        nbytes = int(self.small.item())
        spent = statistics.median(self._both_ways(nbytes, peer, leads) for _ in range(REPEATS))
        # The answer is part of the time; where other programs disturb, it may have been quicker than the pings.
        return latency * 1e6, nbytes / max(spent - latency, spent / 2) / 1e9

    def _ping(self, peer: int, leads: bool) -> float:
        began = time.perf_counter()
        for sends in (leads, not leads):
            self._message(self.small, peer, sends)
        synchronize(self.device)
        return (time.perf_counter() - began) / 2

    def _both_ways(self, nbytes: int, peer: int, leads: bool) -> float:
        """Sends a large message in either direction, one after the other. Returns the seconds of this rank's own, with
        its short answer."""
        spent = 0.0
        for sends in (leads, not leads):
            began = time.perf_counter()
            self._message((self.large if sends else self.arrived)[:nbytes], peer, sends)
            self._message(self.small, peer, not sends)
            synchronize(self.device)
            if sends:
                spent = time.perf_counter() - began
            elif not bool((self.arrived[:nbytes] == peer % 251).all()):
                self.wrong.append(f"message {peer} → {self.world.rank}: other bytes arrived than were sent")
        return spent

    def _message(self, x: Tensor, peer: int, sends: bool) -> None:
        """Sends or receives one message. NCCL would make a communicator of its own for a pair that is not part of a
        batch."""
        if self.world.gloo:
            self.world.send(x, peer) if sends else self.world.receive(x, peer)
            return
        record = self.world.calls.send(x, peer) if sends else self.world.calls.receive(x, peer)
        message = dist.P2POp(dist.isend if sends else dist.irecv, x, group=self.world.group, group_peer=peer)
        for work in dist.batch_isend_irecv([message]):
            work.wait()
        if record is not None:
            record.done()


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
    timings: Sequence[Timings] = ()
    """One for each collective."""

    @property
    def link(self) -> Link:
        return self.machine.intra

    @property
    def rows(self) -> list[FitRow]:
        return link_rows(self.machine, self.transfers)

    @property
    def quality(self) -> FitQuality:
        return quality(self.timings, self.rows)


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
    tick = counter(progress, f"measuring collectives on {ranks.world} ranks", total)
    fits: list[Fitted] = []
    for part in parts:
        axis = _axis(part, ranks.rank)
        transfers: list[Transfer] = []
        measured: list[Timings] = []
        for name in collectives:
            calls = [call_of(name, axis, size, device) for size in SIZES[quick]]
            measured.append(clock.measure(calls, tick, unstable(progress, name, clock.budget_s)))
            for size, by_rank in zip(SIZES[quick], measured[-1].seconds, strict=True):
                transfers.append(Transfer(name, size, part.group, max(by_rank)))
        machine = _fit(transfers, per_node_of(ranks))
        fits.append(Fitted(part.place, part.group, machine, transfers, measured))
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


def _fit(transfers: list[Transfer], per_node: int) -> Cluster:
    return _with_link(fit_link(transfers, per_node), per_node)


def _with_link(link: Link, per_node: int) -> Cluster:
    return Cluster(devices_per_node=per_node, intra=link, inter=link)


def _axis(part: Partition, rank: int) -> Axis:
    """Returns the axis of this rank's group, or one of size 1 where it is in none. Must be called on every rank, since
    every rank has to create every group."""
    mine = Axis("bench")
    for members in part.members:
        group = dist.new_group(members)
        if rank in members:
            assert isinstance(group, dist.ProcessGroup), "a member gets the group itself"
            mine = Axis("bench", len(members), members.index(rank), group).share()
    return mine


MOST_BYTES = 2**24
"""Bytes of the whole tensor up to which an axis is timed."""
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

    def line(self) -> str:
        """Returns the sentence for the user, behind the name of the axis."""
        ranks = ", ".join(map(str, self.ranks[:8])) + (", …" if len(self.ranks) > 8 else "")
        return (
            f"{ranks} is slow: {seconds(self.seconds)} for the largest all-reduce, "
            f"{self.seconds / self.median_s:.2f} × the median of the other lines"
        )


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
        per_node = 1 if self.place == "one rank per host" else self.ranks
        return _with_link(Link(gbs=self.gbs, latency_us=self.latency_us, reached=1.0), per_node)

    @property
    def transfers(self) -> list[Transfer]:
        """The times that the cost model has a formula for."""
        return _transfers(self.times, self.ranks)


def _transfers(times: Sequence[CallTime], ranks: int) -> list[Transfer]:
    known = get_args(Collective)
    return [Transfer(t.collective, t.bytes, RankGroup(ranks), t.seconds) for t in times if t.collective in known]  # pyrefly: ignore[bad-argument-type]


def time_axis(
    axis: Axis,
    name: str,
    geometry: AxisGeometry,
    hosts: Sequence[str],
    device: torch.device,
    *,
    quick: bool,
    budget_s: float,
    progress: Progress,
) -> TimedAxis:
    """Measures one axis. All ranks of the world call it; returns the same on each.

    Args:
        axis: this rank's line.
        geometry: the axis among all ranks, whose `hosts` are those of each rank.
        budget_s: seconds for the whole; sizes that would take longer are left out.
    """
    sizes, left_out = _affordable(axis, [size for size in SIZES[quick] if size <= MOST_BYTES], device, budget_s)
    calls = [(collective, size) for size in sizes for collective in (*COLLECTIVES, *UNFITTED)]
    made = [call_of(name, axis, size, device) for name, size in calls]
    clock = Clock(device, repeats=1, min_repeat_s=MIN_REPEAT_S)
    count = counter(progress, f"speed of collectives on {name}", (len(calls) + 1) * WINDOW)
    timings = clock.measure([*made, lambda: barrier(axis)], count)
    times = [CallTime(*call, max(by_rank)) for call, by_rank in zip(calls, timings.seconds, strict=False)]
    place = place_of(geometry, hosts)
    per_node = 1 if place == "one rank per host" else axis.size
    fitted = [each for each in _transfers(times, axis.size) if each.collective in COLLECTIVES]
    machine = _fit(fitted, per_node)
    return TimedAxis(
        axis=name,
        ranks=axis.size,
        stride=geometry.stride,
        place=place,
        latency_us=machine.intra.latency_us,
        gbs=machine.intra.gbs,
        error=median_error(link_rows(machine, fitted)),
        spread=timings.spread,
        times=times,
        barrier_s=max(timings.seconds[-1]),
        left_out=left_out,
        slow_lines=_slow_lines(geometry, dict(zip(calls, timings.seconds, strict=False)), sizes[-1]),
    )


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


def _affordable(axis: Axis, sizes: Sequence[int], device: torch.device, budget_s: float) -> tuple[list[int], list[int]]:
    """Returns the sizes that can be measured within the budget, at least the first few, and the others."""
    probe = 2**18
    call = call_of("all_reduce", axis, probe, device)
    call()
    per_byte = max(Clock(device, 1, 0.0).measure([call]).seconds[0]) / probe
    repeats = (WINDOW + 2) * (len(COLLECTIVES) + len(UNFITTED))
    spent, kept = 0.0, []
    for size in sizes:
        spent += repeats * (per_byte * size + 2 * MIN_REPEAT_S)
        if len(kept) >= FEWEST_SIZES and spent > budget_s:
            break
        kept.append(size)
    return kept, list(sizes[len(kept) :])


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
