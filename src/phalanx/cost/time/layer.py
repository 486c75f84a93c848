"""Seconds of a list of operators on one device, forward and backward."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from phalanx.blocks.operator import AttentionCore, Operator, Product
from phalanx.config.cluster import Accelerator
from phalanx.config.job import FP8_ALIGNMENT
from phalanx.cost.frameworks.framework import Framework
from phalanx.cost.time.kernel import WIDTHS, attention_seconds, product_seconds, stream_seconds

HOST_BACKWARD = 1.6
"""Operations that the host launches backward per forward one: a product has two, and gradients are accumulated."""


@dataclass(frozen=True)
class Seconds:
    """Seconds of one part of a step, for one micro-batch on one rank, without communication."""

    forward: float = 0.0
    backward: float = 0.0
    """Seconds of both halves: gradients of inputs and of weights."""
    weights: float = 0.0
    """The part of `backward` that computes gradients of weights (W of a schedule that splits)."""
    attention: float = 0.0
    """The part of `forward` that selective recomputation repeats."""
    cheap: float = 0.0
    """The part of `forward` that recompute=products repeats: memory-bound work without products."""
    products: float = 0.0
    """The part of forward and backward in matrix products."""
    host_forward: float = 0.0
    """Seconds in which the host launches the forward pass; if they exceed those of the device, the device waits."""
    host_backward: float = 0.0
    host_cheap: float = 0.0
    """The part of `host_forward` that launches what recompute=products repeats."""

    @property
    def streams(self) -> float:
        """Seconds of the rest of forward and backward: memory-bound work, and launches on CPUs."""
        return self.forward + self.backward - self.products


def operator_seconds(
    device: Accelerator,
    operators: Iterable[Operator],
    framework: Framework,
    products: str,
    tp: int = 1,
    ep: int = 1,
    *,
    slowdown: float = 1.0,
) -> Seconds:
    """Returns the seconds of operators on one of tp × ep ranks, their products in the number format `products`; on the
    device they take `slowdown` times as long as their kernels alone."""
    operators = tuple(operators)
    every = [product for operator in operators if (product := operator.product(tp, ep))]
    streams = [stream for operator in operators for stream in operator.memory_bound]
    forward = inputs = weights = narrow = narrow_back = 0.0
    for p in every:
        kind = number_format(p, products, framework)
        forward += product_seconds(device, kind, p.m, p.n, p.k, p.number)
        inputs += product_seconds(device, kind, p.m, p.k, p.n, p.number)
        weights += 0.0 if p.frozen else product_seconds(device, kind, p.n, p.k, p.m, p.number)
        if kind in ("fp8", "fp4") and framework.casts_each:
            narrow += p.number * p.k * (p.m + p.n)
            narrow_back += p.number * (p.k * (p.m + p.n) + 2 * p.m * p.n)
        elif kind in ("fp8", "fp4"):
            narrow += p.number * p.m * (p.k + p.n / 2)
            narrow_back += p.number * p.m * (p.k + p.n / 2)
    scores = scores_back = 0.0
    kernels = len(every)
    for core in (operator.core for operator in operators if operator.core):
        there, back, started = _attention(device, core, framework, products)
        scores, scores_back, kernels = scores + there, scores_back + back, kernels + started
    width = max(2, WIDTHS[products])
    launches = sum(stream.launches for stream in streams)
    moved, moved_back = (
        stream_seconds(device, framework.passes * width * numbers + framework.cast_bytes * cast, launches)
        for numbers, cast in (
            (sum(stream.forward for stream in streams), narrow),
            (sum(stream.backward for stream in streams), narrow_back),
        )
    )
    cheap = [stream for stream in streams if stream.cheap]
    moved_again = stream_seconds(
        device,
        framework.passes * width * sum(stream.forward for stream in cheap),
        sum(stream.launches for stream in cheap),
    )
    kernels += sum(stream.kernels for stream in streams)
    launching = (device.host_us or framework.kernel_us) * 1e-6
    host, again = kernels * launching, sum(stream.kernels for stream in cheap) * launching
    # A CPU launches an operation and then does it; the host of an accelerator runs ahead.
    within, ahead = (host, 0.0) if device.host_us else (0.0, host)
    return Seconds(
        forward=slowdown * (forward + scores + moved) + within,
        backward=slowdown * (inputs + weights + scores_back + moved_back) + within * HOST_BACKWARD,
        weights=slowdown * weights,
        attention=slowdown * scores,
        cheap=slowdown * moved_again + (again if device.host_us else 0.0),
        products=slowdown * (forward + inputs + weights + scores + scores_back),
        host_forward=ahead,
        host_backward=ahead * HOST_BACKWARD,
        host_cheap=0.0 if device.host_us else again,
    )


def number_format(product: Product, products: str, framework: Framework) -> str:
    """Returns the number format of one product if the others run in `products`."""
    wide = product.sixteen or (product.grouped and not framework.narrow_experts)
    wide = wide or product.n % FP8_ALIGNMENT or product.k % FP8_ALIGNMENT
    return "bf16" if wide and products in ("fp8", "fp4") else products


def _attention(
    device: Accelerator, core: AttentionCore, framework: Framework, products: str
) -> tuple[float, float, int]:
    """Returns the seconds forward and backward, and the number of kernels, over all steps of a ring."""
    heads, kv_heads = core.sequences * core.heads, core.sequences * core.kv_heads
    queries, keys, steps = core.queries, -(-core.keys // core.steps), core.steps
    if framework.attention == "flash":
        shape = (device, products, queries, keys, heads, kv_heads, core.head, core.value_head)
        seen = min(keys, core.keys_per_query)
        forward, backward = (
            steps * attention_seconds(*shape, backward=back, kernel=framework.flash, seen=seen)
            for back in (False, True)
        )
        return forward, backward, 2 * steps
    # Products of every query with every key, between which the probabilities go through memory.
    kind = "fp32" if products == "fp32" else "bf16"
    forward = product_seconds(device, kind, queries, keys, core.head, heads)
    forward += product_seconds(device, kind, queries, core.head, keys, heads)
    backward = 2 * forward
    pairs = max(2, WIDTHS[products]) * heads * queries * keys
    forward += stream_seconds(device, framework.softmax_passes * pairs, 4)
    backward += stream_seconds(device, framework.softmax_passes * pairs, 4)
    return steps * forward, steps * backward, 8 * steps
