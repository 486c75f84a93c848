"""Qwen 2, 2.5 and 3, dense and with experts."""

from __future__ import annotations

from dataclasses import replace

from phalanx.config.families.preset import Preset, llama_kind
from phalanx.config.model import ModelConfig, MoE

_QWEN2_SAMPLES = "4,096 tokens in the main phase of pre-training, 32,768 in the last"


def _qwen2_shape(
    layers: int, width: int, heads: int, *, kv_heads: int, d_ff: int, eps: float = 1e-6, tied: bool = False
) -> ModelConfig:
    """Small models share a head and pad the 151,643 tokens to 151,936, large ones to 152,064."""
    return llama_kind(
        layers,
        width,
        heads,
        kv_heads=kv_heads,
        d_ff=d_ff,
        vocab=151936 if width < 3584 else 152064,
        seq_len=4096,
        rope_theta=1000000.0,
        qkv_bias=True,
        tied=tied,
        norm_eps=eps,
    )


_SHAPES = {
    "0.5b": _qwen2_shape(24, 896, 14, kv_heads=2, d_ff=4864, tied=True),
    "1.5b": _qwen2_shape(28, 1536, 12, kv_heads=2, d_ff=8960, tied=True),
    "3b": _qwen2_shape(36, 2048, 16, kv_heads=2, d_ff=11008, tied=True),
    "7b": _qwen2_shape(28, 3584, 28, kv_heads=4, d_ff=18944),
    "14b": _qwen2_shape(48, 5120, 40, kv_heads=8, d_ff=13824, eps=1e-5),
    "32b": _qwen2_shape(64, 5120, 40, kv_heads=8, d_ff=27648, eps=1e-5),
    "72b": _qwen2_shape(80, 8192, 64, kv_heads=8, d_ff=29568, eps=1e-5),
}
"""The shapes of Qwen2.5; those of Qwen 2 are among them."""


def _qwen2(size: str) -> Preset:
    return Preset(
        _SHAPES[size],
        f"Qwen Team 2024 (arXiv 2407.10671), Table 1; the hub's config.json. {_QWEN2_SAMPLES} (section 3.2)",
        (f"Qwen/Qwen2-{size.upper()}", f"Qwen/Qwen2-{size.upper()}-Instruct"),
        context=131072,
        note="norm_eps as in Qwen2.5-72B; the config.json of Qwen2-72B-Instruct says 1e-6" if size == "72b" else "",
    )


def _qwen25(size: str) -> Preset:
    return Preset(
        _SHAPES[size],
        "Qwen Team 2024 (arXiv 2412.15115), Table 1; the hub's config.json. " + _QWEN2_SAMPLES,
        (f"Qwen/Qwen2.5-{size.upper()}", f"Qwen/Qwen2.5-{size.upper()}-Instruct"),
        context=32768 if size in ("0.5b", "3b") else 131072,
    )


_QWEN3_SOURCE = (
    "Qwen Team 2025 (arXiv 2505.09388), Tables 1 and 2; the hub's config.json. 4,096 tokens in the first two stages of "
    "pre-training, 32,768 in the third (section 3.2)"
)


def _qwen3(
    name: str, layers: int, width: int, heads: int, *, d_ff: int, kv_heads: int = 8, tied: bool = False
) -> Preset:
    shape = llama_kind(
        layers,
        width,
        heads,
        kv_heads=kv_heads,
        d_ff=d_ff,
        vocab=151936,
        seq_len=4096,
        rope_theta=1000000.0,
        head_dim=128,
        qk_norm="head",
        tied=tied,
        norm_eps=1e-6,
    )
    return Preset(shape, _QWEN3_SOURCE, (f"Qwen/Qwen3-{name}", f"Qwen/Qwen3-{name}-Base"), context=40960)


def _qwen3_moe(name: str, layers: int, width: int, heads: int, *, d_ff: int, expert_ff: int) -> Preset:
    """config.json's router_aux_loss_coef is aux_loss."""
    preset = _qwen3(name, layers, width, heads, kv_heads=4, d_ff=d_ff)
    moe = MoE(n_experts=128, top_k=8, d_ff=expert_ff, aux_loss=0.001)
    return replace(
        preset,
        model=replace(preset.model, moe=moe),
        note="aux_loss per sequence; Qwen 3 balanced the load over global batches (Table 2)",
    )


QWEN: dict[str, Preset] = {
    **{f"qwen2-{size}": _qwen2(size) for size in ("0.5b", "1.5b", "7b", "72b")},
    **{f"qwen2.5-{size}": _qwen25(size) for size in _SHAPES},
    "qwen3-0.6b": _qwen3("0.6B", 28, 1024, 16, d_ff=3072, tied=True),
    "qwen3-1.7b": _qwen3("1.7B", 28, 2048, 16, d_ff=6144, tied=True),
    "qwen3-4b": _qwen3("4B", 36, 2560, 32, d_ff=9728, tied=True),
    "qwen3-8b": _qwen3("8B", 36, 4096, 32, d_ff=12288),
    "qwen3-14b": _qwen3("14B", 40, 5120, 40, d_ff=17408),
    "qwen3-32b": _qwen3("32B", 64, 5120, 64, d_ff=25600),
    "qwen3-30b-a3b": _qwen3_moe("30B-A3B", 48, 2048, 32, d_ff=6144, expert_ff=768),
    "qwen3-235b-a22b": _qwen3_moe("235B-A22B", 94, 4096, 64, d_ff=12288, expert_ff=1536),
}
