"""Published results of ZeRO-Offload, ZeRO-Infinity and ZeRO++, beside what is predicted for them.

    python -m benchmarks.published_offload

Figures are those that the papers' abstracts and the authors' own pages print in words. What they leave open is assumed,
and said with each row: a vocabulary of 50,304 tokens, that TFLOP/s count what is recomputed, and the shape and batch of
a trillion parameters. A row that does not fit says what this version keeps elsewhere than the authors do. Nothing runs
on this machine: the figures are the same everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from benchmarks.report import machine, save
from phalanx.config.cluster import Cluster
from phalanx.config.clusters import cluster_of
from phalanx.config.layout import Layout
from phalanx.config.model import ModelConfig
from phalanx.config.presets import gpt_kind
from phalanx.cost.frameworks import PHALANX
from phalanx.cost.prediction import Prediction, hardware_flops_per_step, predict
from phalanx.cost.spec import StepSpec
from phalanx.partition import derived as batch
from phalanx.units import gib

OFFLOAD = "Ren et al. 2021 (arXiv 2101.06840)"
INFINITY = "Rajbhandari et al. 2021 (arXiv 2104.07857)"
PLUS_PLUS = "Wang et al. 2023 (arXiv 2306.10209)"
VOCABULARY = 50_304
NODE = 16
"""Devices of a DGX-2."""


@dataclass(frozen=True)
class Published:
    """One published result: that a model fits, its TFLOP/s per device, or its speed beside another layout's."""

    name: str
    source: str
    model: ModelConfig
    cluster: Cluster
    layout: Layout
    sequences: int
    tflops: float = 0.0
    against: Layout | None = None
    """The layout to which `speedup` compares."""
    on: Cluster | None = None
    """The cluster of `against`, if it is another."""
    speedup: tuple[float, float] = (0.0, 0.0)
    """The least and the greatest that is published."""
    why_not: str = ""
    """Why it does not fit here."""


def _gpt(layers: int, width: int, seq_len: int = 1024) -> ModelConfig:
    return gpt_kind(layers, width, 32, vocab=VOCABULARY, seq_len=seq_len)


def _one_v100() -> Cluster:
    """Returns a DGX-2 of which one device computes: it has the whole host, and a link of its own."""
    node = cluster_of("dgx-2")
    share = node.host
    host = replace(share, memory_gib=share.memory_gib * NODE, update_gbs=share.update_gbs * NODE, link_gbs=12.8)
    return replace(node, devices_per_node=1, host=host)


def _with_disks() -> Cluster:
    """Returns a DGX-2 with its 30 TB of NVMe, taken to reach 1.6 GB/s per device."""
    node = cluster_of("dgx-2")
    return replace(node, host=replace(node.host, disk_gib=30e12 / 2**30 / NODE, disk_gbs=1.6))


def _network(gbits: float) -> Cluster:
    """Returns 24 DGX-2 whose nodes have a network of `gbits` Gb/s."""
    cluster = cluster_of("dgx-2:24")
    return replace(cluster, inter=replace(cluster.inter, gbs=gbits / 8 / NODE))


_ON_HOST = Layout(recompute="full", offload="optimizer", loss_chunk=1024)


def _plus_plus(gbits: float, tokens: int, speedup: tuple[float, float], than: float = 0.0) -> Published:
    """Returns a row of ZeRO++: 18 billion parameters (the authors' tutorial: 40 layers of 6,144, sequences of 512) on
    384 V100 with `tokens` per device, beside ZeRO-3 on the same network, or on one of `than` Gb/s."""
    micro = tokens // 512
    plain = Layout(dp_shard=384, micro_batch=micro, recompute="full")
    full = replace(plain, hpz=NODE, quantise_weights="int8", quantise_gradients="int4")
    name = f"ZeRO++, 18B, {gbits:g} Gb/s, {tokens:,} tokens: × ZeRO-3" + (f" at {than:g} Gb/s" if than else "")
    return Published(
        name,
        PLUS_PLUS + " and the authors' announcement",
        _gpt(40, 6144, 512),
        _network(gbits),
        full,
        384 * micro,
        against=plain,
        on=_network(than) if than else None,
        speedup=speedup,
    )


def rows() -> Iterator[Published]:
    """Yields every row."""
    yield Published(
        "ZeRO-Offload: 13B on a V100 of 32 GB",
        f"{OFFLOAD}, abstract; shape assumed",
        _gpt(65, 4096),
        _one_v100(),
        replace(_ON_HOST, micro_batch=1),
        1,
    )
    yield Published(
        "ZeRO-Offload: 10B on a V100 of 32 GB",
        f"{OFFLOAD}, abstract; shape and batch: the authors' tutorial",
        _gpt(50, 4096),
        _one_v100(),
        replace(_ON_HOST, micro_batch=10),
        10,
        tflops=40,
    )
    yield Published(
        "ZeRO-Infinity: 1T on a DGX-2",
        f"{INFINITY}, abstract; shape and batch assumed",
        _gpt(128, 25_600),
        _with_disks(),
        Layout(
            dp_shard=NODE,
            micro_batch=7,
            recompute="full",
            offload="all",
            offload_to="/nvme",
            tiles=16,
            tile="all",
            loss_chunk=1024,
        ),
        7 * NODE,
        why_not="ZeRO-Infinity has parameters and gradients on the disks, too; here they are in host memory",
    )
    yield Published(
        "ZeRO-3 Offload: 1T on 512 V100",
        f"{INFINITY}; the authors' announcement of ZeRO-3 Offload; shape and batch assumed",
        _gpt(128, 25_600),
        cluster_of("dgx-2:32"),
        Layout(dp_shard=512, micro_batch=5, recompute="full", offload="all", tiles=4, tile="all", loss_chunk=1024),
        5 * 512,
        tflops=49,
    )
    # Up to 2.16 (abstract), about 2 on average.
    yield _plus_plus(100, 1024, (2.0, 2.16))
    yield _plus_plus(100, 2048, (2.0, 2.16))
    yield _plus_plus(400, 1024, (1.28, 1.36))
    yield _plus_plus(400, 2048, (1.24, 1.29))
    # "Similar" TFLOP/s.
    yield _plus_plus(200, 1024, (1.0, 1.0), than=800)
    yield _plus_plus(200, 2048, (1.0, 1.0), than=800)


def spec_of(row: Published, layout: Layout, cluster: Cluster) -> StepSpec:
    """Returns the step of one layout of a row."""
    solved = batch.solve(row.sequences, layout)
    return StepSpec(row.model, cluster, layout, solved, "fp16", 2, PHALANX)


def predicted(row: Published) -> tuple[Prediction, float]:
    """Returns the prediction of a row, and its figure: the speed-up, or TFLOP/s per device."""
    found = predict(spec_of(row, row.layout, row.cluster))
    if row.against is not None:
        return found, predict(spec_of(row, row.against, row.on or row.cluster)).step_time_s / found.step_time_s
    flops = hardware_flops_per_step(row.model, row.layout, row.sequences)
    return found, flops / found.step_time_s / found.devices / 1e12


def main() -> None:
    table = [("result", "published", "predicted", "memory per device", "fits", "source")]
    results = []
    for row in rows():
        low, high = row.speedup
        published = f"{low:g} to {high:g} ×" if high > low else f"{low:g} ×"
        published = published if row.against else f"{row.tflops:g} TFLOP/s" if row.tflops else "fits"
        found, value = predicted(row)
        figure = f"{value:.2f} ×" if row.against else f"{value:.0f} TFLOP/s"
        tiers = ", ".join(f"{tier} {gib(most)}" for tier, (most, _) in found.tiers.items())
        table.append((row.name, published, figure, tiers, "yes" if found.fits else f"no: {row.why_not}", row.source))
        results.append({"name": row.name, "published": published, "predicted": value, "fits": found.fits})
    save("published_offload", {"machine": machine(), "rows": results}, table, "Offload and ZeRO++, published")


if __name__ == "__main__":
    main()
