"""The experts of a mixture-of-experts layer: many MLPs of one shape, each for the tokens that were sent to it.

Shapes: rows (tokens sent to experts, sorted by expert), sizes (how many of them each expert has), d_model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.job.model import Model
from phalanx.model.layers import Activation

Sizes = Tensor | Sequence[int]
"""Rows of each expert: an int64 tensor (experts,) where the router decides, numbers where they are known beforehand."""


class Experts(nn.Module):
    """The routed experts: `up`, `down` and, for SwiGLU, `gate`, as in an MLP, stacked along a leading dimension.

    How many experts there are is read off the weights, so that a rank that holds a part of them runs the same code."""

    def __init__(self, model: Model):
        super().__init__()
        n, width = model.moe.n_experts, model.expert_ff_size
        self.activate = Activation(model)
        self.up = GroupedLinear(n, model.d_model, width, bias=model.bias)
        swiglu = model.activation == "swiglu"
        self.gate = GroupedLinear(n, model.d_model, width, bias=model.bias) if swiglu else None
        self.down = GroupedLinear(n, width, model.d_model, bias=model.bias)

    def forward(self, rows: Tensor, sizes: Sizes) -> Tensor:
        """(rows, d_model), sorted by expert, to the same."""
        wide = self.up(rows, sizes)
        gate = None if self.gate is None else self.gate(rows, sizes)
        return self.down(self.activate(wide, gate), sizes)


class GroupedLinear(nn.Module):
    """A linear layer for each expert: weight (experts, outputs, inputs), bias (experts, outputs) or None."""

    bias_factor: float = 1.0
    """Multiplies the bias. Where ranks hold parts of the inputs and their outputs are added, one of them has 1 and the
    others 0."""

    def __init__(self, n: int, inputs: int, outputs: int, *, bias: bool):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n, outputs, inputs))
        self.bias = nn.Parameter(torch.empty(n, outputs)) if bias else None

    def forward(self, x: Tensor, sizes: Sizes) -> Tensor:
        """(rows, inputs), sorted by expert, to (rows, outputs)."""
        if not isinstance(sizes, Tensor) and len(set(sizes)) == 1:
            return self._equal(x, sizes[0])
        y: Tensor = _GroupedProduct.apply(x, self.weight, sizes)
        if self.bias is None:
            return y
        repeats = torch.as_tensor(sizes, device=x.device)
        # Told the number of rows, torch need not wait for the device to count them.
        return y + (self.bias * self.bias_factor).repeat_interleave(repeats, dim=0, output_size=len(x))

    def _equal(self, x: Tensor, size: int) -> Tensor:
        """The same with as many rows, `size`, for every expert: a batched product."""
        y = x.unflatten(0, (len(self.weight), size)) @ self.weight.transpose(1, 2)
        if self.bias is not None:
            y = y + (self.bias * self.bias_factor).unsqueeze(1)
        return y.flatten(0, 1)


class _GroupedProduct(torch.autograd.Function):
    """Each expert's rows times its weight, transposed. Experts without rows get a gradient of zeros."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, sizes: Sizes) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.sizes = sizes
        if _one_kernel(x, weight):
            return F.grouped_mm(x, weight.transpose(1, 2), offs=_ends(sizes, x.device))
        y = x.new_empty(len(x), weight.shape[1])
        for expert, rows in _rows(sizes):
            torch.mm(x[rows], weight[expert].t(), out=y[rows])
        return y

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        gradient = grad_outputs[0].contiguous()
        need_x, need_weight, _ = ctx.needs_input_grad
        of_x = of_weight = None
        if _one_kernel(x, weight):
            ends = _ends(ctx.sizes, x.device)
            of_x = F.grouped_mm(gradient, weight, offs=ends) if need_x else None
            of_weight = F.grouped_mm(gradient.t(), x, offs=ends) if need_weight else None
            return of_x, of_weight, None
        of_x = torch.empty_like(x) if need_x else None
        of_weight = torch.zeros_like(weight) if need_weight else None
        for expert, rows in _rows(ctx.sizes):
            if of_x is not None:
                torch.mm(gradient[rows], weight[expert], out=of_x[rows])
            if of_weight is not None:
                torch.mm(gradient[rows].t(), x[rows], out=of_weight[expert])
        return of_x, of_weight, None


_ALIGNMENT = 16
"""Bytes to which torch's grouped product wants every row of its factors aligned."""


def _one_kernel(x: Tensor, weight: Tensor) -> bool:
    """Whether torch multiplies all groups in one call: not in fp64, not without rows, not rows that are not aligned."""
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16) or not len(x) or not x.is_contiguous():
        return False
    if any(size * x.element_size() % _ALIGNMENT for size in weight.shape[1:]):
        return False
    return weight.is_contiguous() and not any(t.storage_offset() * t.element_size() % _ALIGNMENT for t in (x, weight))


def _ends(sizes: Sizes, device: torch.device) -> Tensor:
    """Where each expert's rows end, (experts,) of int32."""
    return torch.as_tensor(sizes, device=device).cumsum(0).to(torch.int32)


def _rows(sizes: Sizes) -> list[tuple[int, slice]]:
    """The experts that have rows, and which."""
    found, start = [], 0
    for expert, size in enumerate(sizes.tolist() if isinstance(sizes, Tensor) else sizes):
        if size:
            found.append((expert, slice(start, start + size)))
        start += size
    return found
