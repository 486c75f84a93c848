"""What tensor ranks hold: together everything, each element counted once, and whole heads."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.blocks.operator import is_expert
from phalanx.blocks.parameters import parameter_shapes
from phalanx.config.model import MLA, ModelConfig, MoE
from phalanx.partition.tensor_slices import TensorSlice, experts_of, padded_vocabulary, slice_of

VOCABULARY_ROWS = ("embed.weight", "head.weight")
KEY_VALUE_ROWS = ("attn.wk.weight", "attn.wk.bias", "attn.wv.weight", "attn.wv.bias")

MIXTRAL = ModelConfig(
    n_layers=1,
    d_model=6,
    n_heads=12,
    n_kv_heads=6,
    head_dim=2,
    d_ff=12,
    vocab_size=12,
    activation="swiglu",
    moe=MoE(n_experts=5, d_ff=12),
)
DEEPSEEK = replace(
    MIXTRAL,
    n_layers=2,
    moe=MoE(n_experts=5, d_ff=12, n_shared=2, n_dense_layers=1, bias_balanced=True),
    mla=MLA(q_rank=5, kv_rank=7, rope_head_dim=2, nope_head_dim=3, v_head_dim=4),
)


@st.composite
def cut_models(draw: st.DrawFn) -> tuple[ModelConfig, int, int]:
    """A model, a vocabulary and a number of tensor ranks that the checks of a job let through."""
    tp = draw(st.integers(1, 6))
    kv_heads = draw(st.sampled_from([n for n in range(1, 13) if n % tp == 0 or tp % n == 0]))
    step = kv_heads if kv_heads % tp == 0 else tp
    layers = draw(st.integers(1, 2))
    moe, mla = MoE(), MLA()
    if draw(st.booleans()):
        moe = MoE(
            n_experts=draw(st.integers(1, 5)),
            d_ff=tp * draw(st.integers(1, 5)),
            n_shared=draw(st.integers(0, 2)),
            n_dense_layers=draw(st.integers(0, layers - 1)),
            bias_balanced=draw(st.booleans()),
        )
    if draw(st.booleans()):
        sizes = [draw(st.integers(1, 5)) for _ in range(4)]
        mla = MLA(draw(st.integers(0, 3)), sizes[0], 2 * sizes[1], sizes[2], sizes[3])
    model = ModelConfig(
        n_layers=layers,
        d_model=draw(st.integers(1, 9)),
        n_heads=step * draw(st.integers(1, 3)),
        n_kv_heads=kv_heads,
        head_dim=2 * draw(st.integers(1, 3)),
        d_ff=tp * draw(st.integers(1, 5)),
        seq_len=draw(st.integers(1, 6)),
        norm=draw(st.sampled_from(["layernorm", "rmsnorm"])),
        positions=draw(st.sampled_from(["learned", "rope"])),
        activation=draw(st.sampled_from(["gelu", "swiglu"])),
        bias=draw(st.booleans()),
        qkv_bias=draw(st.booleans()),
        tied=draw(st.booleans()),
        moe=moe,
        mla=mla,
    )
    return model, draw(st.integers(1, 30)), tp


@settings(max_examples=60)
@given(cut_models())
def test_first_pieces_tile_every_parameter_exactly_once(case):
    model, vocab, tp = case
    for name, whole in parameter_shapes(model, vocab).items():
        slices = [slice_of(name, whole, model, tp, rank) for rank in range(tp)]
        counted = np.zeros(whole, dtype=int)
        for each in slices:
            assert each.whole == whole
            assert min(each.shape) > 0
            assert each.shape == slices[0].shape  # every rank's program is the same
            if not each.first:
                continue
            if each.dim is None:
                counted += 1
            else:
                held = [slice(None)] * len(whole)
                held[each.dim] = slice(each.start, each.start + each.real)
                counted[tuple(held)] += 1
        assert (counted == 1).all(), name


@settings(max_examples=60)
@given(cut_models())
def test_only_the_vocabulary_is_padded(case):
    model, vocab, tp = case
    for name, whole in parameter_shapes(model, vocab).items():
        slices = [slice_of(name, whole, model, tp, rank) for rank in range(tp)]
        if slices[0].dim is None:
            continue
        padding = sum(each.size - each.real for each in slices)
        expected = padded_vocabulary(vocab, tp) - vocab if name.endswith(VOCABULARY_ROWS) else 0
        assert padding == expected, name
        assert all(0 <= each.real <= each.size for each in slices)


@settings(max_examples=60)
@given(cut_models())
def test_each_rank_has_the_key_value_heads_that_its_queries_read(case):
    model, vocab, tp = case
    queries_each, group = model.n_heads // tp, model.n_heads // model.kv_heads
    for name, whole in parameter_shapes(model, vocab).items():
        if not name.endswith(KEY_VALUE_ROWS):
            continue
        slices = [slice_of(name, whole, model, tp, rank) for rank in range(tp)]
        for rank, each in enumerate(slices):
            needed = {query // group for query in range(rank * queries_each, (rank + 1) * queries_each)}
            start = each.start if each.dim == 0 else 0
            held = each.size if each.dim == 0 else whole[0]
            assert (start % model.head_size, held % model.head_size) == (0, 0)
            assert needed == set(range(start // model.head_size, (start + held) // model.head_size))
            assert each.copies == max(1, tp // model.kv_heads)
            assert each.first == (rank % each.copies == 0)
            first = rank - rank % each.copies
            assert all(slices[first + i].start == each.start for i in range(each.copies))


@settings(max_examples=30)
@given(st.sampled_from([MIXTRAL, DEEPSEEK]), st.sampled_from([1, 2, 3, 6, 12]), st.booleans())
def test_cut_and_put_together_again_experts_and_latent_attention_are_whole(model, tp, bias):
    model = replace(model, bias=bias)
    for name, shape in parameter_shapes(model).items():
        whole = np.arange(prod(shape)).reshape(shape)
        slices = [slice_of(name, shape, model, tp, rank) for rank in range(tp)]
        if slices[0].dim is None:
            continue
        dim = slices[0].dim
        parts = [whole.take(range(p.start, p.start + p.size), axis=dim) for p in slices if p.first]
        assert (np.concatenate(parts, axis=dim) == whole).all(), name


@settings(max_examples=60)
@given(cut_models())
def test_latent_attention_is_cut_between_heads(case):
    """Queries, keys and values of a head, and what the output reads of it, lie on one rank."""
    model, vocab, tp = case
    of_a_head = {
        "attn.wq.weight": model.head_size,
        "attn.wq_b.weight": model.head_size,
        "attn.wkv_b.weight": model.mla.nope_head_dim + model.mla.v_head_dim,
        "attn.wo.weight": model.v_head_size,
    }
    for name, whole in parameter_shapes(model, vocab).items():
        width = of_a_head.get(name.partition(".")[2].partition(".")[2])
        if width is None or tp == 1:
            continue
        for rank in range(tp):
            each = slice_of(name, whole, model, tp, rank)
            heads = model.n_heads // tp
            assert (each.start, each.size) == (rank * heads * width, heads * width), name


def test_what_serves_all_heads_and_the_router_are_whole():
    whole = {
        name for name, shape in parameter_shapes(DEEPSEEK).items() if slice_of(name, shape, DEEPSEEK, 2, 1).dim is None
    }
    latent = {"wq_a.weight", "wq_a.bias", "q_norm.weight", "q_norm.bias", "kv_norm.weight", "kv_norm.bias"}
    latent |= {"wkv_a.weight", "wkv_a.bias", "wo.bias"}
    of_a_block = {f"attn.{name}" for name in latent}
    of_a_block |= {f"{norm}.{leaf}" for norm in ("attn_norm", "mlp_norm") for leaf in ("weight", "bias")}
    experts = {"router.weight", "router.bias", "experts.down.bias", "shared.down.bias"}
    expected = {f"blocks.{layer}.{name}" for layer in (0, 1) for name in of_a_block}
    expected |= {"blocks.0.mlp.down.bias"} | {f"blocks.1.moe.{name}" for name in experts}
    assert whole == expected | {"positions.weight", "final_norm.weight", "final_norm.bias"}


@given(st.integers(1, 40), st.integers(1, 16))
def test_every_expert_is_on_one_rank_and_ranks_have_equally_many(each, ep):
    held = [experts_of(each * ep, ep, rank) for rank in range(ep)]
    assert [expert for mine in held for expert in mine] == list(range(each * ep))
    assert {len(mine) for mine in held} == {each}


def test_routed_experts_are_told_by_name():
    names = {name for name in parameter_shapes(DEEPSEEK) if is_expert(name)}
    leaves = {f"{matrix}.{leaf}" for matrix in ("up", "gate", "down") for leaf in ("weight", "bias")}
    assert names == {f"blocks.1.moe.experts.{leaf}" for leaf in leaves}


@given(st.integers(1, 10**6), st.integers(1, 64))
def test_padding_is_less_than_a_row_a_rank(vocab, tp):
    padded = padded_vocabulary(vocab, tp)
    assert padded % tp == 0
    assert 0 <= padded - vocab < tp


def test_by_hand():
    model = ModelConfig(n_layers=1, d_model=8, n_heads=4, n_kv_heads=2, vocab_size=10, head_dim=2)
    assert slice_of("embed.weight", (10, 8), model, 4, 3) == TensorSlice((10, 8), 0, 9, 3)
    assert slice_of("embed.weight", (10, 8), model, 4, 3).real == 1
    assert slice_of("blocks.0.attn.wk.weight", (4, 8), model, 4, 1) == TensorSlice(
        (4, 8), 0, 0, 2, copies=2, first=False
    )
    assert slice_of("blocks.0.attn.wk.weight", (4, 8), model, 4, 2) == TensorSlice(
        (4, 8), 0, 2, 2, copies=2, first=True
    )
    assert slice_of("blocks.0.attn.wo.weight", (8, 8), model, 4, 1) == TensorSlice((8, 8), 1, 2, 2)
    assert slice_of("blocks.0.attn.wo.bias", (8,), model, 4, 1) == TensorSlice((8,), copies=4, first=False)
    assert slice_of("blocks.0.mlp.up.bias", (32,), model, 4, 1) == TensorSlice((32,), 0, 8, 8)
    assert slice_of("final_norm.weight", (8,), model, 1, 0) == TensorSlice((8,))
    assert slice_of("blocks.0.moe.experts.up.weight", (5, 12, 6), MIXTRAL, 3, 1) == TensorSlice((5, 12, 6), 1, 4, 4)
    assert slice_of("blocks.0.moe.experts.gate.bias", (5, 12), MIXTRAL, 3, 2) == TensorSlice((5, 12), 1, 8, 4)
    assert slice_of("blocks.0.moe.experts.down.weight", (5, 6, 12), MIXTRAL, 3, 1) == TensorSlice((5, 6, 12), 2, 4, 4)
    assert slice_of("blocks.1.moe.shared.up.weight", (24, 6), DEEPSEEK, 3, 1) == TensorSlice((24, 6), 0, 8, 8)
    assert slice_of("blocks.1.moe.shared.down.weight", (6, 24), DEEPSEEK, 3, 1) == TensorSlice((6, 24), 1, 8, 8)
    assert slice_of("blocks.1.attn.wq_b.weight", (60, 5), DEEPSEEK, 3, 1) == TensorSlice((60, 5), 0, 20, 20)


def test_a_piece_beyond_the_vocabulary_is_all_padding():
    last = slice_of("embed.weight", (3, 2), ModelConfig(), 8, 7)
    assert (last.start, last.size, last.real, prod(last.shape)) == (7, 1, 0, 2)


def test_what_is_not_cut_has_no_padding():
    with pytest.raises(AssertionError, match="only a cut dimension is padded"):
        _ = TensorSlice((3,)).real
