"""Ring attention: every rank keeps its queries, and the keys and values come to it (Liu et al. 2023).

While a rank computes with one block of keys, the next one arrives (ring_travel.py). In the backward pass keys and
values come again, and their gradients return. Only q, k, v, the output and its log-sum-exp are saved in between, so
that memory is that of this rank's tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from phalanx.comm.axis import Axis
from phalanx.model.attention_blocks import attend, gradients
from phalanx.model.blocked_attention import Reach, gradient_of_sinks, join_sinks
from phalanx.model.layers import uncompiled
from phalanx.parallel.ring_blocks import Dropping, Sight
from phalanx.parallel.ring_travel import pair, travel


@uncompiled
def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ring: Axis,
    reach: Reach,
    dropping: Dropping | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Computes causal attention of this rank's queries `q` (batch, heads, tokens, head_size) over all ranks' `k`
    (batch, kv_heads, keys, head_size) and `v`: (batch, heads, tokens, size of v's heads).

    If sequences pass a pipeline in slices, the keys are those of all slices so far, in order, and the queries those of
    the last. The documents of `reach` are those of at least all ranks' keys. `sinks` (heads,) join each
    head's softmax."""
    sight = Sight(ring, q.shape[2], k.shape[2] // q.shape[2], reach, dropping)
    return _Ring.apply(q, k, v, sinks, sight)  # pyright: ignore[reportReturnType]


class _Ring(torch.autograd.Function):
    """Ring attention: queries, keys and values of this rank's tokens to their output."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, sight: Sight) -> Tensor:
        wide = torch.promote_types(q.dtype, torch.float32)
        batch, heads, tokens, _ = q.shape
        # In memory as the projection after it reads it: token by token.
        o = torch.zeros(batch, tokens, heads, v.shape[-1], dtype=wide, device=q.device).transpose(1, 2)
        lse = torch.full((batch, heads, tokens), float("-inf"), dtype=wide, device=q.device)
        keep = sight.keep(q.device)
        for source, keys, values in travel(sight, k, v).arriving():
            for block in sight.blocks[source]:
                rows, columns = block.queries, block.keys
                seen = sight.seen(source, block, keep, q.device)
                result = attend(q[:, :, rows], keys[:, :, columns], values[:, :, columns], seen, sight.scoring)
                _merge(o[:, :, rows], lse[:, :, rows], *result)
        join_sinks(o, lse, sinks)
        o = o.to(q.dtype)
        ctx.sight = sight
        ctx.save_for_backward(q, k, v, o, lse, sinks)
        return o

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        q, k, v, o, lse, sinks = ctx.saved_tensors
        sight: Sight = ctx.sight
        gradient = grad_outputs[0]
        if gradient.stride(-1) != 1:
            gradient = gradient.contiguous()
        of_q = torch.zeros_like(q, dtype=lse.dtype)
        keep = sight.keep(q.device)
        messages = travel(sight, k, v)
        for source, keys, values in messages.arriving():
            both, of_k, of_v = pair(keys, values, lse.dtype)
            both.zero_()
            for block in sight.blocks[source]:
                rows, columns = block.queries, block.keys
                inputs = q[:, :, rows], keys[:, :, columns], values[:, :, columns], o[:, :, rows], lse[:, :, rows]
                seen = sight.seen(source, block, keep, q.device)
                results = gradients(gradient[:, :, rows], *inputs, seen, sight.scoring)
                for whole, part, part_of in zip((of_q, of_k, of_v), results, (rows, columns, columns), strict=True):
                    whole[:, :, part_of].add_(part)
            messages.give_back(source, both)
        of_k, of_v = messages.collected()
        of_sinks = gradient_of_sinks(gradient, o, lse, sinks)
        return of_q.to(q.dtype), of_k.to(k.dtype), of_v.to(v.dtype), of_sinks, None


def _merge(o: Tensor, lse: Tensor, o_block: Tensor, lse_block: Tensor) -> None:
    """Merges a further block's result into the output and the log-sum-exp so far, in place. One of the two has seen at
    least one key of every query."""
    both = torch.logaddexp(lse, lse_block)
    o.mul_((lse - both).exp().unsqueeze(-1)).add_(o_block * (lse_block - both).exp().unsqueeze(-1))
    lse.copy_(both)
