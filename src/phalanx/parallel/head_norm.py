"""Norms of queries and keys over all heads of a token, of which each tensor rank has some.

The ranks sum one square per token of the queries and one of the keys (OLMo 2, section 3.2: RMSNorm of both before they
are rotated), and in the backward pass one product per token. Key heads of which several ranks have copies count once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.comm.axis import Axis
from phalanx.model.layers import uncompiled


@dataclass(frozen=True)
class NormAllHeads:
    """Applies RMS norms over all tensor ranks' heads. It is the `norm_all_heads` of attention."""

    tp: Axis

    @uncompiled
    def __call__(self, q_norm: nn.Module, k_norm: nn.Module, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Maps queries (batch, seq, heads here × head_size) and keys in the same form to their normed ones."""
        assert isinstance(q_norm, nn.RMSNorm)
        assert isinstance(k_norm, nn.RMSNorm)
        whole = q_norm.normalized_shape[0], k_norm.normalized_shape[0]
        return _RMSNorms.apply(q, k, q_norm.weight, k_norm.weight, self.tp, whole, q_norm.eps)  # pyright: ignore[reportReturnType]


class _RMSNorms(torch.autograd.Function):
    """The norms of queries and of keys: (batch, seq, width here) each, to the same shapes."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, tp: Axis, whole: tuple[int, int], eps: float
    ) -> tuple[Tensor, Tensor]:
        ctx.tp, ctx.whole = tp, whole
        ctx.copies = tuple(tp.size * x.shape[-1] // size for x, size in zip((q, k), whole, strict=True))
        wide = torch.promote_types(q.dtype, torch.float32)
        sums = _summed(tp, [x.to(wide).square().sum(-1) / copies for x, copies in zip((q, k), ctx.copies, strict=True)])
        factors = [(total / size + eps).rsqrt().unsqueeze(-1) for total, size in zip(sums, whole, strict=True)]
        ctx.save_for_backward(q, k, q_weight, k_weight, *factors)
        normed_q, normed_k = ((x.to(wide) * factor).to(x.dtype) for x, factor in zip((q, k), factors, strict=True))
        return normed_q * q_weight, normed_k * k_weight

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        q, k, *others = ctx.saved_tensors
        weights, factors = others[:2], others[2:]
        wide = factors[0].dtype
        gradients = [(g * weight).to(wide) for g, weight in zip(grad_outputs, weights, strict=True)]
        # Of a key head with copies each rank has a part of the gradient, which add up in this sum too.
        products = [(g * x.to(wide)).sum(-1) for g, x in zip(gradients, (q, k), strict=True)]
        sums = _summed(ctx.tp, products)
        of_inputs, of_weights = [], []
        for number, x in enumerate((q, k)):
            factor, size = factors[number], ctx.whole[number] * ctx.copies[number]
            of_squares = x.to(wide) * factor**3 * (sums[number] / size).unsqueeze(-1)
            of_inputs.append((gradients[number] * factor - of_squares).to(x.dtype))
            of_weights.append((grad_outputs[number] * (x.to(wide) * factor).to(x.dtype)).flatten(0, -2).sum(0))
        return *of_inputs, *of_weights, None, None, None


def _summed(tp: Axis, parts: list[Tensor]) -> Tensor:
    """Returns the sums over the tensor ranks of some numbers per token, (numbers, batch, seq), in one message."""
    together = torch.stack(parts)
    tp.all_reduce(together).wait()
    return together
