"""Shapes of models in published measurements, by the names that the sources use.

Each is the released configuration (config.json of the model's hub page) or the table of its paper; those in
phalanx.config.presets are taken from there. Parts of a model that `ModelConfig` does not have are approximated and
listed in REMARKS.
"""

from __future__ import annotations

import re
from typing import Any

from phalanx.config.model import MLA, ModelConfig, MoE
from phalanx.config.presets import PRESETS, gpt_kind, llama_kind


def gpt(layers: int, width: int, heads: int, vocab: int = 51200, seq: int = 2048, **more: Any) -> ModelConfig:
    """Returns a GPT-2 kind of `seq` tokens; `more` are other fields."""
    return gpt_kind(layers, width, heads, vocab=vocab, seq_len=seq, **more)


def llama(
    layers: int, width: int, heads: int, kv: int, ff: int, vocab: int, seq: int = 4096, **more: Any
) -> ModelConfig:
    """Returns a Llama kind of `seq` tokens; `more` are other fields. Nothing that is predicted depends on the base of
    its rotary positions."""
    base = ModelConfig.rope_theta
    return llama_kind(layers, width, heads, kv_heads=kv, d_ff=ff, vocab=vocab, seq_len=seq, rope_theta=base, **more)


def _moe(experts: int, top_k: int, ff: int, shared: int = 0, dense: int = 0) -> MoE:
    return MoE(n_experts=experts, top_k=top_k, d_ff=ff, n_shared=shared, n_dense_layers=dense, renormalise=top_k > 1)


def _mla(q_rank: int, nope: int = 128, rope: int = 64, value: int = 128) -> MLA:
    return MLA(q_rank=q_rank, kv_rank=512, rope_head_dim=rope, nope_head_dim=nope, v_head_dim=value)


def _squared(layers: int, width: int, heads: int, kv: int, ff: int, vocab: int, seq: int, **more: Any) -> ModelConfig:
    """Returns a Nemotron: the Llama kind, with two matrices and a squared ReLU instead of SwiGLU."""
    return llama(layers, width, heads, kv, ff, vocab, seq, activation="gelu", **more)


def _maxtext(scale: int) -> ModelConfig:
    """Returns the shape of MaxText's `global_parameter_scale` in billions of parameters: doublings go in turn to heads
    and MLP, to the width, to the layers (maxtext, `get_individual_scales`; base: 16 layers, 2,048 wide, 16 heads, MLP
    7,168)."""
    cycles, rest = divmod(scale.bit_length() - 1, 3)
    heads, width, layers = 2 ** (cycles + (rest > 0)), 2 ** (cycles + (rest > 1)), 2**cycles
    return llama(16 * layers, 2048 * width, 16 * heads, 16 * heads, 7168 * heads, 32000, 2048, head_dim=128)


def _sizes(kind: str, sizes: dict[str, tuple[int, int, int]], **more: Any) -> dict[str, ModelConfig]:
    return {f"{kind}{size}": gpt(*shape, **more) for size, shape in sizes.items()}


_MPT = {"bias": False, "vocab": 50368}
_FALCON = {"positions": "rope", "bias": False, "parallel_block": True}
_PALM = {"head_dim": 256, "tied": True, "parallel_block": True}
_QWEN2 = {"qkv_bias": True}
_SMALL = {"head_dim": 128, "tied": True}

# Keys are lower-case letters and digits, with p for a point: see `plain`.
SHAPES: dict[str, ModelConfig] = {
    **{
        re.sub(r"[^a-z0-9]", "", name.replace(".", "p")): shape
        for name, shape in PRESETS.items()
        if shape.vocab_size  # models without a vocabulary are small ones for tests
    },
    "qwen330b": PRESETS["qwen3-30b-a3b"],
    "qwen3235b": PRESETS["qwen3-235b-a22b"],
    # Brown et al. 2020, table 2.1; the sizes between are NeMo's examples.
    **_sizes(
        "gpt3",
        {
            "125m": (12, 768, 12),
            "126m": (12, 768, 12),
            "350m": (24, 1024, 16),
            "760m": (24, 1536, 16),
            "1p3b": (24, 2048, 16),
            "2p7b": (32, 2560, 32),
            "5b": (24, 4096, 32),
            "6p7b": (32, 4096, 32),
            "13b": (40, 5120, 40),
            "20b": (44, 6144, 48),
            "40b": (48, 8192, 64),
            "175b": (96, 12288, 96),
        },
    ),
    # bigscience tr3m (1.3 B), Megatron's table 3 in Korthikanti et al. 2022, MT-NLG (Smith et al. 2022).
    **_sizes(
        "gpt",
        {
            "1p3b": (24, 2048, 16),
            "22b": (48, 6144, 64),
            "104b": (32, 16384, 32),
            "175b": (96, 12288, 96),
            "530b": (105, 20480, 128),
            "1t": (128, 25600, 160),
        },
    ),
    "bloomcandidate20b": gpt(8, 14400, 32, 250000),
    "bloomcandidate200b": gpt(80, 14400, 96, 250000),
    "mtnlg": gpt(105, 20480, 128),
    "turingnlg": gpt(78, 4256, 28, 51200, 1024),
    "bloom176b": gpt(70, 14336, 112, 250880),
    "bloom7b1": gpt(30, 4096, 32, 250880),
    # Zhang et al. 2022, table 1.
    **_sizes(
        "opt",
        {
            "125m": (12, 768, 12),
            "350m": (24, 1024, 16),
            "1p3b": (24, 2048, 32),
            "2p7b": (32, 2560, 32),
            "6p7b": (32, 4096, 32),
            "13b": (40, 5120, 40),
            "30b": (48, 7168, 56),
            "66b": (64, 9216, 72),
            "175b": (96, 12288, 96),
        },
        vocab=50272,
    ),
    # llm-foundry, scripts/train/yamls/pretrain.
    **_sizes(
        "mpt",
        {
            "125m": (12, 768, 12),
            "350m": (24, 1024, 16),
            "760m": (24, 1536, 12),
            "1b": (24, 2048, 16),
            "3b": (32, 2560, 20),
            "7b": (32, 4096, 32),
            "13b": (40, 5120, 40),
            "30b": (48, 7168, 56),
            "70b": (80, 8192, 64),
        },
        **_MPT,
    ),
    "gptj6b": gpt(28, 4096, 16, 50400, positions="rope", tied=False, parallel_block=True),
    "gopher280b": gpt(80, 16384, 128, 32000),
    "chinchilla70b": gpt(80, 8192, 64, 32000),
    "jurassic1": gpt(76, 13824, 96, 256000),
    "glm130b": llama(70, 12288, 96, 96, 32768, 150528, 2048, norm="layernorm", bias=True),
    # Chowdhery et al. 2022, table 1: one key/value head, SwiGLU.
    "palm8b": llama(32, 4096, 16, 1, 16384, 256000, 2048, **_PALM),
    "palm62b": llama(64, 8192, 32, 1, 32768, 256000, 2048, **_PALM),
    "palm540b": llama(118, 18432, 48, 1, 73728, 256000, 2048, **_PALM),
    "falcon7b": gpt(32, 4544, 71, 65024, n_kv_heads=1, **_FALCON),
    "falcon40b": gpt(60, 8192, 128, 65024, n_kv_heads=8, **_FALCON),
    "falcon180b": gpt(80, 14848, 232, 65024, n_kv_heads=8, **_FALCON),
    "starcoder15b": gpt(40, 6144, 48, 49152, 8192, n_kv_heads=1),
    # Touvron et al. 2023a, table 2.
    "llama7b": llama(32, 4096, 32, 32, 11008, 32000, 2048),
    "llama13b": llama(40, 5120, 40, 40, 13824, 32000, 2048),
    "llama30b": llama(60, 6656, 52, 52, 17920, 32000, 2048),
    "llama33b": llama(60, 6656, 52, 52, 17920, 32000, 2048),
    "llama65b": llama(80, 8192, 64, 64, 22016, 32000, 2048),
    "llama4scout": llama(48, 5120, 40, 8, 16384, 202048, 8192, head_dim=128, moe=_moe(16, 1, 8192, 1)),
    "llama4maverick": llama(48, 5120, 40, 8, 16384, 202048, 8192, head_dim=128, moe=_moe(64, 1, 8192, 1)),
    "llama234b": llama(48, 8192, 64, 8, 22016, 32000),
    "yi6b": llama(32, 4096, 32, 4, 11008, 64000),
    "yi34b": llama(60, 7168, 56, 8, 20480, 64000),
    "apertus70b": llama(80, 8192, 64, 8, 43008, 131072, activation="gelu"),
    "mixtral8x22b": llama(56, 6144, 48, 8, 16384, 32768, 4096, moe=_moe(8, 2, 16384)),
    "mixtrallike": llama(56, 8192, 128, 8, 32768, 32000, 8192, head_dim=128, moe=_moe(16, 2, 32768)),
    "grok1": llama(64, 6144, 48, 8, 32768, 131072, 8192, activation="geglu", moe=_moe(8, 2, 32768)),
    "dbrx": llama(40, 6144, 48, 8, 10752, 100352, 4096, moe=_moe(16, 4, 10752)),
    "olmo7b": llama(32, 4096, 32, 32, 11008, 50304, 2048),
    "olmoe": llama(16, 2048, 16, 16, 1024, 50304, moe=_moe(64, 8, 1024)),
    "minimaxm2": llama(62, 3072, 48, 8, 1536, 200064, head_dim=128, moe=_moe(256, 8, 1536)),
    "smollm1p7b": llama(24, 2048, 32, 32, 8192, 49152, 2048, tied=True),
    "gemma2b": llama(18, 2048, 8, 1, 16384, 256000, 8192, head_dim=256, tied=True, activation="geglu"),
    "gemma7b": llama(28, 3072, 16, 16, 24576, 256000, 8192, head_dim=256, tied=True, activation="geglu"),
    "qwen7b": llama(32, 4096, 32, 32, 11008, 151936, 2048, **_QWEN2),
    "qwen14b": llama(40, 5120, 40, 40, 13696, 152064, 2048, **_QWEN2),
    "qwen72b": llama(80, 8192, 64, 64, 24576, 152064, **_QWEN2),
    # Three of four layers have linear attention (gated delta rule); the heads are those of the fourth, a quarter of
    # them in every layer, and the linear layers' projections count as two more shared experts' width.
    "qwen3next": llama(48, 2048, 4, 2, 5120, 151936, head_dim=256, moe=_moe(512, 10, 512, 10)),
    "deepseekmoe16b": llama(28, 2048, 16, 16, 10944, 102400, moe=_moe(64, 6, 1408, 2, 1)),
    "deepseekv2": llama(60, 5120, 128, 128, 12288, 102400, moe=_moe(160, 6, 1536, 2, 1), mla=_mla(1536)),
    "deepseekv2lite": llama(27, 2048, 16, 16, 10944, 102400, moe=_moe(64, 6, 1408, 2, 1), mla=_mla(0)),
    "moonlight16b": llama(27, 2048, 16, 16, 11264, 163840, 8192, moe=_moe(64, 6, 1408, 2, 1), mla=_mla(0)),
    # Parmar et al. 2024 (2402.16819), table 1; Nemotron-4 340B (2406.11704), table 1.
    "nemotron38b": _squared(32, 4096, 32, 32, 16384, 256000, 4096, norm="layernorm"),
    "nemotron415b": _squared(32, 6144, 48, 8, 24576, 256000, 4096, norm="layernorm"),
    "nemotron422b": _squared(40, 6144, 48, 48, 24576, 256000, 4096, norm="layernorm"),
    "nemotron4340b": _squared(96, 18432, 96, 8, 73728, 256000, 4096, norm="layernorm"),
    # Hybrids of Mamba-2: a block here is one Mamba layer with the MLP or experts beside it. The heads of the few
    # attention layers are dealt out over all blocks; Mamba's projections are as much MLP (shared experts), so that
    # parameters and FLOPs are those of the model. Nemotron-H 2504.03624, table 1: 54 Mamba, 54 MLP of 32,768 and 10
    # attention layers with 64 heads. Nemotron 3 (2512.20848, table 1): Nano 23, 23 and 6 with 32 heads. Super: 40, 40
    # and 8; experts work in a latent space of a quarter of the width, so that each counts as a quarter as wide. Ultra
    # by its 550 B parameters, 55 B of them active. What the two compute to predict more tokens than the next is in the
    # shared experts, too.
    "nemotronh8b": _squared(24, 4096, 8, 2, 33792, 131072, 8192, head_dim=128),
    "nemotronnano9b": _squared(27, 4480, 8, 2, 30720, 131072, 8192, head_dim=128),
    "nemotronnano12b": _squared(28, 5120, 8, 2, 35840, 131072, 8192, head_dim=128),
    "nemotronh56b": _squared(54, 8192, 12, 4, 57344, 131072, 8192, head_dim=128),
    "nemotron3nano": _squared(23, 2688, 8, 2, 1856, 131072, 8192, head_dim=128, moe=_moe(128, 6, 1856, 7)),
    "nemotron3super": _squared(40, 4096, 8, 2, 672, 131072, 8192, head_dim=128, moe=_moe(512, 22, 672, 36)),
    "nemotron3ultra": _squared(48, 8192, 16, 2, 1280, 131072, 8192, head_dim=128, moe=_moe(512, 22, 1280, 35)),
    **{f"maxtext{scale}b": _maxtext(scale) for scale in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)},
}

_ALIASES = {
    "qwen3vl": "qwen3",
    "qwen380b": "qwen3next",
    "deepseekr1": "deepseekv3",
    "glm4p6": "glm4p5",
    "glm4p7": "glm4p5",
    "nemotron5h": "nemotronh",
    "llama4400b": "llama4maverick",
    "llama4109b": "llama4scout",
    "llama405b": "llama3405b",
    "llama70b": "llama270b",
    "mtnlg530b": "mtnlg",
}
"""Other spellings of names."""

_NAMES_WITHOUT_SIZE = {"gpt2": "gpt2", "gpt3": "gpt3175b", "opt": "opt175b", "palm": "palm540b", "bloom": "bloom176b"}
"""Names without a size, which must match as a whole: a GPT of 2.5 B is no gpt2."""

REMARKS = {
    "nemotronh": "hybrid of Mamba as a transformer of the same parameters and FLOPs",
    "nemotronnano": "hybrid of Mamba as a transformer of the same parameters and FLOPs",
    "nemotron3": "hybrid of Mamba as a transformer of the same parameters and FLOPs",
    "qwen3next": "linear attention as a transformer of about the same parameters and FLOPs",
    "nemotron4": "squared ReLU as GELU",
    "llama4maverick": "128 experts in every second layer as 64 in every layer",
    "glm5": "sparse attention as dense",
    "bloom": "ALiBi as learned positions",
}
"""Approximations of shapes, by the beginning of their keys."""


def plain(name: str) -> str:
    """Normalises a model's name to the spelling of SHAPES: lower-case letters and digits, p for a point."""
    text = re.sub(r"[^a-z0-9]", "", re.sub(r"(?<=[0-9])\.(?=[0-9])", "p", name.lower()))
    text = re.sub(r"llama(?:3p[13]|31(?=8b|70b|405b))", "llama3", text)
    for other, own in _ALIASES.items():
        text = text.replace(other, own)
    return text


def key_of(name: str) -> str | None:
    """Returns the longest key of SHAPES that a name contains: `llama3-70b-l12` is a llama3-70b."""
    text = plain(name)
    if text in _NAMES_WITHOUT_SIZE:
        return _NAMES_WITHOUT_SIZE[text]
    found = [key for key in SHAPES if key in text and key not in _NAMES_WITHOUT_SIZE]
    return max(found, key=len) if found else None


def remark(key: str) -> str:
    """Returns the approximation that a shape stands for; empty if it is the model itself."""
    return next((text for start, text in REMARKS.items() if key.startswith(start)), "")
