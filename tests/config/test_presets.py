from __future__ import annotations

import re
from math import prod
from pathlib import Path

import pytest

from phalanx.blocks.kinds import untrained
from phalanx.blocks.parameters import block_shapes, count, count_active
from phalanx.config.presets import CATALOGUE, PRESETS, likely, named

PUBLISHED = {
    # Parameters of the released checkpoints: the total that the hub reads from their safetensors files, except where
    # another source is named. Tied heads that a release stores twice are counted once.
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    # The table of every model card on the hub, "total params".
    "pythia-70m": 70_426_624,
    "pythia-160m": 162_322_944,
    "pythia-410m": 405_334_016,
    "pythia-1b": 1_011_781_632,
    "pythia-1.4b": 1_414_647_808,
    "pythia-2.8b": 2_775_208_960,
    "pythia-6.9b": 6_857_302_016,
    "pythia-12b": 11_846_072_320,
    "gpt-neox-20b": 20_554_567_680,  # Black et al. 2022, section 2.1
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "llama3.1-8b": 8_030_261_248,
    "llama3.1-70b": 70_553_706_496,
    "llama3.1-405b": 405_853_388_800,
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
    "llama3.3-70b": 70_553_706_496,
    "mistral-7b": 7_241_732_096,
    "mistral-7b-v0.3": 7_248_023_552,
    "mistral-small-24b": 23_572_403_200,
    "mixtral-8x7b": 46_702_792_704,
    "qwen2-0.5b": 494_032_768,
    "qwen2-1.5b": 1_543_714_304,
    "qwen2-7b": 7_615_616_512,
    "qwen2-72b": 72_706_203_648,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 751_632_384 - 151_936 * 1024,  # the release stores the tied head
    "qwen3-1.7b": 2_031_739_904 - 151_936 * 2048,  # likewise
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "gemma2-2b": 2_614_341_888,
    "gemma2-9b": 9_241_705_984,
    "gemma2-27b": 27_227_128_320,
    "gemma3-270m": 268_098_176,
    "gemma3-1b": 999_885_952,
    "olmo2-1b": 1_484_916_736,
    "olmo2-7b": 7_298_617_344,
    "olmo2-13b": 13_716_198_400,
    "olmo2-32b": 32_234_279_936,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "kimi-k2": 1_026_408_232_448,
    # The 671 B of the release (README_WEIGHTS.md): with the routers' balancing biases, without the 11.5 B of the
    # multi-token-prediction module.
    "deepseek-v3": 671_026_419_200,
}

MULTIMODAL = {"gemma3-4b": 4_300_079_472, "gemma3-12b": 12_187_325_040, "gemma3-27b": 27_432_406_640}
"""The hub's totals of models that also read images."""
IMAGES, IMAGE_WIDTH = 416_866_032, 1152
"""Parameters and width of their encoder: SigLIP-So400m at 896 pixels, as transformers builds it."""

BABY_VOCABULARY = 65
"""Characters in Shakespeare."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_counts_equal_the_published_ones(name: str):
    assert count(PRESETS[name]) == PUBLISHED[name]


@pytest.mark.parametrize(
    ("name", "published", "own_ends"),
    [("glm-4.5", 358_337_791_296, True), ("glm-4.5-air", 110_468_824_832, True), ("glm-5", 753_864_139_008, False)],
)
def test_counts_with_the_module_for_a_second_token_equal_the_published_ones(name: str, published: int, own_ends: bool):
    """The hub's totals have one layer more (DeepSeek-V3, section 2.2): two norms and a matrix that join hidden states
    and embeddings, a norm before the head, and in GLM-4.5 an embedding and a head of its own."""
    model = PRESETS[name]
    width = model.d_model
    layer = sum(prod(shape) for shape in block_shapes(model, model.n_layers - 1).values())
    module = layer + 2 * width * width + 3 * width + (2 * model.vocab_size * width if own_ends else 0)
    assert count(model) + module == published


@pytest.mark.parametrize("name", MULTIMODAL)
def test_counts_with_the_encoder_of_images_equal_the_published_ones(name: str):
    """A matrix and a norm bring images into the language model."""
    joining = PRESETS[name].d_model * IMAGE_WIDTH + IMAGE_WIDTH
    assert count(PRESETS[name]) + IMAGES + joining == MULTIMODAL[name]


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


@pytest.mark.parametrize(
    ("name", "billions", "table"),
    [
        ("qwen3-30b-a3b", 3.35, True),  # the hub's README: 3.3 B
        ("qwen3-235b-a22b", 22.2, True),
        ("gpt-oss-20b", 3.61, False),  # the model card's Table 1 leaves the embedding table out
        ("gpt-oss-120b", 5.13, False),
        ("kimi-k2", 32.9, True),  # the report's Table 2 says 32.6 B
        ("glm-4.5", 32.9, False),  # the report's Table 1 says 32 B
        ("glm-4.5-air", 12.8, False),  # and 12 B
        ("glm-5", 40.8, False),  # 40 B, without the indexer
    ],
)
def test_published_active_parameters(name: str, billions: float, table: bool):
    model = PRESETS[name]
    active = count_active(model) - (0 if table else model.vocab_size * model.d_model)
    assert active / 1e9 == pytest.approx(billions, rel=0.003)


def test_every_preset_is_counted():
    exempt = {name for name, model in PRESETS.items() if not model.vocab_size}
    ours = {"gpt3-175b", "solar-open-100b", "glm-4.5", "glm-4.5-air", "glm-5", "deepseek-v3.2", *MEGATRON}
    ours |= {"qwen3-next-80b-a3b", "qwen3.5-35b-a3b", "qwen3.5-9b"}
    ours |= {"seed-oss-36b", "granite3-2b", "granite3-8b", "granite4-micro", "phi3-mini", "phi4-14b", "minimax-m2"}
    ours |= {name for name in PRESETS if name.startswith(("llama4", "ministral", "gemma4"))}
    ours |= {
        "olmo3-7b",
        "olmo3-32b",
        "marin-8b",
        "marin-32b",
        "olmoe-1b-7b",
        "smollm3-3b",
    }  # as transformers counts (tests/families)
    priced = {name for name, model in PRESETS.items() if untrained(model)}  # tests/blocks/test_predicted_kinds.py
    assert {*PUBLISHED, *MULTIMODAL, *ours, *exempt, *priced} == set(PRESETS)


def test_every_preset_states_its_source():
    assert all(preset.source for preset in CATALOGUE.values())
    repositories = [hub for preset in CATALOGUE.values() for hub in preset.hub]
    assert len(set(repositories)) == len(repositories)
    assert all(hub.count("/") == 1 for hub in repositories)
    assert all(preset.context >= preset.model.seq_len or not preset.context for preset in CATALOGUE.values())


def test_every_preset_is_found_by_its_repositories():
    for name, preset in CATALOGUE.items():
        assert named(name) == named(name.upper()) == name
        assert all(named(hub) == named(hub.lower()) == name for hub in preset.hub)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("meta-llama/Llama-3.1-8B", "llama3.1-8b"),
        ("Llama-3.1-8B-Instruct", "llama3.1-8b"),
        ("google/gemma-3-27b-it", "gemma3-27b"),
        ("OLMo-2-1124-7B", "olmo2-7b"),
        ("qwen2_5_7b", "qwen2_5_7b"),  # an underscore is no point
        ("qwen2-57b", "qwen2-57b"),  # not qwen2.5-7b
        ("megatron-17b", "megatron-17b"),  # not megatron-1.7b
    ],
)
def test_names_of_other_spelling(text: str, name: str):
    assert named(text) == name


@pytest.mark.parametrize(
    ("text", "meant"),
    [("qwen3-8", "qwen3-8b"), ("Qwen/Qwen3-8B-FP8", "qwen3-8b"), ("meta-llama/Llama3.1-8", "llama3.1-8b")],
)
def test_likely_presets(text: str, meant: str):
    assert named(text) == text
    assert likely(text) == meant


def test_presets_know_their_names():
    assert all(model.preset == name for name, model in PRESETS.items())


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_whole_shapes(name: str):
    model = PRESETS[name]
    assert model.n_heads % model.kv_heads == 0
    assert model.head_size % 2 == 0
    if not model.mla.kv_rank and not model.head_dim:
        assert model.n_heads * model.head_size == model.d_model


def test_the_page_names_every_preset():
    text = (Path(__file__).parents[2] / "docs" / "reference" / "model.md").read_text()
    section = text.split("## Presets")[1].split("\n## ")[0]
    assert set(re.findall(r"`([^`= ]+)`", section.split("\n\n")[2])) == set(PRESETS)
