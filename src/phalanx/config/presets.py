"""Known models as `ModelConfig` values, each with its source. docs/model.md tabulates them with their parameter counts.

A preset is a published shape. Its seq_len is the context length of the main pre-training phase or of the released
configuration; a job overrides it, and any other field, after naming the preset.
"""

from __future__ import annotations

from dataclasses import replace

from phalanx.config.model import MLA, ModelConfig, MoE, RopeScaling


def _gpt(layers: int, width: int, heads: int, *, vocab: int = 50257, seq_len: int) -> ModelConfig:
    return ModelConfig(
        n_layers=layers,
        d_model=width,
        n_heads=heads,
        vocab_size=vocab,
        seq_len=seq_len,
        activation="gelu_tanh",
    )


def _megatron(layers: int, width: int, heads: int) -> ModelConfig:
    return _gpt(layers, width, heads, vocab=51200, seq_len=2048)


def _llama(
    layers: int,
    width: int,
    heads: int,
    *,
    kv_heads: int,
    d_ff: int,
    vocab: int,
    seq_len: int,
    rope_theta: float,
) -> ModelConfig:
    return ModelConfig(
        n_layers=layers,
        d_model=width,
        n_heads=heads,
        n_kv_heads=kv_heads,
        d_ff=d_ff,
        vocab_size=vocab,
        seq_len=seq_len,
        norm="rmsnorm",
        positions="rope",
        activation="swiglu",
        bias=False,
        tied=False,
        rope_theta=rope_theta,
    )


def _llama2(layers: int, width: int, heads: int, *, kv_heads: int, d_ff: int) -> ModelConfig:
    return _llama(layers, width, heads, kv_heads=kv_heads, d_ff=d_ff, vocab=32000, seq_len=4096, rope_theta=10000.0)


def _llama3(layers: int, width: int, heads: int, *, d_ff: int) -> ModelConfig:
    return _llama(layers, width, heads, kv_heads=8, d_ff=d_ff, vocab=128256, seq_len=8192, rope_theta=500000.0)


_SHAPES: dict[str, ModelConfig] = {
    # Radford et al. 2019, Table 2; widths and heads as in the released checkpoints (openai-community/gpt2* on the
    # Hugging Face hub). Table 2 prints 117M and 345M for the first two; the checkpoints hold 124M and 355M.
    "gpt2": _gpt(12, 768, 12, seq_len=1024),
    "gpt2-medium": _gpt(24, 1024, 16, seq_len=1024),
    "gpt2-large": _gpt(36, 1280, 20, seq_len=1024),
    "gpt2-xl": _gpt(48, 1600, 25, seq_len=1024),
    # Brown et al. 2020, Table 2.1, last row.
    "gpt3-175b": _gpt(96, 12288, 96, seq_len=2048),
    # Narayanan et al. 2021 (Megatron-LM, arXiv 2104.04473), Table 1: vocabulary 51,200, sequence 2,048.
    "megatron-1.7b": _megatron(24, 2304, 24),
    "megatron-3.6b": _megatron(30, 3072, 32),
    "megatron-7.5b": _megatron(36, 4096, 32),
    "megatron-18.4b": _megatron(40, 6144, 48),
    "megatron-39.1b": _megatron(48, 8192, 64),
    "megatron-76.1b": _megatron(60, 10240, 80),
    "megatron-145.6b": _megatron(80, 12288, 96),
    "megatron-310.1b": _megatron(96, 16384, 128),
    "megatron-529.6b": _megatron(105, 20480, 128),
    "megatron-1008b": _megatron(128, 25600, 160),
    # Touvron et al. 2023b; config.json of meta-llama/Llama-2-{7b,13b,70b}-hf.
    "llama2-7b": _llama2(32, 4096, 32, kv_heads=32, d_ff=11008),
    "llama2-13b": _llama2(40, 5120, 40, kv_heads=40, d_ff=13824),
    "llama2-70b": _llama2(80, 8192, 64, kv_heads=8, d_ff=28672),
    # Llama Team 2024 (arXiv 2407.21783), Table 3; config.json of meta-llama/Meta-Llama-3-{8B,70B}. The 8,192 tokens
    # are those of pre-training. Llama 3.1's 8B and 70B differ only in rope_scaling.factor=8 and seq_len=131072.
    "llama3-8b": _llama3(32, 4096, 32, d_ff=14336),
    "llama3-70b": _llama3(80, 8192, 64, d_ff=28672),
    # config.json of meta-llama/Llama-3.1-405B: released as 3.1 only, hence with its stretched positions.
    "llama3-405b": replace(_llama3(126, 16384, 128, d_ff=53248), rope_scaling=RopeScaling(factor=8.0)),
    # Jiang et al. 2024 (arXiv 2401.04088), Table 1; config.json of mistralai/Mixtral-8x7B-v0.1, whose
    # router_aux_loss_coef is aux_loss.
    "mixtral-8x7b": replace(
        _llama(32, 4096, 32, kv_heads=8, d_ff=14336, vocab=32000, seq_len=32768, rope_theta=1000000.0),
        moe=MoE(n_experts=8, top_k=2, aux_loss=0.02),
    ),
    # DeepSeek-AI 2024 (arXiv 2412.19437), section 4.2; inference/configs/config_671B.json of the release. Pre-trained
    # at 4,096 tokens. aux_loss is the report's alpha, bias_rate its gamma (0 for the last 500 B tokens). Without the
    # multi-token-prediction module, which the 671 B leave out too.
    "deepseek-v3": replace(
        _llama(61, 7168, 128, kv_heads=128, d_ff=18432, vocab=129280, seq_len=4096, rope_theta=10000.0),
        norm_eps=1e-6,
        init_std=0.006,
        moe=MoE(
            n_experts=256,
            top_k=8,
            d_ff=2048,
            n_shared=1,
            n_dense_layers=3,
            router="sigmoid",
            route_scale=2.5,
            n_groups=8,
            top_groups=4,
            aux_loss=0.0001,
            bias_balanced=True,
            bias_rate=0.001,
        ),
        mla=MLA(q_rank=1536, kv_rank=512, rope_head_dim=64, nope_head_dim=128, v_head_dim=128),
    ),
    # Upstage 2026 (arXiv 2601.07022); config.json of upstage/Solar-Open-100B; router as in the release's code
    # (transformers, models/solar_open). The 4,096 tokens are an assumption: no
    # public page read for this says how long its first phase's sequences were.
    "solar-open-100b": replace(
        _llama(48, 4096, 64, kv_heads=8, d_ff=10240, vocab=196608, seq_len=4096, rope_theta=1000000.0),
        head_dim=128,
        moe=MoE(n_experts=128, top_k=8, d_ff=1280, n_shared=1, router="sigmoid", bias_balanced=True),
    ),
    # nanoGPT's config/train_shakespeare_char.py: the model that learns Shakespeare's characters in minutes.
    "baby": ModelConfig(n_layers=6, d_model=384, n_heads=6, seq_len=256, bias=False, dropout=0.2),
    # Small enough for a test to train it.
    "tiny": ModelConfig(n_layers=2, d_model=64, n_heads=4, seq_len=64),
    # The same for the kinds of Mixtral and of DeepSeek-V3.
    "tiny-moe": replace(
        _llama(2, 64, 4, kv_heads=2, d_ff=128, vocab=0, seq_len=64, rope_theta=10000.0),
        moe=MoE(n_experts=8, top_k=2, aux_loss=0.01),
    ),
    "tiny-deepseek": replace(
        _llama(3, 64, 4, kv_heads=4, d_ff=192, vocab=0, seq_len=64, rope_theta=10000.0),
        moe=MoE(
            n_experts=8,
            top_k=2,
            d_ff=64,
            n_shared=1,
            n_dense_layers=1,
            router="sigmoid",
            aux_loss=0.0001,
            bias_balanced=True,
        ),
        mla=MLA(q_rank=32, kv_rank=16, rope_head_dim=8, nope_head_dim=16, v_head_dim=16),
    ),
}

PRESETS: dict[str, ModelConfig] = {name: replace(model, preset=name) for name, model in _SHAPES.items()}
"""Known models by name; each carries its own name in `preset`."""
