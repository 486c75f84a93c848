"""The machine a job runs on: nodes and devices, what one device can do, and the links between them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from phalanx.hashed import Hashed, hashed_once


@hashed_once
@dataclass(frozen=True)
class Accelerator(Hashed):
    """One device, described by its data sheet and a measured matrix product."""

    name: str = ""
    """Name of the device; empty if it is not described."""
    bf16_tflops: float = 0.0
    """Dense peak in bfloat16, in TFLOP/s; 0 where it has none."""
    fp16_tflops: float = 0.0
    """Dense peak in float16, in TFLOP/s."""
    fp8_tflops: float = 0.0
    """Dense peak in 8-bit floats, in TFLOP/s."""
    fp4_tflops: float = 0.0
    """Dense peak in 4-bit floats, in TFLOP/s."""
    fp32_tflops: float = 0.0
    """Dense peak in float32 (no tensor cores), in TFLOP/s."""
    ceiling: float = 0.8
    """Share of the peak that the best matrix product reaches, over shapes (16 bits; the maximum achievable matmul
    FLOPs of ml-engineering)."""
    fp8_ceiling: float = 0.7
    """The same in 8-bit and 4-bit floats."""
    memory_gib: float = 0.0
    """Device memory available to a program, in GiB."""
    bandwidth_gbs: float = 0.0
    """Device memory bandwidth, in GB/s."""
    cores: int = 1
    """Processors that each compute one tile of a matrix product at a time (streaming multiprocessors)."""
    sustained: float = 0.9
    """Rate of matrix products in a long run, relative to a single one: power and heat lower the clocks, and caches are
    cold between products."""
    older: float = 1.0
    """Rate of kernels written for the previous generation's instructions, relative to those for its own."""
    launch_us: float = 4.0
    """Time between two kernels on the device, in microseconds: the minimum time of a small kernel."""
    product_us: float = 0.0
    """Additional launch time of a matrix product, in microseconds."""
    host_us: float = 0.0
    """Framework overhead per operation on a device that is its own host (a CPU), in microseconds; 0 if the host
    launches
    operations ahead of the device."""


@dataclass(frozen=True)
class Link:
    """The links of one class, as one device sees them."""

    gbs: float = 0.0
    """Bandwidth per device, one way, while all devices send, in GB/s (its share of a shared card)."""
    latency_us: float = 0.0
    """Latency (alpha) of a message, in microseconds."""
    reached: float = 0.8
    """Share of gbs that large collectives reach."""
    pair_gbs: float = 0.0
    """Bandwidth between two devices, one way, in GB/s, if links join pairs of devices; 0: a switch gives each pair all
    of
    `gbs`."""
    reduces: bool = False
    """The switch reduces in the network (NVLink SHARP, InfiniBand SHARP): an all-reduce sends its tensor once, not
    twice."""


@hashed_once
@dataclass(frozen=True)
class Sharing(Hashed):
    """How the processes of a measured CPU node share its cores."""

    node_cores: int = 0
    """Cores of the node."""
    processes: int = 0
    """Number of processes when `accelerator` was measured as one of them; 0: devices share nothing."""
    linked: int = 0
    """Number of processes when the links were measured; 0: the same."""
    alone_products: float = 0.0
    """Matrix-product rate of one process with all cores, relative to one of `processes`."""
    alone_streams: float = 0.0
    """The same ratio for memory-bound operations."""


@hashed_once
@dataclass(frozen=True)
class Cluster(Hashed):
    """The machine: nodes × devices per node, and the rates of devices and links."""

    preset: str = ""
    """Start from a known machine and its number of nodes, such as dgx-h100:64, or `local`, the machine that
    `phalanx bench` measured here; other fields override it."""
    nodes: int = 1
    """Nodes of the job."""
    devices_per_node: int = 0
    """Devices (GPUs, or CPU processes) on a node; 0 means as many as the layout needs."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto uses the accelerator if there is one."""
    peak_tflops: float = 0.0
    """Dense peak of one device in this job's precision, in TFLOP/s, for MFU; 0 looks the device up, and measures a
    matrix product on a CPU."""
    domain: int = 0
    """Neighbouring devices that `intra` joins; 0 means those of a node (72 in a rack of GB200)."""
    pod: int = 0
    """Devices with full bandwidth among them; 0 means all. Rings that cross pods share links."""
    oversubscription: float = 1.0
    """Rings that cross pods get the bandwidth divided by this factor."""
    accelerator: Accelerator = field(default_factory=Accelerator)
    intra: Link = field(default_factory=Link)
    inter: Link = field(default_factory=Link)
    sharing: Sharing = field(default_factory=Sharing)

    @property
    def devices(self) -> int:
        """Devices of the whole machine; 0 where the layout decides."""
        return self.nodes * self.devices_per_node

    @property
    def joined(self) -> int:
        """Neighbouring devices with fast links among them."""
        return self.domain or self.devices_per_node or 1
