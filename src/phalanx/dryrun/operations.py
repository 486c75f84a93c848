"""Operations of a rehearsal: their FLOPs, and results whose values or sizes depend on data."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from phalanx.model.attention_blocks import is_cudnn, is_flash

aten = torch.ops.aten
FAKE = torch._C._TorchDispatchModeKey.FAKE


class RealTensors:
    """Runs the `with` block, inside of an operation of a DryWorld, on real tensors."""

    def __enter__(self) -> None:
        self.mode = torch._C._unset_dispatch_mode(FAKE)

    def __exit__(self, *_: object) -> None:
        if self.mode is not None:
            torch._C._set_dispatch_mode(self.mode)


def flops_of(func: Any, args: Any, kwargs: Any, out: Any) -> float:
    """Returns the FLOPs of a matrix product or of attention, 2 per multiplication and addition, also of what a causal
    mask hides; 0 for other operations. A kernel of attention computes its scores again in the backward pass, which
    does not count: the work is that of the formula."""
    name = func._overloadpacket.__name__
    if name.startswith("_scaled_dot_product_"):  # the kernels of every device
        return 2 * _attention(*args[1:4]) if name.endswith("backward") else _attention(*args[:3])
    match name:
        case "_linear_pointwise":  # oneDNN's: (..., inputs) by (outputs, inputs)
            return 2.0 * args[0].numel() * args[1].shape[0]
        case "_scaled_mm_v2":  # by blocks: torch's formulas know the first version alone
            return 2.0 * args[0].numel() * args[1].shape[1]
        case "_grouped_mm" | "_scaled_grouped_mm":  # every row by one matrix, or every row into one
            a, b = args[:2]
            return 2.0 * a.shape[-2] * a.shape[-1] * b.shape[-1] * (len(a) if a.dim() == 3 and b.dim() == 3 else 1)
        case "_varlen_attn" | "_flash_attention_backward":
            forward = name == "_varlen_attn"
            q, k, v = args[:3] if forward else args[1:4]  # ([batch,] tokens, heads, size)
            longest = k.shape[-3] if q.dim() == 4 else args[6 if forward else 9]  # bounds of queries and keys before
            work = 2.0 * math.prod(q.shape[:-1]) * longest * (q.shape[-1] + v.shape[-1])
            return work if forward else 2 * work
        case _:
            # In place (addmm_, baddbmm_) as otherwise, for which alone torch has a formula.
            count = flop_registry.get(getattr(aten, name.removesuffix("_"), func._overloadpacket))
            return float(count(*args, **kwargs, out_val=out)) if count else 0.0


def _attention(q: Tensor, k: Tensor, v: Tensor) -> float:
    """Returns the forward FLOPs of attention over all pairs of q and k (batch, heads, tokens, size)."""
    return 2.0 * math.prod(q.shape[:-1]) * k.shape[-2] * (q.shape[-1] + v.shape[-1])


def attention_on_gpu(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, dropout_p: float = 0.0, is_causal: bool = False, *,
    scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """Returns torch's attention by the kernel that it takes on a GPU; torch itself asks for its device."""
    keeps = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    if mask is None and is_cudnn(q, v):
        return aten._scaled_dot_product_cudnn_attention(q, k, v, None, keeps, dropout_p, is_causal, scale=scale)[0]
    if mask is None and is_flash(q, v) and q.shape[-1] == v.shape[-1]:
        size, scale = q.shape[-1], scale or q.shape[-1] ** -0.5
        q, k, v = (torch.nn.functional.pad(x, (0, -size % 8)) if size % 8 else x for x in (q, k, v))
        return aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal, scale=scale)[0][..., :size]
    if enable_gqa:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    return aten._scaled_dot_product_efficient_attention(q, k, v, mask, keeps, dropout_p, is_causal, scale=scale)[0]


def result_without_data(func: Any, args: Any, kwargs: Any) -> Any:
    """Returns (result, elements or None) of an operation for which torch's fake tensors need data or another type; None
    for others."""
    if func is aten._grouped_mm.default and args[0].dtype != torch.bfloat16:
        return _grouped(*args, **kwargs), None
    if func is aten.searchsorted.Tensor and args[1].dim() == 1:
        # Where each expert's tokens end in a sorted list of the tokens' experts: evenly divided.
        out = func(*args, **kwargs)
        if not args[1].dtype.is_floating_point:
            with RealTensors():
                return out, torch.arange(1, len(args[1]) + 1) * args[0].shape[-1] // len(args[1])
    return None


def _grouped(
    a: Tensor, b: Tensor, offs: Tensor | None = None, bias: Tensor | None = None, out_dtype: Any = None
) -> Tensor:
    """Returns the empty result of torch's grouped product, which its fake tensors have only in bfloat16."""
    if a.dim() == 2 and b.dim() == 2:
        assert offs is not None
        shape: tuple[int, ...] = (len(offs), a.shape[0], b.shape[1])
    elif a.dim() == 2:
        shape = (a.shape[0], b.shape[-1])
    elif b.dim() == 2:
        shape = (a.shape[1], b.shape[1])
    else:
        shape = (a.shape[0], a.shape[1], b.shape[2])
    return a.new_empty(shape, dtype=out_dtype or a.dtype)
