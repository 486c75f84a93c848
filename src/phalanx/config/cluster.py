"""The machine a job runs on: nodes and devices, what one device can do, and the links between them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import log
from typing import Annotated, Literal

from phalanx.config.calibration import Calibration
from phalanx.config.constraints import Example, Interval
from phalanx.config.values import FieldRow
from phalanx.hashed import Hashed, hashed_once

DeviceName = Literal["auto", "cpu", "cuda", "rocm", "xpu"]
DEVICE_TYPES = {"auto": "", "cpu": "cpu", "cuda": "cuda", "rocm": "cuda", "xpu": "xpu"}
"""torch's type of each device that a job can name: to torch AMD's GPUs are cuda, too."""
DEVICE_WORDS = {
    "cuda": "CUDA devices",
    "rocm": "AMD GPUs that torch can use (it must be built for ROCm)",
    "xpu": "Intel GPUs that torch can use (it must be built for XPU)",
}
"""The accelerators that a job can name, in words."""


def no_device(wanted: str, field: str = "cluster.device") -> str:
    """Returns what is said where a job asks for accelerators that a machine does not have."""
    return f"{field}={wanted}, but this machine has 0 {DEVICE_WORDS[wanted]}; use {field}=cpu"


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
    streams = _rate_factor(shared.alone_streams, share, shared.processes)
    return replace(
        cluster,
        devices_per_node=processes,
        accelerator=_device(cluster.accelerator, shared, share, max(1.0, processes / cores)),
        host=replace(
            cluster.host,
            memory_gib=cluster.host.memory_gib * share,
            link_gbs=cluster.host.link_gbs * streams,
            update_gbs=cluster.host.update_gbs * streams,
        ),
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


def _link(link: Link, share: float, crowd: float) -> Link:
    return replace(link, gbs=link.gbs * min(1.0, share), latency_us=link.latency_us * crowd)


@hashed_once
@dataclass(frozen=True)
class Accelerator(Hashed):
    """One device, by its data sheet and a measured matrix product."""

    name: Annotated[str, Example("h100-80gb")] = ""
    """Name of the device; empty if nothing is known about it. That of a known device (`accelerator: h100-80gb`) brings
    its figures; figures of any other that are not given are those of the nearest known one."""
    bf16_tflops: Annotated[float, Interval(0)] = 0.0
    """Dense peak in bfloat16, in TFLOP/s; 0 if it has none."""
    fp16_tflops: Annotated[float, Interval(0)] = 0.0
    """Dense peak in float16, in TFLOP/s."""
    fp8_tflops: Annotated[float, Interval(0)] = 0.0
    """Dense peak in 8-bit floats, in TFLOP/s."""
    fp4_tflops: Annotated[float, Interval(0)] = 0.0
    """Dense peak in 4-bit floats, in TFLOP/s."""
    fp32_tflops: Annotated[float, Interval(0)] = 0.0
    """Dense peak in float32 (no tensor cores), in TFLOP/s."""
    ceiling: Annotated[float, Interval(above=0, most=1)] = 0.8
    """Share of the 16-bit peak that the best matrix product reaches (ml-engineering's maximum achievable matmul FLOPs).
    """
    fp8_ceiling: Annotated[float, Interval(above=0, most=1)] = 0.7
    """Share of the peak that the best 8-bit or 4-bit matrix product reaches."""
    fp8_experts: bool = False
    """Whether torch multiplies the matrices of experts in 8 bits there."""
    memory_gib: Annotated[float, Interval(0), Example("79.1")] = 0.0
    """Device memory available to a program, in GiB."""
    bandwidth_gbs: Annotated[float, Interval(0), Example("3350")] = 0.0
    """Device memory bandwidth, in GB/s."""
    cores: Annotated[int, Interval(1), Example("132")] = 1
    """Processors that compute one tile of a matrix product each (streaming multiprocessors)."""
    sustained: Annotated[float, Interval(above=0)] = 0.75
    """Rate of matrix products in a long run over that of the best single one: power and heat lower clocks, and other
    data occupies the caches. Of a known device it is that of published clusters."""
    alone: Annotated[float, Interval(0)] = 0.0
    """`sustained` in a job of one device, which no neighbours heat and which waits for no slower one; of two to seven
    it lies between; 0: `sustained`."""
    older: Annotated[float, Interval(above=0)] = 1.0
    """Rate of kernels written for the previous generation's instructions over that of kernels for its own."""
    launch_us: Annotated[float, Interval(0)] = 4.0
    """Time on the device between two kernels, in microseconds: the floor of a small kernel."""
    product_us: Annotated[float, Interval(0)] = 0.0
    """Extra time of the call of a matrix product, in microseconds."""
    host_us: Annotated[float, Interval(0)] = 0.0
    """Extra time of a training program to start an operation, in microseconds, if the same processor executes it (a
    CPU); 0: the host launches operations ahead."""


@dataclass(frozen=True)
class Link:
    """The links of one class, as one device sees them."""

    gbs: Annotated[float, Interval(0)] = 0.0
    """One-way bandwidth per device in GB/s while all devices send; its share of a shared network card."""
    latency_us: Annotated[float, Interval(0)] = 0.0
    """Latency of an empty message (alpha), in microseconds."""
    reached: Annotated[float, Interval(above=0, most=1)] = 0.8
    """Share of `gbs` that large messages of a collective reach."""
    pair_gbs: Annotated[float, Interval(0)] = 0.0
    """One-way bandwidth between two devices in GB/s if links join pairs instead of a switch; 0: there is a switch, and
    a pair has all of `gbs`."""
    reduces: bool = False
    """Whether the switch reduces in the network (NVLink SHARP, InfiniBand SHARP): an all-reduce sends its tensor once.
    """


@dataclass(frozen=True)
class HostShare:
    """One device's share of its host while all devices of the node use it, for `layout.offload`."""

    memory_gib: Annotated[float, Interval(0)] = 0.0
    """Host memory, in GiB; 0: not known."""
    link_gbs: Annotated[float, Interval(0)] = 0.0
    """One-way bandwidth that large copies between device and host reach, in GB/s."""
    update_gbs: Annotated[float, Interval(0)] = 0.0
    """Bytes that the host's processors read and write while they update parameters, in GB/s."""
    disk_gbs: Annotated[float, Interval(0)] = 0.0
    """Bytes that local disks read and write, half of each, in GB/s."""
    disk_gib: Annotated[float, Interval(0)] = 0.0
    """Space on the local disks, in GiB; 0: not known."""


@hashed_once
@dataclass(frozen=True)
class Sharing(Hashed):
    """The share of each process in the cores of a measured CPU node."""

    node_cores: Annotated[int, Interval(0)] = 0
    """Cores of the node."""
    processes: Annotated[int, Interval(0)] = 0
    """Processes that share the node, of which `accelerator` describes one; 0: devices do not share."""
    linked: Annotated[int, Interval(0)] = 0
    """Processes among which the links were measured; 0: as many."""
    alone_products: Annotated[float, Interval(0)] = 0.0
    """Rate of matrix products of one process with all cores, over that of one of `processes`."""
    alone_streams: Annotated[float, Interval(0)] = 0.0
    """Rate of memory-bound operations of one process with all cores, over that of one of `processes`."""


@dataclass(frozen=True, repr=False)
class Cause(FieldRow):
    """One cause of cluster.failures: the interruptions of `devices` in `days`, and how each is overcome."""

    cause: str
    """Its name."""
    count: Annotated[float, Interval(0)]
    """Interruptions."""
    devices: Annotated[float, Interval(above=0)]
    """Devices among which they were counted."""
    days: Annotated[float, Interval(above=0)]
    """Days in which they were counted."""
    found_by: Literal["crash", "timeout", "check"] = "crash"
    """How it is noticed: ranks end; a hang runs into a timeout; only a check finds it."""
    detect_s: Annotated[float, Interval(0)] = 60.0
    """Seconds of training lost until it is noticed."""
    replace_s: Annotated[float, Interval(0)] = 0.0
    """Seconds until another machine is in place of the failed one, without a spare; 0 if it takes none."""
    repair_h: Annotated[float, Interval(0)] = 0.0
    """Hours for which the failed machine is away."""

    @property
    def per_device_day(self) -> float:
        return self.count / (self.devices * self.days)


@hashed_once
@dataclass(frozen=True)
class Cluster(Hashed):
    """The machine: nodes × devices per node, and the rates of devices and links."""

    preset: Annotated[str, Example("dgx-h100:4")] = ""
    """Start from a known machine and its number of nodes, such as dgx-h100:64, or `local`, this machine as measured by
    `phalanx bench`; other fields override it."""
    nodes: Annotated[int, Interval(1), Example("2")] = 1
    """Nodes of the job."""
    devices_per_node: Annotated[int, Interval(0), Example("8")] = 0
    """Devices (GPUs, or CPU processes) per node; 0: as many as the layout needs."""
    device: DeviceName = "auto"
    """Device type; auto uses an accelerator if there is one. rocm is AMD's GPUs, which torch calls cuda, xpu is
    Intel's."""
    peak_tflops: Annotated[float, Interval(0), Example("989.4")] = 0.0
    """Dense peak of one device in this job's precision, in TFLOP/s, for MFU; 0 looks the device up: on a CPU in the
    file of `phalanx bench compute`, and without one it measures a matrix product."""
    domain: Annotated[int, Interval(0), Example("72")] = 0
    """Neighbouring devices that `intra` joins; 0: those of a node (72 in a rack of GB200)."""
    pod: Annotated[int, Interval(0), Example("32")] = 0
    """Devices with full bandwidth among them; 0: all. Links between pods are shared."""
    oversubscription: Annotated[float, Interval(above=0)] = 1.0
    """Between pods: bandwidth that devices demand over that of the links."""
    price_per_device_hour: Annotated[float, Interval(0), Example("2.5")] = 0.0
    """Price of one device for an hour, in any currency, for the cost of a run; 0: not known."""
    power_w: Annotated[float, Interval(0), Example("1275")] = 0.0
    """Power of one device at the wall, with its share of the node, in W, for the energy of a run; 0: not known. Of a
    known machine it is the maker's maximum, which a run stays below."""
    carbon_g_per_kwh: Annotated[float, Interval(0), Example("57")] = 0.0
    """Carbon intensity of the electricity in g CO2-equivalent per kWh, for the emissions of a run; 0: not known."""
    failures: Annotated[
        tuple[Cause, ...], Example("[{cause: GPU, count: 9, devices: 1024, days: 30, replace_s: 600, repair_h: 24}]")
    ] = ()
    """Causes of failures, for `phalanx goodput JOB`; empty: Llama 3's. Each has a cause (its name), a count of
    interruptions of so many devices in so many days, and may have found_by (crash, timeout or check), detect_s (60),
    replace_s (0) and repair_h (0), as docs/guides/goodput.md says."""
    accelerator: Accelerator = field(default_factory=Accelerator)
    intra: Link = field(default_factory=Link)
    inter: Link = field(default_factory=Link)
    host: HostShare = field(default_factory=HostShare)
    sharing: Sharing = field(default_factory=Sharing)
    allow_unreliable: bool = False
    """Predict even if the measurements of the machine are so noisy that predictions would be refused."""
    calibration: Calibration = field(default_factory=Calibration)

    @property
    def devices(self) -> int:
        """Devices of the whole machine; 0 if the layout decides."""
        return self.nodes * self.devices_per_node

    @property
    def joined(self) -> int:
        """Number of neighbouring devices with fast links among them."""
        return self.domain or self.devices_per_node or 1
