"""A CPU node with another number of processes than was measured, and the rates that each process then has."""

from __future__ import annotations

from dataclasses import replace
from math import log

from phalanx.config.cluster import Accelerator, Cluster, HostShare, Link, Sharing


def with_processes(cluster: Cluster, processes: int) -> Cluster:
    """Returns a measured CPU cluster with `processes` processes per node and the rates of each; unchanged if devices do
    not share.

    With fewer processes each has more threads: one alone was measured (`Sharing.alone_products`), and up to the number
    measured together rates grow as a power of the threads. With more, each has a smaller share of the total rate. With
    more processes than cores they take turns: every start of an operation and every message takes proportionally
    longer. The result shares nothing any more.
    """
    shared = cluster.sharing
    if not shared.processes:
        return cluster
    share, linked = shared.processes / processes, (shared.linked or shared.processes) / processes
    cores = max(shared.node_cores, shared.processes)
    return replace(
        cluster,
        devices_per_node=processes,
        accelerator=_device(cluster.accelerator, shared, share, max(1.0, processes / cores)),
        host=_host(cluster.host, share, _rate_factor(shared.alone_streams, share, shared.processes)),
        intra=_link(cluster.intra, linked, max(1.0, processes / max(cores, shared.linked))),
        inter=_link(cluster.inter, linked, max(1.0, processes / max(cores, shared.linked))),
        sharing=Sharing(),
    )


def _rate_factor(gain: float, share: float, processes: int) -> float:
    """Returns the factor on the rate of a process with `share` times the cores; `gain` is that with all of them."""
    if share <= 1 or processes == 1:
        return min(1.0, share)
    return (gain or processes) ** (log(share) / log(processes))


def _device(device: Accelerator, shared: Sharing, share: float, crowd: float) -> Accelerator:
    products, streams = (
        _rate_factor(gain, share, shared.processes) for gain in (shared.alone_products, shared.alone_streams)
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


def _host(host: HostShare, share: float, streams: float) -> HostShare:
    return replace(
        host,
        memory_gib=host.memory_gib * share,
        link_gbs=host.link_gbs * streams,
        update_gbs=host.update_gbs * streams,
    )


def _link(link: Link, share: float, crowd: float) -> Link:
    return replace(link, gbs=link.gbs * min(1.0, share), latency_us=link.latency_us * crowd)
