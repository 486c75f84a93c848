"""Small shapes of every kind that the transformer covers, for the tests of this folder and its neighbours."""

from __future__ import annotations

from dataclasses import replace

import torch

from phalanx.config.model import MLA, ModelConfig, MoE, RopeScaling, WideHeads
from phalanx.model.seeding import initialise
from phalanx.model.transformer import Transformer

_LLAMA = ModelConfig(
    n_layers=2,
    d_model=24,
    n_heads=4,
    n_kv_heads=2,
    vocab_size=37,
    seq_len=12,
    norm="rmsnorm",
    positions="rope",
    activation="swiglu",
    bias=False,
    tied=False,
    head_dim=8,
)

KINDS: dict[str, ModelConfig] = {
    "gpt2": ModelConfig(n_layers=2, d_model=24, n_heads=4, vocab_size=37, seq_len=12, activation="gelu_tanh"),
    "gpt2 without bias": ModelConfig(n_layers=2, d_model=24, n_heads=4, vocab_size=37, seq_len=12, bias=False),
    "gpt2 untied": ModelConfig(n_layers=1, d_model=24, n_heads=3, vocab_size=37, seq_len=12, tied=False, d_ff=40),
    "llama": _LLAMA,
    "llama 3.1": ModelConfig(
        **{**vars(_LLAMA), "n_kv_heads": 1, "rope_scaling": RopeScaling(factor=4.0, original_seq_len=16)}
    ),
    "linear scaling": ModelConfig(
        **{**vars(_LLAMA), "n_kv_heads": 0, "rope_scaling": RopeScaling(kind="linear", factor=2.0)}
    ),
    "qwen 2": ModelConfig(**{**vars(_LLAMA), "qkv_bias": True, "tied": True}),
}

MOE_AND_MLA: dict[str, ModelConfig] = {
    "mixtral": ModelConfig(**{**vars(_LLAMA), "moe": MoE(n_experts=4, top_k=2, d_ff=16, aux_loss=0.02)}),
    "gpt2 with experts": ModelConfig(
        **{**vars(KINDS["gpt2"]), "moe": MoE(n_experts=5, d_ff=16, renormalise=False, n_shared=1, z_loss=0.01)}
    ),
    "deepseek": ModelConfig(
        **{
            **vars(_LLAMA),
            "moe": MoE(
                n_experts=8,
                top_k=3,
                d_ff=16,
                n_shared=2,
                n_dense_layers=1,
                router="sigmoid",
                route_scale=2.5,
                n_groups=4,
                top_groups=2,
                aux_loss=0.01,
                bias_balanced=True,
            ),
            "mla": MLA(q_rank=12, kv_rank=8, rope_head_dim=4, nope_head_dim=6, v_head_dim=7),
        }
    ),
    "latent": ModelConfig(
        **{
            **vars(_LLAMA),
            "norm": "layernorm",
            "bias": True,
            "mla": MLA(kv_rank=8, rope_head_dim=6, nope_head_dim=4, v_head_dim=5),
        }
    ),
}
"""Kinds with mixture of experts, with latent attention, and with both."""

ATTENTION_KINDS: dict[str, ModelConfig] = {
    "gemma 2": replace(_LLAMA, window=5, full_every=2, attention_softcap=3.0, attention_scale=0.2),
    "gemma 3": replace(
        _LLAMA,
        n_layers=3,
        window=4,
        full_every=3,
        qk_norm="head",
        attention_scale=0.3,
        rope_theta=1e6,
        window_rope_theta=100.0,
        rope_scaling=RopeScaling(kind="linear", factor=8.0),
    ),
    "gemma 4": replace(
        _LLAMA,
        n_layers=3,
        window=4,
        full_every=3,
        wide=WideHeads(16, 1),
        values_are_keys=True,
        v_norm=True,
        qk_norm="head",
        attention_scale=1.0,
        rotary_pairs=0.25,
        window_rope_theta=100.0,
    ),
    "qwen 3": replace(_LLAMA, qk_norm="head", n_kv_heads=1),
    "olmo 2": replace(_LLAMA, qk_norm="width", rope_theta=500.0),
    "gpt-neox": replace(
        _LLAMA, norm="layernorm", bias=True, n_kv_heads=0, rotary_fraction=0.25, qk_norm="head", activation="gelu"
    ),
    "gpt-oss": replace(
        _LLAMA,
        window=3,
        full_every=2,
        sinks=True,
        qkv_bias=True,
        rope_scaling=RopeScaling(kind="yarn", factor=4.0, original_seq_len=16, beta_fast=2.0, truncate=False),
    ),
    "deepseek's yarn": replace(
        _LLAMA,
        rope_scaling=RopeScaling(kind="yarn", factor=4.0, original_seq_len=32, beta_fast=4.0, magnitude=1.3),
        attention_scale=0.5,
        sinks=True,
        attention_softcap=2.0,
        qk_norm="width",
        n_kv_heads=0,
    ),
}
"""Kinds whose attention has what model families add to it."""


STRUCTURE_KINDS: dict[str, ModelConfig] = {
    "norms after": replace(_LLAMA, norm_place="after"),
    "norms before and after": replace(
        _LLAMA, norm_place="both", activation="geglu", logit_softcap=2.0, scaled_embedding=True, tied=True
    ),
    "parallel block": replace(
        _LLAMA, norm="layernorm", bias=True, n_kv_heads=0, parallel_block=True, activation="gelu"
    ),
    "norms of shared and routed experts": replace(
        _LLAMA,
        norm_place="both",
        layer_scale=True,
        moe=MoE(n_experts=4, top_k=2, d_ff=16, n_shared=2, own_norms=True),
    ),
    "keys of earlier layers": replace(
        _LLAMA,
        n_layers=4,
        window=4,
        full_every=2,
        wide=WideHeads(16, 1),
        shared_keys=2,
        double_mlp=True,
        layer_embedding=6,
        qk_norm="head",
        v_norm=True,
        activation="geglu",
        window_rope_theta=100.0,
    ),
    "clamped experts": replace(
        _LLAMA,
        bias=True,
        activation="swiglu_clamped",
        moe=MoE(n_experts=4, top_k=2, d_ff=16, router_bias=True),
    ),
}
"""Kinds that differ in what lies around attention."""


def build(model: ModelConfig, dtype: torch.dtype = torch.float64, seed: int = 1) -> Transformer:
    """The model with weights large enough, and biases and norms far enough from 0 and 1, for a mistake to show."""
    transformer = Transformer(model)
    initialise(transformer, model, seed)
    transformer = transformer.to(dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in transformer.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=dtype), alpha=0.2)
    return transformer


def tokens(model: ModelConfig, batch: int, seq: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, model.vocab_size, (batch, seq), generator=generator)
