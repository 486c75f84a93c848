"""The experts of a mixture-of-experts layer: many MLPs of one shape, each for the tokens that were sent to it.

Shapes: rows (tokens sent to experts, sorted by expert), sizes (how many of them each expert has), d_model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.config.model import ModelConfig
from phalanx.model.layers import Activation

Sizes = Tensor | Sequence[int]
"""Rows of each expert: an int64 tensor (experts,) where the router decides, numbers where they are known beforehand."""


class Experts(nn.Module):
    """The routed experts: `up`, `down` and, for SwiGLU, `gate`, as in an MLP, stacked along a leading dimension.

    How many experts there are is read off the weights, so that a rank that holds a part of them runs the same code."""

    def __init__(self, model: ModelConfig):
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

    take: Callable[[Tensor, GroupedProduct, Tensor, Tensor], None] | None = None
    """Takes what the weight's gradient is made of (weight, product, gradient of the output, rows), where it does not go
    the way of autograd."""

    def __init__(self, n: int, inputs: int, outputs: int, *, bias: bool):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n, outputs, inputs))
        self.bias = nn.Parameter(torch.empty(n, outputs)) if bias else None

    def forward(self, x: Tensor, sizes: Sizes) -> Tensor:
        """(rows, inputs), sorted by expert, to (rows, outputs)."""
        product = GroupedProduct(sizes)
        # Where rows of all experts are sharded they have one dimension (parallel/fsdp.py).
        weight = self.weight.view(len(sizes), -1, self.weight.shape[-1])
        if self.take is None:
            y: Tensor = _Product.apply(x, weight, product)
        else:
            # To autograd the weight is a constant: it would look for a gradient here.
            y = _Product.apply(x, weight.detach(), product, partial(self.take, self.weight))
        if self.bias is None:
            return y
        repeats = torch.as_tensor(sizes, device=x.device)
        # Told the number of rows, torch need not wait for the device to count them.
        return y + (self.bias * self.bias_factor).repeat_interleave(repeats, dim=0, output_size=len(x))


@dataclass(frozen=True)
class GroupedProduct:
    """The product of each expert's rows and its weight, and what its backward pass is made of: as a batched product
    where every expert has as many rows, in one kernel where torch has one, else one after the other."""

    sizes: Sizes

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        """(rows, outputs) from rows (rows, inputs) and weights (experts, outputs, inputs)."""
        if equal := self._equal():
            y = x.new_empty(len(x), weight.shape[1])
            torch.bmm(x.unflatten(0, (-1, equal)), weight.transpose(1, 2), out=y.unflatten(0, (-1, equal)))
            return y
        if _one_kernel(x, weight):
            return F.grouped_mm(x, weight.transpose(1, 2), offs=_ends(self.sizes, x.device))
        y = x.new_empty(len(x), weight.shape[1])
        for expert, rows in _rows(self.sizes):
            torch.mm(x[rows], weight[expert].t(), out=y[rows])
        return y

    def of_input(self, gradient: Tensor, weight: Tensor) -> Tensor:
        """The gradient of the rows, from that of the output (rows, outputs)."""
        return self(gradient, weight.transpose(1, 2))

    def of_weight(self, gradient: Tensor, x: Tensor) -> Tensor:
        """The gradient of the weights: zeros for experts without rows."""
        if equal := self._equal():
            return torch.bmm(gradient.unflatten(0, (-1, equal)).transpose(1, 2), x.unflatten(0, (-1, equal)))
        found = x.new_zeros(len(self.sizes), gradient.shape[1], x.shape[1])
        if _one_kernel(x, found):
            return F.grouped_mm(gradient.t(), x, offs=_ends(self.sizes, x.device))
        for expert, rows in _rows(self.sizes):
            torch.mm(gradient[rows].t(), x[rows], out=found[expert])
        return found

    def _equal(self) -> int:
        """Rows of every expert, where that is known to be the same number."""
        return self.sizes[0] if not isinstance(self.sizes, Tensor) and len(set(self.sizes)) == 1 else 0


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        product: GroupedProduct,
        take: Callable[[GroupedProduct, Tensor, Tensor], None] | None = None,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.product, ctx.take = product, take
        return product(x, weight)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        gradient = grad_outputs[0].contiguous()
        product: GroupedProduct = ctx.product
        need_x, need_weight, *_ = ctx.needs_input_grad
        if ctx.take is not None:
            ctx.take(product, gradient, x)
        of_weight = product.of_weight(gradient, x) if need_weight else None
        return product.of_input(gradient, weight) if need_x else None, of_weight, None, None


_ALIGNMENT = 16
"""Bytes to which torch's grouped product wants every row of its factors aligned."""


def _one_kernel(x: Tensor, weight: Tensor) -> bool:
    """Whether torch multiplies all groups in one call: not in fp64, not without rows, not rows that are not aligned."""
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16) or not len(x) or not x.is_contiguous():
        return False
    if any(size * x.element_size() % _ALIGNMENT for size in weight.shape[1:]):
        return False
    lies_whole = weight.is_contiguous() or weight.transpose(1, 2).is_contiguous()
    return lies_whole and not any(t.storage_offset() * t.element_size() % _ALIGNMENT for t in (x, weight))


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
