"""Sliding-window attention (Mistral 7B, Jiang et al. 2023, section 2) in blocks of queries, each with the keys within
their reach: work and memory grow with seq × window, not with seq².

What is saved for the backward pass is what torch's fused attention saves: q, k, v, the output and its log-sum-exp.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from phalanx.model.attention_blocks import Seen, attend, gradients
from phalanx.partition.sequence import window_blocks


def visible(queries: Tensor, keys: Tensor, window: int = 0, documents: Tensor | None = None) -> Tensor:
    """Returns which keys queries see, both given by position (one dimension each): their own and those before, at most
    the last `window` (0: all), within their own document where `documents` (batch, positions) are given. Boolean,
    (queries, keys), or with documents (batch, 1, queries, keys)."""
    seen = queries[:, None] >= keys
    if window:
        seen &= (queries - window)[:, None] < keys
    if documents is None:
        return seen
    return ((documents[:, queries, None] == documents[:, None, keys]) & seen).unsqueeze(1)


def window_attention(q: Tensor, k: Tensor, v: Tensor, window: int, documents: Tensor | None = None) -> Tensor:
    """Maps `q` (batch, heads, seq, head_size), `k` (batch, kv_heads, keys, head_size) and `v` in the same form to
    (batch, heads, seq, size of v's heads). The queries are those of the last `seq` of the keys; each sees the last
    `window` keys up to its own, within its own document where `documents` (batch, at least keys) are given."""
    return _WindowAttention.apply(q, k, v, window, documents)  # pyright: ignore[reportReturnType]


class _WindowAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, window: int, documents: Tensor | None) -> Tensor:
        batch, heads, seq, _ = q.shape
        # In memory as the projection after it reads it: token by token.
        o = q.new_empty(batch, seq, heads, v.shape[-1]).transpose(1, 2)
        lse = q.new_empty(batch, heads, seq, dtype=torch.promote_types(q.dtype, torch.float32))
        for rows, columns, seen in _blocks(q, k, window, documents):
            block = attend(q[:, :, rows], k[:, :, columns], v[:, :, columns], seen)
            o[:, :, rows], lse[:, :, rows] = block
        ctx.window, ctx.documents = window, documents
        ctx.save_for_backward(q, k, v, o, lse)
        return o

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        q, k, v, o, lse = ctx.saved_tensors
        gradient = grad_outputs[0]
        of_q = torch.empty_like(q)
        of_k, of_v = (torch.zeros_like(x, dtype=lse.dtype) for x in (k, v))
        for rows, columns, seen in _blocks(q, k, ctx.window, ctx.documents):
            inputs = q[:, :, rows], k[:, :, columns], v[:, :, columns], o[:, :, rows], lse[:, :, rows]
            of_q[:, :, rows], of_keys, of_values = gradients(gradient[:, :, rows], *inputs, seen)
            of_k[:, :, columns] += of_keys
            of_v[:, :, columns] += of_values
        return of_q, of_k.to(k.dtype), of_v.to(v.dtype), None, None


def _blocks(q: Tensor, k: Tensor, window: int, documents: Tensor | None) -> Iterator[tuple[slice, slice, Seen]]:
    """Yields runs of queries and of keys, and which of these they see."""
    keys, earlier = k.shape[2], k.shape[2] - q.shape[2]
    for queries, reach in window_blocks(range(earlier, keys), range(keys), window):
        of_q, of_k = (torch.arange(run.start, run.stop, device=q.device) for run in (queries, reach))
        mask = visible(of_q, of_k, window, documents)
        rows = slice(queries.start - earlier, queries.stop - earlier)
        yield rows, slice(reach.start, reach.stop), Seen(mask=mask.view(-1, 1, *mask.shape[-2:]))
