from __future__ import annotations

from dataclasses import replace
from math import prod

import pytest

from phalanx.blocks.parameters import block_shapes, count, count_active, parameter_shapes, vocabulary
from phalanx.config.model import MLA, ModelConfig, MoE
from phalanx.errors import JobError


def test_gpt2_kind_by_hand():
    model = ModelConfig(n_layers=1, d_model=8, n_heads=2, vocab_size=11, seq_len=5)
    assert parameter_shapes(model) == {
        "embed.weight": (11, 8),
        "positions.weight": (5, 8),
        "blocks.0.attn_norm.weight": (8,),
        "blocks.0.attn_norm.bias": (8,),
        "blocks.0.attn.wq.weight": (8, 8),
        "blocks.0.attn.wq.bias": (8,),
        "blocks.0.attn.wk.weight": (8, 8),
        "blocks.0.attn.wk.bias": (8,),
        "blocks.0.attn.wv.weight": (8, 8),
        "blocks.0.attn.wv.bias": (8,),
        "blocks.0.attn.wo.weight": (8, 8),
        "blocks.0.attn.wo.bias": (8,),
        "blocks.0.mlp_norm.weight": (8,),
        "blocks.0.mlp_norm.bias": (8,),
        "blocks.0.mlp.up.weight": (32, 8),
        "blocks.0.mlp.up.bias": (32,),
        "blocks.0.mlp.down.weight": (8, 32),
        "blocks.0.mlp.down.bias": (8,),
        "final_norm.weight": (8,),
        "final_norm.bias": (8,),
    }


def test_llama_kind_with_experts_and_latent_attention_by_hand():
    model = ModelConfig(
        n_layers=2,
        d_model=8,
        n_heads=2,
        vocab_size=11,
        norm="rmsnorm",
        positions="rope",
        activation="swiglu",
        bias=False,
        tied=False,
        d_ff=20,
        moe=MoE(n_experts=4, top_k=2, d_ff=6, n_shared=2, n_dense_layers=1, bias_balanced=True),
        mla=MLA(q_rank=5, kv_rank=3, rope_head_dim=2, nope_head_dim=4, v_head_dim=7),
    )
    attention = {
        "attn_norm.weight": (8,),
        "attn.wq_a.weight": (5, 8),
        "attn.q_norm.weight": (5,),
        "attn.wq_b.weight": (2 * (4 + 2), 5),
        "attn.wkv_a.weight": (3 + 2, 8),
        "attn.kv_norm.weight": (3,),
        "attn.wkv_b.weight": (2 * (4 + 7), 3),
        "attn.wo.weight": (8, 2 * 7),
        "mlp_norm.weight": (8,),
    }
    assert block_shapes(model, 0) == attention | {
        "mlp.up.weight": (20, 8),
        "mlp.gate.weight": (20, 8),
        "mlp.down.weight": (8, 20),
    }
    assert block_shapes(model, 1) == attention | {
        "moe.router.weight": (4, 8),
        "moe.router.bias": (4,),
        "moe.experts.up.weight": (4, 6, 8),
        "moe.experts.gate.weight": (4, 6, 8),
        "moe.experts.down.weight": (4, 8, 6),
        "moe.shared.up.weight": (12, 8),
        "moe.shared.gate.weight": (12, 8),
        "moe.shared.down.weight": (8, 12),
    }
    assert list(parameter_shapes(model))[-2:] == ["final_norm.weight", "head.weight"]
    assert count(model) - count_active(model) == 2 * 3 * 6 * 8  # two experts of four stay idle


def test_queries_without_compression_have_one_matrix():
    model = ModelConfig(d_model=8, n_heads=2, mla=MLA(kv_rank=3, rope_head_dim=2, nope_head_dim=4))
    names = list(block_shapes(model, 0))
    assert "attn.wq.weight" in names
    assert "attn.wq_a.weight" not in names
    assert block_shapes(model, 0)["attn.wq.weight"] == (12, 8)


def test_biases_follow_their_flags():
    model = ModelConfig(vocab_size=11, bias=False)
    assert not [name for name in parameter_shapes(model) if name.endswith(".bias")]
    qwen = [name for name in block_shapes(replace(model, qkv_bias=True), 0) if name.endswith(".bias")]
    assert qwen == ["attn.wq.bias", "attn.wk.bias", "attn.wv.bias"]
    rms = parameter_shapes(replace(model, bias=True, norm="rmsnorm"))
    assert not [name for name in rms if "norm" in name and name.endswith(".bias")]


def test_a_tied_head_is_counted_once():
    model = ModelConfig(vocab_size=1000, d_model=128)
    assert count(replace(model, tied=False)) - count(model) == 1000 * 128
    assert count(model) == sum(map(prod, parameter_shapes(model).values())) == count_active(model)


def test_the_vocabulary_is_the_tokenizers_where_it_is_given():
    assert vocabulary(ModelConfig(vocab_size=50257), 65) == 65
    assert vocabulary(ModelConfig(vocab_size=50257)) == 50257
    assert parameter_shapes(ModelConfig(), 65)["embed.weight"] == (65, 128)
    with pytest.raises(JobError, match=r"model\.vocab_size is 0, which means the tokenizer's vocabulary"):
        count(ModelConfig())


def test_tokens_within_an_experts_capacity():
    moe = MoE(n_experts=8, top_k=2)
    assert moe.most_tokens(64) == 64  # no limit
    assert replace(moe, capacity=1.0).most_tokens(64) == 16
    assert replace(moe, capacity=1.25).most_tokens(66) == 21  # of 20.6
    assert replace(moe, capacity=1.1).most_tokens(40) == 11  # though 1.1 × 10 is 11.000000000000002
    assert replace(moe, capacity=100.0).most_tokens(64) == 64


def test_gpt2_kind_with_experts_by_hand():
    model = ModelConfig(d_model=8, n_heads=2, moe=MoE(n_experts=3, d_ff=6, n_shared=1))
    experts = {name: shape for name, shape in block_shapes(model, 0).items() if name.startswith("moe.")}
    assert experts == {
        "moe.router.weight": (3, 8),
        "moe.experts.up.weight": (3, 6, 8),
        "moe.experts.up.bias": (3, 6),
        "moe.experts.down.weight": (3, 8, 6),
        "moe.experts.down.bias": (3, 8),
        "moe.shared.up.weight": (6, 8),
        "moe.shared.up.bias": (6,),
        "moe.shared.down.weight": (8, 6),
        "moe.shared.down.bias": (8,),
    }
    of_one = 6 * 8 + 6 + 8 * 6 + 8
    assert count(replace(model, vocab_size=11)) - count_active(replace(model, vocab_size=11)) == 4 * of_one
