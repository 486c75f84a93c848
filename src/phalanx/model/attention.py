"""Causal self-attention: projections around a core without parameters.

Shapes: batch, seq (tokens of the input), keys (tokens attended to: seq, or more with a cache), d_model, head_size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.config.model import ModelConfig, window_within
from phalanx.model.attention_blocks import Scoring, bias, capped, is_cudnn, is_flash
from phalanx.model.blocked_attention import Reach, blocked_attention
from phalanx.model.documents import Documents
from phalanx.model.layers import Linear, Project, Run, RunCheap, make_norm, project, run, uncompiled
from phalanx.model.noise import Noise
from phalanx.model.rotary import rotate
from phalanx.model.window import visible


class KeysAndValues(Protocol):
    """The keys and values of earlier tokens, which attention also sees."""

    def extend(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Appends new keys and values, (batch, kv_heads, seq, head_size) each, and returns those of all positions."""
        ...


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

    def __init__(self, model: ModelConfig, layer: int):
        super().__init__()
        self.layer = layer
        self.head_size = model.head_size
        queries, keys = model.n_heads * model.head_size, model.kv_heads * model.head_size
        qkv_bias = model.bias or model.qkv_bias
        self.wq = Linear(model.d_model, queries, bias=qkv_bias)
        self.wk = Linear(model.d_model, keys, bias=qkv_bias)
        self.wv = Linear(model.d_model, keys, bias=qkv_bias)
        self.qk_norm = model.qk_norm
        if self.qk_norm != "none":
            whole = self.qk_norm == "width"
            self.q_norm = make_norm(model, queries if whole else model.head_size)
            self.k_norm = make_norm(model, keys if whole else model.head_size)
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
        """Returns queries, keys and values, each (batch, seq, heads × head_size), of `x` (batch, seq, d_model)."""
        return self.project((self.wq, self.wk, self.wv), x)

    def attend(
        self,
        qkv: Sequence[Tensor],
        rotary: Tensor | None,
        noise: Noise | None,
        cache: KeysAndValues | None,
        documents: Documents | None,
    ) -> Tensor:
        """Returns the heads' outputs, (batch, seq, heads × head_size), from the results of `qkv`."""
        q, k, v = qkv
        if self.qk_norm == "width":
            q, k = self.norm_all_heads(self.q_norm, self.k_norm, q, k)
        q, k, v = (heads.unflatten(-1, (-1, self.head_size)) for heads in (q, k, v))
        if self.qk_norm == "head":
            q, k = self.run_cheap(self.place, q, k, rotary)
        else:  # without a norm their results take as much memory as what they read
            q, k = self.place(q, k, rotary)
        q, k, v = (heads.transpose(1, 2) for heads in (q, k, v))
        if cache is not None:
            k, v = all_keys(cache, self, k, v)
        return self.core(q, k, v, noise, documents, self.sinks).transpose(1, 2).flatten(2)

    def place(self, q: Tensor, k: Tensor, rotary: Tensor | None) -> tuple[Tensor, Tensor]:
        """Returns queries and keys, (batch, seq, heads, head_size) each, with their norm and rotated."""
        if self.qk_norm == "head":
            q, k = norm_pair(self.q_norm, self.k_norm, q, k)
        return (q, k) if rotary is None else (rotate(q, rotary), rotate(k, rotary))


class CoreAttention(nn.Module):
    """softmax(scale q kᵀ) v. It is a parameterless module of its own because layouts treat it separately: selective
    recomputation replaces `run`, which calls `attend`, and context parallelism replaces the module."""

    run: Run = staticmethod(run)

    def __init__(self, model: ModelConfig, layer: int):
        super().__init__()
        self.n_heads = model.n_heads
        self.dropout = model.dropout
        self.window, self.seq_len = model.window_of(layer), model.seq_len
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
        if noise is not None and self.dropout > 0:
            return self._with_dropout(q, k, v, noise, documents, sinks)
        window = window_within(self.window, keys)
        if window and seq == 1 and documents is None:
            k, v, window = k[:, :, -window:], v[:, :, -window:], 0
        plain = not window and sinks is None and not self.scoring.softcap
        causal = documents is None
        if seq != keys:  # in a compiled graph a branch is decided, where a comparison's result would be a symbol
            causal = False
        if causal and v.shape[-1] != q.shape[-1] and not _takes_unequal_heads(q, v):
            plain = False
        if plain and (causal or (seq < keys and not torch.is_grad_enabled())):
            # torch's is_causal would align the first query with the first key. One query sees all keys.
            mask = None if documents is None and seq in (1, keys) else self._visible(q, k, documents)
            grouped, scale = q.shape[1] != k.shape[1], self.scoring.scale or None
            return F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, enable_gqa=grouped, scale=scale)
        # Given a mask, torch's function would keep it for the backward pass: in every layer one of its own.
        return blocked_attention(q, k, v, Reach(window, documents, self.scoring), sinks)

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
