"""config.json in both directions: what is written is read back, what is not understood is refused by name."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from families.counterparts import COUNTERPARTS, small_model
from phalanx.blocks.kinds import untrained
from phalanx.blocks.parameters import count
from phalanx.check.load import as_yaml, load_file, load_words
from phalanx.cli.main import main
from phalanx.config import overrides
from phalanx.config.hugging_face import config_json
from phalanx.config.hugging_face.config_json import lines_of
from phalanx.config.presets import CATALOGUE, PRESETS
from phalanx.errors import JobError

ON_THE_HUB = [name for name, preset in CATALOGUE.items() if preset.hub and not untrained(preset.model)]

LLAMA_3_1_8B = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.43.0.dev0",
    "use_cache": True,
    "vocab_size": 128256,
}
DEEPSEEK_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
    "aux_loss_alpha": 0.001,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "initializer_range": 0.02,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "pretraining_tp": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "seq_aux": True,
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "transformers_version": "4.33.1",
    "use_cache": True,
    "v_head_dim": 128,
    "vocab_size": 129280,
}
"""As on the hub."""


@pytest.mark.parametrize("name", ON_THE_HUB)
def test_every_preset_of_the_hub_is_written_and_read_back(name: str):
    model = PRESETS[name]
    family, values = config_json.write(model)
    found = config_json.read(json.loads(json.dumps(values)))
    assert found.family is family
    assert not config_json.differences(found.model, model)
    assert count(found.model) == count(model)


@pytest.mark.parametrize(
    ("change", "window"),
    [
        ({}, 0),  # 28 layers without a window, as transformers has it, are more than there are
        ({"max_window_layers": 4}, 0),
        ({"max_window_layers": 0}, 128),
        ({"max_window_layers": 2}, None),
        ({"max_window_layers": 2, "use_sliding_window": False}, 0),
        ({"max_window_layers": 2, "layer_types": ["sliding_attention"] * 4}, 128),
        ({"model_type": "llama", "use_sliding_window": False}, 0),
    ],
    ids=str,
)
def test_windows_that_begin_at_a_layer(change: dict[str, object], window: int | None):
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_hidden_layers": 4}
    values = {
        "model_type": "qwen2",
        "vocab_size": 64,
        **sizes,
        "sliding_window": 128,
        "use_sliding_window": True,
    } | change
    if window is None:
        with pytest.raises(JobError, match="max_window_layers is 2, supported: layer_types, or 0"):
            config_json.read(values)
    else:
        assert config_json.read(values).model.window == window


@pytest.mark.parametrize("name", COUNTERPARTS)
def test_small_models_of_every_kind_are_written_as_their_own_model_type(name: str):
    counterpart = COUNTERPARTS[name]
    model = small_model(PRESETS[name], counterpart.small)
    family, values = config_json.write(model, counterpart.model_type)
    assert family.model_type == values["model_type"] == counterpart.model_type
    assert not config_json.differences(config_json.read(values).model, model)


def test_a_released_config_is_the_preset():
    found = config_json.read(LLAMA_3_1_8B)
    assert not config_json.differences(found.model, PRESETS["llama3.1-8b"])
    assert found.model.seq_len == 131072


def test_what_transformers_would_do_and_this_program_does_not_is_said():
    """Dropout counts where transformers trains, and the code of auto_map where it loads the folder."""
    more = {"attention_dropout": 0.1, "hidden_dropout": 0.0, "auto_map": {"AutoModelForCausalLM": "own.Model"}}
    found = config_json.read({**LLAMA_3_1_8B, **more})
    assert found.model == config_json.read(LLAMA_3_1_8B).model
    assert found.notes == (
        "attention_dropout 0.1: not taken; training has no dropout unless model.dropout is set",
        "auto_map: the folder's own code is not run; the model is that of its model_type",
    )


def test_deepseek_with_stretched_positions():
    """mscale and mscale_all_dim cancel in queries and keys and enlarge the scores."""
    found = config_json.read(DEEPSEEK_V3)
    assert found.quantised
    assert any("further tokens" in note for note in found.notes)
    scaling = found.model.rope_scaling
    assert (scaling.kind, scaling.factor, scaling.magnitude) == ("yarn", 40.0, 1.0)
    plain = replace(found.model, rope_scaling=PRESETS["deepseek-v3"].rope_scaling, attention_scale=0.0)
    assert not config_json.differences(plain, PRESETS["deepseek-v3"])
    assert count(found.model) == count(PRESETS["deepseek-v3"])


def test_the_language_model_of_gemma_3_with_images():
    values = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "text_config": {
            "hidden_size": 5376,
            "intermediate_size": 21504,
            "model_type": "gemma3_text",
            "num_hidden_layers": 62,
            "num_attention_heads": 32,
            "num_key_value_heads": 16,
            "head_dim": 128,
            "query_pre_attn_scalar": 168,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
        },
        "vision_config": {"hidden_size": 1152},
    }
    found = config_json.read(values)
    assert found.in_images
    assert not config_json.differences(found.model, PRESETS["gemma3-27b"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "lama"}, "did you mean llama"),
        ({"model_type": "llava"}, "with an encoder of images, of which gemma3 and mistral3 are read"),
        ({"model_type": "olmo"}, "a kind with layers that are not implemented"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "whose head is not that of a language model"),
        ({"model_type": "qwen2_moe"}, "gate of its own"),
        ({"model_type": None}, "model_type is missing"),
        ({"model_type": ["llama"]}, "model_type is"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": "4096"}, "hidden_size is '4096', expected a whole number"),
        ({"hidden_size": -1}, "hidden_size is -1"),
        ({"num_hidden_layers": 10**12}, "num_hidden_layers is 1,000,000,000,000"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        ({"hidden_act": "relu"}, "hidden_act is 'relu', supported: 'silu'"),
        (
            {"attention_bais": True},
            "attention_bais is not understood for model_type llama; did you mean attention_bias",
        ),
        ({"attention_sinks": True}, "attention_sinks is not understood for model_type llama (what changes no number"),
        ({"attention_bias": True}, "mlp_bias"),
        ({"architectures": ["LlamaForCausalLMEagle3"]}, "whose head is not that of a language model"),
        ({"architectures": ["MedusaLlamaForCausalLM"]}, "architectures names 'MedusaLlamaForCausalLM', and model_type"),
        ({"architectures": ["Qwen2ForCausalLM"]}, "and model_type llama is LlamaForCausalLM"),
        ({"rope_scaling": {"type": "linear", "rope_type": "yarn", "factor": 2.0}}, "type is 'linear', rope_type is"),
        (
            {"rope_theta": 1e4, "rope_parameters": {"rope_theta": 5e5}},
            "rope_theta is 10000, rope_parameters.rope_theta",
        ),
        ({"rope_scaling": {"factor": 2.0}}, "rope_scaling.factor is 2, and no rope_type says how it stretches"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "rope_type is 'longrope'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_scaling.low_freq_factor is missing"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 8.0, "extra": 1}}, "rope_scaling.extra is not understood"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0.5}}, "rope_scaling.factor is 0.5"),
        ({"rope_scaling": 8}, "rope_scaling is 8, expected an object"),
        ({"rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"}}, "rope_scaling contradicts rope_param"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(change: dict[str, object], message: str):
    with pytest.raises(JobError, match="(?s)") as error:
        config_json.read(LLAMA_3_1_8B | change)
    assert message in str(error.value)


def test_both_spellings_of_positions_may_say_the_same():
    old = LLAMA_3_1_8B["rope_scaling"]
    assert isinstance(old, dict)
    both = LLAMA_3_1_8B | {"rope_parameters": old | {"rope_theta": 500000.0}}
    assert config_json.read(both).model == config_json.read(LLAMA_3_1_8B).model


def test_all_problems_at_once():
    with pytest.raises(JobError) as error:
        config_json.read(LLAMA_3_1_8B | {"hidden_size": 0.5, "hidden_act": "relu", "unheard_of": 1})
    assert len(error.value.problems) == 3


def test_windows_that_are_no_nth_layers_are_a_pattern():
    values = config_json.write(PRESETS["gemma2-2b"])[1]
    kinds = list(values["layer_types"])
    kinds[0] = "full_attention"
    model = config_json.read(values | {"layer_types": kinds}).model
    assert [model.window_of(layer) > 0 for layer in range(model.n_layers)] == [k != "full_attention" for k in kinds]
    ministral = PRESETS["ministral-8b"]
    assert config_json.read(config_json.write(ministral)[1]).model.window_pattern == ministral.window_pattern


def test_the_language_model_beside_images_is_of_its_own_kind():
    for kind, preset in (("ministral3", "ministral3-8b"), ("mistral", "mistral-small-24b")):
        inner = config_json.write(PRESETS[preset], kind)[1]
        found = config_json.read({"model_type": "mistral3", "text_config": inner, "vision_config": {}})
        assert (found.family.model_type, found.in_images) == (kind, True)


def test_growing_queries_have_a_rate_where_positions_are_given():
    """Without one transformers fails, with positions of its own it takes 0.1."""
    values = config_json.write(PRESETS["ministral3-8b"], "ministral3")[1]
    for name in ("llama_4_scaling_beta", "original_max_position_embeddings"):
        rope = {key: value for key, value in values["rope_parameters"].items() if key != name}
        with pytest.raises(JobError, match=f"rope_parameters.{name} is missing"):
            config_json.read(values | {"rope_parameters": rope})
    del values["rope_parameters"]
    assert config_json.read(values).model.query_growth.rate == 0.1


def test_double_mlps_without_layers_that_share_keys_are_none():
    model = replace(PRESETS["gemma4-e2b"], shared_keys=0)
    assert model.double_mlp
    assert config_json.write(model)[0].model_type == "gemma4_text"


def test_longrope_is_read_as_the_way_of_short_texts():
    scaling = {"type": "su", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48}
    values = config_json.write(PRESETS["phi3-mini"], "phi3")[1]
    values |= {"max_position_embeddings": 131072, "rope_scaling": scaling}
    del values["rope_parameters"]
    found = config_json.read(values)
    assert (found.model.seq_len, found.model.rope_scaling.factor) == (4096, 32)
    assert any("4,096 tokens" in note for note in found.notes)
    with pytest.raises(JobError, match=r"short_factor is for a factor above 1.* and holds numbers"):
        config_json.read(values | {"rope_scaling": scaling | {"long_factor": ["a"] * 48}})


def test_a_model_that_transformers_does_not_have_is_refused_with_the_nearest_kind():
    with pytest.raises(JobError, match="sinks true would be false"):
        config_json.write(replace(PRESETS["llama3-8b"], sinks=True))


def test_a_share_of_a_head_is_not_written_for_kinds_that_turn_whole_heads():
    with pytest.raises(JobError, match="rotary_fraction 0.5 would be 1"):
        config_json.write(replace(PRESETS["llama3-8b"], rotary_fraction=0.5), "llama")


def test_fields_that_transformers_ignores_are_known():
    more = {"max_sequence_length": 2048, "unsloth_fixed": True, "unsloth_version": "2025.3.19", "unsloth_new": [1]}
    assert config_json.read(LLAMA_3_1_8B | more).model == config_json.read(LLAMA_3_1_8B).model


@pytest.mark.parametrize(
    ("name", "own", "other"),
    [
        ("use_qk_norm", False, True),
        ("qkv_bias", False, True),
        ("num_local_experts", 0, 8),
        ("use_sliding_window", False, True),
        ("layer_types", ["full_attention"] * 32, ["sliding_attention"] * 32),
    ],
)
def test_a_field_of_another_kind_must_have_this_kind_s_own_value(name: str, own: object, other: object):
    assert config_json.read(LLAMA_3_1_8B | {name: own}).model == config_json.read(LLAMA_3_1_8B).model
    with pytest.raises(JobError, match=f"^{name} is .*, supported for model_type llama: "):
        config_json.read(LLAMA_3_1_8B | {name: other})


def test_refused_fields_are_left_out_on_purpose():
    ours = config_json.read(LLAMA_3_1_8B).model
    stretched = LLAMA_3_1_8B["rope_scaling"]
    assert isinstance(stretched, dict)
    values = LLAMA_3_1_8B | {"colour": 1, "shade": 2, "rope_scaling": stretched | {"tint": 3}}
    with pytest.raises(
        JobError, match=r"(?s)rope_scaling.tint is .*\[rope_scaling.tint\].*colour is .*\[colour,shade\]"
    ):
        config_json.read(values)
    found = config_json.read(values, ["colour", "rope_scaling.tint", "shade"])
    assert found.model == ours
    assert "colour is read as if it were absent" in found.note
    with pytest.raises(JobError, match="shade is not understood"):
        config_json.read(values, ["colour", "rope_scaling.tint"])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("color", "names color, which the file does not have; did you mean colour"),
        ("hidden_size", "names hidden_size, which is not refused: remove it"),
        ("use_cache", "names use_cache, which is not refused: remove it"),
        ("vocab_size.inner", "names vocab_size.inner, which the file does not have"),
    ],
)
def test_only_refused_fields_are_left_out(name: str, message: str):
    with pytest.raises(JobError, match=message):
        config_json.read(LLAMA_3_1_8B | {"colour": 1}, ["colour", name])


@pytest.mark.parametrize("place", ["partial_rotary_factor", "rope_parameters"])
def test_a_share_of_a_head_is_read_as_transformers_reads_it(place: str):
    """It turns whole heads in llama's kind, and fails where positions are stretched, too."""
    values = config_json.write(replace(PRESETS["llama3-8b"], rope_theta=1e4))[1]
    inner = values["rope_parameters"] | {"partial_rotary_factor": 0.5}
    more = {place: 0.5 if place == "partial_rotary_factor" else inner}
    found = config_json.read(values | more)
    assert found.model.rotary_fraction == 1
    assert "partial_rotary_factor 0.5 is ignored" in found.note
    stretched = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
    with pytest.raises(JobError, match="partial_rotary_factor is 0.5, with which transformers computes no linear"):
        config_json.read(values | {"partial_rotary_factor": 0.5, "rope_parameters": stretched})


def test_kinds_that_turn_a_share_of_a_head_state_it_even_if_it_is_whole():
    for name, model_type in {"gpt-neox-20b": "gpt_neox", "glm-4.5": "glm4_moe"}.items():
        values = config_json.write(replace(PRESETS[name], rotary_fraction=1.0), model_type)[1]
        assert values["rope_parameters"]["partial_rotary_factor"] == 1


def test_a_file_is_named(tmp_path):
    file = tmp_path / "config.json"
    with pytest.raises(JobError, match="no such file"):
        config_json.read_file(file)
    file.write_text("{")
    with pytest.raises(JobError, match="no JSON"):
        config_json.read_file(file)
    file.write_text(json.dumps(LLAMA_3_1_8B | {"hidden_size": "wide"}))
    with pytest.raises(JobError, match=r"config.json:1: hidden_size is 'wide'"):
        config_json.read_file(file)


def test_the_line_of_a_field_is_named(tmp_path):
    text = json.dumps(
        LLAMA_3_1_8B | {"rope_scaling": {"rope_type": "llama3", "factr": [8, {"a": 1}]}, "b": "{"}, indent=2
    )
    lines = lines_of(text)
    for name in ("architectures", "rope_scaling", "rope_scaling.factr", "b"):
        assert text.splitlines()[lines[name] - 1].strip().startswith(f'"{name.rpartition(".")[2]}":')
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(JobError) as error:
        config_json.read_file(tmp_path / "config.json")
    places = [problem.partition("config.json")[2] for problem in error.value.problems]
    assert any(
        place.startswith(f":{lines['rope_scaling.factr']}: rope_scaling.factr is not understood") for place in places
    )
    assert any(place.startswith(f":{lines['b']}: b is not understood") for place in places)
    assert ": rope_scaling.factor is missing" in places


def test_a_job_takes_its_model_from_a_file(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_3_1_8B))
    for name in (f"hf:{tmp_path}/config.json", f"hf:{tmp_path}"):
        job = load_words(overrides.parse([f"model={name}", "seq_len=8192"])).job
        assert job.model == replace(PRESETS["llama3.1-8b"], preset=name)
    assert main(["models", f"hf:{tmp_path}"]) == 0
    assert "8,030,261,248 (8.03B)" in capsys.readouterr().out
    with pytest.raises(JobError, match="no such file"):
        load_words(overrides.parse([f"model=hf:{tmp_path}/other.json"]))


def test_a_resolved_job_does_not_read_the_file_again(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_3_1_8B))
    loaded = load_words(overrides.parse([f"model=hf:{tmp_path}"]))
    (tmp_path / "config.json").unlink()
    (tmp_path / "job.yaml").write_text(as_yaml(loaded))
    assert load_file(tmp_path / "job.yaml").job == loaded.job


def test_initial_weights_are_as_the_file_says():
    assert config_json.read(LLAMA_3_1_8B | {"initializer_range": 0.006}).model.init_std == 0.006
    with pytest.raises(JobError, match="initializer_range is -1, expected at least 0"):
        config_json.read(LLAMA_3_1_8B | {"initializer_range": -1})


@pytest.mark.parametrize(
    ("name", "more", "wrong"),
    [
        ("gpt2", {"_num_labels": 1}, {}),
        ("gpt-neox-20b", {"attention_probs_dropout_prob": 0, "hidden_dropout_prob": 0}, {}),
        ("phi3-mini", {"lm_head_bias": False, "full_attn_mod": 1}, {"lm_head_bias": True, "full_attn_mod": 2}),
        ("qwen3-30b-a3b", {"shared_expert_intermediate_size": 0}, {"shared_expert_intermediate_size": 768}),
    ],
)
def test_fields_of_published_files_that_say_nothing_new(name: str, more: dict, wrong: dict):
    """Of distilgpt2, GPT-NeoX, Phi-4-mini and Qwen3-Coder."""
    values = config_json.write(PRESETS[name])[1]
    assert not config_json.differences(config_json.read(values | more).model, PRESETS[name])
    for field, value in wrong.items():
        with pytest.raises(JobError, match=f"{field} is "):
            config_json.read(values | {field: value})


@pytest.mark.parametrize("inside", [None, True, False])
def test_a_model_that_reads_images_has_the_tied_head_of_its_outer_field(inside: bool | None) -> None:
    """As in transformers 5.23, whose module for images and text has the head."""
    inner = {"model_type": "gemma3_text"} | ({} if inside is None else {"tie_word_embeddings": inside})
    for outside in (True, False):
        values = {"model_type": "gemma3", "text_config": inner, "tie_word_embeddings": outside}
        if inside in (None, outside):
            assert config_json.read(values).model.tied is outside
            continue
        with pytest.raises(JobError, match="tie_word_embeddings is .*, and that of text_config .*: programs differ"):
            config_json.read(values)
        assert config_json.read(values, ["tie_word_embeddings"]).model.tied is inside
