"""Matrix products in 8-bit floats with dynamic scales, per row or per tensor (Micikevicius et al. 2022, "FP8 Formats
for Deep Learning"), as torchao's float8 training computes them (torchao/float8/config.py).

Each product of a linear layer contracts the last dimension of both factors: x of (tokens, inputs) with the weight, the
gradient of (tokens, outputs) with the weight's transpose, and both transposes over the tokens. rowwise: each row of a
factor has a scale of its own, and every factor is e4m3. tensorwise: a factor has one scale, and gradients are e5m2.
Scales are powers of two, so that scaling itself rounds nothing. A rank that holds a part of the contracted dimension
scales by the largest element of its part: only elements smaller than 2^-14 of it are rounded otherwise than whole.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.config.job import FP8_ALIGNMENT, Fp8Scaling
from phalanx.errors import JobError

SMALLEST = 2.0**-100
"""Rows whose largest element is smaller are scaled as if it were this: of a row of zeros no scale would be finite."""
_EXPONENT = 0x7F800000
"""The bits of the exponent of an fp32 number."""


Scales = Literal[Fp8Scaling, "elementwise"]


def rounded(factor: Tensor, format: torch.dtype, scales: Scales) -> tuple[Tensor, Tensor]:
    """Returns a factor (rows, columns) in an 8-bit format, row after row in memory, and what it is to be multiplied by,
    in fp32: (rows, 1), () with one scale for all, or of its own shape."""
    if scales == "elementwise":
        largest = factor.abs().float()
    else:
        rows = scales == "rowwise"
        largest = torch.linalg.vector_norm(factor, torch.inf, dim=-1 if rows else None, keepdim=rows).float()
    # A row with an infinite element or one that is not a number stays so: its scale is zero or infinite.
    scale = torch.finfo(format).max / largest.clamp(min=SMALLEST)
    scale = (scale.view(torch.int32) & _EXPONENT).view(torch.float32)
    scaled = factor * scale.to(factor.dtype)
    return scaled.to(format, memory_format=torch.contiguous_format), 1 / scale


@dataclass(frozen=True)
class Fp8Product:
    """x weightᵀ + bias as F.linear computes it, of factors that are rounded to 8 bits. Autograd does not know it."""

    scaling: Fp8Scaling
    emulated: bool = False
    """Whether factors are converted back, and multiplied in their own type."""
    elementwise: bool = False
    """Emulated: whether each number is rounded by a scale of its own, and so alike in a part of a factor and in the
    whole."""
    formats: tuple[torch.dtype, torch.dtype] = (torch.float8_e4m3fn, torch.float8_e5m2)
    """The format with more mantissa, and that with more exponent."""
    of_gradient: bool = False
    """Whether the first factor is a gradient."""
    rounded: Callable[[Tensor, torch.dtype, Scales], tuple[Tensor, Tensor]] = rounded
    """`rounded`, perhaps compiled."""

    @classmethod
    def on(cls, device: torch.device, scaling: Fp8Scaling, dtype: torch.dtype) -> Fp8Product:
        """Returns the product for a device, of factors of type `dtype`: emulated on a CPU, and where they are not in
        bf16; elementwise in float64, to compare layouts. Raises JobError for a GPU without products in 8 bits."""
        if device.type == "cpu" or dtype != torch.bfloat16:
            return cls(scaling, emulated=True, elementwise=dtype == torch.float64)
        name = torch.cuda.get_device_name(device)
        if torch.version.hip:
            kind = torch.cuda.get_device_properties(device).gcnArchName.partition(":")[0]
            if kind == "gfx942":  # MI300 has the formats without a negative zero
                return cls(scaling, formats=(torch.float8_e4m3fnuz, torch.float8_e5m2fnuz))
            has = kind >= "gfx95"
        else:
            has = torch.cuda.get_device_capability(device) >= (8, 9)
        if not has:
            raise JobError(f"train.precision: {name} has no products in fp8; nearest legal: bf16")
        return cls(scaling)

    @property
    def backward(self) -> Fp8Product:
        """The product of a gradient with a factor of the forward pass."""
        return replace(self, of_gradient=True)

    def weight_gradient(self, gradient: Tensor, x: Tensor) -> Tensor:
        """Returns the gradient of a weight (outputs, inputs) from that of the output (tokens, outputs) and the input
        (tokens, inputs)."""
        if not self.accepts(gradient.shape[1], x.shape[1]):
            return gradient.t() @ x
        if missing := 0 if self.emulated else -len(x) % FP8_ALIGNMENT:  # rows of zeros change neither sums nor scales
            gradient, x = (F.pad(each, (0, 0, 0, missing)) for each in (gradient, x))
        return self.backward(gradient.t(), x.t())

    def accepts(self, outputs: int, inputs: int) -> bool:
        """Returns whether a weight (outputs, inputs) is multiplied in 8 bits; others are in their own type."""
        return self.emulated or not (outputs % FP8_ALIGNMENT or inputs % FP8_ALIGNMENT)

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Returns x weightᵀ + bias: (..., inputs) by (outputs, inputs) to (..., outputs)."""
        if not self.accepts(*weight.shape):
            return F.linear(x, weight, bias)
        rowwise, scales = self.scaling == "rowwise", "elementwise" if self.elementwise else self.scaling
        first, of_first = self.rounded(x.flatten(0, -2), self.formats[self.of_gradient and not rowwise], scales)
        second, of_second = self.rounded(weight, self.formats[0], scales)
        if self.emulated:
            y = F.linear(first.to(x.dtype) * of_first.to(x.dtype), second.to(x.dtype) * of_second.to(x.dtype))
        else:
            # The kernels for rows are fast only with sums in fewer bits; the others use them forward.
            fast = rowwise or not self.of_gradient
            multiply = torch._scaled_mm  # pyright: ignore[reportPrivateImportUsage]
            y = multiply(first, second.t(), of_first, of_second.t(), out_dtype=x.dtype, use_fast_accum=fast)
        y = y.view(*x.shape[:-1], weight.shape[0])
        return y if bias is None else y + bias
