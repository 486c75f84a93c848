"""Seconds of one operation on a device: matrix products by their tiles, attention, and memory-bound operations.

A matrix product is cut into tiles, each of which one core computes; cores work in waves, and the last wave leaves some
idle (NVIDIA, "Matrix Multiplication Background", sections on tile and wave quantisation). The fastest of the usual
tiles counts, as a library's own heuristics choose. The rate of a device's cores comes from the best product that was
measured on it (`Accelerator.ceiling`).
"""

from __future__ import annotations

from functools import lru_cache
from math import ceil
from typing import Any

from phalanx.config.cluster import Accelerator
from phalanx.cost.frameworks.framework import FusedKernel

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
FLASH_HALF = 192
"""Mean keys per query at which a fused attention kernel reaches half of that rate."""


WIDTHS = {"fp4": 0.5, "fp8": 1, "bf16": 2, "fp16": 2, "fp32": 4}
"""Bytes per element of an operand."""
FOUR_BITS = 0.75
"""Efficiency of products in four bits relative to those in eight bits: scales per sixteen elements, random Hadamard
transforms, and some layers that stay in 16 bits (NVIDIA 2025, "Pretraining LLMs with NVFP4", 3)."""


def peak_flops(device: Accelerator, products: str) -> float:
    """Returns the data sheet's FLOP/s in a number format, or in the next wider one that the device supports."""
    ladder = ("fp4", "fp8", "bf16", "fp16", "fp32")
    start = ladder.index(products)
    if products == "fp16" and device.fp16_tflops:
        return device.fp16_tflops * 1e12
    return next((peak * 1e12 for name in ladder[start:] if (peak := getattr(device, f"{name}_tflops"))), 0.0)


def rate(device: Accelerator, products: str) -> float:
    """Returns the FLOP/s of the best matrix product in a number format."""
    peak = peak_flops(device, products)
    share = FOUR_BITS if products == "fp4" and device.fp4_tflops else 1.0
    eight = products in ("fp8", "fp4") and peak > device.bf16_tflops * 1e12
    return peak * (device.fp8_ceiling if eight else device.ceiling) * device.sustained * share


@lru_cache(100_000)
def product_seconds(device: Accelerator, products: str, m: int, n: int, k: int, count: int = 1) -> float:
    """Returns the seconds of `count` batched products of (m × k) by (k × n); operands and result are in memory."""
    if not m or not n or not k or not count:
        return 0.0
    moved = count * ((m * k + k * n) * WIDTHS[products] + m * n * max(2, WIDTHS[products]))
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
) -> float:
    """Returns the seconds of fused causal attention over `heads` heads and `kv_heads` key heads of all sequences
    together. The mask leaves out half of the pairs of `queries` with `seen` keys on average (None: all `keys`; fewer
    with a window). The backward pass has five products for two. It runs in 16 bits, or in fp32."""
    seen = keys if seen is None else seen
    products = "fp32" if products == "fp32" else "bf16"
    work = 2.5 if backward else 1.0
    flops = work * queries * seen * heads * (head + value_head)
    full = rate(device, products) * FLASH[kernel][backward] * (device.older if kernel in (1, 2) else 1.0)
    narrow = min(1.0, 0.6 + 0.4 * head / 128)
    slow = UNALIGNED_RATE.get(head & -head, 1.0)
    seconds = flops / (full * narrow * slow * seen / (seen + 2 * FLASH_HALF))
    moved = work * WIDTHS[products] * (heads * queries + kv_heads * keys) * (head + value_head)
    return max(seconds, moved / (device.bandwidth_gbs * 1e9 * STREAM_EFFICIENCY), device.launch_us * 1e-6)


def stream_seconds(device: Accelerator, moved: Any, kernels: float = 1) -> Any:
    """Returns the seconds of `kernels` kernels that read and write `moved` bytes (a number or an array)."""
    return moved / (device.bandwidth_gbs * 1e9 * STREAM_EFFICIENCY) + kernels * device.launch_us * 1e-6
