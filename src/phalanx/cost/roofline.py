"""The roofline of a block (Williams et al. 2009): what its operators compute for each byte they move, and how fast.

Below the ridge point an operator waits for memory, above it for the cores. Seconds are those the prediction counts;
each limit is what the same prediction says of a device that has no other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import inf
from typing import Literal

from phalanx.config.cluster import Accelerator
from phalanx.cost.spec import StepSpec
from phalanx.cost.time import operators
from phalanx.cost.time.communication import block_traffic
from phalanx.cost.time.kernel import BEST_INNER, FILLING, READ, peak_flops, rate
from phalanx.cost.time.layer import work_seconds
from phalanx.cost.time.operators import MemoryBound, Product, Scores, Work

Bound = Literal["compute", "memory", "launch"]


@dataclass(frozen=True)
class Roof:
    """What a device can do at most: FLOP/s and bytes/s of its memory."""

    peak: float
    bandwidth: float

    @property
    def ridge(self) -> float:
        """FLOPs a byte from which on the cores are the limit."""
        return self.peak / self.bandwidth

    def at(self, intensity: float) -> float:
        """FLOP/s of an operator of `intensity` FLOPs a byte."""
        return min(self.peak, intensity * self.bandwidth)


@dataclass(frozen=True)
class OperatorPoint:
    """The forward pass of one operator for a micro-batch on one rank."""

    name: str
    flops: float
    """Of memory-bound operations: one for each number that is read or written."""
    bytes: float
    seconds: float
    bound: Bound
    """Which limit of the device alone takes the longest: its cores, its memory, or the floor of a small kernel."""
    products: str
    """Number format that it computes in."""
    communication: float = 0.0
    """Seconds of the collectives right before and after it, if nothing hid them."""

    @property
    def intensity(self) -> float:
        """FLOPs a byte."""
        return self.flops / self.bytes

    @property
    def flops_per_s(self) -> float:
        return self.flops / self.seconds

    @property
    def verdict(self) -> Bound | Literal["communication"]:
        """What bounds the operator with its collectives."""
        return "communication" if self.communication > self.seconds else self.bound


def data_sheet(device: Accelerator, products: str) -> Roof:
    """The roof of the data sheet: of an H100 in bf16 989 TFLOP/s and 3.35 TB/s, which meet at 295 FLOP/byte."""
    return Roof(peak_flops(device, products), device.bandwidth_gbs * 1e9)


def reached(device: Accelerator, products: str, slowdown: float = 1.0) -> Roof:
    """The roof that a program reaches which takes `slowdown` times as long as its kernels alone: a product whose inner
    dimension has no end, and streaming kernels."""
    peak = rate(device, products) * (1 + FILLING / BEST_INNER)
    return Roof(peak / slowdown, device.bandwidth_gbs * 1e9 * READ / slowdown)


def block_slowdown(spec: StepSpec) -> float:
    """Time of the last block's kernels beside that of the same kernels alone."""
    framework = spec.framework
    return framework.slowdown * (framework.moe_slowdown if spec.model.is_moe_layer(spec.model.n_layers - 1) else 1.0)


def points(spec: StepSpec) -> tuple[OperatorPoint, ...]:
    """The operators of the last block, one with experts where the model has them: matrix products, attention,
    memory-bound operations."""
    layer = spec.model.n_layers - 1
    work = operators.block(spec.model, layer, spec.layout, spec.batch.micro_batch)
    waits = _collectives(spec, work)
    found = [*_products(spec, work), *_attention(spec, work.scores), *_streams(spec, work)]
    return tuple(replace(point, communication=waits[point.name]) for point in found)


def _products(spec: StepSpec, work: Work) -> Iterator[OperatorPoint]:
    for p in work.products:
        narrow = "bf16" if p.sixteen and spec.products in ("fp8", "fp4") else spec.products
        yield _point(spec, Work((p,), None, ()), p, 2.0 * p.m * p.n * p.k * p.number, narrow)


def _attention(spec: StepSpec, scores: Scores | None) -> Iterator[OperatorPoint]:
    """One fused kernel over the half of the pairs that the mask leaves, or products of all with a softmax between."""
    if scores is None:
        return
    s, widths = scores, scores.head + scores.value_head
    pairs = s.queries * (max(1, s.keys // 2) if spec.framework.attention == "flash" else s.keys)
    kind = "fp32" if spec.products == "fp32" else "bf16"
    yield _point(spec, Work((), s, ()), s, 2.0 * s.sequences * s.heads * pairs * widths, kind)


def _streams(spec: StepSpec, work: Work) -> Iterator[OperatorPoint]:
    for stream in work.streams:
        yield _point(spec, Work((), None, (stream,)), stream, stream.forward, spec.products)


def _point(spec: StepSpec, work: Work, op: Product | Scores | MemoryBound, flops: float, kind: str) -> OperatorPoint:
    device, alone = spec.cluster.accelerator, replace(spec.framework, slowdown=1.0, moe_slowdown=1.0)

    def seconds(on: Accelerator) -> float:
        return work_seconds(on, work, alone, spec.products).forward

    free = {"ceiling": inf, "fp8_ceiling": inf}
    bandwidth = device.bandwidth_gbs * 1e9 * READ
    moved = seconds(replace(device, launch_us=0, **free)) * bandwidth
    limits: dict[Bound, float] = {
        "compute": seconds(replace(device, bandwidth_gbs=inf, launch_us=0)),
        "memory": moved / bandwidth,
        "launch": seconds(replace(device, bandwidth_gbs=inf, **free)),
    }
    return OperatorPoint(
        name="attention" if isinstance(op, Scores) else op.name,
        flops=flops,
        bytes=moved,
        seconds=block_slowdown(spec) * seconds(device),
        bound=max(limits, key=lambda name: limits[name]),
        products=kind,
    )


def _collectives(spec: StepSpec, work: Work) -> dict[str, float]:
    """By operator, seconds of its collectives forward: tensor parallelism gathers sequences before the first product of
    each half of a block and scatters after the last (or only sums there), rows travel to their experts and back, keys
    around the ring of attention, or heads of Ulysses."""
    moe = any(p.name.startswith("experts") for p in work.products)
    traffic, feed = block_traffic(spec, moe), "experts" if moe else "mlp"
    first, last = (work.products[0].name, f"{feed}.up"), ("wo", f"{feed}.down")
    found: defaultdict[str, float] = defaultdict(float)
    around = (*first, *last) if spec.layout.sp else last
    for name in around:
        found[name] += traffic.tp_forward / len(around)
    for name in (first[1], last[1]):
        found[name] += traffic.ep_forward / 2
    found["attention"] += traffic.ring_forward + traffic.cp_forward
    return found
