"""Attention in blocks of queries, each with the keys within their reach: work and memory grow with seq × window, not
with seq².

It also computes what torch's fused attention cannot: sinks, capped scores, and documents without a mask that is kept.
What is saved for the backward pass is what fused attention saves: q, k, v, the output and its log-sum-exp. Both passes
make the mask of a run of queries for a moment, and hold their capped scores, which have no fused kernel here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from phalanx.blocks.attention import whole_run
from phalanx.model.attention_blocks import PLAIN_SCORING, Scoring, Seen, attend, gradients, is_flash
from phalanx.model.documents import Documents
from phalanx.model.layers import uncompiled
from phalanx.model.window import visible
from phalanx.partition.tensor_slices import window_blocks


@dataclass(frozen=True)
class Reach:
    """What queries see, and how they score it."""

    window: int = 0
    """Keys that a query sees at most; 0: all."""
    documents: Documents | None = None
    """Those of at least the keys, where queries see only their own document."""
    scoring: Scoring = PLAIN_SCORING


@uncompiled
def blocked_attention(q: Tensor, k: Tensor, v: Tensor, reach: Reach, sinks: Tensor | None = None) -> Tensor:
    """Maps `q` (batch, heads, seq, head_size), `k` (batch, kv_heads, keys, head_size) and `v` in the same form to
    (batch, heads, seq, size of v's heads). The queries are those of the last `seq` of the keys. `sinks` (heads,) are
    scores of each head that join its softmax and belong to no key."""
    return _BlockedAttention.apply(q, k, v, sinks, reach)  # pyright: ignore[reportReturnType]


def join_sinks(o: Tensor, lse: Tensor, sinks: Tensor | None) -> None:
    """Adds `sinks` (heads,) to a softmax, in place: to the output `o` (batch, heads, queries, size) over all keys and
    to its log-sum-exp (batch, heads, queries)."""
    if sinks is None:
        return
    both = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])
    o.mul_((lse - both).exp().unsqueeze(-1))
    lse.copy_(both)


def gradient_of_sinks(gradient: Tensor, o: Tensor, lse: Tensor, sinks: Tensor | None) -> Tensor | None:
    """Returns the gradient of `sinks` from that of the output `o`: a sink's probability meets no value, so it only
    takes away from the others."""
    if sinks is None:
        return None
    probabilities = (sinks.to(lse.dtype)[:, None] - lse).exp()
    passed = (gradient.to(lse.dtype) * o.to(lse.dtype)).sum(dim=-1)
    return -(probabilities * passed).sum(dim=(0, 2)).to(sinks.dtype)


class _BlockedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, reach: Reach) -> Tensor:
        batch, heads, seq, _ = q.shape
        # In memory as the projection after it reads it: token by token.
        o = q.new_empty(batch, seq, heads, v.shape[-1]).transpose(1, 2)
        lse = q.new_empty(batch, heads, seq, dtype=torch.promote_types(q.dtype, torch.float32))
        for rows, columns, seen in _blocks(q, k, v, reach):
            block = attend(q[:, :, rows], k[:, :, columns], v[:, :, columns], seen, reach.scoring)
            o[:, :, rows], lse[:, :, rows] = block
        join_sinks(o, lse, sinks)
        ctx.reach = reach
        ctx.save_for_backward(q, k, v, o, lse, sinks)
        return o

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        q, k, v, o, lse, sinks = ctx.saved_tensors
        reach: Reach = ctx.reach
        gradient = grad_outputs[0]
        of_sinks = gradient_of_sinks(gradient, o, lse, sinks)
        if seen := _seen_at_once(q, k, v, reach):
            return *gradients(gradient, q, k, v, o, lse, seen, reach.scoring), of_sinks, None
        of_q = torch.empty_like(q)
        of_k, of_v = (torch.zeros_like(x, dtype=lse.dtype) for x in (k, v))
        for rows, columns, seen in _blocks(q, k, v, reach):
            inputs = q[:, :, rows], k[:, :, columns], v[:, :, columns], o[:, :, rows], lse[:, :, rows]
            of_q[:, :, rows], of_keys, of_values = gradients(gradient[:, :, rows], *inputs, seen, reach.scoring)
            of_k[:, :, columns] += of_keys
            of_v[:, :, columns] += of_values
        return of_q, of_k.to(k.dtype), of_v.to(v.dtype), of_sinks, None


def _blocks(q: Tensor, k: Tensor, v: Tensor, reach: Reach) -> Iterator[tuple[slice, slice, Seen]]:
    """Yields runs of queries and of keys, and which of these they see."""
    keys, earlier = k.shape[2], k.shape[2] - q.shape[2]
    if seen := _seen_at_once(q, k, v, reach):
        yield slice(None), slice(None), seen
        return
    for queries, columns in _runs(range(earlier, keys), keys, reach):
        of_q, of_k = (torch.arange(run.start, run.stop, device=q.device) for run in (queries, columns))
        mask = visible(of_q, of_k, reach.window, reach.documents)
        rows = slice(queries.start - earlier, queries.stop - earlier)
        yield rows, slice(columns.start, columns.stop), Seen(mask=mask.view(-1, 1, *mask.shape[-2:]))


def _seen_at_once(q: Tensor, k: Tensor, v: Tensor, reach: Reach) -> Seen | None:
    """Returns what all queries see of all keys where one call without a mask computes it; otherwise None."""
    seq, keys, documents = q.shape[2], k.shape[2], reach.documents
    if reach.scoring.softcap:
        return None
    if documents is None:
        alone = (seq == keys and not reach.window) or is_flash(q, v)
    else:
        alone = seq == keys == documents.numbers.shape[1] and is_flash(q, v)
    return Seen(causal=True, documents=documents, window=reach.window) if alone else None


def _runs(queries: range, keys: int, reach: Reach) -> Iterator[tuple[range, range]]:
    """Yields runs of queries with the keys that some of them see, by position."""
    if reach.window:
        yield from window_blocks(queries, range(keys), reach.window)
        return
    length = whole_run(len(queries), keys)
    for start in range(queries.start, queries.stop, length):
        run = range(start, min(start + length, queries.stop))
        yield run, range(run.stop)
