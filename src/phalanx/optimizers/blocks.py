"""The blocks over which 8-bit states share a scale: where they lie must not depend on the layout.

Dettmers et al. 2022 (section 2.1) quantise blocks of consecutive elements of the flattened tensor. Shards would cut
such blocks anywhere, and each layout would train differently. Here blocks lie within rows (the last dimension), and a
row has a multiple of ROW_PARTS blocks: so tensor parallelism may cut rows and columns, FSDP rows, and flat buckets are
cut at multiples of BLOCK elements.
"""

from __future__ import annotations

from math import prod

BLOCK = 256
"""Most elements of a block; a power of two, as every block's length is."""
LEAST_BLOCK = 16
"""Fewest elements: with fewer the scales take more memory than the 8 bits save."""
ROW_PARTS = 8
"""Largest power of two into which a layout may cut rows; odd factors do not matter, as blocks are powers of two."""
LEAST_ELEMENTS = 4096
"""Fewest elements of a parameter that is quantised (Dettmers et al. 2022, section 2; bitsandbytes' min_8bit_size)."""


def block_of(shape: tuple[int, ...]) -> int:
    """Returns the elements per block of a parameter of this whole shape; 0 if it is not quantised: a norm or a bias, a
    small one, or one whose rows do not divide."""
    if len(shape) < 2 or prod(shape) < LEAST_ELEMENTS:
        return 0
    block = BLOCK
    while block >= LEAST_BLOCK and shape[-1] % (block * ROW_PARTS):
        block //= 2
    return block if block >= LEAST_BLOCK else 0
