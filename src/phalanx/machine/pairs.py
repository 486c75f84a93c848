"""Messages between every two ranks, in rounds of disjoint pairs."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.comm import blocking
from phalanx.comm.axis import Axis
from phalanx.data.files import Progress
from phalanx.machine.clock import slowest, synchronize

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
    progress: Progress,
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
        progress("pairs of ranks", number + 1, len(rounds))
        if slowest(time.monotonic() - deadline) > 0:
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
