"""Multi-head latent attention: the keys and values of all heads are computed from one small vector per token
(DeepSeek-V2, section 2.1; with DeepSeek-V3's norms on the compressed vectors).

A query or key head has two parts, [without position | rotary]; all heads share the rotary part of the key. Shapes:
batch, seq (tokens of the input), keys (tokens attended to), d_model, ranks of the compressions.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from phalanx.config.model import ModelConfig
from phalanx.model.attention import CoreAttention, KeysAndValues, all_keys
from phalanx.model.documents import Documents
from phalanx.model.layers import Linear, RunCheap, make_norm, run
from phalanx.model.noise import Noise
from phalanx.model.rotary import rotate


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
