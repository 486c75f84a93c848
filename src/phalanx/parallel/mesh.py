"""The mesh: every rank's place on the axes pp × dp_replicate × dp_shard × cp × tp, built in one place and printable.

Some axes are composed of others, as in torchtitan's mesh. State is sharded over dp_shard × cp (the `shard` axis), since
context-parallel ranks hold the same parameters. Experts are cut over `ep` neighbours of that axis and sharded over the
rest of it (`edp`); with etp=1 over `ep` neighbours of shard × tp, all tensor ranks among them. Neighbours on both keep
a second copy of the parameters (`hpz`, `edp_hpz`). Context-parallel ranks are a grid, ring × ulysses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from math import prod

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from phalanx.comm.axis import Axis, Ledger, Pending, StagedAxis
from phalanx.config.layout import AXES, Layout
from phalanx.errors import JobError
from phalanx.launch.process_group import inherit_timeout, new_group
from phalanx.partition.derived import gathers_parameters, is_copied, near_ranks

DEVICE_AXES = ("pp", "dp_replicate", "shard", "tp")
"""Outermost first; what torch's mesh has, with axes of packages between the first two."""


@dataclass(frozen=True)
class AxisGeometry:
    """The positions of an axis's ranks among all ranks."""

    size: int
    stride: int
    """The difference of ranks between neighbours on the axis."""

    def place(self, rank: int) -> int:
        """Returns the place of `rank` along the axis."""
        return rank // self.stride % self.size


@dataclass(frozen=True)
class Mesh:
    """One rank's view of the mesh. The innermost axis (tp) changes fastest with the rank."""

    sizes: dict[str, int]
    """Ranks along each axis, outermost first."""
    coordinates: dict[str, int]
    """This rank's place along each axis."""
    devices: DeviceMesh | None
    """torch's mesh over pp, dp_replicate, shard and tp, those with more than one rank; None for a single process."""
    expert_devices: DeviceMesh | None = None
    """torch's mesh over pp, dp_replicate, edp, ep and, unless ep has tensor ranks, tp; None without expert
    parallelism."""
    lines: dict[str, AxisGeometry] = field(default_factory=dict)
    """The axes that ranks communicate along, by name."""
    ledger: Ledger = field(default_factory=Ledger)
    """Counts the traffic of every axis."""
    _axes: dict[str, Axis] = field(init=False, default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        for name in self.lines:
            self._axes[name] = self._axis(name)
        self._axes["world"] = Axis("world")
        self._axes["replicas"] = self._axes["dp_replicate"]
        if self.devices is not None:
            everyone = dist.distributed_c10d._get_default_group()
            self._axes["world"] = self._over("world", everyone.size(), everyone.rank(), everyone)

    @property
    def data_ranks(self) -> int:
        """The number of groups of ranks that read different samples."""
        return prod(size for axis, size in self.sizes.items() if axis not in ("pp", "cp", "tp"))

    @property
    def data_rank(self) -> int:
        """The group of this rank among those."""
        return data_rank(self.sizes, self.coordinates)

    @property
    def owns_loss(self) -> bool:
        """True if a sum of losses over all ranks includes this rank's. Tensor ranks compute the same losses, so only
        the first one's count. Context-parallel ranks each compute those of their own tokens. In a pipeline every rank
        counts, since only those with the last stage compute any."""
        return self.coordinates["tp"] == 0

    @property
    def is_sharded(self) -> bool:
        """True if ranks hold different parts of the state, so that a norm needs a sum over ranks."""
        return any(self.sizes[axis] > 1 for axis in ("pp", "dp_shard", "cp", "tp"))

    def axis(self, name: str) -> Axis:
        """Returns the collectives among the ranks that differ from this one only along axis `name`: one of pp,
        dp_replicate, shard (dp_shard × cp), tp, cp, ring, ulysses, ep, ep_near, ep_far, edp, hpz and edp_hpz,
        hpz_across and edp_hpz_across; `world` is all ranks, `replicas` those that gradients are also summed over."""
        return self._axes[name]

    def sum_over(self, replicas: Axis) -> None:
        """Makes `replicas`, of which only this one is part of the mesh, those whose gradients are summed."""
        replicas.ledger = self.ledger
        self._axes["replicas"] = replicas

    def neighbours(self, name: str, size: int) -> Axis:
        """Returns the collectives among `size` neighbours along an axis: ranks 0 to size - 1 are together, and so on.
        Every rank of the axis must call it."""
        if size == 1:
            return Axis(name)
        first = self.axis(name).rank // size * size
        return self.among(name, range(first, first + size))

    def among(self, name: str, places: Sequence[int]) -> Axis:
        """Returns the collectives among some places of an axis, including this rank's own. Only their ranks call it,
        and they must have equally many process groups: torch names a group after its number."""
        if len(places) == 1:
            return Axis(name)
        group = new_group(self._ranks(name, places))
        return self._over(name, len(places), places.index(self.axis(name).rank), group)

    def p2p_groups(self, name: str) -> tuple[Axis, Axis]:
        """Returns an axis twice, for messages to higher and to lower ranks, with process groups of their own: messages
        never mix with collectives, and two that cross do not wait for each other (NCCL serialises those between two
        ranks). All ranks of the axis must call it."""
        axis = self.axis(name)
        if axis.group is None:
            return axis, axis
        everyone = range(axis.size)
        up = self.among(name, everyone)
        return up, up if axis.gloo else self.among(name, everyone)

    def messages(self, name: str, timeout_s: float) -> Axis:
        """Returns an axis with a CPU process group of its own, for messages from threads: they never mix with the
        collectives. Each waits at most `timeout_s` for its peer. All ranks of the axis must call it."""
        axis = self.axis(name)
        if axis.group is None:
            return axis
        group = new_group(dist.get_process_group_ranks(axis.group), "gloo", timedelta(seconds=timeout_s))
        return Axis(name, axis.size, axis.rank, group, self.ledger)

    def _ranks(self, name: str, places: Sequence[int]) -> list[int]:
        line, rank = self.lines[name], dist.get_rank()
        return [rank + (place - line.place(rank)) * line.stride for place in places]

    def reduce_replica(self, x: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Pending:
        """Replaces `x` by the sum (or maximum) over the ranks of this replica: those that differ along any axis but
        the one along which replicas lie, dp_replicate or that of a package."""
        outside = [axis for axis in self.sizes if axis not in AXES]
        for name in ("tp", "shard", *(["dp_replicate"] if outside else [])):
            self.axis(name).all_reduce(x, op).wait()
        return self.axis("pp").all_reduce(x, op)

    def _axis(self, name: str) -> Axis:
        """Creates the collectives of one axis. The ledger records its traffic under the names of layouts: cp for both
        its parts, and dp_shard where the shards are those of dp_shard alone."""
        shown = {"shard": "dp_shard" if self.sizes["cp"] == 1 else "dp_shard_cp", "ring": "cp", "ulysses": "cp"}
        shown |= {"ep_near": "ep", "ep_far": "ep"}
        line = self.lines[name]
        if self.devices is None or line.size == 1:
            return Axis(shown.get(name, name))
        if name in ("ring", "ulysses") and line == self.lines["cp"]:
            return self._axes["cp"]
        if name in (self.devices.mesh_dim_names or ()):
            group = self.devices.get_group(name)
        elif self.expert_devices is not None and name in ("ep", "edp"):
            group = self.expert_devices.get_group(name)
        else:
            # All ranks create the groups of their own lines, equally many.
            group = new_group(self._ranks(name, range(line.size)))
        return self._over(shown.get(name, name), line.size, line.place(dist.get_rank()), group)

    def _over(self, name: str, size: int, rank: int, group: dist.ProcessGroup) -> Axis:
        """Returns the collectives over a process group; through host memory where ranks share a GPU."""
        axis = Axis(name, size, rank, group, self.ledger)
        staged = axis.gloo and self.devices is not None and self.devices.device_type != "cpu"
        return (StagedAxis(name, size, rank, group, self.ledger) if staged else axis).share()

    def __str__(self) -> str:
        axes = " × ".join(f"{axis} {size}" for axis, size in self.sizes.items() if size > 1)
        return f"{axes or 'one rank'} ({prod(self.sizes.values())} ranks)" if axes else "one rank"


def place(layout: Layout, rank: int) -> tuple[dict[str, int], dict[str, int]]:
    """Returns the sizes of the axes, and the coordinates of `rank` along them. Pure arithmetic, for any world size."""
    sizes = {"pp": layout.pp, **layout.axes.sizes, **{axis: getattr(layout, axis) for axis in AXES}}
    coordinates, rest = {}, rank
    for axis in reversed(sizes):
        rest, coordinates[axis] = divmod(rest, sizes[axis])
    return sizes, {axis: coordinates[axis] for axis in sizes}


def data_rank(sizes: Mapping[str, int], coordinates: Mapping[str, int]) -> int:
    """Returns the group of a rank, which `place` has placed, among those that read different samples."""
    rank = 0
    for axis, size in sizes.items():
        if axis not in ("pp", "cp", "tp"):
            rank = rank * size + coordinates[axis]
    return rank


def lines(layout: Layout) -> dict[str, AxisGeometry]:
    """Returns the axes that ranks communicate along. Pure arithmetic, for any world size."""
    tp, cp, shard = layout.tp, layout.cp, layout.shard_ranks
    ulysses, ring = layout.cp_ulysses, layout.ring
    ulysses_first = layout.cp_inner == "ulysses"
    outside, stride = dict[str, AxisGeometry](), layout.dp_replicate * shard * tp
    for axis, size in reversed(layout.axes.sizes.items()):
        outside[axis] = AxisGeometry(size, stride)
        stride *= size
    hpz, crosses = near_ranks(layout), is_copied(layout) and layout.quantise_gradients != "none"
    return {
        "pp": AxisGeometry(layout.pp, stride),
        **outside,
        "dp_replicate": AxisGeometry(layout.dp_replicate, shard * tp),
        "shard": AxisGeometry(shard, tp),
        "tp": AxisGeometry(tp, 1),
        "cp": AxisGeometry(cp, tp),
        "ring": AxisGeometry(ring, tp * (ulysses if ulysses_first else 1)),
        "ulysses": AxisGeometry(ulysses, tp * (1 if ulysses_first else ring)),
        "ep": AxisGeometry(layout.ep, 1 if layout.folds else tp),
        "ep_near": AxisGeometry(layout.ep_node if layout.ep_nodes > 1 else 1, 1 if layout.folds else tp),
        "ep_far": AxisGeometry(layout.ep_nodes, (1 if layout.folds else tp) * layout.ep_node),
        "edp": AxisGeometry(layout.edp, tp * layout.ep_shard),
        "hpz": AxisGeometry(near_ranks(layout), tp),
        "edp_hpz": AxisGeometry(near_ranks(layout, experts=layout.ep > 1), tp * layout.ep_shard),
        # The ranks at one place of every node: of the experts' ranks these are the same.
        "hpz_across": AxisGeometry(shard // hpz if crosses else 1, tp * hpz),
        "edp_hpz_across": AxisGeometry(shard // hpz if crosses and layout.ep > 1 else 1, tp * hpz),
    }


def build(layout: Layout, device_type: str) -> Mesh:
    """Builds the mesh of this process's rank. Raises JobError if layout and number of processes differ."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    if layout.processes != world:
        raise JobError(
            f"layout {layout.line()} needs {layout.processes} processes, but {world} were started; start "
            f"{layout.processes}, or set layout.dp_replicate so that the product of the axes is {world}"
        )
    # FSDP2 requires an axis even where one rank alone gathers from its host.
    always = ("shard",) if gathers_parameters(layout) else ()
    if world == 1 and not always:
        return alone()
    sizes, coordinates = place(layout, dist.get_rank())
    every = lines(layout)
    names = (DEVICE_AXES[0], *layout.axes.sizes, *DEVICE_AXES[1:])
    devices = _devices(
        device_type, {name: every[name].size for name in names if every[name].size > 1 or name in always}
    )
    experts = None
    if layout.ep > 1:
        # FSDP2 requires even an axis of one rank by name.
        names = ("pp", *layout.axes.sizes, "dp_replicate", "edp", "ep", *([] if layout.folds else ["tp"]))
        experts = _devices(device_type, {name: every[name].size for name in names})
    return Mesh(sizes, coordinates, devices, experts, every)


def alone() -> Mesh:
    """Returns the mesh of a process that computes a whole step by itself."""
    return Mesh(*place(Layout(), 0), None, lines=lines(Layout()))


def _devices(device_type: str, sizes: dict[str, int]) -> DeviceMesh:
    mesh = init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    for name in sizes:
        inherit_timeout(mesh.get_group(name))
    return mesh
