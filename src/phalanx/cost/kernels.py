"""Seconds of operators and of single operations on a device: matrix products by their tiles, attention, and
memory-bound operations.

A matrix product is cut into tiles, each of which one core computes; cores work in waves, and the last wave leaves some
idle (NVIDIA, "Matrix Multiplication Background", sections on tile and wave quantisation). The fastest of the usual
tiles counts, as a library's own heuristics choose. The rate of a device's cores comes from the best product that was
measured on it (`Accelerator.ceiling`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import astuple, dataclass, replace
from functools import lru_cache
from math import ceil
from typing import Any

from phalanx.blocks.operator import AttentionCore, MemoryBound, Operator, Product
from phalanx.config.cluster import Accelerator
from phalanx.config.precision import PRODUCT_BYTES, SCALED
from phalanx.cost.spec import Framework, FusedKernel, blended

TILES = (
    (256, 128, 1.0),
    (128, 256, 1.0),
    (128, 128, 0.97),
    (256, 64, 0.9),
    (64, 256, 0.9),
    (128, 64, 0.85),
    (64, 64, 0.7),
)
"""Rows and columns of a tile of the result, and its rate relative to the largest: smaller tiles read their operands
more often from shared memory per multiplication."""
SPLITS = (1, 2, 4)
"""Parts into which the inner dimension may be cut if there are fewer tiles than cores."""
FILLING = 128
"""Start and end of a tile (loading the first operands, writing the result), as rows of the inner dimension."""
BEST_INNER = 5120
"""Inner dimension of the products that the ceilings were measured with."""
STREAM_EFFICIENCY = 0.85
"""Share of the memory's bandwidth that streaming kernels reach (STREAM on NVIDIA's devices: 0.85 to 0.93)."""
UNALIGNED_RATE = {32: 0.97, 16: 0.92, 8: 0.65, 4: 0.45, 2: 0.35, 1: 0.25}
"""Rate of a product whose least aligned dimension is a multiple of only so many elements, relative to multiples of 64,
which the fastest kernels need (128 bytes of 16 bits). Below 8 (16 bytes) tensor cores load operands piece by piece
(NVIDIA, "Tensor Core requirements")."""
FLASH: dict[FusedKernel, tuple[float, float]] = {
    1: (0.55, 0.45),
    2: (0.75, 0.65),
    3: (0.95, 0.8),
    "cudnn": (0.76, 0.64),
}
"""Rates of fused attention, forward and backward, relative to the best product of the device that the kernel was
written for, by kernel: FlashAttention (Dao et al. 2022), FlashAttention-2 (Dao 2023, figures 4 to 7: at most 0.73 and
0.63 of the peak of an A100), FlashAttention-3 and cuDNN 9 in clusters (Shah et al. 2024, figures 5 and 6: at most 640
and 550 TFLOP/s of an H100), and cuDNN 9 as torch 2.11 calls it on one device: both passes together 533 TFLOP/s alone,
470 and 500 in steps with heads of 128, 321 with heads of 64 (one H200, tests/cost/one_device.yaml)."""
SOFTMAX_BACKWARD = 1
"""Passes over the scores that softmax and dropout have more in the backward pass: the gradient of a softmax reads its
result, too (Megatron-LM, scaled_upper_triang_masked_softmax.h)."""
EAGER_SOFTMAX = 13.5, 4
"""Passes over the scores in 16 bits, and kernels, that a softmax in eager mode has more than a fused one: a copy in
fp32, its scale, its mask, the softmax, and a copy in 16 bits move 31 bytes per score instead of 4 (Megatron-LM,
fused_softmax.py: forward_torch_softmax)."""
FLASH_NARROW = 1.4
"""Rate of fused attention with 8-bit products over that in 16 bits: the softmax between them stays (Shah et al. 2024,
figure 7: heads of 128, causal)."""
SCAN = (0.32, 0.21)
"""Share of the best product of the device that the kernels were written for (`older`) that the products of a scan in
chunks reach, forward and backward, added to what the scan moves. Triton's kernels of Mamba-2 multiply small tiles whose
decays they compute besides. tilelang's chunk scan, which is faster, reaches 134 TFLOP/s on an H800, 0.27 of `older`, of
the FLOPs that the mask leaves (its benchmark/mamba2). Nemotron 3 Nano's scan takes 369 us forward on Blackwell
(Megatron-LM's pull request 5829), 330 here with 8,192 tokens: how many it had is assumed. Backward, the kernels compute
states and scores again, 1.3 times the FLOPs that count."""
FLASH_HALF = 192
"""Mean keys per query at which a fused attention kernel reaches half of that rate."""


FOUR_BITS = 0.75
"""Efficiency of products in four bits relative to those in eight bits: scales per sixteen elements, random Hadamard
transforms, and some layers that stay in 16 bits (NVIDIA 2025, "Pretraining LLMs with NVFP4", 3)."""


def peak_flops(device: Accelerator, products: str) -> float:
    """Returns the data sheet's FLOP/s in a number format, or in the next wider one that the device supports."""
    ladder = [*PRODUCT_BYTES]
    start = ladder.index(products)
    if products == SCALED and device.fp16_tflops:
        return device.fp16_tflops * 1e12
    return next((peak * 1e12 for name in ladder[start:] if (peak := getattr(device, f"{name}_tflops"))), 0.0)


def rate(device: Accelerator, products: str) -> float:
    """Returns the FLOP/s of the best matrix product in a number format."""
    peak = peak_flops(device, products)
    share = FOUR_BITS if products == "fp4" and device.fp4_tflops else 1.0
    eight = products in ("fp8", "fp4") and peak > device.bf16_tflops * 1e12
    return peak * (device.fp8_ceiling if eight else device.ceiling) * device.sustained * share


FOUR_BITS_CAST = 2
"""Bytes moved per element more than in 8 bits to cast an operand to four: its largest number is searched before, and
its columns are transformed by themselves (a read of two bytes more for each, and half of the writing)."""
PADDED_BYTES = 4
"""Moved per element of an expert's rows to pad them in 16 bits: read two, write two."""


@lru_cache(100_000)
def product_seconds(device: Accelerator, products: str, m: int, n: int, k: int, count: int = 1) -> float:
    """Returns the seconds of `count` batched products of (m × k) by (k × n); operands and result are in memory."""
    if not m or not n or not k or not count:
        return 0.0
    moved = count * ((m * k + k * n) * PRODUCT_BYTES[products] + m * n * max(2, PRODUCT_BYTES[products]))
    plain = products == "fp32"  # vector units, of a CPU or beside tensor cores: no tile to fill, no alignment
    filling = 0 if plain else FILLING
    core = rate(device, products) * (1 + filling / BEST_INNER) / device.cores
    best = float("inf")
    for rows, columns, relative in TILES:
        tiles = count * ceil(m / rows) * ceil(n / columns)
        for split in SPLITS if tiles < device.cores else SPLITS[:1]:
            waves = ceil(tiles * split / device.cores)
            seconds = waves * 2 * rows * columns * (k / split + filling) / (core * relative)
            best = min(best, seconds)
    slow = 1.0 if plain else UNALIGNED_RATE.get(min(x & -x for x in (n, k)), 1.0)
    seconds = max(best / slow, moved / (device.bandwidth_gbs * 1e9 * STREAM_EFFICIENCY), device.launch_us * 1e-6)
    return seconds + device.product_us * 1e-6


@lru_cache(100_000)
def attention_seconds(
    device: Accelerator,
    products: str,
    queries: int,
    keys: int,
    heads: int,
    kv_heads: int,
    head: int,
    value_head: int,
    *,
    backward: bool,
    kernel: FusedKernel = 3,
    seen: float | None = None,
    narrow: bool = False,
) -> float:
    """Returns the seconds of fused causal attention over `heads` heads and `kv_heads` key heads of all sequences
    together. The mask leaves out half of the pairs of `queries` with `seen` keys on average (None: all `keys`; fewer
    with a window). The backward pass has five products for two. It runs in 16 bits, or in fp32; `narrow`: in 8 bits."""
    seen = keys if seen is None else seen
    products = "fp32" if products == "fp32" else "bf16"
    work = 2.5 if backward else 1.0
    flops = work * queries * seen * heads * (head + value_head)
    full = rate(device, products) * FLASH[kernel][backward] * (device.older if kernel in (1, 2) else 1.0)
    # The first kernel was written for heads of 64, and has no registers left for more of those of 128.
    small = 1.0 if kernel == 1 else min(1.0, 0.6 + 0.4 * head / 128)
    slow = UNALIGNED_RATE.get(head & -head, 1.0) * (FLASH_NARROW if narrow else 1.0)
    seconds = flops / (full * small * slow * seen / (seen + 2 * FLASH_HALF))
    moved = work * PRODUCT_BYTES[products] * (heads * queries + kv_heads * keys) * (head + value_head)
    return max(seconds, moved / (device.bandwidth_gbs * 1e9 * STREAM_EFFICIENCY), device.launch_us * 1e-6)


def stream_seconds(device: Accelerator, moved: Any, kernels: float = 1) -> Any:
    """Returns the seconds of `kernels` kernels that read and write `moved` bytes (a number or an array)."""
    return moved / (device.bandwidth_gbs * 1e9 * STREAM_EFFICIENCY) + kernels * device.launch_us * 1e-6


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
    """The part of `forward` that recompute=products repeats, memory-bound work without products; or recompute=mlp."""
    unrepeated: float = 0.0
    """The part of `forward` that recompute=full does not repeat."""
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

    def mixed(self, other: Seconds, share: float) -> Seconds:
        """Returns the same work, a `share` of which takes the seconds of `other`."""
        return Seconds(
            *((1 - share) * one + share * two for one, two in zip(astuple(self), astuple(other), strict=True))
        )

    def launched(self, factor: float) -> Seconds:
        """Returns the same work, launched in `factor` times the time."""
        forward, backward, cheap = (factor * host for host in (self.host_forward, self.host_backward, self.host_cheap))
        return replace(self, host_forward=forward, host_backward=backward, host_cheap=cheap)


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
    every = [product for operator in operators if (product := operator.product(tp, ep, folds=framework.ep_folds))]
    streams = [stream for operator in operators for stream in _streams(operator, framework)]
    forward = inputs = weights = narrow = narrow_back = 0.0
    for p in every:
        kind = number_format(p, products, framework)
        forward += product_seconds(device, kind, p.m, p.n, p.k, p.number)
        inputs += product_seconds(device, kind, p.m, p.k, p.n, p.number)
        weights += 0.0 if p.frozen else product_seconds(device, kind, p.n, p.k, p.m, p.number)
        if kind in ("fp8", "fp4") and framework.casts_each:
            narrow += p.number * p.k * (p.m + p.n)
            narrow_back += p.number * (p.k * (p.m + p.n) + 2 * p.m * p.n)
            if p.grouped:  # what a weight's gradient is summed over is padded before
                narrow_back += PADDED_BYTES / framework.cast_bytes * p.number * p.m * (p.k + p.n)
        elif kind in ("fp8", "fp4"):
            each = framework.moe_cast_bytes if p.grouped else framework.cast_bytes
            share = (each + FOUR_BITS_CAST * (kind == "fp4")) / framework.cast_bytes
            narrow += share * p.number * p.m * (p.k + p.n / 2)
            narrow_back += share * p.number * p.m * (p.k + p.n / 2)
    scores = scores_back = 0.0
    kernels = len(every)
    for core in (operator.core for operator in operators if operator.core):
        there, back, started = _attention(device, core, framework, products)
        scores, scores_back, kernels = scores + there, scores_back + back, kernels + started
    width = max(2, PRODUCT_BYTES[products])
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
    for operator in operators:
        if operator.fused:
            there, back = _scan_beyond(device, operator, framework, products)
            scores, scores_back = scores + there, scores_back + back
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


def _scan_beyond(device: Accelerator, operator: Operator, framework: Framework, products: str) -> tuple[float, float]:
    """Returns the seconds, forward and backward, that products of kernels beside attention's add to what they move,
    which counts with other memory-bound work: an indexer's, at the rate of the framework's attention kernel (assumed),
    those by which they take longer; a scan's, all of them."""
    assert operator.fused is not None, "chosen for having one"
    scan, width = operator.fused, max(2, PRODUCT_BYTES[products])
    full = rate(device, "fp32" if products == "fp32" else "bf16")
    if scan.chunks:
        return scan.forward / (full * device.older * SCAN[0]), scan.backward / (full * device.older * SCAN[1])
    moved = [
        sum(stream_seconds(device, width * each, 0) for each in numbers)
        for numbers in zip(*((stream.forward, stream.backward) for stream in operator.memory_bound), strict=True)
    ]
    flops = scan.forward / 2 if scan.causal else scan.forward, scan.backward
    there, back = (
        max(0.0, work / (full * reached) - streamed)
        for work, reached, streamed in zip(flops, FLASH[framework.flash], moved, strict=True)
    )
    return there, back


def _streams(operator: Operator, framework: Framework) -> Iterable[MemoryBound]:
    """Returns an operator's memory-bound work: a dispatcher that sends tokens, not rows, sorts no rows before, and the
    experts' activation is part of fused products."""
    if framework.fused_experts and operator.name == "experts.activation":
        return ()
    if not framework.ep_once or operator.name not in ("dispatch", "combine"):
        return operator.memory_bound
    unsorted = 2 * sum(message.elements for message in operator.messages if message.axis == "ep")
    return [
        one._replace(forward=max(0.0, one.forward - unsorted), backward=max(0.0, one.backward - unsorted))
        for one in operator.memory_bound
    ]


def number_format(product: Product, products: str, framework: Framework) -> str:
    """Returns the number format of one product if the others run in `products`."""
    wide = product.sixteen or (product.grouped and not framework.narrow_experts)
    wide = wide or product.n % framework.narrow_unit or product.k % framework.narrow_unit
    return "bf16" if wide and products in ("fp8", "fp4") else products


def _attention(
    device: Accelerator, core: AttentionCore, framework: Framework, products: str
) -> tuple[float, float, int]:
    """Returns the seconds forward and backward, and the number of kernels, over all steps of a ring."""
    heads, kv_heads = core.sequences * core.heads, core.sequences * core.kv_heads
    queries, keys, steps = core.queries, ceil(core.keys / core.steps), core.steps
    windowed = core.keys_per_query * core.steps < core.keys
    if framework.attention == "flash" and not (windowed and framework.windows == "unfused"):
        shape = (device, products, queries, keys, heads, kv_heads, core.head, core.value_head)
        seen = min(keys, core.keys_per_query) if core.chosen else core.keys_per_query
        own, crowd = framework.flash, framework.crowd
        one = framework.alone.flash if framework.alone and crowd < 1 else own

        def seconds(kernel: FusedKernel, backward: bool) -> float:
            narrow = framework.narrow_attention
            return steps * attention_seconds(*shape, backward=backward, kernel=kernel, seen=seen, narrow=narrow)

        forward, backward = (
            seconds(own, back) if one == own else blended(seconds(one, back), seconds(own, back), crowd)
            for back in (False, True)
        )
        return forward, backward, 2 * ceil(steps)
    # Products of every query with every key, between which the probabilities go through memory.
    kind = "fp32" if products == "fp32" else "bf16"
    forward = product_seconds(device, kind, queries, keys, core.head, heads)
    forward += product_seconds(device, kind, queries, core.head, keys, heads)
    backward = 2 * forward
    pairs = max(2, PRODUCT_BYTES[products]) * heads * queries * keys
    eager = heads % framework.softmax_heads > 0
    passes, launches = framework.softmax_passes + EAGER_SOFTMAX[0] * eager, 4 + EAGER_SOFTMAX[1] * eager
    forward += stream_seconds(device, passes * pairs, launches)
    backward += stream_seconds(device, (passes + SOFTMAX_BACKWARD) * pairs, launches)
    return steps * forward, steps * backward, (4 + launches) * ceil(steps)
