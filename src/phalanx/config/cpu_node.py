"""A CPU node with another number of processes than it was measured with: what each then has of its cores."""

from __future__ import annotations

from dataclasses import replace
from math import log

from phalanx.config.cluster import Accelerator, Cluster, Link, Sharing


def with_processes(cluster: Cluster, processes: int) -> Cluster:
    """A CPU's cluster that was measured, with so many processes on each node, and what each can do then. Where devices
    do not share it stays as it is.

    Fewer processes have more threads each: one alone was measured (`Sharing.alone_products`), between it and the number
    that was measured together rates grow as a power of the threads. More have a smaller share of what all together can
    do. Where they are more than cores, each waits for its turn: whatever it starts, and every message, takes so many
    times as long. What comes out shares nothing any more."""
    shared = cluster.sharing
    if not shared.processes:
        return cluster
    share, linked = shared.processes / processes, (shared.linked or shared.processes) / processes
    cores = max(shared.node_cores, shared.processes)
    return replace(
        cluster,
        devices_per_node=processes,
        accelerator=_device(cluster.accelerator, shared, share, max(1.0, processes / cores)),
        intra=_link(cluster.intra, linked, max(1.0, processes / max(cores, shared.linked))),
        inter=_link(cluster.inter, linked, max(1.0, processes / max(cores, shared.linked))),
        sharing=Sharing(),
    )


def _grown(gain: float, share: float, processes: int) -> float:
    """What becomes of a rate where a process has `share` times the cores, if one with all has `gain` times the rate."""
    if share <= 1 or processes == 1:
        return min(1.0, share)
    return (gain or processes) ** (log(share) / log(processes))


def _device(device: Accelerator, shared: Sharing, share: float, crowd: float) -> Accelerator:
    products, streams = (
        _grown(gain, share, shared.processes) for gain in (shared.alone_products, shared.alone_streams)
    )
    return replace(
        device,
        bf16_tflops=device.bf16_tflops * products,
        fp16_tflops=device.fp16_tflops * products,
        fp32_tflops=device.fp32_tflops * products,
        memory_gib=device.memory_gib * share,
        bandwidth_gbs=device.bandwidth_gbs * streams,
        launch_us=device.launch_us * crowd,
        product_us=device.product_us * crowd,
        host_us=device.host_us * crowd,
    )


def _link(link: Link, share: float, crowd: float) -> Link:
    return replace(link, gbs=link.gbs * min(1.0, share), latency_us=link.latency_us * crowd)
