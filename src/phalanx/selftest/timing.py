"""Times the collectives of every axis, the messages between every two ranks, and the ranks' own work.

All lines of an axis communicate at the same time, as in training. Calls take turns, and each is the median of several
rounds (calibrate/comm.py); latency and bandwidth are fitted as by `phalanx bench comm`. Pairs are measured in rounds of
disjoint ones. A rank's own time is what it spends without waiting for others. In a collective all ranks wait for the
slowest, so only own times tell which one it is; they need no common clock.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.blocks.operator import Collective
from phalanx.calibrate.comm import WINDOW, Clock, call_of, synchronize
from phalanx.comm import blocking
from phalanx.comm.axis import Axis
from phalanx.config.cluster import Cluster, Link
from phalanx.cost.communication import RankGroup
from phalanx.cost.fit import COLLECTIVES, Transfer, fit_link, link_rows, median_error
from phalanx.launch.watchdog.diagnosis import FACTOR, median_if_slow
from phalanx.parallel.mesh import AxisGeometry
from phalanx.pictures.elements import seconds
from phalanx.selftest.check import ALL, barrier, root

ALONE_RANKS = 8
"""World size up to which one pair at a time is measured; with more ranks all pairs of a round communicate at once."""
MOST_ROUNDS = 64
"""Rounds that are measured, so that the time does not grow with the world: others are left out."""
PROBE_BYTES = 2**18
"""Bytes of the messages that tell how large those may be that bandwidth is measured with."""
LARGE_BYTES = {"cpu": 2**22, "cuda": 2**26}
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
        kinds: dict[bool, list[tuple[int, int, float]]] = {}
        for a, b, _, gbs in self.directed():
            kinds.setdefault(hosts[a] == hosts[b], []).append((a, b, gbs))
        found = []
        for pairs in (pairs for pairs in kinds.values() if len(pairs) >= FEWEST_COMPARED):
            median = statistics.median(gbs for *_, gbs in pairs)
            found += [(a, b, gbs, median) for a, b, gbs in pairs if gbs < median / SLOW_PAIR]
        return sorted(found, key=lambda pair: pair[2] / pair[3])


def partner(number: int, rank: int, ranks: int) -> int | None:
    """Returns whom `rank` meets in a round of a tournament in which every two of `ranks` meet once (the circle method);
    None where it rests, as one does in every round of an odd number. There are `rounds_of(ranks)` rounds."""
    even = ranks + ranks % 2
    circle = even - 1
    if rank == circle:
        found = number * (circle + 1) // 2 % circle  # meets the one that would meet itself
    else:
        found = (number - rank) % circle
        found = circle if found == rank else found
    return found if found < ranks else None


def rounds_of(ranks: int) -> int:
    """Returns the number of rounds in which every two of `ranks` meet once."""
    return ranks + ranks % 2 - 1 if ranks > 1 else 0


@dataclass(frozen=True)
class PairSchedule:
    """The rounds that are measured. Pure arithmetic, at any world size."""

    world: int

    @property
    def ranks(self) -> list[int]:
        """The ranks of the matrix."""
        count = min(self.world, MOST_RANKS)
        return [number * self.world // count for number in range(count)]

    @property
    def alone(self) -> bool:
        """Whether each pair has a round of its own."""
        return self.world <= ALONE_RANKS

    def rounds(self) -> list[list[int | None]]:
        """Returns the partner of each of `ranks` (both as places in that list) in every round."""
        count = len(self.ranks)
        every = rounds_of(count)
        if self.alone:
            pairs = [(a, b) for a in range(count) for b in range(a + 1, count)]
            return [[{a: b, b: a}.get(place) for place in range(count)] for a, b in pairs]
        kept = (
            range(every) if every <= MOST_ROUNDS else [number * every // MOST_ROUNDS for number in range(MOST_ROUNDS)]
        )
        return [[partner(number, place, count) for place in range(count)] for number in kept]


def measure_pairs(
    world: Axis,
    hosts: Sequence[str],
    device: torch.device,
    *,
    quick: bool,
    budget_s: float,
    tick: Callable[[int, int], None],
) -> PairMatrix:
    """Measures the pairs of the schedule, for `budget_s` seconds at most, and then once more those that look slow:
    another program may have disturbed them. All ranks call it; returns the same on each."""
    schedule = PairSchedule(world.size)
    rounds, ranks = schedule.rounds(), schedule.ranks
    mine = _Messages(world, ranks, device, LARGE_S[quick])
    deadline, measured = time.monotonic() + budget_s, 0
    for number, partners in enumerate(rounds):
        mine.round(partners)
        measured += sum(partner is not None for partner in partners) // 2
        tick(number + 1, len(rounds))
        late = torch.tensor([float(time.monotonic() > deadline)])
        blocking.all_reduce(late, dist.ReduceOp.MAX)
        if late.item():
            break
    at_once = 1 if schedule.alone else len(ranks) // 2
    matrix = PairMatrix(ranks, *mine.matrices(), at_once, world.size * (world.size - 1) // 2 - measured)
    places = {rank: place for place, rank in enumerate(ranks)}
    for a, b in sorted({(min(a, b), max(a, b)) for a, b, *_ in matrix.slow(hosts)})[:MOST_CONFIRMED]:
        pair = {places[a]: places[b], places[b]: places[a]}
        mine.round([pair.get(place) for place in range(len(ranks))])
    wrong = [text for theirs in world.gather_json(mine.wrong) for text in theirs]
    latency_us, gbs = mine.matrices()
    return replace(matrix, latency_us=latency_us, gbs=gbs, wrong=wrong)


class _Messages:
    """Messages between this rank and one other."""

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
        nbytes = self._agreed(int(PROBE_BYTES * self.large_s / probe), peer, leads)
        spent = statistics.median(self._both_ways(nbytes, peer, leads) for _ in range(REPEATS))
        # The answer is part of the time; where other programs disturb, it may have been quicker than the pings.
        return latency * 1e6, nbytes / max(spent - latency, spent / 2) / 1e9

    def _ping(self, peer: int, leads: bool) -> float:
        """Returns half the seconds of a small message there and back."""
        began = time.perf_counter()
        for sends in (leads, not leads):
            self._message(self.small, peer, sends)
        synchronize(self.device)
        return (time.perf_counter() - began) / 2

    def _agreed(self, nbytes: int, peer: int, leads: bool) -> int:
        """Returns the leader's number of bytes on both ranks, within the limits."""
        self.small.fill_(max(PROBE_BYTES, min(self.large.numel(), nbytes)))
        self._message(self.small, peer, leads)
        return int(self.small.item())

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
        products = torch.tensor([min(MOST_PRODUCTS, max(1, round(wanted)))])
        blocking.all_reduce(products, dist.ReduceOp.MAX)
        self.products = int(products.item())

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
    timings = clock.measure([*make.values(), lambda: barrier(axis)], count)
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
