"""Seconds of the operations of a block on one device, forward and backward."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from phalanx.config.cluster import Accelerator
from phalanx.cost.frameworks.framework import Framework
from phalanx.cost.time.kernel import WIDTHS, attention_seconds, product_seconds, stream_seconds
from phalanx.cost.time.operators import Product, Scores, Work

HOST_BACKWARD = 1.6
"""Operations that the host starts backward for each forward: a product has two, and gradients are added up."""


@dataclass(frozen=True)
class Seconds:
    """Time of one part of a step, for one micro-batch on one rank, without communication."""

    forward: float = 0.0
    backward: float = 0.0
    """Both halves: gradients of inputs and of weights."""
    weights: float = 0.0
    """The part of `backward` that makes gradients of weights (W of a schedule that splits)."""
    attention: float = 0.0
    """The part of `forward` that selective recomputation repeats."""
    products: float = 0.0
    """The part of forward and backward in matrix products."""
    host_forward: float = 0.0
    """Time in which the host starts the forward pass: where it is longer than that on the device, the device waits."""
    host_backward: float = 0.0

    @property
    def streams(self) -> float:
        """The rest of forward and backward: what memory bounds, and starting operations where the device does that."""
        return self.forward + self.backward - self.products


@lru_cache(20_000)
def work_seconds(device: Accelerator, work: Work, framework: Framework, products: str) -> Seconds:
    """A part of a model on `device`, its products in the number format `products`."""
    kinds = [_format(p, products) for p in work.products]
    forward = sum(
        product_seconds(device, kind, p.m, p.n, p.k, p.number) for p, kind in zip(work.products, kinds, strict=True)
    )
    inputs = sum(
        product_seconds(device, kind, p.m, p.k, p.n, p.number) for p, kind in zip(work.products, kinds, strict=True)
    )
    weights = sum(
        product_seconds(device, kind, p.n, p.k, p.m, p.number) for p, kind in zip(work.products, kinds, strict=True)
    )
    scores, scores_back, scores_kernels = _attention(device, work.scores, framework, products)
    narrow = sum(
        p.number * p.m * (p.k + p.n / 2) for p, kind in zip(work.products, kinds, strict=True) if kind in ("fp8", "fp4")
    )
    casts = narrow * framework.cast_bytes
    width = max(2, WIDTHS[products])
    moved, moved_back = (
        stream_seconds(device, framework.passes * width * numbers + casts, len(work.streams))
        for numbers in (sum(s.forward for s in work.streams), sum(s.backward for s in work.streams))
    )
    kernels = len(work.products) + scores_kernels + sum(s.kernels for s in work.streams)
    host = kernels * (device.host_us or framework.kernel_us) * 1e-6
    # One processor starts an operation and then does it, or the host runs ahead of its device.
    within, ahead = (host, 0.0) if device.host_us else (0.0, host)
    slowdown = framework.slowdown * (framework.moe_slowdown if any(p.name == "router" for p in work.products) else 1.0)
    return Seconds(
        forward=slowdown * (forward + scores + moved) + within,
        backward=slowdown * (inputs + weights + scores_back + moved_back) + within * HOST_BACKWARD,
        weights=slowdown * weights,
        attention=slowdown * scores,
        products=slowdown * (forward + inputs + weights + scores + scores_back),
        host_forward=ahead,
        host_backward=ahead * HOST_BACKWARD,
    )


def _format(p: Product, products: str) -> str:
    """The number format of one product where the others run in `products`."""
    return "bf16" if p.sixteen and products in ("fp8", "fp4") else products


def _attention(
    device: Accelerator, scores: Scores | None, framework: Framework, products: str
) -> tuple[float, float, int]:
    """Forward and backward seconds, and kernels."""
    if scores is None:
        return 0.0, 0.0, 0
    heads, kv_heads = scores.sequences * scores.heads, scores.sequences * scores.kv_heads
    if framework.attention == "flash":
        shape = (device, products, scores.queries, scores.keys, heads, kv_heads, scores.head, scores.value_head)
        forward, backward = (
            attention_seconds(*shape, backward=back, generation=framework.flash) for back in (False, True)
        )
        return forward, backward, 2
    # Every product of every query with every key, and the probabilities go through memory between them.
    s, k, d = scores.queries, scores.keys, scores.head
    kind = "fp32" if products == "fp32" else "bf16"
    forward = product_seconds(device, kind, s, k, d, heads) + product_seconds(device, kind, s, d, k, heads)
    backward = 2 * forward
    pairs = max(2, WIDTHS[products]) * heads * s * k
    forward += stream_seconds(device, framework.softmax_passes * pairs, 4)
    backward += stream_seconds(device, framework.softmax_passes * pairs, 4)
    return forward, backward, 8
