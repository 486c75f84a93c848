"""DeepSeek-V3 and what follows it: many small experts with balancing biases (Kimi K2, GLM-4.5, GLM-5, Solar Open),
and latent attention in some of them."""

from __future__ import annotations

from math import log
from typing import Any

from phalanx.config.families.preset import Preset, llama_kind
from phalanx.config.model import MLA, ModelConfig, MoE, RopeScaling

_KIMI_FACTOR = 32.0
_LATENT = MLA(q_rank=1536, kv_rank=512, rope_head_dim=64, nope_head_dim=128, v_head_dim=128)
"""DeepSeek-V3's latent attention, which Kimi K2 kept."""
_NO_MTP = "without the module that predicts a second token"


def _experts(number: int, d_ff: int, *, dense: int, **more: Any) -> MoE:
    """Returns DeepSeek-V3's kind of experts: 8 of `number` per token and a shared one, chosen by sigmoids and balanced
    by biases, after `dense` layers without experts; `more` are other fields."""
    return MoE(
        n_experts=number,
        top_k=8,
        d_ff=d_ff,
        n_shared=1,
        n_dense_layers=dense,
        router="sigmoid",
        bias_balanced=True,
        **more,
    )


def _kimi_k2() -> ModelConfig:
    """YaRN with mscale and mscale_all_dim 1: rotated parts keep their size, and all scores grow by the square of
    0.1 ln(factor) + 1, as in DeepSeek-V3's release (inference/model.py)."""
    growth = 0.1 * log(_KIMI_FACTOR) + 1
    return llama_kind(
        61,
        7168,
        64,
        kv_heads=64,
        d_ff=18432,
        vocab=163840,
        seq_len=4096,
        rope_theta=50000.0,
        norm_eps=1e-6,
        attention_scale=(_LATENT.nope_head_dim + _LATENT.rope_head_dim) ** -0.5 * growth**2,
        rope_scaling=RopeScaling(
            kind="yarn", factor=_KIMI_FACTOR, original_seq_len=4096, beta_fast=1.0, beta_slow=1.0, magnitude=1.0
        ),
        moe=_experts(384, 2048, dense=1, route_scale=2.827),
        mla=_LATENT,
    )


def _glm(
    layers: int,
    width: int,
    *,
    d_ff: int,
    n_experts: int,
    expert_ff: int,
    dense: int,
    route_scale: float,
    qk_norm: str,
) -> ModelConfig:
    """GLM-4.5's report, section 2.4: bias_rate for the first 15 of 23 trillion tokens, 0 after them."""
    return llama_kind(
        layers,
        width,
        96,
        kv_heads=8,
        d_ff=d_ff,
        vocab=151552,
        seq_len=4096,
        rope_theta=1000000.0,
        head_dim=128,
        qkv_bias=True,
        qk_norm=qk_norm,
        rotary_fraction=0.5,
        moe=_experts(n_experts, expert_ff, dense=dense, route_scale=route_scale, aux_loss=0.0001),
    )


_GLM45 = "GLM-4.5 Team 2025 (arXiv 2508.06471), Table 1 and section 2.4; the hub's config.json"

DEEPSEEK: dict[str, Preset] = {
    # aux_loss is the report's alpha, bias_rate its gamma (0 for the last 500 B tokens). Pre-trained at 4,096 tokens.
    "deepseek-v3": Preset(
        llama_kind(
            61,
            7168,
            128,
            kv_heads=128,
            d_ff=18432,
            vocab=129280,
            seq_len=4096,
            rope_theta=10000.0,
            norm_eps=1e-6,
            init_std=0.006,
            moe=_experts(
                256, 2048, dense=3, route_scale=2.5, n_groups=8, top_groups=4, aux_loss=0.0001, bias_rate=0.001
            ),
            mla=_LATENT,
        ),
        "DeepSeek-AI 2024 (arXiv 2412.19437), section 4.2; inference/configs/config_671B.json of the release",
        ("deepseek-ai/DeepSeek-V3-Base", "deepseek-ai/DeepSeek-V3", "deepseek-ai/DeepSeek-R1"),
        context=163840,
        note=f"{_NO_MTP}, and without YaRN, which belongs to the long-context phase",
    ),
    "kimi-k2": Preset(
        _kimi_k2(),
        "Kimi Team 2025 (arXiv 2507.20534), Table 2 and section 2.5; the hub's config.json, scripts/models/kimi-k2.sh "
        "of github.com/THUDM/slime (624b824)",
        ("moonshotai/Kimi-K2-Base", "moonshotai/Kimi-K2-Instruct"),
        context=131072,
        note="beta_fast and beta_slow are those of Kimi-K2-Instruct-0905's config.json; coefficients that balanced its "
        "experts are not published",
    ),
    "glm-4.5": Preset(
        _glm(92, 5120, d_ff=12288, n_experts=160, expert_ff=1536, dense=3, route_scale=2.5, qk_norm="head"),
        f"{_GLM45}, scripts/models/glm4.5-355B-A32B.sh of github.com/THUDM/slime (624b824)",
        ("zai-org/GLM-4.5-Base", "zai-org/GLM-4.5"),
        context=131072,
        note=_NO_MTP,
    ),
    "glm-4.5-air": Preset(
        _glm(46, 4096, d_ff=10944, n_experts=128, expert_ff=1408, dense=1, route_scale=1.0, qk_norm="none"),
        f"{_GLM45}, scripts/models/glm4.5-106B-A12B.sh of github.com/THUDM/slime (624b824)",
        ("zai-org/GLM-4.5-Air-Base", "zai-org/GLM-4.5-Air"),
        context=131072,
        note=_NO_MTP,
    ),
    "glm-5": Preset(
        llama_kind(
            78,
            6144,
            64,
            kv_heads=64,
            d_ff=12288,
            vocab=154880,
            seq_len=4096,
            rope_theta=1000000.0,
            moe=_experts(256, 2048, dense=3, route_scale=2.5),
            mla=MLA(q_rank=2048, kv_rank=512, rope_head_dim=64, nope_head_dim=192, v_head_dim=256, norm_eps=1e-6),
        ),
        "GLM-5 Team 2026, architecture table of the report; transformers' GlmMoeDsaConfig, scripts/models/"
        "glm5-744B-A40B.sh of github.com/THUDM/slime (624b824)",
        ("zai-org/GLM-5",),
        context=202752,
        note="full attention: its sparse attention, and the indexer that selects keys, belong to the last phases of "
        f"training; {_NO_MTP}",
    ),
    # Router as in the release's code (transformers, models/solar_open).
    "solar-open-100b": Preset(
        llama_kind(
            48,
            4096,
            64,
            kv_heads=8,
            d_ff=10240,
            vocab=196608,
            seq_len=4096,
            rope_theta=1000000.0,
            head_dim=128,
            moe=_experts(128, 1280, dense=0),
        ),
        "Upstage 2026 (arXiv 2601.07022); the hub's config.json",
        ("upstage/Solar-Open-100B",),
        note="4,096 tokens are an assumption: how long its first phase's samples were is not published",
    ),
}
