from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from phalanx.blocks.parameters import count, count_active
from phalanx.config.model import ModelConfig
from phalanx.config.presets import PRESETS

PUBLISHED = {
    # Number of parameters of the released checkpoints.
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "mixtral-8x7b": 46_702_792_704,
    # The 671 B of the release (README_WEIGHTS.md): with the routers' balancing biases, without the 11.5 B of the
    # multi-token-prediction module.
    "deepseek-v3": 671_026_419_200,
}

BABY_VOCABULARY = 65
"""Characters in Shakespeare."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_counts_equal_the_published_ones(name: str):
    assert count(PRESETS[name]) == PUBLISHED[name]


def test_gpt3_has_175_billion():
    assert count(PRESETS["gpt3-175b"]) == pytest.approx(174.6e9, rel=1e-4)  # Brown et al. 2020, Table D.1


MEGATRON = {
    # Narayanan et al. 2021, Table 1: billions of parameters as printed.
    "megatron-1.7b": 1.7,
    "megatron-3.6b": 3.6,
    "megatron-7.5b": 7.5,
    "megatron-18.4b": 18.4,
    "megatron-39.1b": 39.1,
    "megatron-76.1b": 76.1,
    "megatron-145.6b": 145.6,
    "megatron-310.1b": 310.1,
    "megatron-529.6b": 529.6,
    "megatron-1008b": 1008.0,
}


@pytest.mark.parametrize("name", MEGATRON)
def test_megatron_rows(name: str):
    """Equation 2 of the paper, P = 12 l h² (1 + 13 / (12 h) + (V + s) / (12 l h)), leaves the final LayerNorm out."""
    model = PRESETS[name]
    layers, h, vocab, s = model.n_layers, model.d_model, model.vocab_size, model.seq_len
    formula = 12 * layers * h * h + 13 * layers * h + (vocab + s) * h
    assert count(model) == formula + 2 * h
    assert round(count(model) / 1e9, 1) == MEGATRON[name]


def test_active_parameters():
    assert count_active(PRESETS["mixtral-8x7b"]) / 1e9 == pytest.approx(12.9, abs=0.05)  # Jiang et al. 2024
    deepseek = PRESETS["deepseek-v3"]
    look_up = deepseek.vocab_size * deepseek.d_model
    # The published 37 B leave the input embedding out, which a token only looks up.
    assert round((count_active(deepseek) - look_up) / 1e9) == 37
    solar = PRESETS["solar-open-100b"]  # its model card: 102.6 B, 12 B of them active
    assert (count(solar) // 10**8 / 10, round(count_active(solar) / 1e9)) == (102.6, 12)
    assert count_active(PRESETS["llama3-8b"]) == count(PRESETS["llama3-8b"])


def test_presets_know_their_names():
    assert all(model.preset == name for name, model in PRESETS.items())


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_whole_shapes(name: str):
    model = PRESETS[name]
    assert model.n_heads % model.kv_heads == 0
    assert model.head_size % 2 == 0
    if not model.mla.kv_rank and not model.head_dim:
        assert model.n_heads * model.head_size == model.d_model


def test_the_documented_table_equals_the_presets():
    text = (Path(__file__).parents[2] / "docs" / "model.md").read_text()
    section = text.split("## Presets")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `([^`]+)` \|(.+)\|$", section, flags=re.MULTILINE)
    table = {name: [cell.strip() for cell in cells.split("|")] for name, cells in rows}
    assert table == {name: documented(model) for name, model in PRESETS.items()}


def documented(model: ModelConfig) -> list[str]:
    """Layers, width, heads, key/value heads, context, vocabulary, parameters."""
    whole = replace(model, vocab_size=model.vocab_size or BABY_VOCABULARY)
    parameters = f"{count(whole):,}"
    if model.moe.n_experts:
        parameters += f" ({count_active(whole):,} active)"
    return [
        str(model.n_layers),
        f"{model.d_model:,}",
        str(model.n_heads),
        "latent" if model.mla.kv_rank else str(model.kv_heads),
        f"{model.seq_len:,}",
        f"{model.vocab_size:,}" if model.vocab_size else "tokenizer's",
        parameters,
    ]
