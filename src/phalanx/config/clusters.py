"""Known devices and machines, each with its source: what `cluster.preset` may name.

Peaks, memory and its bandwidth: ml-engineering's accelerator tables (Bekman, compute/accelerator, 2026) unless said
otherwise; ceilings: its table of maximum achievable matmul FLOPs; where a device is not in that, the ceiling of its
family. Links: the makers' data sheets, one way and a device. Latencies: a message over NVLink takes a few microseconds,
over InfiniBand or Slingshot about ten with NCCL's protocol (NCCL, src/graph/tuning.cc: base latencies of ring/simple of
6.6 us inside a node and 14 us between nodes).
"""

from __future__ import annotations

from dataclasses import replace

from phalanx.config import local_cluster
from phalanx.config.cluster import Accelerator, Cluster, Link
from phalanx.errors import JobError
from phalanx.nearest import nearest

ACCELERATORS: dict[str, Accelerator] = {
    a.name: a
    for a in (
        # NVIDIA data sheets; the V100 has no bfloat16. Its best matrix product: 85 % of 125 (vendor's cuBLAS figures).
        Accelerator("v100-16gb", 0, 125, 0, 0, 15.7, 0.80, 0.7, 15.8, 900, 80, 0.8, 1.0, 5.0),
        Accelerator("v100-32gb", 0, 125, 0, 0, 15.7, 0.80, 0.7, 31.7, 900, 80, 0.8, 1.0, 5.0),
        Accelerator("a100-40gb", 312, 312, 0, 0, 19.5, 0.869, 0.7, 39.4, 1555, 108, 0.92, 1.0, 4.0),
        Accelerator("a100-80gb", 312, 312, 0, 0, 19.5, 0.869, 0.7, 79.2, 2039, 108, 0.92, 1.0, 4.0),
        Accelerator("a100-pcie-80gb", 312, 312, 0, 0, 19.5, 0.811, 0.7, 79.2, 1935, 108, 0.92, 1.0, 4.0),
        Accelerator("h100-80gb", 989, 989, 1979, 0, 67, 0.803, 0.709, 79.1, 3350, 132, 0.82, 0.62, 3.0),
        # Meta's Grand Teton variant (torchtitan, benchmarks/llama3_h100_202412): HBM2e and 500 W instead of 700; at
        # 500 W the clock, and with it the ceiling, is lower by the cube root of the power: (500/700)^(1/3) = 0.89.
        Accelerator("h100-96gb", 989, 989, 1979, 0, 67, 0.803 * 0.89, 0.709 * 0.89, 94.5, 2400, 132, 0.82, 0.62, 3.0),
        Accelerator("h100-pcie-80gb", 756, 756, 1513, 0, 51, 0.75, 0.66, 79.1, 2000, 114, 0.82, 0.62, 3.0),
        Accelerator("h800-80gb", 989, 989, 1979, 0, 67, 0.803, 0.709, 79.1, 3350, 132, 0.82, 0.62, 3.0),
        Accelerator("h200", 989, 989, 1979, 0, 67, 0.803, 0.734, 139.8, 4800, 132, 0.82, 0.62, 3.0),
        # The Hopper of a Grace Hopper superchip, with 96 GB of HBM3.
        Accelerator("gh200", 989, 989, 1979, 0, 67, 0.838, 0.776, 94.5, 4000, 132, 0.82, 0.62, 3.0),
        Accelerator("b200", 2250, 2250, 4500, 9000, 80, 0.776, 0.763, 178.4, 8000, 148, 0.62, 0.35, 3.0),
        Accelerator("b300", 2250, 2250, 4500, 13500, 80, 0.786, 0.745, 268.0, 8000, 148, 0.66, 0.35, 3.0),
        Accelerator("gb200", 2500, 2500, 5000, 10000, 80, 0.729, 0.723, 184.0, 8000, 152, 0.72, 0.35, 3.0),
        Accelerator("gb300", 2500, 2500, 5000, 15000, 80, 0.729, 0.723, 276.0, 8000, 152, 0.78, 0.35, 3.0),
        # One of the two dies of an MI250X, which is what a program sees.
        Accelerator("mi250x-gcd", 191.5, 191.5, 0, 0, 23.9, 0.75, 0.7, 64.0, 1638, 110, 0.9, 1.0, 5.0),
        Accelerator("mi300x", 1307, 1307, 2615, 0, 163.4, 0.514, 0.45, 191.5, 5300, 304, 0.9, 1.0, 5.0),
        Accelerator("mi325x", 1307, 1307, 2615, 0, 163.4, 0.604, 0.5, 255.5, 6000, 304, 0.9, 1.0, 5.0),
        # Air-cooled: the same chip as the MI355X with 1,000 W instead of 1,400; ceiling by the cube root of the power.
        Accelerator("mi350x", 2300, 2300, 4600, 9200, 144.2, 0.61, 0.58, 287.5, 8000, 256, 0.9, 1.0, 5.0),
        Accelerator("mi355x", 2300, 2300, 4600, 9200, 157.3, 0.68, 0.65, 287.5, 8000, 256, 0.9, 1.0, 5.0),
        # One of the two tiles of a Max 1550. 256 TFLOP/s in bf16 is what ALCF measured (Aurora user guide); the peak is
        # half of the data sheet's 839.
        Accelerator("max1550-tile", 419.5, 419.5, 0, 0, 26.2, 0.61, 0.6, 64.0, 1000, 64, 0.9, 1.0, 8.0),
        Accelerator("gaudi2", 432, 432, 865, 0, 11, 0.969, 0.955, 94.6, 2450, 24, 0.9, 1.0, 6.0),
        Accelerator("gaudi3", 1677, 1677, 1677, 0, 14.3, 0.741, 0.769, 126.5, 3700, 64, 0.9, 1.0, 6.0),
        # A compiler makes one program of a step, so that nothing is launched; few large tiles (one core has two to four
        # 128 × 128 or 256 × 256 systolic arrays). No table of ceilings has them: 0.95 (scaling-book, chapter 12).
        Accelerator("tpu-v4", 275, 275, 275, 0, 34, 0.95, 0.95, 31.7, 1228, 2, 0.9, 1.0, 1.0),
        Accelerator("tpu-v5e", 197, 197, 394, 0, 24, 0.95, 0.95, 15.7, 819, 1, 0.9, 1.0, 1.0),
        Accelerator("tpu-v5p", 459, 459, 918, 0, 57, 0.95, 0.95, 94.8, 2765, 2, 0.78, 1.0, 1.0),
        Accelerator("tpu-v6e", 918, 918, 1836, 0, 114, 0.95, 0.95, 31.2, 1640, 1, 0.9, 1.0, 1.0),
    )
}
"""Devices by name. Memory is what a program can have, a little less than is printed on the box."""

NVLINK2, NVLINK3, NVLINK4, NVLINK5 = (
    Link(95, 7, 0.9, pair_gbs=25),
    Link(300, 6, 0.80),
    Link(450, 5, 0.82, reduces=True),
    Link(900, 5, 0.80, reduces=True),
)
"""NVLink of V100 (6 × 25 GB/s), A100 (12 × 25), H100 (18 × 25) and B200 (18 × 50). Of NVLINK2 four devices of a node
have pairs of links and no switch (22, 45 and 85 GB/s measured among two, three and four: vTrain's tables of NCCL).
`reached` of NVLINK3: 229 to 240 of
300 GB/s bus bandwidth in all-reduces of 1 GB (vTrain's tables of NCCL); from Hopper on the switch adds."""


def _network(gbits: float, devices_per_card: float = 1, latency_us: float = 12, reached: float = 0.85) -> Link:
    """One card of `gbits` Gb/s for so many devices."""
    return Link(gbits / 8 / devices_per_card, latency_us, reached)


def _machine(
    device: str, devices: int, intra: Link, inter: Link, *, domain: int = 0, pod: int = 0, oversubscription: float = 1.0
) -> Cluster:
    return Cluster(
        devices_per_node=devices,
        domain=domain,
        pod=pod,
        oversubscription=oversubscription,
        accelerator=ACCELERATORS[device],
        intra=intra,
        inter=inter,
    )


_MACHINES: dict[str, Cluster] = {
    "dgx-v100": _machine("v100-32gb", 8, NVLINK2, _network(100, 2)),
    "dgx-a100": _machine("a100-80gb", 8, NVLINK3, _network(200)),
    "dgx-a100-40gb": _machine("a100-40gb", 8, NVLINK3, _network(200)),
    "a800": _machine("a100-80gb", 8, replace(NVLINK3, gbs=200), _network(200)),
    "a100-pcie": _machine("a100-pcie-80gb", 8, Link(32, 10, 0.75), _network(200, 8)),
    "dgx-h100": _machine("h100-80gb", 8, NVLINK4, _network(400)),
    "dgx-h100-nvl256": _machine("h100-80gb", 8, NVLINK4, _network(400), domain=256),
    "h100-pcie": _machine("h100-pcie-80gb", 8, Link(64, 10, 0.75), _network(400, 8)),
    "gh200": _machine("gh200", 1, NVLINK4, _network(400)),
    "dgx-h200": _machine("h200", 8, NVLINK4, _network(400)),
    "h800": _machine("h800-80gb", 8, replace(NVLINK4, gbs=200), _network(400)),
    "dgx-b200": _machine("b200", 8, NVLINK5, _network(400)),
    "dgx-b300": _machine("b300", 8, NVLINK5, _network(800)),
    "gb200-nvl72": _machine("gb200", 4, NVLINK5, _network(400), domain=72),
    "gb300-nvl72": _machine("gb300", 4, NVLINK5, _network(800), domain=72),
    "mi300x": _machine("mi300x", 8, Link(448, 8, 0.7, pair_gbs=64), _network(400)),
    "mi325x": _machine("mi325x", 8, Link(448, 8, 0.7, pair_gbs=64), _network(400)),
    "mi350x": _machine("mi350x", 8, Link(537, 8, 0.7, pair_gbs=76.8), _network(400)),
    "mi355x": _machine("mi355x", 8, Link(537, 8, 0.7, pair_gbs=76.8), _network(400)),
    "gaudi2": _machine("gaudi2", 8, Link(262, 8, 0.85), _network(300, 1)),
    "gaudi3": _machine("gaudi3", 8, Link(525, 8, 0.85), _network(600, 1)),
    # The sites of the lectures. Polaris: two Slingshot-11 cards for four A100-40GB (ALCF user guide). Perlmutter: four
    # cards. Frontier: four cards for eight dies, 50 GB/s a link between dies. Aurora: ALCF
    # measured 185 GB/s between the two tiles of a GPU and 15 between GPUs, which is what a tile's share of the eight
    # cards reaches, too (200 Gb/s for 1.5 tiles): beyond a pair of tiles all ways are as slow as the network.
    "polaris": _machine("a100-40gb", 4, replace(NVLINK3, gbs=300), _network(200, 2)),
    "sophia": _machine("a100-40gb", 8, NVLINK3, _network(200)),
    "perlmutter": _machine("a100-40gb", 4, NVLINK3, _network(200)),
    "frontier": _machine("mi250x-gcd", 8, Link(50, 8, 0.75), _network(200, 2)),
    "aurora": _machine("max1550-tile", 12, Link(185, 10, 0.9), _network(200, 1.5), domain=2),
    # Machines that papers trained on. Selene (Narayanan et al. 2021): eight HDR cards. Jean Zay: four 100 Gb/s
    # Omni-Path cards for eight A100 (bigscience, train/tr11-176B-ml); its V100 nodes four for four. Eos: DGX H100.
    # Meta's (Llama 3, section 3.3.1): pods of 3,072 devices, 1:7 above; and the H100 of torchtitan's reports.
    "selene": _machine("a100-80gb", 8, NVLINK3, _network(200)),
    "jean-zay": _machine("a100-80gb", 8, NVLINK3, _network(100, 2, 15)),
    "jean-zay-v100": _machine("v100-32gb", 4, NVLINK2, _network(100, 1, 15)),
    "jean-zay-v100-16gb": _machine("v100-16gb", 4, NVLINK2, _network(100, 1, 15)),
    "eos": _machine("h100-80gb", 8, NVLINK4, _network(400)),
    "meta-h100": _machine("h100-80gb", 8, NVLINK4, _network(400), pod=3072, oversubscription=7),
    "grand-teton": _machine("h100-96gb", 8, NVLINK4, _network(400)),
    # A torus has no switch: every device passes on what its neighbours send, over two or three axes at once. 45 GB/s
    # one way a link (scaling-book, chapter 2), two links an axis; `domain` is the largest slice, beyond it the data
    # centre's network.
    "tpu-v4": _machine("tpu-v4", 4, Link(270, 1, 0.85), Link(6, 20, 0.8), domain=4096),
    "tpu-v5e": _machine("tpu-v5e", 8, Link(180, 1, 0.85), Link(1.5, 50, 0.6), domain=256),
    "tpu-v5p": _machine("tpu-v5p", 4, Link(540, 1, 0.85), Link(6, 20, 0.8), domain=8960),
    "tpu-v6e": _machine("tpu-v6e", 8, Link(360, 1, 0.85), Link(6, 20, 0.8), domain=256),
}

CLUSTERS: dict[str, Cluster] = {name: replace(machine, preset=name) for name, machine in _MACHINES.items()}
"""Known machines by name, as one node."""
LOCAL = "local"
"""The name of the machine that was measured here (local_cluster.py)."""


def cluster_of(preset: str) -> Cluster:
    """The machine that `cluster.preset` names: `dgx-h100:64` is sixty-four of its nodes, `dgx-h100` one, `local` the
    machine that `phalanx bench` measured here.

    Raises JobError with the nearest name where there is none like it, where the nodes are no number, and where `local`
    was not measured."""
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
