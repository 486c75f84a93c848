from __future__ import annotations

import pytest

from phalanx.blocks.parameters import count, count_active
from phalanx.check.model import model_problems
from phalanx.validation.row import key_of, plain, remark, shapes

BILLIONS = {
    # What the papers and model cards print.
    "gpt3175b": (175, 175),
    "gpt104b": (104, 104),
    "bloom176b": (176, 176),
    "opt66b": (66, 66),
    "mpt30b": (30, 30),
    "palm540b": (540, 540),
    "falcon180b": (180, 180),
    "llama65b": (65.2, 65.2),
    "llama3405b": (405, 405),
    "nemotron4340b": (340, 340),
    "mixtral8x22b": (141, 39),
    "grok1": (314, 84),
    "dbrx": (132, 36),
    "qwen330b": (30.5, 3.3),
    "qwen3235b": (235, 22),
    "qwen3next": (80, 3.9),
    "deepseekv2": (236, 21),
    "deepseekv2lite": (15.7, 2.4),
    "deepseekv3": (671, 37),
    "kimik2": (1026, 32),
    "glm4p5": (355, 32),
    "glm5": (744, 40),
    "gptoss20b": (20.9, 3.6),
    "gptoss120b": (116.8, 5.1),
    "nemotron3nano": (31.6, 3.6),
    "nemotron3super": (120, 12),
    "nemotron3ultra": (550, 55),
}


@pytest.mark.parametrize("key", BILLIONS)
def test_shapes_have_the_parameters_that_their_papers_print(key):
    total, active = BILLIONS[key]
    shape = shapes()[key]
    assert count(shape) / 1e9 == pytest.approx(total, rel=0.02)
    # Some count the embedding or the head out, and the hybrids' predictions of several tokens are in.
    assert count_active(shape) / 1e9 == pytest.approx(active, rel=0.2)


@pytest.mark.parametrize("key", shapes())
def test_every_shape_is_legal_and_has_a_vocabulary(key):
    shape = shapes()[key]
    assert not list(model_problems(shape))
    assert shape.vocab_size > 1000
    assert shape.seq_len >= 1024
    assert shape.head_dim or shape.mla.kv_rank or shape.d_model % shape.n_heads == 0
    assert shape.n_heads % shape.kv_heads == 0


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("llama3-70b-l12", "llama370b"),
        ("LLAMA3.1_405B", "llama3405b"),
        ("llama31_8b", "llama38b"),
        ("Meta-Llama-3.3-70B-Instruct", "llama370b"),
        ("llama3.2-1b", "llama3p21b"),
        ("maxtext-llama3-70b", "llama370b"),
        ("DeepSeekV3 (w/o MTP)", "deepseekv3"),
        ("deepseek-v2-lite", "deepseekv2lite"),
        ("Qwen3_30B_a3B", "qwen330ba3b"),
        ("Qwen2.5-72B", "qwen2p572b"),
        ("GPT OSS 120B", "gptoss120b"),
        ("Nemotron_3_Super", "nemotron3super"),
        ("grok1-314b proxy", "grok1"),
        ("gpt-1.3B", "gpt1p3b"),
        ("opt-1.3b", "opt1p3b"),
        ("opt-13b", "opt13b"),
        ("GLM-4.5-Air", "glm4p5air"),
        ("gpt-2.5B", None),
        ("gpt2", "gpt2"),
        ("a model of our own", None),
        ("", None),
    ],
)
def test_names_are_found_however_they_are_written(name, key):
    assert key_of(name) == key


def test_a_point_between_digits_is_not_lost():
    assert plain("OPT-1.3B v.2") == "opt1p3bv2"


@pytest.mark.parametrize("name", ["GLM-5.3 flash", "Kimi K2.5", "DeepSeek-V4-Pro", "Kimi K3"])
def test_another_version_is_not_taken_for_a_known_model(name):
    assert key_of(name) is None


def test_what_stands_for_something_else_says_so():
    assert "squared ReLU" in remark("nemotron4340b")
    assert not remark("qwen3next")
    assert not remark("nemotron3super")
    assert not remark("llama38b")


@pytest.mark.parametrize(
    ("key", "billions"),
    [("nemotronh8b", 8.1), ("nemotronh47b", 46.8), ("nemotronh56b", 56.3), ("nemotronnano9b", 8.9)],
)
def test_hybrids_have_the_parameters_in_their_names(key, billions):
    assert count(shapes()[key]) / 1e9 == pytest.approx(billions, rel=0.01)


def test_maxtext_scales_as_its_own_rule_does():
    # base.yml with global_parameter_scale 16, 32 and 128: heads and MLP, width, layers in turn.
    assert [(shapes()[k].n_layers, shapes()[k].d_model, shapes()[k].n_heads) for k in ("maxtext16b", "maxtext32b")] == [
        (32, 4096, 64),
        (32, 8192, 64),
    ]
    assert (shapes()["maxtext128b"].n_layers, shapes()["maxtext128b"].n_heads) == (64, 128)
