"""Llama 2 and 3, Mistral and Mixtral."""

from __future__ import annotations

from dataclasses import replace

from phalanx.config.families.preset import Preset, llama_kind
from phalanx.config.model import ModelConfig, MoE, RopeScaling


def _llama2(size: str, layers: int, width: int, heads: int, *, kv_heads: int, d_ff: int) -> Preset:
    shape = llama_kind(
        layers, width, heads, kv_heads=kv_heads, d_ff=d_ff, vocab=32000, seq_len=4096, rope_theta=10000.0
    )
    hub = (f"meta-llama/Llama-2-{size}-hf", f"meta-llama/Llama-2-{size}-chat-hf")
    return Preset(shape, "Touvron et al. 2023 (arXiv 2307.09288); the hub's config.json", hub)


def _llama3_shape(layers: int, width: int, heads: int, *, d_ff: int, factor: float = 1.0) -> ModelConfig:
    """Samples of 8,192 tokens: pre-training's (Llama Team 2024, section 3.4.2), and the config.json's
    original_max_position_embeddings where positions are stretched by `factor`."""
    shape = llama_kind(layers, width, heads, kv_heads=8, d_ff=d_ff, vocab=128256, seq_len=8192, rope_theta=500000.0)
    return replace(shape, rope_scaling=RopeScaling(factor=factor))


_LLAMA3 = "Llama Team 2024 (arXiv 2407.21783), Table 3; the hub's config.json"
_LLAMA32 = "the hub's config.json; Llama-3.2 entries of github.com/Lightning-AI/litgpt (2685705)"


def _stretched(release: str, size: str, shape: ModelConfig, source: str = _LLAMA3) -> Preset:
    hub = (f"meta-llama/Llama-{release}-{size}", f"meta-llama/Llama-{release}-{size}-Instruct")
    if release == "3.1":
        hub += (f"meta-llama/Meta-Llama-3.1-{size}", f"meta-llama/Meta-Llama-3.1-{size}-Instruct")
    return Preset(shape, source, hub[1:] if release == "3.3" else hub, context=131072)


def _llama3(size: str, shape: ModelConfig) -> Preset:
    return Preset(shape, _LLAMA3, (f"meta-llama/Meta-Llama-3-{size}", f"meta-llama/Meta-Llama-3-{size}-Instruct"))


_3_2 = "positions as released; the sizes came from Llama 3.1 by pruning and distillation"

LLAMA: dict[str, Preset] = {
    "llama2-7b": _llama2("7b", 32, 4096, 32, kv_heads=32, d_ff=11008),
    "llama2-13b": _llama2("13b", 40, 5120, 40, kv_heads=40, d_ff=13824),
    "llama2-70b": _llama2("70b", 80, 8192, 64, kv_heads=8, d_ff=28672),
    "llama3-8b": _llama3("8B", _llama3_shape(32, 4096, 32, d_ff=14336)),
    "llama3-70b": _llama3("70B", _llama3_shape(80, 8192, 64, d_ff=28672)),
    "llama3-405b": Preset(
        _llama3_shape(126, 16384, 128, d_ff=53248, factor=8.0),
        _LLAMA3,
        context=131072,
        note="released as 3.1 only, hence with its stretched positions: the same shape as llama3.1-405b",
    ),
    "llama3.1-8b": _stretched("3.1", "8B", _llama3_shape(32, 4096, 32, d_ff=14336, factor=8.0)),
    "llama3.1-70b": _stretched("3.1", "70B", _llama3_shape(80, 8192, 64, d_ff=28672, factor=8.0)),
    "llama3.1-405b": _stretched("3.1", "405B", _llama3_shape(126, 16384, 128, d_ff=53248, factor=8.0)),
    "llama3.2-1b": replace(
        _stretched(
            "3.2", "1B", replace(_llama3_shape(16, 2048, 32, d_ff=8192, factor=32.0), tied=True, head_dim=64), _LLAMA32
        ),
        note=_3_2,
    ),
    "llama3.2-3b": replace(
        _stretched(
            "3.2", "3B", replace(_llama3_shape(28, 3072, 24, d_ff=8192, factor=32.0), tied=True, head_dim=128), _LLAMA32
        ),
        note=_3_2,
    ),
    "llama3.3-70b": _stretched("3.3", "70B", _llama3_shape(80, 8192, 64, d_ff=28672, factor=8.0)),
}


def _mistral_7b(*, vocab: int, seq_len: int, rope_theta: float, window: int = 0) -> ModelConfig:
    return llama_kind(
        32,
        4096,
        32,
        kv_heads=8,
        d_ff=14336,
        vocab=vocab,
        seq_len=seq_len,
        rope_theta=rope_theta,
        window=window,
    )


MISTRAL: dict[str, Preset] = {
    # Table 1: context_len 8192, window_size 4096. The hub's config.json allows 32,768 positions.
    "mistral-7b": Preset(
        _mistral_7b(vocab=32000, seq_len=8192, rope_theta=10000.0, window=4096),
        "Jiang et al. 2023 (arXiv 2310.06825), Table 1; the hub's config.json",
        ("mistralai/Mistral-7B-v0.1", "mistralai/Mistral-7B-Instruct-v0.1"),
        context=32768,
    ),
    # The release without a window, and with function-calling tokens.
    "mistral-7b-v0.3": Preset(
        _mistral_7b(vocab=32768, seq_len=32768, rope_theta=1000000.0),
        "the hub's config.json; Mistral-7B-v0.3 of github.com/Lightning-AI/litgpt (2685705)",
        ("mistralai/Mistral-7B-v0.3", "mistralai/Mistral-7B-Instruct-v0.3"),
        note="length of samples in training not published: the released context",
    ),
    "mistral-small-24b": Preset(
        llama_kind(
            40,
            5120,
            32,
            kv_heads=8,
            d_ff=32768,
            vocab=131072,
            seq_len=32768,
            rope_theta=100000000.0,
            head_dim=128,
        ),
        "the hub's config.json of the Small-24B and Small-3.2 releases, whose text model is the same",
        ("mistralai/Mistral-Small-24B-Base-2501", "mistralai/Mistral-Small-24B-Instruct-2501"),
        note="length of samples in training not published: the released context",
    ),
    # Jiang et al. 2024 (arXiv 2401.04088), Table 1; config.json, whose router_aux_loss_coef is aux_loss.
    "mixtral-8x7b": Preset(
        llama_kind(
            32,
            4096,
            32,
            kv_heads=8,
            d_ff=14336,
            vocab=32000,
            seq_len=32768,
            rope_theta=1000000.0,
            moe=MoE(n_experts=8, top_k=2, aux_loss=0.02),
        ),
        "Jiang et al. 2024 (arXiv 2401.04088), Table 1; the hub's config.json",
        ("mistralai/Mixtral-8x7B-v0.1", "mistralai/Mixtral-8x7B-Instruct-v0.1"),
    ),
}
