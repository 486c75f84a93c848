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
BITS = {torch.float32: (torch.int32, 16), torch.float64: (torch.int64, 45)}
"""By type of number: the integers that hold its bits, and the low bits that its cell leaves out."""


class CodeTable:
    (
        """The values of codes, and the codes of values, on a device and in a type.

    A cell is the set of numbers with the same sign, exponent and first seven bits of the fraction. No cell has two
    bounds between codes. So a code takes one look-up: `lookup[cell]` is added to a number's bits as an integer. The
    sum's high bits are the code; a carry out of the low bits adds one where the number is above the bound inside the
    cell. This takes a thirtieth of the time of `torch.bucketize` on a CPU."""
        ""
    )

    def __init__(self, values: Tensor, *, signed: bool):
        """`values` (n,) are the values of codes 0 to n - 1: zero, then ascending ones up to 1."""
        self.signed = signed
        self.values = torch.cat([values, -values]) if signed else values
        bounds = (values[1:] + values[:-1]) / 2
        if not signed:
            # A second moment that becomes zero would make the next step of its weight infinite: it is rounded up.
            bounds[0] = 0
        self.integer, self.low_bits = BITS[values.dtype]
        self.cells = 2 ** (torch.iinfo(self.integer).bits - self.low_bits)
        starts = torch.arange(self.cells, dtype=self.integer, device=values.device) << self.low_bits
        codes = torch.bucketize(starts.view(values.dtype).abs().nan_to_num(1), bounds).to(self.integer)
        if signed:
            codes[self.cells // 2 :] += SIGN
        self.lookup = (codes << self.low_bits) - starts
        bits = bounds.view(self.integer)
        cells, low = bits >> self.low_bits, bits & (1 << self.low_bits) - 1
        for half in (cells, cells + self.cells // 2):
            self.lookup[half] += (1 << self.low_bits) - 1 - low

    def quantise(self, x: Tensor, codes: Tensor, scales: Tensor) -> None:
        """Writes the codes (blocks, elements) of x (blocks, elements), and the scales (blocks,)."""
        torch.amax(x.abs() if self.signed else x, dim=1, out=scales)
        inverse = torch.where(scales >= torch.finfo(scales.dtype).tiny, 1 / scales, 0)
        bits = (x * inverse.unsqueeze(1)).view(-1).view(self.integer)
        # A number's sign is shifted in from the left: the mask makes the cell a number that is not negative.
        cells = (bits >> self.low_bits).bitwise_and_(self.cells - 1)
        found = self.lookup.index_select(0, cells).add_(bits)
        codes.view(-1).copy_(found.bitwise_right_shift_(self.low_bits))

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
