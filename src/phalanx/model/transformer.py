"""A decoder-only transformer of the GPT-2 kind or the Llama kind, as one device would run it.

Nothing here knows of other devices. What a layout changes, it changes from outside and by name: `embed`, `positions`,
`blocks`, `final_norm`, `head`; in a block `attn` with `wq`, `wk`, `wv`, `core`, `wo`, and `mlp` with `up`, `gate`,
`down`. Numbers of heads are read off the weights, so that a shard of a layer computes with the heads it has, and blocks
are keyed by their layer, so that a pipeline stage keeps the names of the blocks it holds. Layers that read the same
input are called together (`qkv`, `widen`), so that what they share in a layout is done once.

Shapes: batch, seq (tokens of the input), keys (tokens attended to: seq, or more with a cache), d_model, head_size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.errors import JobError
from phalanx.job.check import untrainable_shape
from phalanx.job.model import Model
from phalanx.job.parameters import vocabulary
from phalanx.model.cache import Cache
from phalanx.model.noise import Noise, dropout
from phalanx.model.rotary import rotary_table, rotate

Multiply = Callable[..., Tensor]
"""x weightᵀ + bias as F.linear computes it: (x, weight, bias=None)."""


class KeysAndValues(Protocol):
    """Keys and values of tokens before these, which attention sees as well."""

    def extend(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Those of all positions, from those of the new ones: (batch, kv_heads, seq, head_size) each."""
        ...


class Transformer(nn.Module):
    """The whole model: embeddings, blocks, final norm and head.

    `vocab_size` is the tokenizer's, used where the model's shape leaves it open. The parameters are exactly those of
    `phalanx.job.parameters.parameter_shapes`; `phalanx.model.init.initialise` gives them their values.
    Raises JobError for a shape that this module does not cover."""

    def __init__(self, model: Model, vocab_size: int | None = None):
        super().__init__()
        if problems := [f"{path}: {message}" for path, message in untrainable_shape(model)]:
            raise JobError(problems)
        vocab = vocabulary(model, vocab_size)
        self.model = model
        self.embed = nn.Embedding(vocab, model.d_model)
        self.positions = nn.Embedding(model.seq_len, model.d_model) if model.positions == "learned" else None
        self.blocks = nn.ModuleDict({str(layer): Block(model, layer) for layer in range(model.n_layers)})
        self.final_norm = make_norm(model)
        self.head = Head(model, vocab)

    def forward(
        self,
        tokens: Tensor,
        *,
        noise: Noise | None = None,
        cache: Cache | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """Logits (batch, seq, vocab) of `tokens` (batch, seq). The arguments are those of `hidden`."""
        return self.logits(self.normed(self.hidden(tokens, noise=noise, cache=cache, positions=positions)))

    def hidden(
        self,
        tokens: Tensor,
        *,
        noise: Noise | None = None,
        cache: Cache | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """What the last block writes, (batch, seq, d_model), for `tokens` (batch, seq).

        `noise` switches dropout on; `cache` holds the tokens before these and takes these in; `positions` (seq,) are
        the tokens' places in their sequence, by default those that follow the cache."""
        if positions is None:
            start = cache.length if cache is not None else 0
            positions = torch.arange(start, start + tokens.shape[1], device=tokens.device)
        x = self.through(self.blocks, self.embed_tokens(tokens, positions, noise), positions, noise, cache)
        if cache is not None:
            cache.length += tokens.shape[1]
        return x

    def through(
        self,
        layers: Iterable[str],
        x: Tensor,
        positions: Tensor,
        noise: Noise | None = None,
        cache: KeysAndValues | None = None,
    ) -> Tensor:
        """What the blocks of some layers make of `x` (batch, seq, d_model), one after the other."""
        rotary = self.rotary(positions, x.dtype)
        for layer in layers:
            x = self.blocks[layer](x, rotary, noise, cache)
        return x

    def normed(self, x: Tensor) -> Tensor:
        """What the head reads, (batch, seq, d_model), from what the last block wrote."""
        return self.final_norm(x)

    def embed_tokens(self, tokens: Tensor, positions: Tensor, noise: Noise | None) -> Tensor:
        """What the first block reads, (batch, seq, d_model)."""
        x = self.embed(tokens)
        if self.positions is not None:
            if len(positions) > self.model.seq_len:
                raise JobError(
                    f"{len(positions)} tokens, but the model has {self.model.seq_len} learned positions: "
                    "shorten the input or train with a larger model.seq_len"
                )
            x = x + self.positions(positions)
        return dropout(x, self.model.dropout, noise, "embed")

    def rotary(self, positions: Tensor, dtype: torch.dtype) -> Tensor | None:
        """What the blocks need to rotate queries and keys of `positions` (seq,); None for learned positions."""
        return rotary_table(self.model, positions, dtype) if self.model.positions == "rope" else None

    def logits(self, x: Tensor) -> Tensor:
        """(..., vocab) from what `normed` gave, (..., d_model)."""
        return self.head(x, self.embed.weight if self.model.tied else None)


class Block(nn.Module):
    """One layer: attention, then MLP, each on a normalised copy of the residual stream and added to it."""

    def __init__(self, model: Model, layer: int):
        super().__init__()
        self.dropout = model.dropout
        self.site = f"blocks.{layer}"
        self.attn_norm = make_norm(model)
        self.attn = Attention(model, layer)
        self.mlp_norm = make_norm(model)
        self.mlp = MLP(model)

    def forward(self, x: Tensor, rotary: Tensor | None, noise: Noise | None, cache: KeysAndValues | None) -> Tensor:
        """(batch, seq, d_model) to the same."""
        attended = self.attn(self.attn_norm(x), rotary, noise, cache)
        x = x + dropout(attended, self.dropout, noise, f"{self.site}.attn.residual")
        return x + dropout(self.mlp(self.mlp_norm(x)), self.dropout, noise, f"{self.site}.mlp.residual")


class Linear(nn.Linear):
    """x weightᵀ + bias by a product, `multiply`, that a layout may exchange for one with other kernels."""

    multiply: Multiply = staticmethod(F.linear)

    def forward(self, input: Tensor) -> Tensor:
        """(..., inputs) to (..., outputs)."""
        return self.multiply(input, self.weight, self.bias)


class Attention(nn.Module):
    """Causal self-attention with as many key/value heads as query heads, or fewer (Ainslie et al. 2023)."""

    def __init__(self, model: Model, layer: int):
        super().__init__()
        self.layer = layer
        self.head_size = model.head_size
        queries, keys = model.n_heads * model.head_size, model.kv_heads * model.head_size
        qkv_bias = model.bias or model.qkv_bias
        self.wq = Linear(model.d_model, queries, bias=qkv_bias)
        self.wk = Linear(model.d_model, keys, bias=qkv_bias)
        self.wv = Linear(model.d_model, keys, bias=qkv_bias)
        self.core = CoreAttention(model, layer)
        self.wo = Linear(queries, model.d_model, bias=model.bias)

    def forward(self, x: Tensor, rotary: Tensor | None, noise: Noise | None, cache: KeysAndValues | None) -> Tensor:
        """(batch, seq, d_model) to the same."""
        q, k, v = (heads.unflatten(-1, (-1, self.head_size)) for heads in self.qkv(x))
        if rotary is not None:
            q, k = rotate(q, rotary), rotate(k, rotary)
        q, k, v = (heads.transpose(1, 2) for heads in (q, k, v))
        if cache is not None:
            k, v = cache.extend(self.layer, k, v)
        return self.wo(self.core(q, k, v, noise).transpose(1, 2).flatten(2))

    def qkv(self, x: Tensor) -> tuple[Tensor, ...]:
        """Queries, keys and values, each (batch, seq, heads × head_size), of `x` (batch, seq, d_model)."""
        return self.wq(x), self.wk(x), self.wv(x)


class CoreAttention(nn.Module):
    """softmax(q kᵀ / √head_size) v. A module of its own, without parameters, because layouts treat it apart: it is what
    selective recomputation repeats and what context parallelism replaces."""

    def __init__(self, model: Model, layer: int):
        super().__init__()
        self.n_heads = model.n_heads
        self.dropout = model.dropout
        self.site = f"blocks.{layer}.attn.probabilities"

    def forward(self, q: Tensor, k: Tensor, v: Tensor, noise: Noise | None) -> Tensor:
        """`q` (batch, heads, seq, head_size), `k` and `v` (batch, kv_heads, keys, head_size) to
        (batch, heads, seq, head_size). The queries are those of the last `seq` of the keys."""
        grouped = q.shape[1] != k.shape[1]
        if noise is not None and self.dropout > 0:
            return self._with_dropout(q, k, v, noise)
        if q.shape[2] == k.shape[2]:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        # torch's is_causal would align the first query with the first key.
        mask = None if q.shape[2] == 1 else causal_mask(q, k)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=grouped)

    def _with_dropout(self, q: Tensor, k: Tensor, v: Tensor, noise: Noise) -> Tensor:
        """The same step by step: torch's fused kernels draw dropout masks of their own."""
        queries_per_key = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(queries_per_key, dim=1), v.repeat_interleave(queries_per_key, dim=1)
        scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1) + causal_mask(q, k)
        # In half precision the softmax adds in fp32 by itself; asked to return fp32 it would keep twice the memory.
        return noise.dropout_heads(scores.softmax(dim=-1), self.dropout, self.site, self.n_heads) @ v


class MLP(nn.Module):
    """Two matrices around a GELU, or three with a SiLU gate (SwiGLU, Shazeer 2020)."""

    def __init__(self, model: Model):
        super().__init__()
        self.gelu = "tanh" if model.activation == "gelu_tanh" else "none"
        self.up = Linear(model.d_model, model.ff_size, bias=model.bias)
        swiglu = model.activation == "swiglu"
        self.gate = Linear(model.d_model, model.ff_size, bias=model.bias) if swiglu else None
        self.down = Linear(model.ff_size, model.d_model, bias=model.bias)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, seq, d_model) to the same."""
        if self.gate is None:
            (wide,) = self.widen(x)
            return self.down(F.gelu(wide, approximate=self.gelu))
        wide, gate = self.widen(x)
        return self.down(F.silu(gate) * wide)

    def widen(self, x: Tensor) -> tuple[Tensor, ...]:
        """The hidden activations, and the gate's where there is one, each (batch, seq, width)."""
        return (self.up(x),) if self.gate is None else (self.up(x), self.gate(x))


class Head(nn.Module):
    """Logits from the final hidden states, by a matrix of its own or, where tied, by the embedding's."""

    multiply: Multiply = staticmethod(F.linear)

    def __init__(self, model: Model, vocab: int):
        super().__init__()
        self.weight = None if model.tied else nn.Parameter(torch.empty(vocab, model.d_model))

    def forward(self, x: Tensor, embedding: Tensor | None) -> Tensor:
        """(batch, seq, vocab) from `x` (batch, seq, d_model) and, where tied, `embedding` (vocab, d_model)."""
        weight = embedding if self.weight is None else self.weight
        assert weight is not None, "a tied head needs the embedding's weight"
        return self.multiply(x, weight)


def make_norm(model: Model) -> nn.Module:
    """The model's normalisation over d_model."""
    if model.norm == "rmsnorm":
        return nn.RMSNorm(model.d_model, eps=model.norm_eps)
    return nn.LayerNorm(model.d_model, eps=model.norm_eps, bias=model.bias)


def causal_mask(q: Tensor, k: Tensor) -> Tensor:
    """What to add to scores (seq, keys): 0 where a query may see a key (its own token's and all before; the last query
    belongs to the last key), -inf elsewhere."""
    seq, keys = q.shape[2], k.shape[2]
    return torch.full((seq, keys), float("-inf"), dtype=q.dtype, device=q.device).triu(keys - seq + 1)
