"""Products of factors in 8 bits with dynamic scales (Micikevicius et al. 2022, "FP8 Formats for Deep Learning"), of
linear layers and of experts.

Each product of a linear layer contracts the last dimension of both factors: x of (tokens, inputs) with the weight, the
gradient of (tokens, outputs) with the weight's transpose, and both transposes over the tokens. The scalings:

- rowwise: each row of a factor has a scale, and every factor is e4m3, as in torchao (torchao/float8/config.py);
- tensorwise: a factor has one scale, and gradients are e5m2, as in torchao;
- mxfp8: each 32 elements of a row have a scale of 8 bits, and every factor is e4m3 (Rouhani et al. 2023,
  "Microscaling Data Formats for Deep Learning").

Scales are powers of two, so that scaling itself rounds nothing; none makes the largest element overflow. A rank that
holds a part of the contracted dimension scales by the largest element of its part: only elements smaller than 2^-14 of
it are rounded otherwise than whole.

Experts have scales per row, whatever the others have: torch's grouped kernel knows no others outside of Blackwell.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.config.precision import FP8_UNITS, Fp8Scaling
from phalanx.errors import JobError
from phalanx.model.moe import GroupedProduct

SMALLEST = 2.0**-100
"""Rows whose largest element is smaller are scaled as if it were this: of a row of zeros no scale would be finite."""
_EXPONENT = 0x7F800000
"""The bits of the exponent of an fp32 number."""
_GROUP = FP8_UNITS["rowwise"]
"""Experts' rows are a multiple of it where they are summed over."""

Scales = Literal[Fp8Scaling, "elementwise"]


def rounded(factor: Tensor, format: torch.dtype, scales: Scales) -> tuple[Tensor, Tensor]:
    """Returns a factor (..., rows, columns) in an 8-bit format, row after row in memory, and what it is to be
    multiplied by, in fp32: (..., rows, 1), () with one scale for all, of its own shape, or (..., rows, blocks)."""
    if scales == "mxfp8":
        columns, unit = factor.shape[-1], FP8_UNITS[scales]
        blocks = F.pad(factor, (0, -columns % unit)).unflatten(-1, (-1, unit))
        narrow, scale = rounded(blocks, format, "rowwise")
        return narrow.flatten(-2).narrow(-1, 0, columns), scale.squeeze(-1)
    if scales == "elementwise":
        largest = factor.abs()
    else:
        rows = scales == "rowwise"
        largest = torch.linalg.vector_norm(factor, torch.inf, dim=-1 if rows else None, keepdim=rows)
    return _scaled(factor, largest, format)


def rounded_by_expert(
    factor: Tensor, ends: Tensor, format: torch.dtype, scales: Scales
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns rows (rows, columns) that are sorted by expert, `ends` (experts,), as `padded` arranges them, in an 8-bit
    format and transposed: (columns, rows); what they are to be multiplied by, (experts, columns), each column of an
    expert having a scale, or (columns, rows); and their ends."""
    factor, new_ends = padded(factor, ends)
    if scales == "elementwise":
        return *rounded(factor.t(), format, scales), new_ends
    begins = torch.arange(0, len(factor), _GROUP, device=ends.device, dtype=ends.dtype)
    expert = torch.searchsorted(new_ends, begins, right=True).clamp_(max=len(ends) - 1).unsqueeze(1)
    of_groups = factor.unflatten(0, (-1, _GROUP)).abs().amax(1)
    largest = factor.new_zeros(len(ends), factor.shape[1])
    largest = largest.scatter_reduce(0, expert.expand_as(of_groups), of_groups, "amax")
    scale = _scale(largest, format)
    of_groups = scale.to(factor.dtype).index_select(0, expert.squeeze(1)).unsqueeze(1)
    narrow = (factor.unflatten(0, (-1, _GROUP)) * of_groups).flatten(0, 1).t()
    return narrow.to(format, memory_format=torch.contiguous_format), 1 / scale, new_ends


def padded(factor: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    """Returns rows that are sorted by expert with zeros after those of each, so that each expert has a multiple of
    16, and their ends. The host need not know how many each has: there is room for all. Rows of nobody are zeros."""
    starts = F.pad(ends, (1, -1))
    new_ends = (((ends - starts + _GROUP - 1) // _GROUP) * _GROUP).cumsum(0, dtype=ends.dtype)
    size = len(factor) + (_GROUP - 1) * len(ends)
    row = torch.arange(-(-size // _GROUP) * _GROUP, device=ends.device, dtype=ends.dtype)
    expert = torch.searchsorted(new_ends, row, right=True)
    known = expert.clamp(max=len(ends) - 1)
    source = row + (starts - F.pad(new_ends, (1, -1))).index_select(0, known)
    real = (expert < len(ends)) & (source < ends.index_select(0, known))
    # Chosen, not multiplied: rows of nobody may hold what is not a number.
    return factor.index_select(0, source.where(real, 0)).where(real.unsqueeze(1), 0), new_ends


def _scaled(factor: Tensor, largest: Tensor, format: torch.dtype) -> tuple[Tensor, Tensor]:
    scale = _scale(largest, format)
    return (factor * scale.to(factor.dtype)).to(format, memory_format=torch.contiguous_format), 1 / scale


def _scale(largest: Tensor, format: torch.dtype) -> Tensor:
    # A row with an infinite element or one that is not a number stays so: its scale is zero or infinite.
    scale = torch.finfo(format).max / largest.float().clamp(min=SMALLEST)
    return (scale.view(torch.int32) & _EXPONENT).view(torch.float32)


@dataclass(frozen=True)
class ScaledProduct:
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
    grouped: bool = True
    """Whether the device has a kernel for experts."""
    rounded: Callable[[Tensor, torch.dtype, Scales], tuple[Tensor, Tensor]] = rounded
    """`rounded`, perhaps compiled."""
    rounded_by_expert: Callable[[Tensor, Tensor, torch.dtype, Scales], tuple[Tensor, Tensor, Tensor]] = (
        rounded_by_expert
    )
    """`rounded_by_expert`, perhaps compiled."""

    @classmethod
    def on(cls, device: torch.device, scaling: Fp8Scaling, dtype: torch.dtype) -> ScaledProduct:
        """Returns the product for a device, of factors of type `dtype`: emulated on a CPU, and where they are not in
        bf16; elementwise in float64, to compare layouts. Raises JobError for a GPU without such products."""
        if device.type == "cpu" or dtype != torch.bfloat16:
            return cls(scaling, emulated=True, elementwise=dtype == torch.float64)
        name, blocks = torch.get_device_module(device).get_device_name(device), scaling == "mxfp8"
        if device.type == "xpu":  # no device of Intel's that torch drives and that trains has them
            has = has_blocks = grouped = False
        elif torch.version.hip:
            kind = torch.cuda.get_device_properties(device).gcnArchName.partition(":")[0]
            if kind == "gfx942" and not blocks:  # MI300 has the formats without a negative zero
                return cls(scaling, formats=(torch.float8_e4m3fnuz, torch.float8_e5m2fnuz), grouped=False)
            has, has_blocks, grouped = kind >= "gfx95" or kind == "gfx942", False, False
        else:
            capability = torch.cuda.get_device_capability(device)
            # torch 2.13 has built its grouped kernel with scales of rows for Hopper alone (pytorch#188063).
            has, has_blocks, grouped = capability >= (8, 9), capability[0] == 10, capability[0] == 9
        if not has:
            raise JobError(f"train.precision: {name} has no products in fp8; nearest legal: bf16")
        if blocks and not has_blocks:
            raise JobError(
                f"train.fp8_scaling: torch multiplies blocks of {FP8_UNITS['mxfp8']} (mxfp8) on NVIDIA's Blackwell for "
                f"data centres only, and this is {name}; nearest legal: rowwise"
            )
        return cls(scaling, grouped=grouped)

    def compiled(self) -> ScaledProduct:
        """Returns this product with its roundings compiled."""
        rounded, by_expert = (torch.compile(each, dynamic=True) for each in (self.rounded, self.rounded_by_expert))
        return replace(self, rounded=rounded, rounded_by_expert=by_expert)

    @property
    def backward(self) -> ScaledProduct:
        """The product of a gradient with a factor of the forward pass."""
        return replace(self, of_gradient=True)

    def weight_gradient(self, gradient: Tensor, x: Tensor) -> Tensor:
        """Returns the gradient of a weight (outputs, inputs) from that of the output (tokens, outputs) and the input
        (tokens, inputs)."""
        if not self.accepts(gradient.shape[1], x.shape[1]):
            return gradient.t() @ x
        if missing := 0 if self.emulated else -len(x) % FP8_UNITS[self.scaling]:
            # Rows of zeros change neither sums nor scales.
            gradient, x = (F.pad(each, (0, 0, 0, missing)) for each in (gradient, x))
        return self.backward(gradient.t(), x.t())

    def accepts(self, outputs: int, inputs: int) -> bool:
        """Returns whether a weight (outputs, inputs) is multiplied in 8 bits; others are in their own type."""
        return self.emulated or self.fits(outputs, inputs)

    def fits(self, outputs: int, inputs: int) -> bool:
        """Returns whether kernels have such sizes, also where they are emulated."""
        unit = FP8_UNITS[self.scaling]
        return not (outputs % unit or inputs % unit)

    def groups(self, outputs: int, inputs: int) -> bool:
        """Returns whether experts' weights (experts, outputs, inputs) are multiplied in 8 bits."""
        return self.emulated or (self.grouped and not (outputs % _GROUP or inputs % _GROUP))

    def scales(self, scaling: Fp8Scaling) -> Scales:
        """Returns the scales of factors whose product is scaled so."""
        return "elementwise" if self.elementwise else scaling

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Returns x weightᵀ + bias: (..., inputs) by (outputs, inputs) to (..., outputs)."""
        if not self.accepts(*weight.shape):
            return F.linear(x, weight, bias)
        tensorwise, scales = self.scaling == "tensorwise", self.scales(self.scaling)
        first, of_first = self.rounded(x.flatten(0, -2), self.formats[self.of_gradient and tensorwise], scales)
        second, of_second = self.rounded(weight, self.formats[0], scales)
        if self.emulated:
            y = F.linear(back(first, of_first, x.dtype), back(second, of_second, x.dtype))
        elif self.scaling == "mxfp8":
            y = _product_of_blocks(first, second, of_first, of_second, x.dtype)
        else:
            # The kernels for rows are fast only with sums in fewer bits; the others use them forward.
            fast = not (tensorwise and self.of_gradient)
            multiply = torch._scaled_mm
            y = multiply(first, second.t(), of_first, of_second.t(), out_dtype=x.dtype, use_fast_accum=fast)
        y = y.view(*x.shape[:-1], weight.shape[0])
        return y if bias is None else y + bias


@dataclass(frozen=True)
class ScaledGrouped(GroupedProduct):
    """The products of experts, of factors that are rounded to 8 bits with a scale per row: an expert's own over its
    rows, where they are summed over."""

    scaled: ScaledProduct

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        """Returns (rows, outputs) from rows (rows, inputs) and weights (experts, outputs, inputs)."""
        scaled = self.scaled
        if not scaled.groups(*weight.shape[1:]) or not len(x):
            return super().__call__(x, weight)
        (first, of_first), (second, of_second) = (
            scaled.rounded(each, scaled.formats[0], scaled.scales("rowwise")) for each in (x, weight)
        )
        if scaled.emulated:
            return super().__call__(back(first, of_first, x.dtype), back(second, of_second, x.dtype))
        return _grouped(first, second.transpose(1, 2), of_first.squeeze(1), of_second.squeeze(2), self._ends(x))

    def weight_gradient(self, gradient: Tensor, x: Tensor) -> Tensor:
        """Returns the gradient of the weights: zeros for experts without rows."""
        scaled = self.scaled
        if not scaled.groups(gradient.shape[1], x.shape[1]) or not len(x):
            return super().weight_gradient(gradient, x)
        (first, of_first, ends), (second, of_second, _) = (
            scaled.rounded_by_expert(each, self._ends(x), scaled.formats[0], scaled.scales("rowwise"))
            for each in (gradient, x)
        )
        if not scaled.emulated:
            return _grouped(first, second.t(), of_first.flatten(), of_second.flatten(), ends)
        whole = GroupedProduct(ends, self.experts)
        if not scaled.elementwise:
            expert = whole.expert_of_rows(first.shape[1])
            of_first, of_second = of_first[expert].t(), of_second[expert].t()
        return whole.weight_gradient(back(first, of_first, x.dtype).t(), back(second, of_second, x.dtype).t())

    def _ends(self, x: Tensor) -> Tensor:
        if self.ends is not None:
            return self.ends
        each = len(x) // self.experts
        return torch.arange(each, len(x) + 1, each, device=x.device, dtype=torch.int32)


def back(narrow: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns a factor that was rounded, with what it is to be multiplied by, in `dtype`."""
    if scale.dim() and 1 < scale.shape[-1] < narrow.shape[-1]:  # of blocks
        scale = scale.repeat_interleave(FP8_UNITS["mxfp8"], -1)[..., : narrow.shape[-1]]
    return narrow.to(dtype) * scale.to(dtype)


def _grouped(first: Tensor, second: Tensor, of_first: Tensor, of_second: Tensor, ends: Tensor) -> Tensor:
    multiply = torch._scaled_grouped_mm
    return multiply(first, second, of_first, of_second, offs=ends, out_dtype=torch.bfloat16, use_fast_accum=True)


def _product_of_blocks(
    first: Tensor, second: Tensor, of_first: Tensor, of_second: Tensor, dtype: torch.dtype
) -> Tensor:
    blocks, tiled = F.ScalingType.BlockWise1x32, F.SwizzleType.SWIZZLE_32_4_4
    return F.scaled_mm(
        first, second.t(), tiles(of_first), blocks, tiles(of_second), blocks, tiled, tiled, output_dtype=dtype
    )


def tiles(scales: Tensor) -> Tensor:
    """Returns scales (rows, blocks) in 8 bits as tensor cores read them: tiles of 128 rows and 4 blocks, each as
    32 × 16 with rows 32 apart beside each other (cuBLAS, "1D block scaling factors layout")."""
    rows, blocks = scales.shape
    whole = F.pad(scales, (0, -blocks % 4, 0, -rows % 128)).to(torch.float8_e8m0fnu)
    tiled = whole.view(torch.uint8).unflatten(1, (-1, 4)).unflatten(0, (-1, 4, 32))
    return tiled.permute(0, 3, 2, 1, 4).flatten().view(torch.float8_e8m0fnu)
