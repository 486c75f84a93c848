"""What a block keeps from its forward to its backward pass: its operators, one after the other, and what each keeps.

From the list follows Korthikanti et al. 2022, table 2, for the GPT-2 kind with dropout (s tokens, b sequences, h wide,
a heads, t tensor ranks, 2 bytes a number): sbh (34 + 5as/h) of everything; sbh (10 + 24/t + 5as/ht) with tp; all of it
by t with sp; without the terms in a s with selective recomputation; 2sbh with full. Two bytes a norm's mean and
deviation are left out, as there, and attention's log-sum-exp, four bytes a head.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Literal, NamedTuple

from phalanx.config.layout import Layout
from phalanx.config.model import ModelConfig
from phalanx.cost.frameworks.memory_profile import PHALANX, MemoryProfile
from phalanx.partition.recompute import alike, recompute_of

INDEX = 8
"""Bytes of a place in a tensor (int64)."""
WIDE = 4
"""Bytes of a router's numbers, which are fp32 at least."""


class SavedTensor(NamedTuple):
    """What one operator keeps of a token, all tensor ranks together, and how a layout cuts it."""

    operator: str
    size: float
    """Bytes."""
    cut: Literal["whole", "tokens", "gathered", "width"]
    """How tp ranks share it. tokens: with sp, each has its own. gathered: so too, where inputs are gathered again in
    the backward pass, else each has all. width: each has a part of the heads or of the hidden width. whole: none."""
    inside: bool = False
    """It lies inside attention's core, which selective recomputation repeats."""


def activation_bytes(
    model: ModelConfig,
    layout: Layout,
    micro_batch: int,
    width: int = 2,
    layer: int | None = None,
    memory_profile: MemoryProfile = PHALANX,
    narrow: bool = False,
) -> int:
    """Bytes that block `layer` keeps on a rank of a micro-batch of so many sequences, in numbers of `width` bytes.

    By default it is the last block, which has experts where any has. What a layout adds or leaves out: without
    `layout.sp_regather` the inputs of the matrices are kept whole; without dropout there are no masks, and torch's
    fused attention keeps no scores. An RMS norm is counted as a layer norm; torch's for CPUs keeps an fp32 copy more,
    in half precisions two. Tokens spread evenly over experts, times `memory_profile.imbalance`. `narrow`: products
    are in 8 bits, which matters to programs that keep their operands so.
    """
    layer = model.n_layers - 1 if layer is None else layer
    experts = model.is_moe_layer(layer)
    layout = alike(layout, recompute_of(layout, layer, model.n_layers))
    tokens = micro_batch * model.seq_len / layout.cp
    return round(tokens * sum(size for _, size in block(model, layout, width, experts, memory_profile, narrow)))


@lru_cache(maxsize=4096)
def block(
    model: ModelConfig, layout: Layout, width: int, experts: bool, memory_profile: MemoryProfile, narrow: bool = False
) -> tuple[tuple[str, float], ...]:
    """Operators of a block, with or without experts, and the bytes that each keeps on a rank of one of its tokens. It
    recomputes what `layout.recompute` says."""
    t, stream = layout.tp, model.d_model * width
    shares = {"whole": 1, "tokens": t if layout.sp else 1, "width": t}
    shares["gathered"] = shares["tokens"] if layout.sp_regather or memory_profile.regathers else 1
    alone = (("block input", stream / shares["tokens"]),)
    if layout.recompute == "full":
        return alone
    selective = memory_profile.selective if layout.recompute == "selective" else ""
    if selective == "products":
        kept = _products(model, width, experts)
    else:
        kept = operators(
            model, layout, width, experts, memory_profile, read=1 if narrow and memory_profile.keeps_narrow else width
        )
    found = (
        (each.operator, each.size / shares[each.cut]) for each in kept if not (selective == "core" and each.inside)
    )
    return tuple((name, size / 2) for name, size in (*alone, *found)) if selective == "layers" else tuple(found)


def operators(
    model: ModelConfig, layout: Layout, width: int, experts: bool, memory_profile: MemoryProfile, read: int
) -> Iterator[SavedTensor]:
    """All that a block keeps, in the order of its forward pass: of what matrices read `read` bytes a number."""
    stream, mask = model.d_model * width, model.d_model if model.dropout else 0
    yield SavedTensor("attn_norm", stream, "tokens")
    if model.mla.kv_rank:
        yield from _latent(model, width, memory_profile, read)
    else:
        yield from _projections(model, layout, width, memory_profile, read)
    yield from _core(model, layout, width, memory_profile)
    # Attention's own backward pass reads its output, too.
    yield SavedTensor("wo", model.n_heads * model.v_head_size * (width if read == width else width + read), "width")
    yield SavedTensor("attn dropout", mask, "tokens")
    yield SavedTensor("mlp_norm", stream, "tokens")
    if experts:
        yield from _experts(model, layout, width, memory_profile, read)
    else:
        yield SavedTensor("up", model.d_model * read, "gathered")
        yield SavedTensor("mlp", model.ff_size * _hidden(model, width, memory_profile, read), "width")
    yield SavedTensor("mlp dropout", mask, "tokens")


def _projections(
    model: ModelConfig, layout: Layout, width: int, memory_profile: MemoryProfile, read: int
) -> Iterator[SavedTensor]:
    """What queries, keys and values are made of, and they themselves. Rotary positions turn them and keep nothing."""
    queries = model.n_heads * model.head_size * width
    # Fewer key heads than ranks that share the heads: these hold copies.
    keys = max(model.kv_heads, layout.tp * layout.cp_ulysses) * model.head_size * width
    yield SavedTensor("wq, wk, wv", model.d_model * read, "gathered")
    yield SavedTensor("queries", queries, "width")
    yield SavedTensor("keys, values", 2 * keys, "width")
    if _scored(model, layout, memory_profile):
        # Without the fused kernel every head has keys and values of its own.
        yield SavedTensor("keys, values of each head", 2 * (queries - keys), "width", inside=True)


def _latent(model: ModelConfig, width: int, memory_profile: MemoryProfile, read: int) -> Iterator[SavedTensor]:
    """Latent attention: compressed queries, keys and values before and after their norms, and what is made of them."""
    mla = model.mla
    spread = "tokens" if memory_profile.routes_shards else "whole"
    heads = model.n_heads * width
    yield SavedTensor("wq_a, wkv_a" if mla.q_rank else "wq, wkv_a", model.d_model * read, spread)
    yield SavedTensor("q_norm, wq_b", mla.q_rank * (width + read), spread)
    yield SavedTensor("kv_norm", (mla.kv_rank + mla.rope_head_dim) * width, spread)
    yield SavedTensor("wkv_b", mla.kv_rank * read, spread)
    yield SavedTensor("queries, keys", 2 * heads * model.head_size, "width")
    yield SavedTensor(
        "values", heads * (mla.v_head_dim + (0 if memory_profile.values_apart else mla.nope_head_dim)), "width"
    )


def _core(model: ModelConfig, layout: Layout, width: int, memory_profile: MemoryProfile) -> Iterator[SavedTensor]:
    """Attention's probabilities, where they are kept, and with dropout a mask and what it leaves of them."""
    if layout.cp_ulysses > 1:
        # The output before and after it exchanges heads for tokens.
        yield SavedTensor("exchange", model.n_heads * model.v_head_size * width, "width", inside=True)
    if _scored(model, layout, memory_profile):
        kept = 2 * width + 1 if model.dropout else width
        yield SavedTensor("softmax", model.n_heads * model.seq_len * kept, "width", inside=True)


def _experts(
    model: ModelConfig, layout: Layout, width: int, memory_profile: MemoryProfile, read: int
) -> Iterator[SavedTensor]:
    """A mixture of experts: `rows` are what tokens send to experts, `top_k` each unless there is a capacity."""
    moe, stream, hidden = (
        model.moe,
        model.d_model * width,
        model.expert_ff_size * _hidden(model, width, memory_profile, read),
    )
    rows = float(moe.top_k)
    if moe.capacity:
        here = model.seq_len // layout.cp
        rows = moe.n_experts * min(moe.most_tokens(model.seq_len), here) / here
    arrived = rows * (memory_profile.imbalance if layout.ep > 1 else 1)
    spread = "tokens" if memory_profile.routes_shards else "whole"
    scores = moe.n_experts * WIDE * (2 if moe.z_loss else 1)
    gates = moe.top_k * (INDEX + (WIDE if moe.renormalise else 0)) + (2 * WIDE if moe.renormalise else 0)
    yield SavedTensor("router", stream, spread)
    yield SavedTensor("scores", scores, spread)
    yield SavedTensor("gates", gates + rows * width, spread)
    yield SavedTensor("places", 2 * INDEX * rows, spread)
    yield SavedTensor("experts.up", arrived * model.d_model * read, spread)
    yield SavedTensor("experts", arrived * hidden, "width")
    if not memory_profile.weights_inside:
        # What experts wrote, and with gates: torch's index_add keeps what it adds.
        yield SavedTensor("combine", 2 * rows * stream, spread)
    yield SavedTensor("shared", moe.n_shared * hidden, "width")


def _products(model: ModelConfig, width: int, experts: bool) -> Iterator[SavedTensor]:
    """torchtitan's selective recomputation by operator: the block's input, attention's output, what a reduce-scatter
    writes, and the first of every two matrix products: of wq, wk, wv, wo, gate, up, down it is wq, wv, gate, down."""
    stream = model.d_model * width
    hidden = model.moe.top_k * model.expert_ff_size if experts else model.ff_size
    yield SavedTensor("block input", stream, "tokens")
    yield SavedTensor("wq, wv", (model.n_heads * model.head_size + model.kv_heads * model.v_head_size) * width, "width")
    yield SavedTensor("attention", model.n_heads * model.v_head_size * width, "width")
    yield SavedTensor("gate", hidden * width, "width")
    yield SavedTensor("down", stream, "tokens")


def _hidden(model: ModelConfig, width: int, memory_profile: MemoryProfile, read: int) -> int:
    """Bytes a number of the hidden width that an MLP keeps: what it activates, and what the last matrix reads."""
    tensors = memory_profile.swiglu_kept if model.activation == "swiglu" else 2
    return (tensors - 1) * width + read


def _scored(model: ModelConfig, layout: Layout, memory_profile: MemoryProfile) -> bool:
    """Whether attention keeps its probabilities. A ring computes those of each of its blocks again."""
    if layout.ring > 1:
        return False
    return memory_profile.scores == "always" or (memory_profile.scores == "dropout" and model.dropout > 0)
