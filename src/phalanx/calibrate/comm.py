"""Collectives among the ranks that were started, in groups of every power of two and of all, by bytes.

Inside a node all groups of a size work at once, as tensor-parallel groups do; between nodes a group has one rank of
each, and all of a node's ranks are in one, so that they share its network cards. That is what a Link's bandwidth is:
"a device, one way, while all devices send".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist

from phalanx.calibrate.clock import Clock
from phalanx.comm.axis import Axis
from phalanx.config.cluster import Cluster, Link
from phalanx.cost.fit import FitRow, Transfer, fit_link, link_rows, median_error
from phalanx.cost.time.link import RankGroup
from phalanx.cost.traffic.collectives import Collective
from phalanx.data.progress import Progress
from phalanx.errors import JobError
from phalanx.launch.ranks import Ranks
from phalanx.train.device import keep_freed_memory

SIZES = {True: [2**10, 2**16, 2**20, 2**23], False: [2**10 * 4**step for step in range(9)]}
"""Bytes of the whole tensor, by --quick: 1 KiB to 8 MiB, or to 64 MiB."""

Place = Literal["intra", "inter"]


@dataclass(frozen=True)
class Partition:
    """Groups of equal size that communicate at the same time."""

    place: Place
    group: RankGroup
    members: list[list[int]]
    """Ranks of each group; those in none wait."""


@dataclass(frozen=True)
class Fitted:
    """The links of one class, as groups of one size see them."""

    place: Place
    group: RankGroup
    machine: Cluster
    """With these links for both classes."""
    transfers: list[Transfer]

    @property
    def link(self) -> Link:
        return self.machine.intra

    @property
    def rows(self) -> list[FitRow]:
        return link_rows(self.machine, self.transfers)

    @property
    def error(self) -> float:
        return median_error(self.rows)


def partitions(world: int, per_node: int) -> list[Partition]:
    """Groups of 2, 4, 8, … and all ranks of a node, and of as many nodes. Rank 0 is in each."""
    nodes = world // per_node
    found = []
    for n in _sizes(per_node):
        starts = [node * per_node + at for node in range(nodes) for at in range(0, per_node - n + 1, n)]
        found.append(Partition("intra", RankGroup(n), [list(range(start, start + n)) for start in starts]))
    for n in _sizes(nodes):
        starts = [node * per_node + place for place in range(per_node) for node in range(0, nodes - n + 1, n)]
        members = [list(range(start, start + n * per_node, per_node)) for start in starts]
        found.append(Partition("inter", RankGroup(n, per_node), members))
    return found


def per_node_of(ranks: Ranks) -> int:
    """Ranks on each node. Raises JobError where there is one rank, or where nodes differ or are not known."""
    if ranks.world < 2:
        raise JobError("bench comm measures messages between ranks, and there is one rank: --nproc-per-node 2")
    if ranks.local_world is None:
        raise JobError(
            f"{ranks.source} does not say how many of the {ranks.world} ranks are on a node; start them with torchrun"
        )
    if ranks.world % ranks.local_world:
        raise JobError(
            f"{ranks.world} ranks with {ranks.local_world} on this node: bench comm needs as many on every node"
        )
    return ranks.local_world


def measure(
    ranks: Ranks, device: torch.device, collectives: Sequence[Collective], quick: bool, progress: Progress
) -> list[Fitted]:
    """Every collective in every group, and the fit of each group size. On all ranks of a process group; the same on
    each."""
    keep_freed_memory()
    clock = Clock.of(device, quick)
    cut = partitions(ranks.world, per_node_of(ranks))
    total = len(cut) * len(collectives) * len(SIZES[quick]) * clock.repeats
    found: list[Fitted] = []
    done = 0

    def tick() -> None:
        nonlocal done
        done += 1
        progress(f"measuring collectives on {ranks.world} ranks", done, total)

    for part in cut:
        axis = _axis(part, ranks.rank)
        transfers: list[Transfer] = []
        for name in collectives:
            measured = clock.turns([_call(name, axis, size, device) for size in SIZES[quick]], tick)
            for size, seconds in zip(SIZES[quick], measured, strict=True):
                transfers.append(Transfer(name, size, part.group, max(seconds)))
        found.append(_fit(part, transfers, per_node_of(ranks)))
    return found


def chosen(found: Sequence[Fitted], place: Place) -> Fitted | None:
    """What stands for a class of links: the largest groups, in which all devices send."""
    return max((one for one in found if one.place == place), key=lambda one: one.group.ranks, default=None)


def _sizes(most: int) -> Iterator[int]:
    n = 2
    while n < most:
        yield n
        n *= 2
    if most > 1:
        yield most


def _fit(part: Partition, transfers: list[Transfer], per_node: int) -> Fitted:
    link = fit_link(transfers, per_node)
    return Fitted(part.place, part.group, Cluster(devices_per_node=per_node, intra=link, inter=link), transfers)


def _axis(part: Partition, rank: int) -> Axis:
    """The axis of this rank's group; of one rank where it is in none. Every rank has to make every group."""
    mine = Axis("bench")
    for members in part.members:
        group = dist.new_group(members)
        if rank in members:
            assert isinstance(group, dist.ProcessGroup), "a member gets the group itself"
            mine = Axis("bench", len(members), members.index(rank), group)
    return mine


def _call(name: Collective, axis: Axis, size: int, device: torch.device) -> Callable[[], Any]:
    """One collective over `size` bytes, through the calls that training makes; nothing on an axis of one rank. `send`
    is a message to the next rank while the one before sends too, as in ring attention and in a pipeline under way."""
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
