"""The roofline of a block (Williams et al. 2009): the arithmetic intensity of its operators, and their FLOP/s.

Below the ridge point an operator is memory-bound, above it compute-bound. Seconds are those of the prediction; each
limit is the prediction for a device that has no other.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf
from typing import Literal

from phalanx.blocks.kinds import BlockKind, block, block_kinds
from phalanx.blocks.operator import Operator, Place
from phalanx.config.cluster import Accelerator
from phalanx.cost import kernels
from phalanx.cost.communication import messages_seconds, place
from phalanx.cost.spec import StepSpec

Bound = Literal["compute", "memory", "launch"]


@dataclass(frozen=True)
class Roof:
    """The roof of a device: its peak FLOP/s and the bytes/s of its memory."""

    peak: float
    bandwidth: float

    @property
    def ridge(self) -> float:
        """FLOPs per byte above which operators are compute-bound."""
        return self.peak / self.bandwidth

    def at(self, intensity: float) -> float:
        """Returns the attainable FLOP/s of an operator of `intensity` FLOPs per byte."""
        return min(self.peak, intensity * self.bandwidth)


@dataclass(frozen=True)
class OperatorPoint:
    """The forward pass of one operator for a micro-batch on one rank."""

    name: str
    flops: float
    """FLOPs; of memory-bound operations one per element that is read or written."""
    bytes: float
    seconds: float
    bound: Bound
    """The longest limit of the device itself: its cores, its memory, or the launch of a small kernel."""
    products: str
    """Number format of its products."""
    communication: float = 0.0
    """Seconds of the collectives right before and after it, without overlap."""

    @property
    def intensity(self) -> float:
        """FLOPs per byte."""
        return self.flops / self.bytes

    @property
    def flops_per_s(self) -> float:
        return self.flops / self.seconds

    @property
    def verdict(self) -> Bound | Literal["communication"]:
        """The bound of the operator with its collectives."""
        return "communication" if self.communication > self.seconds else self.bound


def data_sheet(device: Accelerator, products: str) -> Roof:
    """Returns the roof of the data sheet: of an H100 in bf16 989 TFLOP/s and 3.35 TB/s, which meet at 295 FLOP/byte."""
    return Roof(kernels.peak_flops(device, products), device.bandwidth_gbs * 1e9)


def reached(device: Accelerator, products: str, slowdown: float = 1.0) -> Roof:
    """Returns the roof that a framework attains with kernels `slowdown` times as slow as alone: that of a product with
    an infinite inner dimension, and of streaming kernels."""
    peak = kernels.rate(device, products) * (1 + kernels.FILLING / kernels.BEST_INNER)
    return Roof(peak / slowdown, device.bandwidth_gbs * 1e9 * kernels.STREAM_EFFICIENCY / slowdown)


def block_slowdown(spec: StepSpec) -> float:
    """Returns the slowdown of the last block's kernels over the same kernels alone."""
    return spec.framework.block_slowdown(block_kinds(spec.model)[-1])


def points(spec: StepSpec) -> tuple[OperatorPoint, ...]:
    """Returns the operators of the last block, which has experts if any has: matrix products, attention, memory-bound
    operations; and attention of other layers if it has another window. Collectives count with the product, or with
    attention, of their operator."""
    here, kinds = place(spec), block_kinds(spec.model)
    operators = block(here, kinds[-1])
    windows = list(dict.fromkeys(kind.window for kind in reversed(kinds)))
    products, streams = list[OperatorPoint](), list[OperatorPoint]()
    for operator in operators:
        alone = replace(operator, memory_bound=(), saved=(), messages=())
        waits = _waits(spec, here, operator)
        if product := operator.product(spec.layout.tp, spec.layout.ep_shard):
            narrow = kernels.number_format(product, spec.products, spec.framework)
            products.append(_point(spec, operator.name, alone, product.flops, narrow, waits))
        elif operator.core and len(windows) > 1:
            for window in windows:
                name = f"attention, window {window:,}" if window else "attention, all keys"
                products.append(replace(_attention(spec, here, kinds[-1]._replace(window=window)), name=name))
        elif operator.core:
            products.append(_attention(spec, here, kinds[-1]))
        elif waits:
            products[-1] = replace(products[-1], communication=products[-1].communication + waits)
        for stream in operator.memory_bound:
            part = Operator(stream.name, memory_bound=(stream,))
            streams.append(_point(spec, stream.name, part, stream.forward, spec.products))
    return (*products, *streams)


def _attention(spec: StepSpec, here: Place, kind: BlockKind) -> OperatorPoint:
    """Returns one fused kernel over half of the pairs, which the mask leaves, or unfused products of all pairs."""
    operator = next(each for each in block(here, kind) if each.core)
    core, waits = operator.core, _waits(spec, here, operator)
    assert core is not None, "chosen for having one"
    alone = replace(operator, memory_bound=(), saved=(), messages=())
    pairs = (
        max(core.queries, core.pairs // (1 if core.chosen else 2))
        if spec.framework.attention == "flash"
        else core.queries * core.keys
    )
    flops = 2.0 * core.sequences * core.heads * pairs * (core.head + core.value_head)
    return _point(spec, "attention", alone, flops, "fp32" if spec.products == "fp32" else "bf16", waits)


def _waits(spec: StepSpec, here: Place, operator: Operator) -> float:
    """Returns the seconds of an operator's collectives in the forward pass."""
    return sum(each.forward for each in messages_seconds(spec, here, [operator])[0].values())


def _point(
    spec: StepSpec, name: str, operator: Operator, flops: float, kind: str, communication: float = 0.0
) -> OperatorPoint:
    device = spec.cluster.accelerator

    def seconds(on: Accelerator) -> float:
        return kernels.operator_seconds(
            on, [operator], spec.framework, spec.products, spec.layout.tp, spec.layout.ep_shard
        ).forward

    free = {"ceiling": inf, "fp8_ceiling": inf}
    bandwidth = device.bandwidth_gbs * 1e9 * kernels.STREAM_EFFICIENCY
    moved = seconds(replace(device, launch_us=0, **free)) * bandwidth
    limits: dict[Bound, float] = {
        "compute": seconds(replace(device, bandwidth_gbs=inf, launch_us=0)),
        "memory": moved / bandwidth,
        "launch": seconds(replace(device, bandwidth_gbs=inf, **free)),
    }
    return OperatorPoint(
        name=name,
        flops=flops,
        bytes=moved,
        seconds=block_slowdown(spec) * seconds(device),
        bound=max(limits, key=lambda name: limits[name]),
        products=kind,
        communication=communication,
    )
