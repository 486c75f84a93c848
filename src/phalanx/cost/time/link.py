"""Seconds that a collective takes: its algorithm's messages over the links between the ranks of its group.

alpha-beta: each message costs a latency and its bytes over the bandwidth (Thakur et al. 2005, section 2). Ranks that
lie on one node talk over `intra`, others over `inter`; as many of a group's ranks as lie on one node have so many
network cards. NCCL's choice (src/graph/tuning.cc): rings for large tensors, trees for small ones, reduction in the
switch where it can.
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
"""Time before the first byte of a collective moves: its kernel, and the meeting of the ranks (NCCL's 1 MB all-reduce
on two A100 takes 45 us, of which 5 are for the bytes: vTrain's tables)."""
HOP = 0.65
"""Latency of a step of a ring inside a node beside that of a message alone: chunks follow each other."""
PACE = 1.4
"""The same of a ring through several nodes, beside a message over the network: all steps go at the pace of the slowest,
and a rank's part is too small to cut into chunks that follow each other. An all-gather of 2 GB over 32 nodes of eight
H100, where large tensors reach 340 GB/s, reached 200: 17 us for each of 255 steps (NVIDIA/nccl, issue 1218)."""
NEIGHBOUR = 8
"""Devices over whose cards one tensor travels at most (NCCL: one channel a card)."""


@dataclass(frozen=True)
class RankGroup:
    """Ranks that communicate: how many, and how many ranks of the whole world lie from one to the next."""

    ranks: int
    stride: int = 1

    def near(self, domain: int) -> int:
        """How many of the ranks lie in one domain of neighbouring devices."""
        return max(1, min(self.ranks, domain // self.stride))


@lru_cache(100_000)
def seconds(cluster: Cluster, collective: Collective, payload: float, group: RankGroup) -> float:
    """A collective over a tensor of `payload` bytes: what an all-gather ends with, a reduce-scatter begins with, and
    what a rank has of an all-to-all. 0 for a group of one."""
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
    hops = (n - 1) * (PACE * cluster.inter.latency_us if nodes > 1 else HOP * cluster.intra.latency_us) * 1e-6
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
    """Returns `occupancy` of a group's all-gathers of `payload` bytes each."""
    spent = seconds(cluster, "all_gather", payload, group)
    return occupancy(cluster, payload * (1 - 1 / group.ranks), spent)


def occupancy(cluster: Cluster, sent: Any, spent: Any) -> Any:
    """Returns the share of what neighbouring devices can exchange that `sent` bytes in `spent` seconds (numbers, or
    arrays of them) use: by as much they slow down what runs beside them. Bytes that come slowly over a network take few
    cores and little of the memory's bandwidth, and a ring that waits for its next step takes none."""
    return smaller(1.0, quotient(sent, spent) / _bytes(cluster.intra))


def _bytes(link: Link) -> float:
    """Bytes a second of large messages; no end of them where a link is not described."""
    return link.gbs * link.reached * 1e9 or inf


def _bandwidth(cluster: Cluster, group: RankGroup, near: int, nodes: int) -> float:
    """Bytes a second that pass each rank of a ring."""
    inside = _bytes(cluster.intra)
    if cluster.intra.pair_gbs:
        inside = min(inside, (near - 1 or 1) * cluster.intra.pair_gbs * cluster.intra.reached * 1e9)
    if nodes == 1:
        return inside
    outside = _bytes(cluster.inter) * min(near, NEIGHBOUR)
    if cluster.pod and group.ranks * group.stride > cluster.pod:
        # A ring leaves a pod once, whatever it has of ranks there.
        outside /= max(1.0, cluster.oversubscription * group.stride / cluster.pod)
    return min(inside, outside) if near > 1 else outside


def _all_to_all(cluster: Cluster, payload: float, n: int, near: int, nodes: int) -> float:
    """Every rank sends a part to every other: those on other nodes share the rank's own card."""
    part = payload / n
    return _exchange(cluster, nodes, (near - 1) * part, (n - near) * part)


def _exchange(cluster: Cluster, nodes: int, inside: float, outside: float) -> float:
    """Every rank sends so many bytes within its node and so many beyond, at the same time."""
    far = outside / _bytes(cluster.inter) if nodes > 1 else 0.0
    latency = cluster.inter.latency_us if nodes > 1 else cluster.intra.latency_us
    return (START_US + 2 * latency) * 1e-6 + max(inside / _bytes(cluster.intra), far)


@lru_cache(100_000)
def dispatch_seconds(
    cluster: Cluster, tokens: float, width: float, copies: float, group: RankGroup, *, once: bool
) -> float:
    """Tokens of `width` bytes travel to `copies` experts each, evenly over the ranks of `group`.

    `once`: a token goes over the network once to each node that has some of its experts, and is passed on there
    (DeepEP, HybridEP; DeepSeek-V3, section 3.2.2), and in a node once to each device; otherwise once an expert."""
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
