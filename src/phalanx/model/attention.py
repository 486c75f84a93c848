"""Causal self-attention: projections around a core without parameters.

Shapes: batch, seq (tokens of the input), keys (tokens attended to: seq, or more with a cache), d_model, head_size.

Attention in blocks of queries, each with the keys within their reach, takes work and memory of seq × window, and also
computes what torch's fused attention cannot: sinks, capped scores, and documents without a mask that is kept. It saves
what fused attention saves: q, k, v, the output and its log-sum-exp. Latent attention (DeepSeek-V2, section 2.1; with
DeepSeek-V3's norms) computes the keys and values of all heads from one small vector per token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.blocks.attention import whole_run
from phalanx.config.model import ModelConfig, window_within
from phalanx.model.attention_blocks import (
    PLAIN_SCORING,
    Scoring,
    Seen,
    attend,
    bias,
    capped,
    gradients,
    is_cudnn,
    is_flash,
)
from phalanx.model.documents import Documents, in_chunks
from phalanx.model.layers import Linear, Project, RMSNorm, Run, RunCheap, make_norm, project, rotate, run, uncompiled
from phalanx.model.seeding import Noise
from phalanx.partition.tensor_slices import window_blocks


def visible(queries: Tensor, keys: Tensor, window: int = 0, documents: Documents | None = None) -> Tensor:
    """Returns which keys queries see, both given by position (one dimension each): their own and those before, at most
    the last `window` (0: all), within their own document where `documents` are given. Boolean, (queries, keys), or with
    documents (batch, 1, queries, keys)."""
    seen = queries[:, None] >= keys
    if window:
        seen &= (queries - window)[:, None] < keys
    if documents is None:
        return seen
    numbers = documents.numbers
    return ((numbers[:, queries, None] == numbers[:, None, keys]) & seen).unsqueeze(1)


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
    return _BlockedAttention.apply(q, k, v, sinks, reach)


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
    if reach.scoring.softcap and not reach.scoring.by_products(q, k):
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


class KeysAndValues(Protocol):
    """The keys and values of earlier tokens, which attention also sees."""

    def extend(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Appends new keys and values, (batch, kv_heads, seq, head_size) each, and returns those of all positions."""
        ...


class SharedKeys:
    """Keys and values of one forward pass that later layers read, and those of earlier tokens, if there are any."""

    def __init__(self, sources: Mapping[int, int], earlier: KeysAndValues | None):
        """`sources` are the layers whose keys others read, by those."""
        self.sources, self.earlier = sources, earlier
        self.lent: dict[int, tuple[Tensor, Tensor]] = {}
        """Keys and values of all positions, by layer."""

    def extend(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Returns keys and values of all positions, as `KeysAndValues`, and keeps those that later layers read."""
        if self.earlier is not None:
            keys, values = self.earlier.extend(layer, keys, values)
        if layer not in self.lent and layer in self.sources.values():  # otherwise this is recomputation
            self.lent[layer] = keys, values
        return keys, values


@uncompiled
def lent_keys(cache: KeysAndValues | None, attention: Any) -> tuple[Tensor, Tensor]:
    """Returns the keys and values of all positions that a layer's `attention` reads, an earlier layer's."""
    assert isinstance(cache, SharedKeys), "the model makes one for each forward pass"
    return cache.lent[cache.sources[attention.layer]]


@uncompiled
def all_keys(cache: KeysAndValues, attention: Any, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Appends the keys and values of a layer's `attention` to a cache, and returns those of all positions."""
    return cache.extend(attention.layer, keys, values)


NormPair = Callable[[nn.Module, nn.Module, Tensor, Tensor], tuple[Tensor, Tensor]]
"""Applies a norm of queries and one of keys: (norm of queries, norm of keys, queries, keys) to both."""


def norm_pair(q_norm: nn.Module, k_norm: nn.Module, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Applies each norm to its tensor, (..., size) to the same shape."""
    return q_norm(q), k_norm(k)


class Attention(nn.Module):
    """Causal self-attention with as many key/value heads as query heads, or fewer (Ainslie et al. 2023). A layout may
    replace `project`, which applies the matrices that read the input, `norm_all_heads`, which applies norms over all
    heads of a token together, and `run_cheap`, which calls what is cheap to repeat."""

    project: Project = staticmethod(project)
    run_cheap: RunCheap = staticmethod(run)
    norm_all_heads: NormPair = staticmethod(norm_pair)
    gated = False
    """Whether the sigmoid of a projection of the input multiplies the heads' outputs."""
    makes_keys = True
    """Whether it has keys and values of its own."""

    def __init__(self, model: ModelConfig, layer: int):
        super().__init__()
        self.layer = layer
        self.head_size = model.head_size
        queries, keys = model.n_heads * model.head_size, model.kv_heads * model.head_size
        qkv_bias = model.bias or model.qkv_bias
        self.wq = Linear(model.d_model, queries, bias=qkv_bias)
        self.wk = Linear(model.d_model, keys, bias=qkv_bias) if self.makes_keys else None
        has_values = self.makes_keys and not model.values_are_keys
        self.wv = Linear(model.d_model, keys, bias=qkv_bias) if has_values else None
        self.wg = Linear(model.d_model, queries, bias=qkv_bias) if self.gated else None
        self.qk_norm = model.qk_norm if model.norms_heads(layer) else "none"
        if self.qk_norm == "unit":
            self.q_norm, self.k_norm = (
                RMSNorm(model.head_size, eps=model.norm_eps, elementwise_affine=False) for _ in "qk"
            )
        elif self.qk_norm != "none":
            whole = self.qk_norm == "width"
            self.q_norm = make_norm(model, queries if whole else model.head_size)
            self.k_norm = make_norm(model, keys if whole else model.head_size) if self.makes_keys else nn.Identity()
        norms_values = model.v_norm and self.makes_keys
        self.v_norm = RMSNorm(model.head_size, model.norm_eps, elementwise_affine=False) if norms_values else None
        self.sinks = nn.Parameter(torch.empty(model.n_heads)) if model.sinks else None
        self.core = CoreAttention(model, layer)
        self.wo = Linear(queries, model.d_model, bias=model.bias)

    def forward(
        self,
        x: Tensor,
        rotary: Tensor | None,
        noise: Noise | None,
        cache: KeysAndValues | None,
        documents: Documents | None = None,
    ) -> Tensor:
        """Computes attention, (batch, seq, d_model) to the same shape."""
        return self.wo(self.attend(self.qkv(x), rotary, noise, cache, documents))

    def qkv(self, x: Tensor) -> tuple[Tensor, ...]:
        """Returns queries, keys and, with a matrix of their own, values, each (batch, seq, heads × head_size), of `x`
        (batch, seq, d_model), and the gate's scores if there is one."""
        return self.project([layer for layer in (self.wq, self.wk, self.wv, self.wg) if layer is not None], x)

    def attend(
        self,
        qkv: Sequence[Tensor],
        rotary: Tensor | None,
        noise: Noise | None,
        cache: KeysAndValues | None,
        documents: Documents | None,
    ) -> Tensor:
        """Returns the heads' outputs, (batch, seq, heads × head_size), from the results of `qkv`."""
        q, k, *rest = qkv
        v, *gate = rest if self.wv is not None else (k, *rest)
        if self.qk_norm == "width":
            q, k = self.norm_all_heads(self.q_norm, self.k_norm, q, k)
        q, k, v = (heads.unflatten(-1, (-1, self.head_size)) for heads in (q, k, v))
        if self.qk_norm in ("head", "unit"):
            q, k = self.run_cheap(self.place, q, k, rotary)
        else:  # without a norm their results take as much memory as what they read
            q, k = self.place(q, k, rotary)
        if self.v_norm is not None:
            v = self.v_norm(v)
        q, k, v = (heads.transpose(1, 2) for heads in (q, k, v))
        if cache is not None:
            k, v = all_keys(cache, self, k, v)
        attended = self.core(q, k, v, noise, documents, self.sinks).transpose(1, 2).flatten(2)
        return self.run_cheap(_gated, attended, *gate) if gate else attended

    def place(self, q: Tensor, k: Tensor, rotary: Tensor | None) -> tuple[Tensor, Tensor]:
        """Returns queries and keys, (batch, seq, heads, head_size) each, with their norm and rotated."""
        if self.qk_norm == "head":
            q, k = norm_pair(self.q_norm, self.k_norm, q, k)
        if rotary is None or len(rotary) == 1:  # queries grow, and nothing turns
            return q if rotary is None else (q * rotary[0]).to(q.dtype), k
        q, k = rotate(q, rotary[:2]), rotate(k, rotary[-2:])
        return norm_pair(self.q_norm, self.k_norm, q, k) if self.qk_norm == "unit" else (q, k)


class SharedAttention(Attention):
    """The same, to keys and values of an earlier layer (Gemma 3n and 4)."""

    makes_keys = False

    def attend(
        self,
        qkv: Sequence[Tensor],
        rotary: Tensor | None,
        noise: Noise | None,
        cache: KeysAndValues | None,
        documents: Documents | None,
    ) -> Tensor:
        (q,) = (queries.unflatten(-1, (-1, self.head_size)) for queries in qkv)
        q = self.run_cheap(self.place_queries, q, rotary) if self.qk_norm == "head" else self.place_queries(q, rotary)
        k, v = lent_keys(cache, self)
        return self.core(q.transpose(1, 2), k, v, noise, documents, self.sinks).transpose(1, 2).flatten(2)

    def place_queries(self, q: Tensor, rotary: Tensor | None) -> Tensor:
        """Returns queries (batch, seq, heads, head_size) with their norm and rotated."""
        q = self.q_norm(q) if self.qk_norm == "head" else q
        if rotary is None:
            return q
        return (q * rotary[0]).to(q.dtype) if len(rotary) == 1 else rotate(q, rotary[:2])


def _gated(attended: Tensor, gate: Tensor) -> Tensor:
    return attended * gate.sigmoid()


class GatedAttention(Attention):
    """The same with a gate per element of the heads' outputs (Qwen3-Next; Qiu et al. 2025, arXiv 2505.06708)."""

    gated = True


class CoreAttention(nn.Module):
    """softmax(scale q kᵀ) v. It is a parameterless module of its own because layouts treat it separately: selective
    recomputation replaces `run`, which calls `attend`, and context parallelism replaces the module."""

    run: Run = staticmethod(run)

    def __init__(self, model: ModelConfig, layer: int):
        super().__init__()
        self.n_heads = model.n_heads
        self.dropout = model.dropout
        self.window, self.seq_len = model.window_of(layer), model.seq_len
        self.chunks = self.window if model.window_kind == "chunks" else 0
        """Tokens of a chunk, outside of which a query sees nothing; 0: there are none."""
        self.scoring = Scoring(model.attention_scale, model.attention_softcap)
        self.site = f"blocks.{layer}.attn.probabilities"

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        noise: Noise | None,
        documents: Documents | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Runs `attend`."""
        return self.run(self.attend, q, k, v, noise, documents, sinks)

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        noise: Noise | None,
        documents: Documents | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Maps `q` (batch, heads, seq, head_size), `k` (batch, kv_heads, keys, head_size) and `v` in the same form to
        (batch, heads, seq, size of v's heads). The queries are those of the last `seq` of the keys.

        A query sees the last `window` keys up to its own (0: all), and with `documents` (of at least the keys) only
        those of its own document. `sinks` (heads,) are scores that join each head's softmax and belong to no key (Xiao
        et al. 2023, section 3.3; gpt-oss)."""
        seq, keys = q.shape[2], k.shape[2]
        drops = noise is not None and self.dropout > 0
        if self.chunks and keys > self.chunks:
            if documents is None and seq == keys and not drops:
                return self._each_chunk(q, k, v, sinks)
            if documents is None and seq == 1:
                k, v = (x[:, :, (keys - 1) // self.chunks * self.chunks :] for x in (k, v))
                keys = k.shape[2]
            else:
                documents = in_chunks(documents, self.chunks, k)
        if noise is not None and drops:
            return self._with_dropout(q, k, v, noise, documents, sinks)
        window = window_within(self.window, keys)
        if window and seq == 1 and documents is None:
            k, v, window = k[:, :, -window:], v[:, :, -window:], 0
        plain = not window and sinks is None and not self.scoring.softcap
        causal = documents is None
        if seq != keys:  # in a compiled graph a branch is decided, where a comparison's result would be a symbol
            causal = False
        unequal = v.shape[-1] != q.shape[-1] and not _takes_unequal_heads(q, v)
        if causal and (unequal or self.scoring.by_products(q, k)):
            plain = False
        if plain and (causal or (seq < keys and not torch.is_grad_enabled())):
            # torch's is_causal would align the first query with the first key. One query sees all keys.
            mask = None if documents is None and seq in (1, keys) else self._visible(q, k, documents)
            grouped, scale = q.shape[1] != k.shape[1], self.scoring.scale or None
            return F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, enable_gqa=grouped, scale=scale)
        # Given a mask, torch's function would keep it for the backward pass: in every layer one of its own.
        return blocked_attention(q, k, v, Reach(window, documents, self.scoring), sinks)

    def _each_chunk(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
        """Computes the same as if chunks were sequences. What fills the last one up lies behind all queries."""
        seq, size = q.shape[2], self.chunks
        if more := -seq % size:  # padding by nothing would copy
            q, k, v = (F.pad(x, (0, 0, 0, more)) for x in (q, k, v))
        chunks = [x.unflatten(2, (-1, size)) for x in (q, k, v)]
        q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in chunks)
        o = CoreAttention.attend(self, q, k, v, None, None, sinks)  # no context ranks exchange anything here
        return o.unflatten(0, (-1, chunks[0].shape[2])).transpose(1, 2).flatten(2, 3)[:, :, :seq]

    def _with_dropout(
        self, q: Tensor, k: Tensor, v: Tensor, noise: Noise, documents: Documents | None, sinks: Tensor | None
    ) -> Tensor:
        """Computes the same without a fused kernel: torch's fused kernels draw dropout masks of their own."""
        queries_per_key = q.shape[1] // k.shape[1]
        if queries_per_key > 1:  # otherwise a copy would be made all the same
            k, v = k.repeat_interleave(queries_per_key, dim=1), v.repeat_interleave(queries_per_key, dim=1)
        scores = capped((q * self.scoring.scale_of(q)) @ k.transpose(-2, -1), self.scoring.softcap)
        scores.add_(bias(self._visible(q, k, documents), scores.dtype))  # masked_fill would keep the mask
        if sinks is not None:
            scores = torch.cat((scores, sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:3], 1)), dim=-1)
        # In half precision the softmax adds in fp32 by itself; asked to return fp32 it would keep twice the memory.
        probabilities = scores.softmax(dim=-1)[..., : k.shape[2]]
        del scores
        return self._drop(probabilities, noise) @ v

    @uncompiled
    def _drop(self, probabilities: Tensor, noise: Noise) -> Tensor:
        return noise.dropout_heads(probabilities, self.dropout, self.site, self.n_heads)

    def _visible(self, q: Tensor, k: Tensor, documents: Documents | None) -> Tensor:
        """Returns which keys the queries see, (seq, keys), or with documents (batch, 1, seq, keys)."""
        places = torch.arange(k.shape[2], device=q.device)
        return visible(places[-q.shape[2] :], places, self.window, documents)


@uncompiled
def _takes_unequal_heads(q: Tensor, v: Tensor) -> bool:
    """Returns whether torch's function is best for values of another size than the queries. On CPUs it would compute,
    and keep, whole scores. On GPUs cuDNN computes them, in fp32 memory-efficient attention does, and where flash
    attention is the fastest it gets padded values."""
    if q.device.type == "cpu":
        return not torch.backends.cuda.flash_sdp_enabled()  # also the switch of torch's kernels for CPUs
    return is_cudnn(q, v) or not is_flash(q, v)


class LatentAttention(nn.Module):
    """Causal self-attention with compressed queries (where `q_rank` is not 0), keys and values.

    Keys and values are expanded before they are cached or attended to: the compression saves parameters here, not
    memory. A layout may replace `run_cheap`, which calls what is cheap to repeat."""

    run_cheap: RunCheap = staticmethod(run)

    def __init__(self, model: ModelConfig, layer: int):
        super().__init__()
        mla, bias = model.mla, model.bias or model.qkv_bias
        self.layer = layer
        self.parts = [mla.nope_head_dim, mla.rope_head_dim]
        self.kv_parts = [mla.nope_head_dim, mla.v_head_dim]
        self.kv_rank = mla.kv_rank
        queries = model.n_heads * model.head_size
        self.compresses_queries = mla.q_rank > 0
        if self.compresses_queries:
            self.wq_a = Linear(model.d_model, mla.q_rank, bias=bias)
            self.q_norm = make_norm(model, mla.q_rank, mla.norm_eps)
            self.wq_b = Linear(mla.q_rank, queries, bias=bias)
        else:
            self.wq = Linear(model.d_model, queries, bias=bias)
        self.wkv_a = Linear(model.d_model, mla.kv_rank + mla.rope_head_dim, bias=bias)
        self.kv_norm = make_norm(model, mla.kv_rank, mla.norm_eps)
        self.wkv_b = Linear(mla.kv_rank, model.n_heads * sum(self.kv_parts), bias=bias)
        self.core = CoreAttention(model, layer)
        self.wo = Linear(model.n_heads * mla.v_head_dim, model.d_model, bias=model.bias)

    def forward(
        self,
        x: Tensor,
        rotary: Tensor | None,
        noise: Noise | None,
        cache: KeysAndValues | None,
        documents: Documents | None = None,
    ) -> Tensor:
        """Computes attention, (batch, seq, d_model) to the same shape."""
        assert rotary is not None, "latent attention needs rotary positions"
        q, k, v = (heads.transpose(1, 2) for heads in self.heads(x, rotary))
        if cache is not None:
            k, v = all_keys(cache, self, k, v)
        return self.wo(self.core(q, k, v, noise, documents).transpose(1, 2).flatten(2))

    def heads(self, x: Tensor, rotary: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns queries, keys (batch, seq, heads, head_size) and values (batch, seq, heads, v_head_dim), rotated to
        their positions, of `x` (batch, seq, d_model)."""
        queries, compressed = self.compress(x)
        queries = self.wq_b(self.q_norm(queries)) if self.compresses_queries else queries
        latent, k_turned = compressed.split([self.kv_rank, self.parts[1]], -1)
        k, v = self.wkv_b(self.kv_norm(latent)).unflatten(-1, (-1, sum(self.kv_parts))).split(self.kv_parts, -1)
        return *self.run_cheap(self.place, queries, k, k_turned, rotary), v

    def place(self, queries: Tensor, k: Tensor, k_turned: Tensor, rotary: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the heads' queries and keys, (batch, seq, heads, head_size) each, with the rotary parts turned: of
        `queries` (batch, seq, heads × head_size), and of keys without them, `k`, and theirs, `k_turned` (batch, seq,
        rope_head_dim)."""
        q, q_turned = queries.unflatten(-1, (-1, sum(self.parts))).split(self.parts, -1)
        k_turned = rotate(k_turned.unsqueeze(2), rotary).expand(-1, -1, k.shape[2], -1)
        return torch.cat((q, rotate(q_turned, rotary)), -1), torch.cat((k, k_turned), -1)

    def compress(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Returns compressed queries (batch, seq, q_rank), or the heads' queries where queries are not compressed, and
        (batch, seq, kv_rank + rope_head_dim) for keys and values, from `x` (batch, seq, d_model)."""
        return self.wq_a(x) if self.compresses_queries else self.wq(x), self.wkv_a(x)
