"""The experts of a mixture-of-experts layer: MLPs of one shape, each applied to the tokens routed to it.

Shapes: rows (tokens routed to experts, sorted by expert), experts, d_model. Only in fp64, for which torch has no
grouped product, does the host wait for the device to count an expert's rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.config.model import ModelConfig
from phalanx.model.layers import Activation, RunCheap, run, uncompiled

Ends = Tensor | None
"""The end of each expert's rows, (experts,) of int32, on the device; None if all have equally many. Rows after the last
end are nobody's: what they become is undefined."""


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

    def forward(self, rows: Tensor, ends: Ends) -> Tensor:
        """Applies the experts to rows (rows, d_model), sorted by expert; the output has the same shape."""
        wide = self.up(rows, ends)
        gate = None if self.gate is None else self.gate(rows, ends)
        return self.down(self.run_cheap(self.activate, wide, gate), ends)


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
        self.experts = n
        """Experts whose matrices are here."""
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
    def forward(self, x: Tensor, ends: Ends) -> Tensor:
        """Maps rows (rows, inputs), sorted by expert, to (rows, outputs)."""
        y = self._without_adapter(x, ends)
        if self.lora_a is None or self.lora_b is None:
            return y
        return y + self.lora_b(self.lora_a(x, ends) * self.lora_scale, ends)

    def _without_adapter(self, x: Tensor, ends: Ends) -> Tensor:
        # Where rows of all experts are sharded they have one dimension (parallel/fsdp.py).
        weight = self.weight.view(self.experts, -1, self.weight.shape[-1])
        product = GroupedProduct(ends, self.experts)
        if self.take is None or not self.weight.requires_grad:
            y: Tensor = _Product.apply(x, weight, product)
        else:
            # Detached: otherwise autograd would expect a gradient here.
            y = _Product.apply(x, weight.detach(), product, partial(self.take, self.weight))
        return y if self.bias is None else add_bias(y, self.bias * self.bias_factor, ends)


def add_bias(y: Tensor, bias: Tensor, ends: Ends) -> Tensor:
    """Returns rows `y` (rows, outputs), sorted by expert, with their experts' `bias` (experts, outputs)."""
    return _AddBias.apply(y, bias, GroupedProduct(ends, len(bias)))  # pyright: ignore[reportReturnType]


@dataclass(frozen=True)
class GroupedProduct:
    """The product of each expert's rows and its weight, with the products of its backward pass: batched if every expert
    has the same number of rows, else in one kernel; in fp64 one after the other."""

    ends: Ends
    experts: int

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        """Returns (rows, outputs) from rows (rows, inputs) and weights (experts, outputs, inputs)."""
        if self.ends is None:
            y = x.new_empty(len(x), weight.shape[1])
            torch.bmm(self._each(x), weight.transpose(1, 2), out=self._each(y))
            return y
        if _one_kernel(x):
            return F.grouped_mm(_fit(x), _fit(weight).transpose(1, 2), offs=self.ends)[:, : weight.shape[1]]
        y = x.new_empty(len(x), weight.shape[1])
        for expert, rows in _rows(self.ends):
            torch.mm(x[rows], weight[expert].t(), out=y[rows])
        return y

    def input_gradient(self, gradient: Tensor, weight: Tensor) -> Tensor:
        """Returns the gradient of the rows from the gradient of the output, (rows, outputs)."""
        return self(gradient, weight.transpose(1, 2))

    def weight_gradient(self, gradient: Tensor, x: Tensor) -> Tensor:
        """Returns the gradient of the weights: zeros for experts without rows."""
        if self.ends is None:
            return torch.bmm(self._each(gradient).transpose(1, 2), self._each(x))
        outputs, inputs = gradient.shape[1], x.shape[1]
        if _one_kernel(x):
            found = F.grouped_mm(_fit(gradient).t(), _fit(x), offs=self.ends)
            return found[:, :outputs, :inputs]
        found = x.new_zeros(self.experts, outputs, inputs)
        for expert, rows in _rows(self.ends):
            torch.mm(gradient[rows].t(), x[rows], out=found[expert])
        return found

    def bias_gradient(self, gradient: Tensor) -> Tensor:
        """Returns the sum of each expert's rows of `gradient`, (experts, outputs)."""
        if self.ends is None:
            return self._each(gradient).sum(1)
        # In the same order in every run, as an index_add on a GPU is not.
        rows = torch.arange(len(gradient), device=gradient.device, dtype=self.ends.dtype)
        return F.embedding_bag(rows, gradient, F.pad(self.ends, (1, 0)), mode="sum")[:-1]  # not rows of nobody

    def expert_of_rows(self, rows: int) -> Tensor:
        """Returns the expert of each row; the last one's for rows after the last end."""
        assert self.ends is not None, "equally many rows need none"
        number = torch.arange(rows, device=self.ends.device, dtype=self.ends.dtype)
        return torch.searchsorted(self.ends, number, right=True).clamp_(max=self.experts - 1)

    def _each(self, rows: Tensor) -> Tensor:
        return rows.view(self.experts, len(rows) // self.experts, rows.shape[1])


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


class _AddBias(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, bias: Tensor, product: GroupedProduct) -> Tensor:
        ctx.product = product
        if product.ends is None:
            return (product._each(y) + bias.unsqueeze(1)).view_as(y)
        return y + bias.index_select(0, product.expert_of_rows(len(y)))

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        (gradient,) = grad_outputs
        of_bias = ctx.product.bias_gradient(gradient.contiguous()) if ctx.needs_input_grad[1] else None
        return gradient, of_bias, None


_ALIGNMENT = 16
"""Alignment in bytes that torch's grouped product requires of every row of its factors. It requires none of the numbers
of rows: rows lie one after the other in both factors, also where they are what is summed over."""


def _one_kernel(x: Tensor) -> bool:
    """Returns whether torch multiplies all groups in one call: not in fp64, nor without rows."""
    return x.dtype in (torch.float32, torch.bfloat16, torch.float16) and len(x) > 0


def _fit(factor: Tensor) -> Tensor:
    """Returns a factor (..., columns) as torch's grouped product takes it: with zeros in further columns, and for
    experts in further rows, where their bytes are not aligned."""
    unit = _ALIGNMENT // factor.element_size()
    more = [end for size in factor.shape[:0:-1] for end in (0, -size % unit)]
    if any(more):
        return F.pad(factor, more)
    lies_whole = factor.is_contiguous() or factor.transpose(-1, -2).is_contiguous()
    return (
        factor
        if lies_whole and not factor.storage_offset() % unit
        else factor.clone(memory_format=torch.contiguous_format)
    )


def _rows(ends: Tensor) -> list[tuple[int, slice]]:
    """Returns the experts with rows, and their rows. A program waits here for the device."""
    every = ends.tolist()
    pairs = enumerate(zip([0, *every], every, strict=False))
    return [(expert, slice(start, end)) for expert, (start, end) in pairs if start < end]
