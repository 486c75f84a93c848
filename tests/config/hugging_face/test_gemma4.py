"""Gemma 4's config.json: what is implemented, and what is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from phalanx.check.model import model_problems
from phalanx.config.hugging_face.config_json import read, write
from phalanx.config.presets import PRESETS
from phalanx.errors import JobError

SMALL = {"num_hidden_layers": 6, "hidden_size": 64, "head_dim": 16, "global_head_dim": 32}
SMALL |= {"model_type": "gemma4_text", "hidden_size_per_layer_input": 0}


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (
            {"hidden_size_per_layer_input": None, "vocab_size": 300},
            "vocab_size_per_layer_input is 262,144, supported: vocab_size 300",
        ),
        (
            {"num_kv_shared_layers": 2, "use_double_wide_mlp": True, "enable_moe_block": True, "num_experts": 4}
            | {"top_k_experts": 2, "moe_intermediate_size": 512},
            "use_double_wide_mlp is true, supported beside experts: false",
        ),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention is 'all'"),
        ({"attention_bias": True}, "attention_bias is true"),
        ({"layer_types": ["full_attention", *["sliding_attention"] * 5]}, "ends with sliding_attention"),
        ({"enable_moe_block": True, "num_experts": 4}, "top_k_experts is missing"),
        (
            {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 100},
            "intermediate_size is 9,216, supported: a multiple of moe_intermediate_size 100",
        ),
        ({"per_layer_config": {"0": {"head_dim": 8}}}, "per_layer_config.0 is for a layer with a window"),
        ({"per_layer_config": {"5": {"sliding_window": 8}}}, "per_layer_config.5.sliding_window is not understood"),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "proportional", "partial_rotary_factor": 2.0}}},
            "partial_rotary_factor is 2, expected at most 1",
        ),
        ({"altup_num_inputs": 4}, "altup_num_inputs is not understood"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(JobError) as refused:
        read(SMALL | fields)
    assert any(said in problem for problem in refused.value.problems), refused.value.problems


def test_layers_without_keys_need_earlier_ones_that_are_alike() -> None:
    found = {n: [text for _, text in model_problems(read(SMALL | {"num_kv_shared_layers": n}).model)] for n in (1, 6)}
    assert found[1] == ["no layer with keys of its own has all keys, as layer 5 has; nearest legal: fewer"]
    assert found[6] == [
        "must leave a layer with keys of its own: n_layers is 6, shared_keys 6; nearest legal: 5",
    ]


def test_sizes_of_full_layers_are_read_from_either_spelling() -> None:
    shared = {"attention_k_eq_v": True, "num_global_key_value_heads": 2}
    model = read(SMALL | shared).model
    assert (model.wide.head_dim, model.wide.n_kv_heads, model.values_are_keys) == (32, 2, True)
    each = {"attention_k_eq_v": True, "per_layer_config": {"5": {"head_dim": 32, "num_key_value_heads": 2}}}
    assert read(SMALL | {"global_head_dim": None} | each).model == model
    for none in (None, {}):  # no layer has heads of its own then, whatever global_head_dim says
        assert not read(SMALL | {"per_layer_config": none}).model.wide.head_dim
    # Without shared values transformers ignores the number of key/value heads.
    assert read(SMALL | {"num_global_key_value_heads": 2}).model.wide.n_kv_heads == 0


def test_the_last_layer_of_an_unlisted_model_is_full() -> None:
    model = read(SMALL | {"num_hidden_layers": 8}).model
    assert [model.window_of(layer) > 0 for layer in range(8)] == [True] * 5 + [False, True, False]


def test_a_model_inside_of_one_with_images_is_read() -> None:
    text = write(PRESETS["gemma4-31b"])[1]
    whole = {"model_type": "gemma4", "text_config": text, "vision_config": {}, "audio_config": None}
    found = read(whole | {"boa_token_id": 1, "eoa_token_index": 2, "vision_soft_tokens_per_image": 280})
    assert found.model == read(text).model
    assert found.in_images
