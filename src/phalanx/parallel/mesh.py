"""The mesh: every rank's place on the axes pp × dp_replicate × dp_shard × cp × tp, built in one place and printable."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from phalanx.errors import JobError
from phalanx.job.layout import AXES, Layout


@dataclass(frozen=True)
class Mesh:
    """One rank's view of the mesh. The innermost axis (tp) changes fastest with the rank."""

    sizes: dict[str, int]
    """Ranks along each axis, outermost first."""
    coordinates: dict[str, int]
    """This rank's place along each axis."""
    devices: DeviceMesh | None
    """torch's mesh over the axes with more than one rank; None for a single process."""

    @property
    def data_ranks(self) -> int:
        """Groups of ranks that read different samples."""
        return self.sizes["dp_replicate"] * self.sizes["dp_shard"]

    @property
    def data_rank(self) -> int:
        """Which of those groups this rank is in."""
        return self.coordinates["dp_replicate"] * self.sizes["dp_shard"] + self.coordinates["dp_shard"]

    def group(self, axis: str) -> dist.ProcessGroup:
        """The ranks that differ from this one along `axis` alone. The axis must have more than one rank."""
        if self.devices is None or self.sizes[axis] == 1:
            raise ValueError(f"axis {axis} has one rank and no group")
        return self.devices.get_group(axis)

    def __str__(self) -> str:
        axes = " × ".join(f"{axis} {size}" for axis, size in self.sizes.items() if size > 1)
        return f"{axes or 'one rank'} ({prod(self.sizes.values())} ranks)" if axes else "one rank"


def place(layout: Layout, rank: int) -> tuple[dict[str, int], dict[str, int]]:
    """Sizes of the axes, and the coordinates of `rank` along them. Pure arithmetic, for any world size."""
    sizes = {axis: getattr(layout, axis) for axis in AXES}
    coordinates, rest = {}, rank
    for axis in reversed(AXES):
        rest, coordinates[axis] = divmod(rest, sizes[axis])
    return sizes, {axis: coordinates[axis] for axis in AXES}


def build(layout: Layout, device_type: str) -> Mesh:
    """The mesh of this process's rank. Raises JobError when the layout and the number of processes differ."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    if layout.processes != world:
        raise JobError(
            f"layout {layout.line()} needs {layout.processes} processes, but {world} were started; start "
            f"{layout.processes}, or set layout.dp_replicate so that the product of the axes is {world}"
        )
    if world == 1:
        sizes, coordinates = place(Layout(), 0)
        return Mesh(sizes, coordinates, None)
    sizes, coordinates = place(layout, dist.get_rank())
    wide = {axis: size for axis, size in sizes.items() if size > 1}
    devices = init_device_mesh(device_type, tuple(wide.values()), mesh_dim_names=tuple(wide))
    return Mesh(sizes, coordinates, devices)
