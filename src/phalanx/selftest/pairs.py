"""Latency and bandwidth between every two ranks, measured in rounds of disjoint pairs."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.comm import blocking
from phalanx.comm.axis import Axis

ALONE_RANKS = 8
"""World size up to which one pair at a time is measured; with more ranks all pairs of a round communicate at once."""
MOST_ROUNDS = 64
"""Rounds that are measured, so that the time does not grow with the world: others are left out."""
PROBE_BYTES = 2**18
"""Bytes of the messages that tell how large those may be that bandwidth is measured with."""
LARGE_BYTES = {"cpu": 2**22, "cuda": 2**26}
"""Most bytes of these, by kind of device."""
LARGE_S = {True: 0.01, False: 0.03}
"""Seconds that one of them should take at most, by --quick."""
PINGS, REPEATS = 8, 5
FEWEST_COMPARED = 3
"""Measurements of a kind from which on one of them can be called slow; two ranks have two, one each way."""

Pair = tuple[int, int]


@dataclass(frozen=True)
class PairMatrix:
    """What every two ranks reach. Rows are senders; the diagonal and pairs that were left out are NaN."""

    latency_us: list[list[float]]
    """Microseconds of a message of 8 bytes: half of the way there and back."""
    gbs: list[list[float]]
    """10⁹ bytes per second, one way."""
    at_once: int
    """Pairs that communicated at the same time."""
    left_out: int
    """Pairs that were not measured."""
    wrong: list[str] = field(default_factory=list)
    """Messages that arrived with other bytes than were sent."""

    def directed(self) -> Iterator[tuple[int, int, float, float]]:
        """Yields sender, receiver, microseconds and 10⁹ bytes per second of every measured pair."""
        for a, row in enumerate(self.gbs):
            for b, gbs in enumerate(row):
                if not math.isnan(gbs):
                    yield a, b, self.latency_us[a][b], gbs


def rounds_of(world: int) -> list[list[Pair]]:
    """Returns rounds of disjoint pairs in which every two ranks meet once (the circle method of tournaments). Pure
    arithmetic."""
    ranks = [*range(world), *([-1] if world % 2 else [])]  # with an odd number, one rank rests in each round
    rounds = []
    for _ in range(len(ranks) - 1):
        half = len(ranks) // 2
        pairs = zip(ranks[:half], reversed(ranks[half:]), strict=True)
        rounds.append([(min(a, b), max(a, b)) for a, b in pairs if min(a, b) >= 0])
        ranks = [ranks[0], ranks[-1], *ranks[1:-1]]
    return rounds


def schedule(world: int) -> tuple[list[list[Pair]], int]:
    """Returns the rounds to measure, and the number of pairs that are left out. In a small world each pair has a round
    of its own."""
    rounds = rounds_of(world) if world > 1 else []
    if world <= ALONE_RANKS:
        return [[pair] for pairs in rounds for pair in pairs], 0
    kept = rounds
    if len(rounds) > MOST_ROUNDS:
        kept = [rounds[number * len(rounds) // MOST_ROUNDS] for number in range(MOST_ROUNDS)]
    return kept, world * (world - 1) // 2 - sum(map(len, kept))


def measure_pairs(
    world: Axis, device: torch.device, *, quick: bool, budget_s: float, tick: Callable[[int, int], None]
) -> PairMatrix:
    """Measures the pairs of the schedule, for `budget_s` seconds at most. All ranks call it; returns the same on
    each."""
    rounds, left_out = schedule(world.size)
    mine = _Messages(world, device, LARGE_S[quick])
    latency = torch.full((world.size, world.size), -1.0, dtype=torch.float64)
    gbs, deadline = latency.clone(), time.monotonic() + budget_s
    for number, pairs in enumerate(rounds):
        peer = next((a + b - world.rank for a, b in pairs if world.rank in (a, b)), None)
        blocking.barrier()
        if peer is not None:
            latency[world.rank, peer], gbs[world.rank, peer] = mine.measure(peer, leads=world.rank < peer)
        tick(number + 1, len(rounds))
        late = torch.tensor([float(time.monotonic() > deadline)])
        blocking.all_reduce(late, dist.ReduceOp.MAX)
        if late.item():
            left_out += sum(map(len, rounds[number + 1 :]))
            break
    for figures in (latency, gbs):
        blocking.all_reduce(figures, dist.ReduceOp.MAX)
    wrong = [text for theirs in world.gather_json(mine.wrong) for text in theirs]
    at_once = max(map(len, rounds), default=0)
    return PairMatrix(_rows(latency), _rows(gbs), at_once, left_out, wrong)


class _Messages:
    """Messages between this rank and one other."""

    def __init__(self, world: Axis, device: torch.device, large_s: float):
        self.world, self.device, self.large_s = world, device, large_s
        self.small = torch.zeros(1, dtype=torch.int64, device=device)  # 8 bytes
        most = LARGE_BYTES[device.type]
        self.large = torch.full((most,), world.rank % 251, dtype=torch.uint8, device=device)
        self.arrived = torch.zeros_like(self.large)
        self.wrong: list[str] = []

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
        self._synchronize()
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
            self._synchronize()
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

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _rows(figures: Tensor) -> list[list[float]]:
    return torch.where(figures < 0, math.nan, figures).tolist()


def slow_pairs(matrix: PairMatrix, hosts: Sequence[str], factor: float) -> list[tuple[int, int, float, float]]:
    """Returns sender, receiver, 10⁹ bytes per second and the median of its kind, for pairs that reach less than the
    median divided by `factor`. Pairs on one host and pairs between hosts are compared apart."""
    kinds: dict[bool, list[tuple[int, int, float]]] = {}
    for a, b, _, gbs in matrix.directed():
        kinds.setdefault(hosts[a] == hosts[b], []).append((a, b, gbs))
    found = []
    for pairs in (pairs for pairs in kinds.values() if len(pairs) >= FEWEST_COMPARED):
        median = statistics.median(gbs for *_, gbs in pairs)
        found += [(a, b, gbs, median) for a, b, gbs in pairs if gbs < median / factor]
    return sorted(found, key=lambda pair: pair[2] / pair[3])
