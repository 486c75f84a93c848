"""gpt-oss: experts with biases and a clamped gate, sinks, windows of 128 keys in every other layer, YaRN."""

from __future__ import annotations

from phalanx.config.families.preset import Preset, llama_kind
from phalanx.config.model import MoE, RopeScaling


def _gpt_oss(size: str, layers: int, n_experts: int) -> Preset:
    shape = llama_kind(
        layers,
        2880,
        64,
        kv_heads=8,
        d_ff=2880,
        vocab=201088,
        seq_len=4096,
        rope_theta=150000.0,
        head_dim=64,
        activation="swiglu_clamped",
        bias=True,
        window=128,
        full_every=2,
        sinks=True,
        rope_scaling=RopeScaling(kind="yarn", factor=32.0, original_seq_len=4096, truncate=False),
        moe=MoE(n_experts=n_experts, top_k=4, d_ff=2880, router_bias=True),
    )
    return Preset(
        shape,
        "OpenAI 2025 (arXiv 2508.10925), Table 1; the hub's config.json, gpt_oss/torch/model.py of github.com/openai/"
        "gpt-oss (7b58334)",
        (f"openai/gpt-oss-{size}",),
        context=131072,
        note="4,096 tokens are config.json's initial_context_length; how its experts were balanced is not published",
    )


GPT_OSS: dict[str, Preset] = {"gpt-oss-20b": _gpt_oss("20b", 24, 32), "gpt-oss-120b": _gpt_oss("120b", 36, 128)}
