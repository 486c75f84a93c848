"""The tier of memory on which each part of the state lives: the device, its host, or a disk. Training, the cost model
and the planner all ask here.

Offloading keeps a part away from the device until it is needed: optimizer state with its update (ZeRO-Offload: Ren et
al. 2021), also in files (ZeRO-Infinity: Rajbhandari et al. 2021).
"""

from __future__ import annotations

from typing import Literal

from phalanx.config.layout import Layout

BUFFERS = 3
"""Buffers through which state in files passes: one is read, one updated, one written."""
BUFFER_BYTES = 64 * 2**20
"""Bytes of state in one buffer: requests of tens of MiB reach a disk's bandwidth."""
Tier = Literal["device", "host", "disk"]
Part = Literal["optimizer", "parameters", "activations"]
PARTS: tuple[Part, ...] = ("optimizer", "parameters", "activations")
"""Parts that `layout.offload` may name."""
HOST = "cpu"
"""The word of `layout.offload_to` for host memory; anything else is a folder."""


def named(layout: Layout) -> tuple[str, ...]:
    """Returns the words of `layout.offload` as they are written, joined by "+": known parts or not."""
    if layout.offload == "none":
        return ()
    return PARTS if layout.offload == "all" else tuple(layout.offload.split("+"))


def tier_of(layout: Layout, part: Part) -> Tier:
    """Returns where a part lives between its uses. Only optimizer state goes to a folder."""
    if part not in named(layout):
        return "device"
    return "disk" if part == "optimizer" and layout.offload_to != HOST else "host"


def figures(layout: Layout) -> tuple[str, ...]:
    """Returns the fields of cluster.host that the prediction of a layout's offload needs."""
    needed = ["link_gbs"] if named(layout) else []
    needed += ["update_gbs"] if is_offloaded(layout, "optimizer") else []
    return (*needed, "disk_gbs") if tier_of(layout, "optimizer") == "disk" else tuple(needed)


def is_offloaded(layout: Layout, part: Part) -> bool:
    """Returns whether a part lives elsewhere than on the device."""
    return tier_of(layout, part) != "device"


def gathers_parameters(layout: Layout) -> bool:
    """Returns whether a block's parameters are whole on the device only while it computes: ZeRO-3's, which several
    ranks share, or which come from the host."""
    return layout.zero == 3 and (layout.shard_ranks > 1 or is_offloaded(layout, "parameters"))


def has_buckets(layout: Layout) -> bool:
    """Returns whether several processes sum their gradients in buckets, as DDP, ZeRO-1 and ZeRO-2 do."""
    replicas = 1 if layout.data_parallel == "threads" else layout.dp_replicate // layout.independent_replicas
    return layout.shard_ranks * replicas > 1 and not gathers_parameters(layout)


def offloaded_layers(layout: Layout, stage: range) -> range:
    """Returns the layers of a stage whose activations leave the device: its first ones, which keep them longest. By
    default all but the last, whose backward pass comes first, or the only one."""
    if not is_offloaded(layout, "activations"):
        return stage[:0]
    return stage[: layout.offload_blocks or max(1, len(stage) - 1)]
