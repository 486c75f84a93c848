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

from phalanx.cost.habits import PHALANX, Habits
from phalanx.job.layout import Layout
from phalanx.job.model import Model
from phalanx.job.recompute import alike, recompute_of

INDEX = 8
"""Bytes of a place in a tensor (int64)."""
WIDE = 4
"""Bytes of a router's numbers, which are fp32 at least."""


class Kept(NamedTuple):
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
    model: Model,
    layout: Layout,
    micro_batch: int,
    width: int = 2,
    layer: int | None = None,
    habits: Habits = PHALANX,
    narrow: bool = False,
) -> int:
    """Bytes that block `layer` keeps on a rank of a micro-batch of so many sequences, in numbers of `width` bytes.

    By default it is the last block, which has experts where any has. What a layout adds or leaves out: without
    `layout.sp_regather` the inputs of the matrices are kept whole; without dropout there are no masks, and torch's
    fused attention keeps no scores. An RMS norm is counted as a layer norm; torch's for CPUs keeps an fp32 copy more,
    in half precisions two. Tokens are taken to spread evenly over experts, times `habits.imbalance`. `narrow`: products
    are in 8 bits, which matters to programs that keep their operands so.
    """
    layer = model.n_layers - 1 if layer is None else layer
    experts = model.is_moe_layer(layer)
    layout = alike(layout, recompute_of(layout, layer, model.n_layers))
    tokens = micro_batch * model.seq_len / layout.cp
    return round(tokens * sum(size for _, size in block(model, layout, width, experts, habits, narrow)))


@lru_cache(maxsize=4096)
def block(
    model: Model, layout: Layout, width: int, experts: bool, habits: Habits, narrow: bool = False
) -> tuple[tuple[str, float], ...]:
    """Operators of a block, with or without experts, and the bytes that each keeps on a rank of one of its tokens. It
    recomputes what `layout.recompute` says."""
    t, stream = layout.tp, model.d_model * width
    shares = {"whole": 1, "tokens": t if layout.sp else 1, "width": t}
    shares["gathered"] = shares["tokens"] if layout.sp_regather or habits.regathers else 1
    alone = (("block input", stream / shares["tokens"]),)
    if layout.recompute == "full":
        return alone
    selective = habits.selective if layout.recompute == "selective" else ""
    if selective == "products":
        kept = _products(model, width, experts)
    else:
        kept = operators(model, layout, width, experts, habits, read=1 if narrow and habits.keeps_narrow else width)
    found = (
        (each.operator, each.size / shares[each.cut]) for each in kept if not (selective == "core" and each.inside)
    )
    return tuple((name, size / 2) for name, size in (*alone, *found)) if selective == "layers" else tuple(found)


def operators(model: Model, layout: Layout, width: int, experts: bool, habits: Habits, read: int) -> Iterator[Kept]:
    """All that a block keeps, in the order of its forward pass: of what matrices read `read` bytes a number."""
    stream, mask = model.d_model * width, model.d_model if model.dropout else 0
    yield Kept("attn_norm", stream, "tokens")
    if model.mla.kv_rank:
        yield from _latent(model, width, habits, read)
    else:
        yield from _projections(model, layout, width, habits, read)
    yield from _core(model, layout, width, habits)
    # Attention's own backward pass reads its output, too.
    yield Kept("wo", model.n_heads * model.v_head_size * (width if read == width else width + read), "width")
    yield Kept("attn dropout", mask, "tokens")
    yield Kept("mlp_norm", stream, "tokens")
    if experts:
        yield from _experts(model, layout, width, habits, read)
    else:
        yield Kept("up", model.d_model * read, "gathered")
        yield Kept("mlp", model.ff_size * _hidden(model, width, habits, read), "width")
    yield Kept("mlp dropout", mask, "tokens")


def _projections(model: Model, layout: Layout, width: int, habits: Habits, read: int) -> Iterator[Kept]:
    """What queries, keys and values are made of, and they themselves. Rotary positions turn them and keep nothing."""
    queries = model.n_heads * model.head_size * width
    # Fewer key heads than ranks that share the heads: these hold copies.
    keys = max(model.kv_heads, layout.tp * layout.cp_ulysses) * model.head_size * width
    yield Kept("wq, wk, wv", model.d_model * read, "gathered")
    yield Kept("queries", queries, "width")
    yield Kept("keys, values", 2 * keys, "width")
    if _scored(model, layout, habits):
        # Without the fused kernel every head has keys and values of its own.
        yield Kept("keys, values of each head", 2 * (queries - keys), "width", inside=True)


def _latent(model: Model, width: int, habits: Habits, read: int) -> Iterator[Kept]:
    """Latent attention: compressed queries, keys and values before and after their norms, and what is made of them."""
    mla = model.mla
    spread = "tokens" if habits.routes_shards else "whole"
    heads = model.n_heads * width
    yield Kept("wq_a, wkv_a" if mla.q_rank else "wq, wkv_a", model.d_model * read, spread)
    yield Kept("q_norm, wq_b", mla.q_rank * (width + read), spread)
    yield Kept("kv_norm", (mla.kv_rank + mla.rope_head_dim) * width, spread)
    yield Kept("wkv_b", mla.kv_rank * read, spread)
    yield Kept("queries, keys", 2 * heads * model.head_size, "width")
    yield Kept("values", heads * (mla.v_head_dim + (0 if habits.values_apart else mla.nope_head_dim)), "width")


def _core(model: Model, layout: Layout, width: int, habits: Habits) -> Iterator[Kept]:
    """Attention's probabilities, where they are kept, and with dropout a mask and what it leaves of them."""
    if layout.cp_ulysses > 1:
        # The output before and after it exchanges heads for tokens.
        yield Kept("exchange", model.n_heads * model.v_head_size * width, "width", inside=True)
    if _scored(model, layout, habits):
        kept = 2 * width + 1 if model.dropout else width
        yield Kept("softmax", model.n_heads * model.seq_len * kept, "width", inside=True)


def _experts(model: Model, layout: Layout, width: int, habits: Habits, read: int) -> Iterator[Kept]:
    """A mixture of experts: `rows` are what tokens send to experts, `top_k` each unless there is a capacity."""
    moe, stream, hidden = model.moe, model.d_model * width, model.expert_ff_size * _hidden(model, width, habits, read)
    rows = float(moe.top_k)
    if moe.capacity:
        here = model.seq_len // layout.cp
        rows = moe.n_experts * min(moe.most_tokens(model.seq_len), here) / here
    arrived = rows * (habits.imbalance if layout.ep > 1 else 1)
    spread = "tokens" if habits.routes_shards else "whole"
    scores = moe.n_experts * WIDE * (2 if moe.z_loss else 1)
    gates = moe.top_k * (INDEX + (WIDE if moe.renormalise else 0)) + (2 * WIDE if moe.renormalise else 0)
    yield Kept("router", stream, spread)
    yield Kept("scores", scores, spread)
    yield Kept("gates", gates + rows * width, spread)
    yield Kept("places", 2 * INDEX * rows, spread)
    yield Kept("experts.up", arrived * model.d_model * read, spread)
    yield Kept("experts", arrived * hidden, "width")
    if not habits.weights_inside:
        # What experts wrote, and with gates: torch's index_add keeps what it adds.
        yield Kept("combine", 2 * rows * stream, spread)
    yield Kept("shared", moe.n_shared * hidden, "width")


def _products(model: Model, width: int, experts: bool) -> Iterator[Kept]:
    """torchtitan's selective recomputation by operator: the block's input, attention's output, what a reduce-scatter
    writes, and the first of every two matrix products: of wq, wk, wv, wo, gate, up, down it is wq, wv, gate, down."""
    stream = model.d_model * width
    hidden = model.moe.top_k * model.expert_ff_size if experts else model.ff_size
    yield Kept("block input", stream, "tokens")
    yield Kept("wq, wv", (model.n_heads * model.head_size + model.kv_heads * model.v_head_size) * width, "width")
    yield Kept("attention", model.n_heads * model.v_head_size * width, "width")
    yield Kept("gate", hidden * width, "width")
    yield Kept("down", stream, "tokens")


def _hidden(model: Model, width: int, habits: Habits, read: int) -> int:
    """Bytes a number of the hidden width that an MLP keeps: what it activates, and what the last matrix reads."""
    tensors = habits.swiglu_kept if model.activation == "swiglu" else 2
    return (tensors - 1) * width + read


def _scored(model: Model, layout: Layout, habits: Habits) -> bool:
    """Whether attention keeps its probabilities. A ring computes those of each of its blocks again."""
    if layout.ring > 1:
        return False
    return habits.scores == "always" or (habits.scores == "dropout" and model.dropout > 0)
