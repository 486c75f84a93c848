"""Block-wise dynamic quantisation to 8 bits (Dettmers et al. 2022, sections 2.1 and 2.2; the data type: Dettmers 2016).

Each block is divided by its largest magnitude, its scale, and each element becomes the nearest value of a table whose
values are denser near zero, over seven decades. Code 0 is zero, so that zeros need no scale.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

DECADES = 7
SIGN = 128
"""The bit of a code that holds the sign."""
CELL_BITS = 16
"""Bits of an fp32 number that its cell leaves out."""


class CodeTable:
    """The values of codes, on a device and in a type."""

    def __init__(self, values: Tensor, *, signed: bool):
        """`values` (n,) are the values of codes 0 to n - 1: zero, then ascending ones up to 1."""
        self.signed = signed
        self.values = torch.cat([values, -values]) if signed else values
        bounds = (values[1:] + values[:-1]) / 2
        if not signed:
            # A second moment that becomes zero would make the next step of its weight infinite: it is rounded up.
            bounds[0] = 0
        # The first 16 bits of an fp32 number name its cell, of which none has two bounds: the code at the cell's lower
        # end is at most one too low. That takes a fifth of the time of a binary search.
        cells = (torch.arange(2**15, dtype=torch.int32, device=values.device) << CELL_BITS).view(torch.float32)
        self.lowest = torch.bucketize(cells.to(values.dtype).nan_to_num(1), bounds, out_int32=True)
        self.bounds = torch.cat([bounds, bounds.new_tensor([torch.inf])])

    def quantise(self, x: Tensor, codes: Tensor, scales: Tensor) -> None:
        """Writes the codes (blocks, elements) of x (blocks, elements), and the scales (blocks,)."""
        magnitudes = x.abs()
        torch.amax(magnitudes, dim=1, out=scales)
        inverse = torch.where(scales >= torch.finfo(scales.dtype).tiny, 1 / scales, 0)
        flat = magnitudes.mul_(inverse.unsqueeze(1)).view(-1)
        cells = flat.float().view(torch.int32) >> CELL_BITS
        found = self.lowest.index_select(0, cells)
        # A comparison that writes integers takes half of the time of one that adds truth values to them.
        found += torch.gt(flat, self.bounds.index_select(0, found), out=cells)
        if self.signed:
            found |= x.view(-1).float().view(torch.int32) >> 31 & SIGN
        codes.view(-1).copy_(found)

    def dequantise(self, codes: Tensor, scales: Tensor) -> Tensor:
        """Returns the elements (blocks, elements) of codes of that shape and scales (blocks,)."""
        return self.values.index_select(0, codes.reshape(-1).int()).view(codes.shape).mul_(scales.unsqueeze(1))


@cache
def table(device: torch.device, dtype: torch.dtype, *, signed: bool) -> CodeTable:
    """Returns the table of signed values (127 magnitudes) or of those that are not negative (255)."""
    values = [0.0]
    for decade in range(DECADES):
        steps = 2 ** (decade + (0 if signed else 1))
        values += [10.0 ** (decade - DECADES + 1) * (0.1 + 0.9 * (step + 0.5) / steps) for step in range(steps)]
    # The block's largest element has a code of its own, so that scales are exact.
    values = [*values[:-1], 1.0] if signed else [*values, 1.0]
    return CodeTable(torch.tensor(values, dtype=torch.float64).to(device, dtype), signed=signed)
