"""GPT-2, GPT-3 and Megatron-LM's GPTs; GPT-NeoX and Pythia, whose attention and MLP stand side by side."""

from __future__ import annotations

from phalanx.config.families.preset import Preset, gpt_kind
from phalanx.config.model import ModelConfig

_VOCAB = 50257
"""GPT-2's tokens, which GPT-3 has, too."""


def _gpt2(hub: str, layers: int, width: int, heads: int) -> Preset:
    """Radford et al. 2019, Table 2; widths and heads as in the released checkpoints. Table 2 prints 117M and 345M for
    the first two; the checkpoints hold 124M and 355M."""
    model = gpt_kind(layers, width, heads, vocab=_VOCAB, seq_len=1024)
    return Preset(model, "Radford et al. 2019, Table 2; the hub's config.json", (f"openai-community/{hub}",))


def _megatron(layers: int, width: int, heads: int) -> Preset:
    """Narayanan et al. 2021, Table 1: vocabulary 51,200, sequence 2,048."""
    return Preset(
        gpt_kind(layers, width, heads, vocab=51200, seq_len=2048), "Narayanan et al. 2021 (arXiv 2104.04473), Table 1"
    )


def _neox(layers: int, width: int, heads: int, *, vocab: int) -> ModelConfig:
    """Returns a GPT-NeoX: its tokens are padded to a multiple that its tensor ranks divide."""
    return gpt_kind(
        layers,
        width,
        heads,
        vocab=vocab,
        seq_len=2048,
        activation="gelu",
        positions="rope",
        rotary_fraction=0.25,
        parallel_block=True,
        tied=False,
    )


def _pythia(size: str, layers: int, width: int, heads: int, *, vocab: int = 50304) -> Preset:
    """Biderman et al. 2023, Table 1; models/*/pythia-*.yml of EleutherAI/pythia (a19eecb)."""
    return Preset(
        _neox(layers, width, heads, vocab=vocab),
        "Biderman et al. 2023 (arXiv 2304.01373), Table 1; models/ of github.com/EleutherAI/pythia",
        (f"EleutherAI/pythia-{size}", f"EleutherAI/pythia-{size}-deduped"),
    )


GPT: dict[str, Preset] = {
    "gpt2": _gpt2("gpt2", 12, 768, 12),
    "gpt2-medium": _gpt2("gpt2-medium", 24, 1024, 16),
    "gpt2-large": _gpt2("gpt2-large", 36, 1280, 20),
    "gpt2-xl": _gpt2("gpt2-xl", 48, 1600, 25),
    "gpt3-175b": Preset(
        gpt_kind(96, 12288, 96, vocab=_VOCAB, seq_len=2048),
        "Brown et al. 2020, Table 2.1",
        note="its alternating sparse attention is taken as full",
    ),
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
    "gpt-neox-20b": Preset(
        _neox(44, 6144, 64, vocab=50432),
        "Black et al. 2022 (arXiv 2204.06745), Table 1; the hub's config.json",
        ("EleutherAI/gpt-neox-20b",),
    ),
    "pythia-70m": _pythia("70m", 6, 512, 8),
    "pythia-160m": _pythia("160m", 12, 768, 12),
    "pythia-410m": _pythia("410m", 24, 1024, 16),
    "pythia-1b": _pythia("1b", 16, 2048, 8),
    "pythia-1.4b": _pythia("1.4b", 24, 2048, 16),
    "pythia-2.8b": _pythia("2.8b", 32, 2560, 32),
    "pythia-6.9b": _pythia("6.9b", 32, 4096, 32, vocab=50432),
    "pythia-12b": _pythia("12b", 36, 5120, 40, vocab=50688),
}
