"""The operations of a step on one rank: matrix products, attention and memory-bound work of a block and of the head.

Only sizes: `phalanx.cost.layer` turns them into seconds. What memory-bound operations move is counted in passes over a
tensor, each read and each written operand one; a backward pass reads the gradient besides and writes another.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from phalanx.blocks.parameters import vocabulary
from phalanx.config.layout import Layout
from phalanx.config.model import ModelConfig
from phalanx.partition.tensor_slices import padded_vocabulary


class Product(NamedTuple):
    """`number` products of (m × k) by (k × n): rows are tokens, k × n is a weight."""

    name: str
    m: int
    n: int
    k: int
    number: int = 1
    sixteen: bool = False
    """Stays in 16 bits where the others run in 8 or 4: router and head."""


class Scores(NamedTuple):
    """Attention of one rank: `heads` of all its sequences, `queries` × `keys` pairs each (with cp of all the ring's
    steps together)."""

    sequences: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    head: int
    value_head: int


class MemoryBound(NamedTuple):
    """A memory-bound operation: numbers that it reads and writes forward and backward, and its kernels where nothing
    is fused."""

    name: str
    forward: float
    backward: float
    kernels: int = 1
    fused: bool = False
    """One kernel in every program."""


@dataclass(frozen=True)
class Work:
    """What one part of a model (a block, or what lies around the blocks) does for a micro-batch on one rank."""

    products: tuple[Product, ...]
    scores: Scores | None
    streams: tuple[MemoryBound, ...]

    @property
    def flops(self) -> int:
        """Forward FLOPs of the matrix products and of attention without a mask."""
        dense = sum(2 * p.m * p.n * p.k * p.number for p in self.products)
        if self.scores is None:
            return dense
        s = self.scores
        return dense + 2 * s.sequences * s.heads * s.queries * s.keys * (s.head + s.value_head)


@lru_cache(10_000)
def block(model: ModelConfig, layer: int, layout: Layout, micro_batch: int) -> Work:
    """One block. Routed experts get equal numbers of rows."""
    t = layout.tp
    tokens = -(-micro_batch * model.seq_len // layout.cp)
    beside = tokens * model.d_model / (t if layout.sp else 1)
    attention, streams, scores = _attention(model, layout, tokens, micro_batch)
    feed, more = _experts(model, layout, tokens) if model.is_moe_layer(layer) else _mlp(model, tokens, t)
    drops = 0.5 if model.dropout else 0
    # A norm reads and writes, a residual sum reads two and writes one; backward, gradients of both and the input again.
    around = (
        MemoryBound("norms", 4 * beside, 6 * beside, 2 if model.norm == "layernorm" else 8),
        MemoryBound("residuals", (6 + 2 * drops) * beside, (4 + 2 * drops) * beside, 4),
    )
    return Work((*attention, *feed), scores, (*around, *streams, *more))


def _attention(
    model: ModelConfig, layout: Layout, tokens: int, micro_batch: int
) -> tuple[list[Product], list[MemoryBound], Scores]:
    h, t, head, value = model.d_model, layout.tp, model.head_size, model.v_head_size
    heads = model.n_heads // t
    kv_heads = max(1, model.kv_heads // t)
    products: list[Product] = []
    streams: list[MemoryBound] = []
    if mla := (model.mla if model.mla.kv_rank else None):
        if mla.q_rank:
            products += [Product("wq_a", tokens, mla.q_rank, h), Product("wq_b", tokens, heads * head, mla.q_rank)]
        else:
            products.append(Product("wq", tokens, heads * head, h))
        products.append(Product("wkv_a", tokens, mla.kv_rank + mla.rope_head_dim, h))
        products.append(Product("wkv_b", tokens, heads * (mla.nope_head_dim + value), mla.kv_rank))
        latent = tokens * (mla.q_rank + mla.kv_rank)
        streams.append(MemoryBound("latent norms", 2 * latent, 3 * latent, 4))
        # Keys are put together of a part with positions, the same for all heads, and a part without.
        streams.append(MemoryBound("heads", 4 * tokens * heads * head, 4 * tokens * heads * head, 4))
        kv_heads = heads
    else:
        products.append(Product("qkv", tokens, heads * head + 2 * kv_heads * head, h))
    products.append(Product("wo", tokens, h, heads * value))
    if model.positions == "rope":
        turned = tokens * (heads + kv_heads) * model.rotary_size
        streams.append(MemoryBound("rotary", 2 * turned, 2 * turned, 6))
    keys = model.seq_len
    scores = Scores(micro_batch, heads, kv_heads, -(-model.seq_len // layout.cp), keys, head, value)
    return products, streams, scores


def _mlp(model: ModelConfig, tokens: int, t: int) -> tuple[list[Product], list[MemoryBound]]:
    width = model.ff_size // t
    return _feed("mlp", model, tokens, width, 1)


def _feed(name: str, model: ModelConfig, rows: int, width: int, count: int) -> tuple[list[Product], list[MemoryBound]]:
    """Two or three matrices and what lies between them, for `count` experts of `rows` rows each."""
    gated = model.activation == "swiglu"
    inner = count * rows * width
    products = [
        Product(f"{name}.up", rows, (2 if gated else 1) * width, model.d_model, count),
        Product(f"{name}.down", rows, model.d_model, width, count),
    ]
    streams = [MemoryBound(f"{name}.activation", (3 if gated else 2) * inner, (5 if gated else 3) * inner, 2)]
    return products, streams


def _experts(model: ModelConfig, layout: Layout, tokens: int) -> tuple[list[Product], list[MemoryBound]]:
    moe, h = model.moe, model.d_model
    own = max(1, moe.n_experts // layout.ep)
    routed = tokens * moe.top_k
    rows = max(1, routed * layout.ep // moe.n_experts)
    products, streams = _feed("experts", model, rows, max(1, model.expert_ff_size // layout.tp), own)
    products.insert(0, Product("router", tokens, moe.n_experts, h, sixteen=True))
    # Rows are copied into the order of their experts, and back with their gates, on both sides of the exchange.
    copies = 4 if layout.ep > 1 else 2
    streams.append(MemoryBound("permute", 2 * copies * routed * h, 2 * copies * routed * h, 8 + copies))
    streams.append(MemoryBound("route", 8 * tokens * moe.n_experts, 8 * tokens * moe.n_experts, 12))
    if moe.n_shared:
        shared = _feed("shared", model, tokens, moe.n_shared * model.expert_ff_size // layout.tp, 1)
        products += shared[0]
        streams += shared[1]
    return products, streams


@lru_cache(10_000)
def head(model: ModelConfig, layout: Layout, micro_batch: int) -> Work:
    """The last norm, the head and the loss: fp32 logits are read and written by the softmax and by its gradient."""
    tokens = -(-micro_batch * model.seq_len // layout.cp)
    rows = padded_vocabulary(vocabulary(model), layout.tp) // layout.tp
    product = Product("head", tokens, rows, model.d_model, sixteen=True)
    logits = tokens * rows
    streams = (
        MemoryBound("final norm", 2 * tokens * model.d_model, 3 * tokens * model.d_model, 1),
        MemoryBound("loss", 8 * logits, 6 * logits, 20),
    )
    return Work((product,), None, streams)


@lru_cache(10_000)
def embedding(model: ModelConfig, layout: Layout, micro_batch: int) -> Work:
    """Rows of a table, and the sum with the positions."""
    tokens = -(-micro_batch * model.seq_len // layout.cp)
    return Work((), None, (MemoryBound("embedding", 3 * tokens * model.d_model, 3 * tokens * model.d_model, 3),))
