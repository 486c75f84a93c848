"""Seconds of a collective: its algorithm's messages over the links between the ranks of its group.

alpha-beta: each message costs a latency and its bytes over the bandwidth (Thakur et al. 2005, section 2). Ranks on one
node communicate over `intra`, others over `inter`; a group uses one network card per rank on a node. NCCL's choice
(src/graph/tuning.cc): rings for large tensors, trees for small ones, and reduction in the switch if it can.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import ceil, inf, log2
from typing import Any

from phalanx.config.cluster import Cluster, Link
from phalanx.cost.elementwise import quotient, smaller
from phalanx.cost.traffic.collectives import Collective

START_US = 20.0
"""Microseconds before the first byte of a collective moves: its kernel, and the synchronization of the ranks (NCCL's 1
MB all-reduce on two A100 takes 45 us, of which 5 are for the bytes: vTrain's tables)."""
INTRA_STEP = 0.65
"""Latency of a step of a ring inside a node relative to that of a single message: chunks are pipelined."""
INTER_STEP = 1.4
"""Latency of a step of a ring across nodes relative to a message over the network: all steps wait for the slowest, and
a rank's part is too small to be pipelined in chunks. An all-gather of 2 GB over 32 nodes of eight H100, where large
tensors reach 340 GB/s, reached 200: 17 us for each of 255 steps (NVIDIA/nccl, issue 1218)."""
MAX_CARDS = 8
"""Most devices over whose cards one tensor travels (NCCL: one channel per card)."""


@dataclass(frozen=True)
class RankGroup:
    """Ranks that communicate: their number, and the stride between neighbours in ranks of the whole world."""

    ranks: int
    stride: int = 1

    def near(self, domain: int) -> int:
        """Returns how many of the ranks lie in one domain of neighbouring devices."""
        return max(1, min(self.ranks, domain // self.stride))


@lru_cache(100_000)
def seconds(cluster: Cluster, collective: Collective, payload: float, group: RankGroup) -> float:
    """Returns the seconds of a collective over a tensor of `payload` bytes: an all-gather's output, a reduce-scatter's
    input, a rank's part of an all-to-all. 0 for a group of one."""
    n = group.ranks
    if n == 1 or payload <= 0:
        return 0.0
    near = group.near(cluster.joined)
    nodes = ceil(n / near)
    if collective == "send":
        link = cluster.intra if group.stride < cluster.joined else cluster.inter
        slow = link.pair_gbs / link.gbs if link.pair_gbs else 1.0
        return link.latency_us * 1e-6 + payload / _bytes(link) / slow
    if collective == "all_to_all":
        return _all_to_all(cluster, payload, n, near, nodes)
    bandwidth = _bandwidth(cluster, group, near, nodes)
    step = INTER_STEP * cluster.inter.latency_us if nodes > 1 else INTRA_STEP * cluster.intra.latency_us
    hops = (n - 1) * step * 1e-6
    start = START_US * 1e-6
    share = (n - 1) / n
    if collective != "all_reduce":
        return start + hops + share * payload / bandwidth
    ring = 2 * hops + 2 * share * payload / bandwidth
    deep = 2 * (log2(nodes) * cluster.inter.latency_us + log2(near) * cluster.intra.latency_us) * 1e-6
    tree = deep + 2 * payload / (bandwidth * 0.9)
    if nodes == 1 and cluster.intra.reduces:
        switch = 4 * cluster.intra.latency_us * 1e-6 + payload / bandwidth
        return start + min(ring, tree, switch)
    return start + min(ring, tree)


def load(cluster: Cluster, group: RankGroup, payload: float) -> float:
    """Returns the `occupancy` of a group's all-gathers of `payload` bytes each."""
    spent = seconds(cluster, "all_gather", payload, group)
    return occupancy(cluster, payload * (1 - 1 / group.ranks), spent)


def occupancy(cluster: Cluster, sent: Any, spent: Any) -> Any:
    """Returns the share of the bandwidth between neighbouring devices that `sent` bytes in `spent` seconds (numbers or
    arrays) use: they slow down overlapping computation in proportion. Slow transfers over a network take few cores and
    little of the memory's bandwidth, and a ring that waits for its next step takes none."""
    return smaller(1.0, quotient(sent, spent) / _bytes(cluster.intra))


def _bytes(link: Link) -> float:
    """Returns the bytes per second of large messages; infinite for a link that is not described."""
    return link.gbs * link.reached * 1e9 or inf


def _bandwidth(cluster: Cluster, group: RankGroup, near: int, nodes: int) -> float:
    """Returns the bytes per second that pass each rank of a ring."""
    inside = _bytes(cluster.intra)
    if cluster.intra.pair_gbs:
        inside = min(inside, (near - 1 or 1) * cluster.intra.pair_gbs * cluster.intra.reached * 1e9)
    if nodes == 1:
        return inside
    outside = _bytes(cluster.inter) * min(near, MAX_CARDS)
    if cluster.pod and group.ranks * group.stride > cluster.pod:
        # A ring leaves a pod once, however many of its ranks are there.
        outside /= max(1.0, cluster.oversubscription * group.stride / cluster.pod)
    return min(inside, outside) if near > 1 else outside


def _all_to_all(cluster: Cluster, payload: float, n: int, near: int, nodes: int) -> float:
    """Returns the seconds in which every rank sends a part to every other, beyond its node over its own card."""
    part = payload / n
    return _exchange(cluster, nodes, (near - 1) * part, (n - near) * part)


def _exchange(cluster: Cluster, nodes: int, inside: float, outside: float) -> float:
    """Returns the seconds in which every rank sends `inside` bytes within its node and `outside` bytes beyond."""
    far = outside / _bytes(cluster.inter) if nodes > 1 else 0.0
    latency = cluster.inter.latency_us if nodes > 1 else cluster.intra.latency_us
    return (START_US + 2 * latency) * 1e-6 + max(inside / _bytes(cluster.intra), far)


@lru_cache(100_000)
def dispatch_seconds(
    cluster: Cluster, tokens: float, width: float, copies: float, group: RankGroup, *, once: bool
) -> float:
    """Returns the seconds of sending tokens of `width` bytes to `copies` experts each, balanced over `group`.

    `once`: a token crosses the network once to each node that has some of its experts, where it is forwarded (DeepEP,
    HybridEP; DeepSeek-V3, section 3.2.2), and within a node once to each device; otherwise once per expert."""
    n = group.ranks
    if n == 1 or tokens <= 0:
        return 0.0
    near = group.near(cluster.joined)
    nodes = ceil(n / near)
    if not once:
        return _all_to_all(cluster, tokens * width * copies, n, near, nodes)
    reached = nodes * (1 - (1 - 1 / nodes) ** copies)
    devices = n * (1 - (1 - 1 / n) ** copies)
    inside = tokens * width * devices * (near - 1) / near
    return _exchange(cluster, nodes, inside, tokens * width * reached * (nodes - 1) / nodes)
