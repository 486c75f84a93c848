"""Gemma 2 and the language models of Gemma 3: windows that alternate with full attention, norms before and after each
half of a layer, GeGLU, scaled embeddings. Their norms multiply by 1 + w; here w holds that sum."""

from __future__ import annotations

from typing import Any

from phalanx.config.families.preset import Preset, llama_kind
from phalanx.config.model import ModelConfig, RopeScaling


def _gemma(
    layers: int, width: int, heads: int, *, kv_heads: int, d_ff: int, head_dim: int, query_scale: int, **more: Any
) -> ModelConfig:
    """`query_scale` is the configuration's query_pre_attn_scalar: scores are divided by its root."""
    kind: dict[str, Any] = {
        "activation": "geglu",
        "norm_place": "both",
        "scaled_embedding": True,
        "tied": True,
        "norm_eps": 1e-6,
        "head_dim": head_dim,
        "attention_scale": 0.0 if query_scale == head_dim else query_scale**-0.5,
    }
    return llama_kind(layers, width, heads, kv_heads=kv_heads, d_ff=d_ff, **(kind | more))


def _gemma2(size: str, layers: int, width: int, heads: int, *, query_scale: int = 256, **more: Any) -> Preset:
    shape = _gemma(
        layers,
        width,
        heads,
        vocab=256000,
        seq_len=8192,
        rope_theta=10000.0,
        window=4096,
        full_every=2,
        attention_softcap=50.0,
        logit_softcap=30.0,
        query_scale=query_scale,
        **more,
    )
    return Preset(
        shape,
        "Gemma Team 2024 (arXiv 2408.00118), Table 1; the hub's config.json, Gemma2_* of github.com/google-deepmind/"
        "gemma (7691fd4)",
        (f"google/gemma-2-{size}", f"google/gemma-2-{size}-it"),
    )


def _gemma3(
    size: str,
    layers: int,
    width: int,
    heads: int,
    *,
    vocab: int = 262144,
    window: int = 512,
    query_scale: int = 256,
    head_dim: int = 256,
    multimodal: bool = False,
    **more: Any,
) -> Preset:
    """Pre-trained with samples of 32,768 tokens; the larger ones, which also read images, were then stretched to
    131,072 (Gemma Team 2025, section 2.1)."""
    shape = _gemma(
        layers,
        width,
        heads,
        vocab=vocab,
        seq_len=32768,
        rope_theta=1000000.0,
        window=window,
        full_every=6,
        window_rope_theta=10000.0,
        qk_norm="head",
        query_scale=query_scale,
        head_dim=head_dim,
        rope_scaling=RopeScaling(kind="linear", factor=8.0) if multimodal else RopeScaling(),
        **more,
    )
    base = f"google/gemma-3-{size}" if size == "270m" else f"google/gemma-3-{size}-pt"
    return Preset(
        shape,
        "Gemma Team 2025 (arXiv 2503.19786), Table 1; the hub's config.json, Gemma3_* of github.com/google-deepmind/"
        "gemma (7691fd4)",
        (base, f"google/gemma-3-{size}-it"),
        context=131072 if multimodal else 0,
        note="the language model, without the encoder of images" if multimodal else "",
    )


def _gemma3_multimodal(size: str, layers: int, width: int, heads: int, **more: Any) -> Preset:
    """The hub's checkpoints hold 64 tokens more than the 262,144 of the tokenizer, the first of them for images."""
    return _gemma3(size, layers, width, heads, vocab=262208, window=1024, multimodal=True, **more)


GEMMA: dict[str, Preset] = {
    "gemma2-2b": _gemma2("2b", 26, 2304, 8, kv_heads=4, d_ff=9216, head_dim=256),
    "gemma2-9b": _gemma2("9b", 42, 3584, 16, kv_heads=8, d_ff=14336, head_dim=256),
    "gemma2-27b": _gemma2("27b", 46, 4608, 32, kv_heads=16, d_ff=36864, head_dim=128, query_scale=144),
    "gemma3-270m": _gemma3("270m", 18, 640, 4, kv_heads=1, d_ff=2048),
    "gemma3-1b": _gemma3("1b", 26, 1152, 4, kv_heads=1, d_ff=6912),
    "gemma3-4b": _gemma3_multimodal("4b", 34, 2560, 8, kv_heads=4, d_ff=10240),
    "gemma3-12b": _gemma3_multimodal("12b", 48, 3840, 16, kv_heads=8, d_ff=15360),
    "gemma3-27b": _gemma3_multimodal("27b", 62, 5376, 32, kv_heads=16, d_ff=21504, head_dim=128, query_scale=168),
}
