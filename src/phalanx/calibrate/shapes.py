"""What `phalanx bench compute` multiplies: shapes that training has, over the sizes that a device can be given.

Dimensions are multiples of a unit, 1 for a CPU process and 8 for an accelerator.
"""

from __future__ import annotations

from typing import NamedTuple

CPU, ACCELERATOR = 1, 8
"""Units."""
QUICK = 3
"""With --quick, every third size of a family, and none above QUICK_FLOPS."""
QUICK_FLOPS = 5e9
"""For a unit of 1; with dimensions it grows by the cube."""
VOCABULARIES = (4096, 16384, 32768, 50257)


class Shape(NamedTuple):
    """(m × k) by (k × n), one of a family of them."""

    family: str
    m: int
    n: int
    k: int


def products(unit: int, quick: bool) -> list[Shape]:
    """The shapes by family: squares; more and more tokens through one weight; slices of weights, as tensor-parallel
    ranks have them; gradients of a weight, whose inner dimension is the tokens; heads over vocabularies."""
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
        families = [_some([s for s in family if 2 * s.m * s.n * s.k <= QUICK_FLOPS * unit**3]) for family in families]
    return [shape for family in families for shape in family]


def lengths(unit: int, quick: bool) -> list[int]:
    """Of the sequences that attention is measured on."""
    return [256 * unit, 1024 * unit] if quick else [128 * unit * 2**step for step in range(5)]


def streams(quick: bool) -> list[int]:
    """Numbers of elements that are copied and added: from what a cache holds to what none does."""
    return [2**22, 2**25] if quick else [2**18, 2**20, 2**22, 2**24, 2**26]


def _some(family: list[Shape]) -> list[Shape]:
    """The last, and every third before it."""
    return family[::-1][::QUICK][::-1]
