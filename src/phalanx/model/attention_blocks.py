"""Attention of some queries over one block of keys, with what it takes to put blocks together afterwards.

Next to its output a block gives the log-sum-exp of every query's scores. From those of several blocks follows what
attention over all their keys gives (Milakov and Gimelshein 2018; Liu et al. 2023, ring attention), and given the output
and the log-sum-exp over all keys, a block's gradients follow from its own keys alone (Dao et al. 2022, section B.2).

Four back ends: torch's fused kernel for the CPU, products there where a layout gives faster ones (oneDNN's), flash
attention on CUDA, and products and a softmax step by step for what these cannot do: dropout, capped scores, masks on
CUDA, wide numbers there. Documents that flash attention gets as runs of tokens need no mask, nor does a window.
Attention without any of these is torch's own function's, whose kernels `kernel_order` ranks.

Shapes: batch, heads, queries, keys; kv_heads divides heads.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from inspect import signature
from itertools import repeat
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from phalanx.blocks.attention import MOST_CAPPED_SCORES, MOST_SCORES
from phalanx.model.cpu_kernels import SmallProducts
from phalanx.model.documents import Documents, PackedDocuments

_aten = torch.ops.aten
LEAST_PRODUCTS, PRODUCT_UNIT = (128 * 128 * 64, 32), 64
"""Fewest pairs of a query and a key per head, times its size, and the narrowest heads, that are worth calls of their
own for each head: below them torch's fused kernel is as fast (measured on an EPYC of the fifth generation). And what
numbers of queries and of keys must be multiples of: code is compiled, and kept, for each number, so it must recur."""
PRODUCT_RUN, PRODUCT_SCORES = 128, 2**18
"""Queries or keys of a product, and most scores, of several heads, that are computed at once: so they remain in the
cache of a core."""
LOG2E = 1 / math.log(2)
"""Scores are multiplied by it: torch's exp2 is up to ten times faster on a CPU than its exp."""


@dataclass(frozen=True)
class Seen:
    """The keys of a block that its queries see."""

    causal: bool = False
    """Query number i sees the keys up to number i; there are as many of both, or where it `is_flash` more keys: then
    the queries are those of the last."""
    mask: Tensor | None = None
    """Boolean, (batch or 1, heads or 1, queries, keys), true where a query sees a key; not with `causal`."""
    keep: Tensor | None = None
    """Dropout: which probabilities meet the values, boolean, (batch, heads, queries, keys)."""
    keep_scale: float = 1.0
    """And what these are multiplied by."""
    documents: Documents | None = None
    """Those of exactly the keys, of which a query sees its own alone: with `causal` where it `is_flash`, and as many
    queries as keys."""
    window: int = 0
    """Where it `is_flash`, the keys up to its own that a query sees at most, with `causal`; without it, of keys before
    the queries, the last that the last query sees, and a query n before it n more; 0: all."""

    @property
    def options(self) -> dict[str, int]:
        """The window in the arguments of flash attention: how many keys before and after its own a query sees."""
        return {"window_size_left": self.window - 1, "window_size_right": -(not self.causal)} if self.window else {}


@dataclass(frozen=True)
class Scoring:
    """How the product of a query and a key becomes a score."""

    scale: float = 0.0
    """Multiplies it; 0 means head_size ** -0.5."""
    softcap: float = 0.0
    """Then a score s becomes c tanh(s / c) with this c; 0 leaves it."""
    small: SmallProducts | None = None
    """Products that are faster than those of torch's fused kernel for the CPU, and compile code for each shape."""

    def by_products(self, q: Tensor, k: Tensor) -> bool:
        """Returns whether `small` computes it, head by head. A rehearsal counts the fused kernel, or runs of capped
        scores, which save the same and compute the same pairs."""
        if self.small is None or type(q) is not Tensor:
            return False
        least, narrowest = LEAST_PRODUCTS
        recur = not q.shape[2] % PRODUCT_UNIT and not k.shape[2] % PRODUCT_UNIT
        size = q.shape[-1]
        return recur and q.shape[2] * k.shape[2] * size >= least and size >= narrowest

    def scale_of(self, q: Tensor) -> float:
        """Returns the factor for queries `q` (..., head_size)."""
        return self.scale or q.shape[-1] ** -0.5


PLAIN_SCORING = Scoring()


def capped(scores: Tensor, softcap: float) -> Tensor:
    """Returns c tanh(s / c) of scores s, or `scores` itself if c is 0."""
    return (scores / softcap).tanh() * softcap if softcap else scores


def attend(q: Tensor, k: Tensor, v: Tensor, seen: Seen, scoring: Scoring = PLAIN_SCORING) -> tuple[Tensor, Tensor]:
    """Returns output (batch, heads, queries, size of v's heads), and log-sum-exp (batch, heads, queries) in at least
    fp32, of `q` (batch, heads, queries, head_size) over `k` (batch, kv_heads, keys, head_size) and `v`. A query that
    sees nothing gets zeros and -inf."""
    if seen.keep is None and scoring.by_products(q, k):
        return _products_forward(q, k, v, seen, scoring)
    if _fused(q, v, seen, scoring):
        padded = _padded(q, k, v)
        kernel = _cpu_forward if q.device.type == "cpu" else _cuda_forward
        o, lse = kernel(*padded, seen, scoring.scale_of(q))
        return o[..., : v.shape[-1]], lse
    outputs, sums = [], []
    for rows in _runs(q, k, scoring):
        scores = _masked(_scores(q[:, :, rows], k, scoring), seen, rows)
        lse = scores.logsumexp(dim=-1)
        probabilities = _probabilities(scores, lse)
        o = _fold(_dropped(probabilities, seen, rows).to(v.dtype), k.shape[1]) @ v
        outputs.append(o.view(*lse.shape, v.shape[-1]))
        sums.append(lse)
    return torch.cat(outputs, dim=2), torch.cat(sums, dim=2)


def gradients(
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    seen: Seen,
    scoring: Scoring = PLAIN_SCORING,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns a block's contributions to the gradients of `q`, `k` and `v`, where `o` and `lse` are those over all
    keys, also those of other blocks, and `gradient` is that of `o`."""
    if seen.keep is None and scoring.by_products(q, k):
        return _products_backward(gradient, q, k, v, o, lse, seen, scoring)
    if _fused(q, v, seen, scoring):
        padded, width = _padded(q, k, v), v.shape[-1]
        size = padded[0].shape[-1]
        kernel = _cpu_backward if q.device.type == "cpu" else _cuda_backward
        inputs = _widened(gradient, size), *padded, _widened(o, size)
        of_q, of_k, of_v = kernel(*inputs, lse, seen, scoring.scale_of(q))
        return of_q[..., : q.shape[-1]], of_k[..., : k.shape[-1]], of_v[..., :width]
    wide, scale, kv_heads = lse.dtype, scoring.scale_of(q), k.shape[1]
    of_q, of_k, of_v = torch.empty_like(q), torch.zeros_like(k, dtype=wide), torch.zeros_like(v, dtype=wide)
    for rows in _runs(q, k, scoring):
        query, given = q[:, :, rows], gradient[:, :, rows]
        scores = _scores(query, k, scoring)
        # Of c tanh(s / c), before unseen keys get -inf.
        slope = (scores / scoring.softcap).square_().neg_().add_(1) if scoring.softcap else None
        probabilities = _probabilities(_masked(scores, seen, rows), lse[:, :, rows])
        used = _dropped(probabilities, seen, rows).to(v.dtype)
        of_v += _fold(used, kv_heads).transpose(-2, -1) @ _fold(given, kv_heads)
        del used
        passed = (_fold(given, kv_heads) @ v.transpose(-2, -1)).view_as(probabilities).to(wide)
        if seen.keep is not None:
            passed.mul_(seen.keep[:, :, rows]).mul_(seen.keep_scale)
        # The sum over all keys of p dp, which makes the rows of the softmax's gradient sum to nothing.
        delta = (given.to(wide) * o[:, :, rows].to(wide)).sum(dim=-1, keepdim=True)
        of_scores = passed.sub_(delta).mul_(probabilities).mul_(scale)
        of_scores = _fold((of_scores if slope is None else of_scores.mul_(slope)).to(q.dtype), kv_heads)
        of_q[:, :, rows] = (of_scores @ k).view_as(query)
        of_k += of_scores.transpose(-2, -1) @ _fold(query, kv_heads)
    return of_q, of_k.to(k.dtype), of_v.to(v.dtype)


def _fused(q: Tensor, v: Tensor, seen: Seen, scoring: Scoring) -> bool:
    """Returns whether one of torch's kernels computes it."""
    if seen.keep is not None or scoring.softcap:
        return False
    if q.device.type == "cpu":
        return True
    return seen.mask is None and is_flash(q, v)


def is_flash(q: Tensor, v: Tensor) -> bool:
    """Returns whether torch's flash attention can compute it, all keys at once."""
    half = q.dtype in (torch.float16, torch.bfloat16)
    return q.device.type == "cuda" and half and max(q.shape[-1], v.shape[-1]) <= 256


CUDNN_WIDEST = {(9, 0): 256, (10, 0): 128}
"""By compute capability, where cuDNN's attention comes before flash attention, the widest heads that torch gives it. On
Hopper it was measured: an H200 reaches 533 TFLOP/s with it and 286 with flash attention, causal, forward and backward,
heads of 128, 8,192 tokens (docs/guides/gpu.md). On data-centre Blackwell it is what torch itself prefers: flash
attention 2 has no code of its own there."""


def kernel_order(device: torch.device) -> list[SDPBackend]:
    """Returns the kernels behind torch's attention on a GPU, of which it takes the first that can compute a call."""
    flash, cudnn = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION], [SDPBackend.CUDNN_ATTENTION]
    first = torch.cuda.get_device_capability(device) in CUDNN_WIDEST
    return [*(cudnn + flash if first else flash + cudnn), SDPBackend.MATH]


def ordered_kernels(device: torch.device) -> AbstractContextManager[object]:
    """Makes torch's attention rank its kernels by `kernel_order` on a GPU, whatever this version of torch prefers."""
    return sdpa_kernel(kernel_order(device), set_priority=True) if device.type == "cuda" else nullcontext()


def kernels_text(device: torch.device) -> str:
    """Returns what `kernel_order` has chosen for a GPU, for a log."""
    names = ", ".join(kernel.name.removesuffix("_ATTENTION").lower() for kernel in kernel_order(device))
    capability = ".".join(map(str, torch.cuda.get_device_capability(device)))
    return f"kernels by rank {names} (compute capability {capability}); windows and documents in half precision: flash"


def is_cudnn(q: Tensor, v: Tensor) -> bool:
    """Returns whether `kernel_order` makes cuDNN compute heads of these sizes, which may differ there."""
    if q.device.type != "cuda" or q.dtype not in (torch.float16, torch.bfloat16):
        return False
    sizes = q.shape[-1], v.shape[-1]
    fits = max(sizes) <= CUDNN_WIDEST.get(torch.cuda.get_device_capability(q.device), 0)
    return fits and not any(size % 8 for size in sizes) and torch.backends.cuda.cudnn_sdp_enabled()


def _cpu_forward(q: Tensor, k: Tensor, v: Tensor, seen: Seen, scale: float) -> tuple[Tensor, Tensor]:
    mask = None if seen.mask is None else bias(seen.mask, q.dtype)
    o, lse = _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, seen.causal, attn_mask=mask, scale=scale)
    if seen.mask is not None:  # where a query sees nothing, the kernel says 0
        lse = lse.masked_fill(~seen.mask.any(dim=-1), float("-inf"))
    return o, lse


def _cpu_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, seen: Seen, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    mask = None
    if seen.mask is not None:
        mask = bias(seen.mask, q.dtype)
        # Of a query that sees nothing: exp(-inf - 0), not exp(-inf + inf).
        lse = lse.masked_fill(lse == float("-inf"), 0.0)
    return _aten._scaled_dot_product_flash_attention_for_cpu_backward(
        gradient, q, k, v, o, lse, 0.0, seen.causal, attn_mask=mask, scale=scale
    )


def _products_forward(q: Tensor, k: Tensor, v: Tensor, seen: Seen, scoring: Scoring) -> tuple[Tensor, Tensor]:
    """Computes `attend`: some heads at a time, and a run of queries, of which with a causal mask each sees the keys up
    to its end."""
    assert scoring.small is not None
    (batch, heads, queries, _), small = q.shape, scoring.small
    # In memory as the projection after it reads it: token by token.
    o = q.new_empty(batch, queries, heads, v.shape[-1]).transpose(1, 2)
    lse = q.new_empty(batch, heads, queries, 1)
    unseen = q.new_full((PRODUCT_RUN, PRODUCT_RUN), -math.inf).triu_(1)
    cap, factor = scoring.softcap * LOG2E, scoring.scale_of(q) / (scoring.softcap or 1 / LOG2E)
    for query, key, value, out, sums, mask in zip(q, k, v, o, lse, _masks(seen, q), strict=True):
        turned = small.turned(key).mul_(factor)
        for rows in _product_runs(queries):
            last, length = rows.stop if seen.causal else key.shape[1], rows.stop - rows.start
            for group, read in _groups(heads, len(key), length * last):
                scores = q.new_empty(group.stop - group.start, length, last)
                small.multiply(scores, query[group, rows], turned[read, :, :last])
                if cap:
                    scores.tanh_().mul_(cap)
                if mask is not None:
                    scores += mask[group, rows]
                elif seen.causal:
                    scores[..., rows.start :].add_(unseen[:length, :length])
                best = scores.amax(dim=-1, keepdim=True)
                if mask is not None:  # some queries may see nothing
                    best.masked_fill_(best == -math.inf, 0.0)
                total = scores.sub_(best).exp2_().sum(dim=-1, keepdim=True)
                of_rows = out[group, rows]
                small.multiply(of_rows, scores, value[read, :last])
                of_rows /= total.clamp(min=1)  # the best key adds 1
                sums[group, rows] = best.add_(total.log2_()).div_(LOG2E)
    return o, lse[..., 0]


def _products_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, seen: Seen, scoring: Scoring
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes `gradients`, some heads and a run of keys at a time, all scores as (keys, queries), so that they enter
    the next products as they are."""
    assert scoring.small is not None
    (batch, heads, queries, size), scale, small = q.shape, scoring.scale_of(q), scoring.small
    multiply = small.multiply
    of_q, of_k, of_v = (
        q.new_empty(batch, queries, heads, size).transpose(1, 2),
        torch.zeros_like(k),
        torch.zeros_like(v),
    )
    less = lse.mul(-LOG2E)[:, :, None]
    less.masked_fill_(less == math.inf, 0.0)  # sees nothing
    delta = (gradient * o).sum(dim=-1).mul_(-scale)[:, :, None]
    unseen = q.new_full((PRODUCT_RUN, PRODUCT_RUN), -math.inf).tril_(-1)
    cap, factor = scoring.softcap * LOG2E, scale / (scoring.softcap or 1 / LOG2E)
    inputs = q, k, v, gradient, of_q, of_k, of_v, less, delta, _masks(seen, q)
    for query, key, value, given, for_query, for_key, for_value, less_here, delta_here, mask in zip(
        *inputs, strict=True
    ):
        turned, turned_given = small.turned(query).mul_(factor), small.turned(given).mul_(scale)
        turned_key, turned_result = small.turned(key), q.new_zeros(heads, size, queries)
        for columns in _product_runs(key.shape[1]):
            first, length = columns.start if seen.causal else 0, columns.stop - columns.start
            for group, read in _groups(heads, len(key), length * (queries - first)):
                weights = less_here[group, :, first:].expand(-1, length, -1).contiguous()
                scores = torch.empty_like(weights) if cap else weights
                multiply(scores, key[read, columns], turned[group, :, first:], add=not cap)
                if cap:
                    weights.add_(scores.tanh_(), alpha=cap)
                if mask is not None:
                    weights += mask[group, :, columns].mT
                elif seen.causal:
                    weights[..., :length].add_(unseen[:length, :length])
                weights.exp2_()
                of_scores = delta_here[group, :, first:].expand(-1, length, -1).contiguous()
                multiply(of_scores, value[read, columns], turned_given[group, :, first:], add=True)
                of_scores *= weights
                if cap:  # the slope of c tanh(s / c)
                    of_scores.addcmul_(of_scores, scores.square_(), value=-1)
                multiply(for_value[read, columns], weights, given[group, first:], add=True)
                multiply(for_key[read, columns], of_scores, query[group, first:], add=True)
                multiply(turned_result[group, :, first:], turned_key[read, :, columns], of_scores, add=True)
        small.transpose(for_query, turned_result)
    return of_q, of_k, of_v


def _masks(seen: Seen, q: Tensor) -> Iterable[Tensor | None]:
    """Returns what a mask adds to the scores of each sequence of `q`, (heads, queries, keys), without a copy per
    head."""
    return repeat(None, len(q)) if seen.mask is None else bias(seen.mask, q.dtype).expand(*q.shape[:2], -1, -1)


def _groups(heads: int, kv_heads: int, scores: int) -> Iterator[tuple[slice, slice]]:
    """Yields heads that are computed at once, with `scores` scores each, and the key heads that they read."""
    each = heads // kv_heads
    step = PRODUCT_SCORES // scores // each * each or 1
    for start in range(0, heads, step):
        stop = min(start + step, heads)
        yield slice(start, stop), slice(start // each, (stop - 1) // each + 1)


def _product_runs(tokens: int) -> Iterator[slice]:
    return (slice(start, min(start + PRODUCT_RUN, tokens)) for start in range(0, tokens, PRODUCT_RUN))


def bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns what a mask, true where a query sees a key, adds to the scores: 0 or -inf, in the same shape."""
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, float("-inf"))


def _cuda_forward(q: Tensor, k: Tensor, v: Tensor, seen: Seen, scale: float) -> tuple[Tensor, Tensor]:
    from torch.nn.attention.varlen import AuxRequest, varlen_attn  # it imports torch._dynamo: a second

    # Fewer key heads than query heads: torch 2.12 and later ask for it.
    grouped: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in signature(varlen_attn).parameters else {}
    outputs, sums = [], []
    packed = [_packed(x) for x in (q, k, v)]
    whole = PackedDocuments(slice(None), _equal(q), q.shape[2])
    for tokens, bounds, longest in seen.documents.packed if seen.documents else (whole,):
        keys, longest_key = (bounds, longest) if seen.documents else (_equal(k), k.shape[2])
        o, lse = varlen_attn(
            *(packed[0][tokens], packed[1][tokens], packed[2][tokens], bounds, keys, longest, longest_key),
            return_aux=AuxRequest(lse=True),
            scale=scale,
            window_size=(seen.window - 1 if seen.window else -1, 0 if seen.causal else -1),
            **grouped,
        )
        outputs.append(o)
        sums.append(lse)
    return _unpacked(_joined(outputs), len(q)), _joined(sums, dim=1).unflatten(1, (len(q), -1)).transpose(0, 1)


def _equal(x: Tensor) -> Tensor:
    """Returns where the sequences of `x` (batch, heads, tokens, size) begin and end as runs of the tokens of all."""
    return torch.arange(0, x.shape[0] * x.shape[2] + 1, x.shape[2], dtype=torch.int32, device=x.device)


def _cuda_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, seen: Seen, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    # A random state is read only with dropout.
    random = torch.empty(2, dtype=torch.int64, device=q.device)
    rest = 0.0, seen.causal, random, random
    backward = partial(_aten._flash_attention_backward, scale=scale, **seen.options)
    if seen.documents is None:
        tokens = [x.transpose(1, 2) for x in (gradient, q, k, v, o)]
        of_q, of_k, of_v = backward(*tokens, lse.contiguous(), None, None, q.shape[2], k.shape[2], *rest)
        return of_q.transpose(1, 2), of_k.transpose(1, 2), of_v.transpose(1, 2)
    packed, sums = [_packed(x) for x in (gradient, q, k, v, o)], lse.transpose(0, 1).flatten(1)
    parts = []
    for tokens, bounds, longest in seen.documents.packed:
        inputs = *(x[tokens] for x in packed), sums[:, tokens].contiguous()
        parts.append(backward(*inputs, bounds, bounds, longest, longest, *rest))
    of_q, of_k, of_v = (_unpacked(_joined(gradients), len(q)) for gradients in zip(*parts, strict=True))
    return of_q, of_k, of_v


def _packed(x: Tensor) -> Tensor:
    """Maps (batch, heads, seq, size) to the tokens of all sequences, (tokens, heads, size)."""
    return x.transpose(1, 2).flatten(0, 1)


def _unpacked(x: Tensor, batch: int) -> Tensor:
    """Maps (tokens, heads, size) to (batch, heads, seq, size)."""
    return x.unflatten(0, (batch, -1)).transpose(1, 2)


def _joined(parts: Sequence[Tensor], dim: int = 0) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(tuple(parts), dim)


def _padded(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Pads heads to one size, as the kernels require (CUDA's: a multiple of 8). Zeros change neither scores nor the
    part of the output that is read."""
    size = max(q.shape[-1], v.shape[-1])
    if q.device.type == "cuda":
        size = -(-size // 8) * 8
    return _widened(q, size), _widened(k, size), _widened(v, size)


def _widened(x: Tensor, size: int) -> Tensor:
    return x if x.shape[-1] == size else F.pad(x, (0, size - x.shape[-1]))


def _runs(q: Tensor, k: Tensor, scoring: Scoring) -> Iterator[slice]:
    """Yields runs of queries whose scores fit."""
    most = MOST_CAPPED_SCORES if scoring.softcap else MOST_SCORES // q.shape[0]
    length = max(1, most // (q.shape[1] * k.shape[2]))
    return (slice(start, start + length) for start in range(0, q.shape[2], length))


def _scores(q: Tensor, k: Tensor, scoring: Scoring) -> Tensor:
    """Returns scores of all keys in at least fp32, (batch, heads, queries, keys)."""
    batch, heads, queries, _ = q.shape
    scores = _fold(q * scoring.scale_of(q), k.shape[1]) @ k.transpose(-2, -1)
    scores = scores.view(batch, heads, queries, k.shape[2]).to(torch.promote_types(q.dtype, torch.float32))
    return scores.div_(scoring.softcap).tanh_().mul_(scoring.softcap) if scoring.softcap else scores


def _masked(scores: Tensor, seen: Seen, rows: slice) -> Tensor:
    """Sets the scores of unseen keys of queries `rows` to -inf, in place."""
    mask = None if seen.mask is None else seen.mask[:, :, rows]
    if seen.causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril(rows.start)
    return scores if mask is None else scores.masked_fill_(~mask, float("-inf"))


def _probabilities(scores: Tensor, lse: Tensor) -> Tensor:
    """Computes probabilities in place. A query that sees nothing gets zeros."""
    return scores.sub_(lse.masked_fill(lse == float("-inf"), 0.0).unsqueeze(-1)).exp_()


def _dropped(x: Tensor, seen: Seen, rows: slice) -> Tensor:
    return x if seen.keep is None else (x * seen.keep[:, :, rows]).mul_(seen.keep_scale)


def _fold(x: Tensor, kv_heads: int) -> Tensor:
    """Stacks the queries of heads that read the same keys: (batch, kv_heads, many, width). A product with the keys then
    needs no copies of these, and one over the queries sums over the heads."""
    return x.unflatten(1, (kv_heads, -1)).flatten(2, 3)
