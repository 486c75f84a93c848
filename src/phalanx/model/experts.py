"""The experts of a mixture-of-experts layer: MLPs of one shape, each applied to the tokens routed to it.

Shapes: rows (tokens routed to experts, sorted by expert), sizes (rows per expert), d_model.
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
from phalanx.model.layers import Activation, RunCheap, run, uncompiled

Sizes = Tensor | Sequence[int]
"""Rows of each expert: an int64 tensor (experts,) if the router decides, or numbers known beforehand."""


class Experts(nn.Module):
    """The routed experts: `up`, `down` and perhaps `gate`, as in an MLP, stacked along a leading dimension.

    The weights' shapes give the number of experts, so that a rank that holds only some of them runs the same code. A
    layout may replace `run_cheap`, which calls the activation."""

    run_cheap: RunCheap = staticmethod(run)

    def __init__(self, model: ModelConfig):
        super().__init__()
        n, width = model.moe.n_experts, model.expert_ff_size
        self.activate = Activation(model)
        self.up = GroupedLinear(n, model.d_model, width, bias=model.bias)
        gated = model.gated
        self.gate = GroupedLinear(n, model.d_model, width, bias=model.bias) if gated else None
        self.down = GroupedLinear(n, width, model.d_model, bias=model.bias)

    def forward(self, rows: Tensor, sizes: Sizes) -> Tensor:
        """Applies the experts to rows (rows, d_model), sorted by expert; the output has the same shape."""
        wide = self.up(rows, sizes)
        gate = None if self.gate is None else self.gate(rows, sizes)
        return self.down(self.run_cheap(self.activate, wide, gate), sizes)


class GroupedLinear(nn.Module):
    """A linear layer for each expert: weight (experts, outputs, inputs), bias (experts, outputs) or None."""

    bias_factor: float = 1.0
    """Multiplies the bias. If ranks hold parts of the inputs and their outputs are summed, one of them has 1 and the
    others 0."""

    take: Callable[[Tensor, GroupedProduct, Tensor, Tensor], None] | None = None
    """Takes the factors of the weight's gradient (weight, product, gradient of the output, rows) if autograd does
    not."""

    def __init__(self, n: int, inputs: int, outputs: int, *, bias: bool):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n, outputs, inputs))
        self.bias = nn.Parameter(torch.empty(n, outputs)) if bias else None
        self.lora_a: GroupedLinear | None = None
        self.lora_b: GroupedLinear | None = None
        """The experts' adapters, if there are any, as those of a Linear."""
        self.lora_scale = 1.0

    def add_adapter(self, rank: int, scale: float) -> None:
        """Adds an adapter for each expert, whose output is multiplied by `scale`."""
        n, outputs, inputs = self.weight.shape
        self.lora_a = GroupedLinear(n, inputs, rank, bias=False)
        self.lora_b = GroupedLinear(n, rank, outputs, bias=False)
        self.lora_scale = scale

    @uncompiled
    def forward(self, x: Tensor, sizes: Sizes) -> Tensor:
        """Maps rows (rows, inputs), sorted by expert, to (rows, outputs)."""
        y = self._without_adapter(x, sizes)
        if self.lora_a is None or self.lora_b is None:
            return y
        return y + self.lora_b(self.lora_a(x, sizes) * self.lora_scale, sizes)

    def _without_adapter(self, x: Tensor, sizes: Sizes) -> Tensor:
        product = GroupedProduct(sizes)
        # Where rows of all experts are sharded they have one dimension (parallel/fsdp.py).
        weight = self.weight.view(len(sizes), -1, self.weight.shape[-1])
        if self.take is None or not self.weight.requires_grad:
            y: Tensor = _Product.apply(x, weight, product)
        else:
            # Detached: otherwise autograd would expect a gradient here.
            y = _Product.apply(x, weight.detach(), product, partial(self.take, self.weight))
        return y if self.bias is None else add_bias(y, self.bias * self.bias_factor, sizes)


def add_bias(y: Tensor, bias: Tensor, sizes: Sizes) -> Tensor:
    """Returns rows `y` (rows, outputs), sorted by expert, with their experts' `bias` (experts, outputs)."""
    repeats = torch.as_tensor(sizes, device=y.device)
    # Told the number of rows, torch need not wait for the device to count them.
    return y + bias.repeat_interleave(repeats, dim=0, output_size=len(y))


@dataclass(frozen=True)
class GroupedProduct:
    """The product of each expert's rows and its weight, with the products of its backward pass: batched if every expert
    has the same number of rows, in one kernel if torch has one, otherwise one after the other."""

    sizes: Sizes

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        """Returns (rows, outputs) from rows (rows, inputs) and weights (experts, outputs, inputs)."""
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

    def input_gradient(self, gradient: Tensor, weight: Tensor) -> Tensor:
        """Returns the gradient of the rows from the gradient of the output, (rows, outputs)."""
        return self(gradient, weight.transpose(1, 2))

    def weight_gradient(self, gradient: Tensor, x: Tensor) -> Tensor:
        """Returns the gradient of the weights: zeros for experts without rows."""
        if equal := self._equal():
            return torch.bmm(gradient.unflatten(0, (-1, equal)).transpose(1, 2), x.unflatten(0, (-1, equal)))
        found = x.new_zeros(len(self.sizes), gradient.shape[1], x.shape[1])
        if _one_kernel(x, found):
            return F.grouped_mm(gradient.t(), x, offs=_ends(self.sizes, x.device))
        for expert, rows in _rows(self.sizes):
            torch.mm(gradient[rows].t(), x[rows], out=found[expert])
        return found

    def _equal(self) -> int:
        """Returns the number of rows per expert where it is known to be equal for all."""
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
        # Frozen weights have no gradient, for which alone the rows are needed.
        ctx.save_for_backward(x if ctx.needs_input_grad[1] or take is not None else None, weight)
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
        of_weight = product.weight_gradient(gradient, x) if need_weight else None
        return product.input_gradient(gradient, weight) if need_x else None, of_weight, None, None


_ALIGNMENT = 16
"""Alignment in bytes that torch's grouped product requires of every row of its factors."""


def _one_kernel(x: Tensor, weight: Tensor) -> bool:
    """Returns whether torch multiplies all groups in one call: not in fp64, without rows, or for unaligned rows."""
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16) or not len(x) or not x.is_contiguous():
        return False
    if any(size * x.element_size() % _ALIGNMENT for size in weight.shape[1:]):
        return False
    lies_whole = weight.is_contiguous() or weight.transpose(1, 2).is_contiguous()
    return lies_whole and not any(t.storage_offset() * t.element_size() % _ALIGNMENT for t in (x, weight))


def _ends(sizes: Sizes, device: torch.device) -> Tensor:
    """Returns the end of each expert's rows, (experts,) of int32."""
    return torch.as_tensor(sizes, device=device).cumsum(0).to(torch.int32)


def _rows(sizes: Sizes) -> list[tuple[int, slice]]:
    found, start = [], 0
    for expert, size in enumerate(sizes.tolist() if isinstance(sizes, Tensor) else sizes):
        if size:
            found.append((expert, slice(start, start + size)))
        start += size
    return found
