"""Shapes that `phalanx bench compute` measures: those of training, over the sizes that suit a device.

Dimensions are multiples of a unit, 1 for a CPU process and 8 for an accelerator.
"""

from __future__ import annotations

from typing import NamedTuple

CPU_UNIT, ACCELERATOR_UNIT = 1, 8
"""Factors of all dimensions. A GPU has about a thousand times the FLOP/s of a CPU core, and so gets eight times the
dimensions, 512 times the work."""
QUICK_STEP = 3
"""--quick measures every third size of a family."""
QUICK_FLOPS = 5e9
"""Most FLOPs of a product with --quick, for a unit of 1: 50 ms at 0.1 TFLOP/s. Grows with the cube of the unit."""
VOCABULARIES = (4096, 16384, 32768, 50257)
"""Vocabulary sizes; the last is GPT-2's, which is odd."""


class Shape(NamedTuple):
    """A product of (m × k) and (k × n) matrices, and the family of shapes that it belongs to."""

    family: str
    m: int
    n: int
    k: int


def products(unit: int, quick: bool) -> list[Shape]:
    """Returns the products to measure, in families: squares; more and more tokens through one weight; slices of
    weights, as tensor-parallel ranks have them; gradients of a weight, whose inner dimension is the tokens; output
    heads over vocabularies."""
    d = 512 * unit
    tokens = [64 * unit * 2**step for step in range(7)]
    slices = [4 * d // parts for parts in (32, 16, 8, 4, 2)]
    squares = [64 * unit * size for size in (1, 2, 4, 6, 8, 12, 16, 24, 32)]
    some = 1024 * unit
    families = [
        [Shape("n × n × n", n, n, n) for n in squares],
        [Shape(f"tokens × {4 * d} × {d}", m, 4 * d, d) for m in tokens],
        [Shape(f"{some} × slice × {d}", some, n, d) for n in slices],
        [Shape(f"{some} × {d} × slice", some, d, k) for k in slices],
        [Shape(f"{4 * d} × {d} × tokens", 4 * d, d, k) for k in tokens],
        [Shape(f"{d} × vocabulary × {d}", d, n, d) for n in VOCABULARIES],
    ]
    if quick:
        families = [
            _thinned([s for s in family if 2 * s.m * s.n * s.k <= QUICK_FLOPS * unit**3]) for family in families
        ]
    return [shape for family in families for shape in family]


def lengths(unit: int, quick: bool) -> list[int]:
    """Returns the sequence lengths that attention is measured at, in tokens."""
    return [256 * unit, 1024 * unit] if quick else [128 * unit * 2**step for step in range(5)]


def streams(quick: bool) -> list[int]:
    """Returns numbers of elements that are copied and added, from a cache's size to far above it."""
    return [2**22, 2**25] if quick else [2**18, 2**20, 2**22, 2**24, 2**26]


def _thinned(family: list[Shape]) -> list[Shape]:
    """Returns the last shape and every QUICK_STEP-th before it."""
    return family[::-1][::QUICK_STEP][::-1]
