"""Seconds of what is offloaded: gradients come down beside the backward pass, the host updates, parameters go up beside
the update (Ren et al. 2021, sections 4.2 and 5.1); state in files is read and written beside the update, too
(Rajbhandari et al. 2021, section 5.2); activations of a block are copied beside the passes of its neighbours."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import ceil
from typing import Any

from phalanx.config.cluster import Cluster, HostShare
from phalanx.config.layout import Layout
from phalanx.cost.elementwise import larger
from phalanx.cost.held import LayerKind
from phalanx.cost.memory.rank_parts import StepParts
from phalanx.cost.spec import StepSpec
from phalanx.cost.time.exposed import added
from phalanx.errors import JobError
from phalanx.optimizers.catalogue import OptimizerCosts
from phalanx.partition.tiers import BUFFER_BYTES, figures, is_offloaded, tier_of

PARTS = 16
"""Parts in which parameters are updated and go up, of a large model: the last one's copy is not hidden."""


def require_host(cluster: Cluster, layout: Layout) -> None:
    """Raises JobError if a layout offloads and a figure of the host that its prediction needs is not known."""
    missing = [name for name in figures(layout) if not getattr(cluster.host, name)]
    if missing:
        fields = " and ".join(f"cluster.host.{name}" for name in missing)
        part = "the disks of the devices' host" if missing == ["disk_gbs"] else "the devices' host"
        raise JobError(
            f"cluster: layout.offload={layout.offload} uses {part}, about which nothing is known; set {fields}, name "
            "a machine that is known, such as cluster=dgx-h100, or measure this one with `phalanx bench compute` and "
            "say cluster=local"
        )


def host_update_seconds(host: HostShare, costs: OptimizerCosts, updated: Any, clipped: Any) -> Any:
    """Returns the seconds in which a device's share of the host updates `updated` parameters, and clips gradients that
    have `clipped` bytes to be read: numbers or arrays."""
    return (updated * costs.moved_on_cpu + clipped) / (host.update_gbs * 1e9)


@dataclass(frozen=True)
class HostWork:
    """Seconds of an offloaded optimizer beside the device: two copy engines and the host's processors."""

    down: float
    """Copying gradients to the host."""
    update: float
    up: float
    """Copying parameters to the device."""
    backward: float
    """The last micro-batch's backward pass, which makes the gradients of `blocks` blocks one after the other."""
    blocks: int
    files: float = 0.0
    """Reading and writing state in files, in `buffers` parts."""
    buffers: int = 1

    @property
    def late(self) -> tuple[float, float]:
        """The seconds by which gradients arrive after the backward pass, and parameters after the update."""
        return _excess(self.down, self.backward, self.blocks), _excess(self.up, self.updating, PARTS)

    @property
    def late_files(self) -> float:
        """The seconds that files add to the update: the first part is read before it, the last written after it."""
        return _excess(self.files, self.update, self.buffers)

    @property
    def updating(self) -> float:
        """The seconds of the update, with those of files beside it."""
        return self.update + self.late_files

    def copies_down(self) -> list[tuple[float, float]]:
        """Returns start and seconds of each copy of gradients, from the start of the backward pass on."""
        return _one_by_one(self.down, self.backward, self.blocks)

    def copies_up(self) -> list[tuple[float, float]]:
        """Returns start and seconds of each copy of parameters, from the start of the update on."""
        return _one_by_one(self.up, self.updating, PARTS)


def host_work(
    spec: StepSpec, updated: float, widths: tuple[int, int], state: float, backward: float, update: float
) -> HostWork:
    """Returns the work of an offloaded optimizer.

    Args:
        updated: parameters that the rank updates.
        widths: bytes of a gradient and of a parameter.
        state: bytes of the optimizer's state per parameter.
        backward: seconds of the last micro-batch's backward pass, beside which gradients come down.
        update: seconds of the host's update, beside which parameters go up.
    """
    rate = spec.cluster.host.link_gbs * 1e9
    down, up = (updated * width / rate for width in widths)
    if is_offloaded(spec.layout, "parameters"):
        up = 0.0  # they go up when they are gathered
    files = 0.0
    if tier_of(spec.layout, "optimizer") == "disk":
        files = 2 * updated * state / (spec.cluster.host.disk_gbs * 1e9)
    parts = max(1, ceil(updated * state / BUFFER_BYTES))
    return HostWork(down, update, up, backward, max(2, spec.model.n_layers // spec.layout.pp), files, parts)


def _one_by_one(copies: float, work: float, parts: int) -> list[tuple[float, float]]:
    """Returns start and seconds of copies in equal parts, each as soon as `work` has made it and the one before is
    through: they end `_excess` seconds after the work."""
    found, free = list[tuple[float, float]](), 0.0
    for part in range(parts):
        start = larger(free, work * (part + 1) / parts)
        found.append((start, copies / parts))
        free = start + copies / parts
    return found


def exposed_swaps(spec: StepSpec, kind: LayerKind, forward: float, backward: float) -> tuple[float, float]:
    """Returns the seconds that copies of a block's activations add to the passes of a micro-batch, which take `forward`
    and `backward` seconds in an equal block beside it. A CPU copies with the cores that compute."""
    copied = _parts_of(spec).kinds[kind].kept / (spec.cluster.host.link_gbs * 1e9)
    slowdown = 1.0 if spec.cluster.accelerator.host_us else 0.0
    return added(copied, forward, slowdown), added(copied, backward, slowdown)


@lru_cache(1024)
def _parts_of(spec: StepSpec) -> StepParts:
    return StepParts(spec)


def _excess(copies: float, work: float, parts: int) -> float:
    """Returns the seconds by which copies in equal parts outlast the work that makes these one after the other."""
    return larger(copies - work * (1 - 1 / parts), copies / parts)
