"""Known machines, each with its source: what `cluster.preset` may name.

Links are the makers' figures, one way and per device; `reached` is measured where a link says so, assumed elsewhere. A
message over NVLink takes a few microseconds, over InfiniBand or Slingshot about ten with NCCL's protocol (NCCL,
src/graph/tuning.cc: base latencies of ring/simple of 6.6 us inside a node and 14 us between nodes).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from phalanx.config import local_cluster
from phalanx.config.calibration import Calibration
from phalanx.config.cluster import Cluster, HostShare, Link, Sharing
from phalanx.config.device_entry import device_problems
from phalanx.config.devices import ACCELERATORS
from phalanx.errors import JobError
from phalanx.facts import stated
from phalanx.nearest import nearest
from phalanx.registry import Registry, View

NVLINK2 = Link(gbs=95, latency_us=7, reached=0.9, pair_gbs=25)
"""V100: 6 × 25 GB/s. Four devices of a node have pairs of links and no switch: 22, 45 and 85 GB/s measured among two,
three and four (vTrain's tables of NCCL)."""
NVSWITCH1 = Link(gbs=150, latency_us=7, reached=0.8)
"""V100 of a DGX-2: 6 × 25 GB/s through switches; the share is that of the A100's."""
NVLINK3 = Link(gbs=300, latency_us=6, reached=0.80)
"""A100: 12 × 25 GB/s; 229 to 240 of 300 GB/s bus bandwidth in all-reduces of 1 GB (vTrain's tables of NCCL)."""
NVLINK4 = Link(gbs=450, latency_us=5, reached=0.82, reduces=True)
"""H100: 18 × 25 GB/s. From Hopper on the switch reduces (NVLS)."""
NVLINK5 = Link(gbs=900, latency_us=5, reached=0.80, reduces=True)
"""B200: 18 × 50 GB/s."""
PCIE4 = Link(gbs=32, latency_us=10, reached=0.75)
PCIE5 = Link(gbs=64, latency_us=10, reached=0.75)
"""16 lanes."""
INFINITY_FABRIC = Link(gbs=448, latency_us=8, reached=0.7, pair_gbs=64)
"""MI300X and MI325X: a link of 64 GB/s to each of seven others."""
INFINITY_FABRIC_4 = Link(gbs=537, latency_us=8, reached=0.7, pair_gbs=76.8)
"""MI350X and MI355X: a link of 76.8 GB/s to each of seven others."""
TPU_NETWORK = Link(gbs=6, latency_us=20, reached=0.8)
"""The data centre's network, beyond the torus."""


def _cards(gbits: float, devices_per_card: float = 1, latency_us: float = 12) -> Link:
    """Returns the links of network cards of `gbits` Gb/s, each shared by `devices_per_card` devices."""
    return Link(gbs=gbits / 8 / devices_per_card, latency_us=latency_us, reached=0.85)


LINK_REACHED = 0.8
"""Share of a PCIe link's bandwidth that large copies of pinned memory reach: 25 of 32 GB/s over PCIe 4.0."""
UPDATE_REACHED = 0.43
"""Share of the host's memory bandwidth that an optimizer's update reaches: AdamW on 10 billion parameters moves 280 GB
in 2.57 s on a host with 256 GB/s (Ren et al. 2021, table 4: CPU-Adam, two Xeon 8168)."""


DISK_REACHED = 0.8
"""Share of the disks' peak bandwidth that large requests reach, of which half are writes: assumed."""


def _host(
    devices: int, memory_gb: float, bandwidth_gbs: float, link_gbs: float, disk_tb: float = 0, disk_gbs: float = 0
) -> HostShare:
    """Returns each device's share of a host with `memory_gb` that moves `bandwidth_gbs`, its link to the host, and its
    share of the local disks."""
    update = UPDATE_REACHED * bandwidth_gbs / devices
    disk = DISK_REACHED * disk_gbs / devices, disk_tb * 1e12 / 2**30 / devices
    return HostShare(memory_gb * 1e9 / 2**30 / devices, link_gbs * LINK_REACHED, update, *disk)


DGX1_HOST = _host(8, 512, 154, 8, disk_tb=7.68, disk_gbs=2)
"""Two Xeon E5-2698 v4 of four channels DDR4-2400; two devices share 16 lanes of PCIe 3.0. Disks: four SATA drives of
1.92 TB, 0.5 GB/s each, in RAID 0."""
DGX2_HOST = _host(16, 1500, 256, 4, disk_tb=30.7, disk_gbs=25)
"""Two Xeon 8168 of six channels DDR4-2666; four devices share 16 lanes of PCIe 3.0. Disks: eight NVMe drives of
3.84 TB, taken to be as fast as those of DGX A100."""
DGX_A100_HOST = _host(8, 2000, 410, 16, disk_tb=30.7, disk_gbs=25)
"""Two EPYC 7742 of eight channels DDR4-3200; two devices share 16 lanes of PCIe 4.0. Disks: eight NVMe drives of
3.84 TB in RAID 0, 25 GB/s (NVIDIA's presentation of DGX A100)."""
DGX_A100_40GB_HOST = _host(8, 1000, 410, 16, disk_tb=15.4, disk_gbs=25)
"""The same with half the memory and four drives."""
DGX_H100_HOST = _host(8, 2000, 614, 64, disk_tb=30.7, disk_gbs=25)
"""Two Xeon 8480C of eight channels DDR5-4800; 16 lanes of PCIe 5.0 per device. Disks: eight NVMe drives of 3.84 TB in
RAID 0, taken to be as fast as those of DGX A100."""
DGX_B200_HOST = _host(8, 2000, 717, 64, disk_tb=30.7, disk_gbs=25)
"""Two Xeon 8570 of eight channels DDR5-5600; 16 lanes of PCIe 5.0 per device. Disks as of DGX H100."""
GRACE_HOST = _host(1, 480, 512, 450)
"""One Grace with LPDDR5X; NVLink-C2C."""
GRACE_PAIR_HOST = _host(2, 480, 512, 450)
"""A Grace for two devices, which share its NVLink-C2C."""
MILAN_HOST = _host(4, 512, 205, 32)
"""One EPYC 7543P of eight channels DDR4-3200 for four devices, 16 lanes of PCIe 4.0 each."""
NO_HOST = HostShare()


def _node(device: str, devices: int, *, intra: Link, inter: Link, host: HostShare = NO_HOST) -> Cluster:
    return Cluster(devices_per_node=devices, accelerator=ACCELERATORS[device], intra=intra, inter=inter, host=host)


@stated
@dataclass(frozen=True)
class MachineEntry:
    """One row of the table: a node and the links between nodes."""

    cluster: Cluster
    source: str
    """Source of the figures."""


LOCAL = "local"
"""Name of the machine that was measured here (local_cluster.py)."""
_OWN = {
    "dgx-v100": MachineEntry(
        _node("v100-32gb", 8, intra=NVLINK2, inter=_cards(100, devices_per_card=2), host=DGX1_HOST),
        source="NVIDIA DGX-1 with V100 data sheet: four 100 Gb/s cards",
    ),
    "dgx-2": MachineEntry(
        _node("v100-32gb", 16, intra=NVSWITCH1, inter=_cards(100, devices_per_card=2), host=DGX2_HOST),
        source="NVIDIA DGX-2 data sheet: 16 V100 and 12 NVSwitches, eight 100 Gb/s cards, 30 TB of NVMe",
    ),
    "dgx-a100": MachineEntry(
        _node("a100-80gb", 8, intra=NVLINK3, inter=_cards(200), host=DGX_A100_HOST),
        source="NVIDIA DGX A100 data sheet: eight 200 Gb/s cards",
    ),
    "dgx-a100-40gb": MachineEntry(
        _node(
            "a100-40gb",
            8,
            intra=NVLINK3,
            inter=_cards(200),
            host=DGX_A100_40GB_HOST,
        ),
        source="NVIDIA DGX A100 data sheet: eight 200 Gb/s cards",
    ),
    "a800": MachineEntry(
        _node("a100-80gb", 8, intra=replace(NVLINK3, gbs=200), inter=_cards(200)),
        source="NVIDIA A800 data sheet: NVLink of 400 GB/s, both ways; otherwise as dgx-a100",
    ),
    "a100-pcie": MachineEntry(
        _node("a100-pcie-80gb", 8, intra=PCIE4, inter=_cards(200, devices_per_card=8)),
        source="PCIe 4.0; one 200 Gb/s card for a node is assumed",
    ),
    "dgx-h100": MachineEntry(
        _node("h100-80gb", 8, intra=NVLINK4, inter=_cards(400), host=DGX_H100_HOST),
        source="NVIDIA DGX H100 data sheet: eight 400 Gb/s cards",
    ),
    "dgx-h100-nvl256": MachineEntry(
        replace(_node("h100-80gb", 8, intra=NVLINK4, inter=_cards(400)), domain=256),
        source="NVIDIA H100 architecture whitepaper: the NVLink Switch System joins 256",
    ),
    "h100-pcie": MachineEntry(
        _node("h100-pcie-80gb", 8, intra=PCIE5, inter=_cards(400, devices_per_card=8)),
        source="PCIe 5.0; one 400 Gb/s card for a node is assumed",
    ),
    "gh200": MachineEntry(
        _node("gh200", 1, intra=NVLINK4, inter=_cards(400), host=GRACE_HOST),
        source="NVIDIA GH200 data sheet; one 400 Gb/s card per superchip is assumed",
    ),
    "dgx-h200": MachineEntry(
        _node("h200", 8, intra=NVLINK4, inter=_cards(400), host=DGX_H100_HOST),
        source="NVIDIA DGX H200 data sheet: eight 400 Gb/s cards",
    ),
    "h800": MachineEntry(
        _node("h800-80gb", 8, intra=replace(NVLINK4, gbs=200), inter=_cards(400)),
        source="NVIDIA H800 data sheet: NVLink of 400 GB/s, both ways; otherwise as dgx-h100",
    ),
    "dgx-b200": MachineEntry(
        _node("b200", 8, intra=NVLINK5, inter=_cards(400), host=DGX_B200_HOST),
        source="NVIDIA DGX B200 data sheet: eight 400 Gb/s cards",
    ),
    "dgx-b300": MachineEntry(
        _node("b300", 8, intra=NVLINK5, inter=_cards(800)),
        source="NVIDIA DGX B300 data sheet: eight 800 Gb/s cards",
    ),
    "gb200-nvl72": MachineEntry(
        replace(_node("gb200", 4, intra=NVLINK5, inter=_cards(400), host=GRACE_PAIR_HOST), domain=72),
        source="NVIDIA GB200 NVL72 data sheet: NVLink joins the 72 devices of a rack",
    ),
    "gb300-nvl72": MachineEntry(
        replace(_node("gb300", 4, intra=NVLINK5, inter=_cards(800), host=GRACE_PAIR_HOST), domain=72),
        source="NVIDIA GB300 NVL72 data sheet: NVLink joins the 72 devices of a rack",
    ),
    "mi300x": MachineEntry(
        _node("mi300x", 8, intra=INFINITY_FABRIC, inter=_cards(400)),
        source="AMD MI300X data sheet: seven Infinity Fabric links; eight 400 Gb/s cards",
    ),
    "mi325x": MachineEntry(
        _node("mi325x", 8, intra=INFINITY_FABRIC, inter=_cards(400)),
        source="AMD MI325X data sheet: seven Infinity Fabric links; eight 400 Gb/s cards",
    ),
    "mi350x": MachineEntry(
        _node("mi350x", 8, intra=INFINITY_FABRIC_4, inter=_cards(400)),
        source="AMD MI350X data sheet: seven Infinity Fabric links; eight 400 Gb/s cards",
    ),
    "mi355x": MachineEntry(
        _node("mi355x", 8, intra=INFINITY_FABRIC_4, inter=_cards(400)),
        source="AMD MI355X data sheet: seven Infinity Fabric links; eight 400 Gb/s cards",
    ),
    "gaudi2": MachineEntry(
        _node("gaudi2", 8, intra=Link(gbs=262, latency_us=8, reached=0.85), inter=_cards(300)),
        source="Intel Gaudi 2 data sheet: 24 ports of 100 Gb/s, 21 of them inside the node",
    ),
    "gaudi3": MachineEntry(
        _node("gaudi3", 8, intra=Link(gbs=525, latency_us=8, reached=0.85), inter=_cards(600)),
        source="Intel Gaudi 3 data sheet: 24 ports of 200 Gb/s, 21 of them inside the node",
    ),
    "polaris": MachineEntry(
        _node("a100-40gb", 4, intra=NVLINK3, inter=_cards(200, devices_per_card=2), host=MILAN_HOST),
        source="ALCF user guide: two Slingshot-11 cards for four A100",
    ),
    "sophia": MachineEntry(
        _node("a100-40gb", 8, intra=NVLINK3, inter=_cards(200), host=DGX_A100_HOST),
        source="ALCF user guide: DGX A100",
    ),
    "perlmutter": MachineEntry(
        _node(
            "a100-40gb",
            4,
            intra=NVLINK3,
            inter=_cards(200),
            host=_host(4, 256, 205, 32),
        ),
        source="NERSC, Perlmutter architecture: four Slingshot-11 cards for four A100",
    ),
    "frontier": MachineEntry(
        _node("mi250x-gcd", 8, intra=Link(gbs=50, latency_us=8, reached=0.75), inter=_cards(200, devices_per_card=2)),
        source="OLCF, Frontier user guide: four Slingshot-11 cards for eight dies, 50 GB/s per link between dies",
    ),
    # Between GPUs 15 GB/s were measured, which is also a tile's share of the eight cards (200 Gb/s for 1.5 tiles):
    # beyond a pair of tiles all links are as slow as the network.
    "aurora": MachineEntry(
        replace(
            _node(
                "max1550-tile",
                12,
                intra=Link(gbs=185, latency_us=10, reached=0.9),
                inter=_cards(200, devices_per_card=1.5),
            ),
            domain=2,
        ),
        source="ALCF, Aurora user guide: 185 GB/s measured between the two tiles of a GPU",
    ),
    "selene": MachineEntry(
        _node("a100-80gb", 8, intra=NVLINK3, inter=_cards(200), host=DGX_A100_HOST),
        source="Narayanan et al. 2021: eight HDR cards",
    ),
    "jean-zay": MachineEntry(
        _node("a100-80gb", 8, intra=NVLINK3, inter=_cards(100, devices_per_card=2, latency_us=15)),
        source="bigscience, train/tr11-176B-ml: four 100 Gb/s Omni-Path cards for eight A100",
    ),
    "jean-zay-v100": MachineEntry(
        _node("v100-32gb", 4, intra=NVLINK2, inter=_cards(100, latency_us=15)),
        source="bigscience: four 100 Gb/s Omni-Path cards for four V100",
    ),
    "jean-zay-v100-16gb": MachineEntry(
        _node("v100-16gb", 4, intra=NVLINK2, inter=_cards(100, latency_us=15)),
        source="bigscience: four 100 Gb/s Omni-Path cards for four V100",
    ),
    "eos": MachineEntry(
        _node("h100-80gb", 8, intra=NVLINK4, inter=_cards(400), host=DGX_H100_HOST),
        source="NVIDIA Eos: DGX H100",
    ),
    "meta-h100": MachineEntry(
        replace(_node("h100-80gb", 8, intra=NVLINK4, inter=_cards(400)), pod=3072, oversubscription=7),
        source="Llama 3 (2024), section 3.3.1: pods of 3,072 devices, 1:7 oversubscribed above",
    ),
    "grand-teton": MachineEntry(
        _node("h100-96gb", 8, intra=NVLINK4, inter=_cards(400)),
        source="torchtitan, benchmarks/llama3_h100_202412",
    ),
    # A torus has no switch: every device passes on what its neighbours send, over two or three axes at once, two links
    # per axis. `domain` is the largest slice.
    "tpu-v4": MachineEntry(
        replace(_node("tpu-v4", 4, intra=Link(gbs=270, latency_us=1, reached=0.85), inter=TPU_NETWORK), domain=4096),
        source="How to Scale Your Model (Austin et al. 2025), chapter 2",
    ),
    "tpu-v5e": MachineEntry(
        replace(
            _node(
                "tpu-v5e",
                8,
                intra=Link(gbs=180, latency_us=1, reached=0.85),
                inter=Link(gbs=1.5, latency_us=50, reached=0.6),
            ),
            domain=256,
        ),
        source="How to Scale Your Model (Austin et al. 2025), chapter 2",
    ),
    "tpu-v5p": MachineEntry(
        replace(_node("tpu-v5p", 4, intra=Link(gbs=540, latency_us=1, reached=0.85), inter=TPU_NETWORK), domain=8960),
        source="How to Scale Your Model (Austin et al. 2025), chapter 2",
    ),
    "tpu-v6e": MachineEntry(
        replace(_node("tpu-v6e", 8, intra=Link(gbs=360, latency_us=1, reached=0.85), inter=TPU_NETWORK), domain=256),
        source="How to Scale Your Model (Austin et al. 2025), chapter 2",
    ),
}


def _entry_problems(name: str, entry: MachineEntry) -> Iterator[str]:
    """Yields every figure that a known machine must state and this one does not, and those that it must not state."""
    cluster = entry.cluster
    if name == LOCAL:
        yield "the name stands for the machine that `phalanx bench` measured"
    if not cluster.accelerator.name:
        yield "cluster.accelerator.name is missing"
    yield from (f"cluster.accelerator.{problem}" for problem in device_problems(cluster.accelerator))
    if not cluster.devices_per_node:
        yield "cluster.devices_per_node is missing"
    for link in ("intra", "inter") if cluster.devices_per_node > 1 else ("inter",):
        for figure in ("gbs", "latency_us", "reached"):
            if not getattr(getattr(cluster, link), figure) > 0:
                yield f"cluster.{link}.{figure} is missing"
    for field, nothing in (("preset", ""), ("nodes", 1), ("sharing", Sharing()), ("calibration", Calibration())):
        if getattr(cluster, field) != nothing:
            yield f"cluster.{field} is not a machine's own: leave it out"


MACHINES = Registry("cluster", _OWN, _entry_problems)
"""Known machines with their sources, by name, as one node."""
CLUSTERS = View(MACHINES, lambda name, entry: replace(entry.cluster, preset=name))
"""Known machines by name, as one node."""


def cluster_of(preset: str) -> Cluster:
    """Returns the machine of `cluster.preset`: `dgx-h100:64` is 64 of its nodes, `dgx-h100` one, `local` the machine
    that `phalanx bench` measured here. Raises JobError with the nearest name for an unknown machine, for an invalid
    number of nodes, and for a `local` that was not measured."""
    name, colon, nodes = preset.partition(":")
    if name not in CLUSTERS and name != LOCAL:
        meant = nearest(name, [*CLUSTERS, LOCAL])
        hint = f"; did you mean {meant}{colon}{nodes}?" if meant else ""
        raise JobError(f"no cluster preset {name!r}{hint} (known: {', '.join([*CLUSTERS, LOCAL])})")
    if colon and not (nodes.isdecimal() and len(nodes) < 20 and int(nodes) > 0):
        raise JobError(f"{preset!r}: after the colon comes the number of nodes, such as {name}:8")
    if name == LOCAL:
        return replace(local_cluster.read(int(nodes or 0)), preset=preset)
    return replace(CLUSTERS[name], preset=preset, nodes=int(nodes or 1))
