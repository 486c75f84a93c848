"""Model types that are read as shapes to predict: their parameters are those of transformers' own models, and what
changes the computation is refused."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch

from phalanx.blocks.kinds import not_trained
from phalanx.blocks.parameters import parameter_shapes
from phalanx.config.hugging_face.config_json import READ, read
from phalanx.config.hugging_face.families import PREDICTED, WITH_DELTAS
from phalanx.config.presets import unknown
from phalanx.errors import CheckpointError, JobError
from phalanx.exchange.folder import open_folder

_DELTA = {
    "linear_num_value_heads": 8,
    "linear_num_key_heads": 4,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 10,
    "linear_conv_kernel_dim": 3,
}
_SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 20}
_QWEN = _SIZES | _DELTA | {"num_hidden_layers": 5}
_QWEN_MOE = _QWEN | _EXPERTS | {"num_experts": 6, "shared_expert_intermediate_size": 40}
_HYBRID = {
    **_SIZES,
    **_EXPERTS,
    "mamba_num_heads": 6,
    "mamba_head_dim": 8,
    "n_groups": 2,
    "ssm_state_size": 12,
    "conv_kernel": 4,
    "n_routed_experts": 6,
    "moe_shared_expert_intermediate_size": 40,
}

SMALL: dict[str, dict[str, Any]] = {
    "qwen3_next": _QWEN_MOE,
    "qwen3_5_text": _QWEN,
    "qwen3_5_moe_text": _QWEN_MOE,
    "nemotron_h": _HYBRID
    | {"layers_block_type": ["mamba", "moe", "mamba", "attention", "moe", "attention", "mlp", "mamba"]},
    "nemotron_h, latents": _HYBRID | {"moe_latent_size": 28, "layers_block_type": ["mamba", "moe", "attention", "moe"]},
}


def theirs(model_type: str, values: dict[str, Any]) -> int:
    """Returns the parameters of transformers' own model."""
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config = CONFIG_MAPPING[model_type](**values)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    # Balancing biases are buffers there.
    biases = sum(buffer.numel() for name, buffer in model.named_buffers() if "e_score_correction_bias" in name)
    return biases + sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("name", SMALL)
def test_a_shape_has_the_parameters_of_transformers_model(name: str) -> None:
    model_type = name.partition(",")[0]
    described = read({"model_type": model_type, **SMALL[name]})
    shapes = parameter_shapes(described.model)
    assert sum(map(prod, shapes.values())) == theirs(model_type, SMALL[name]), shapes
    assert bool(not_trained(described.model)) == (model_type in {family.model_type for family in PREDICTED})


def test_every_type_is_compared_and_said_to_leave_modules_out() -> None:
    assert {name.partition(",")[0] for name in SMALL} == {family.model_type for family in (*PREDICTED, *WITH_DELTAS)}
    for family in (*PREDICTED, *WITH_DELTAS):
        assert any("model.mtp=1 is one" in note for note in family.notes)


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("field", ["clip_qkv", "use_something_new", "hc_mult"])
def test_a_field_that_is_not_understood_is_refused(name: str, field: str) -> None:
    with pytest.raises(JobError, match=f"{field} is not understood"):
        read({"model_type": name.partition(",")[0], **SMALL[name], field: 4})


@pytest.mark.parametrize(
    ("name", "changed", "said"),
    [
        ("qwen3_next", {"shared_expert_intermediate_size": 50}, "a multiple of moe_intermediate_size 20"),
        ("qwen3_next", {"layer_types": ["sliding_attention"] * 5}, "layer_types holds 'sliding_attention'"),
        ("qwen3_next", {"mlp_only_layers": [0]}, "mlp_only_layers is [0]"),
        ("qwen3_5_text", {"attn_output_gate": False}, "attn_output_gate is false"),
        ("nemotron_h", {"layers_block_type": ["mamba", "rwkv"]}, "layers_block_type holds '?'"),
        ("nemotron_h", {"layers_block_type": [{"kind": "mamba"}]}, "layers_block_type holds '?'"),
        ("nemotron_h", {"hybrid_override_pattern": "ME" * 100_000}, "has 200,000 layers, expected at most 10,000"),
        ("qwen3_next", {"layer_types": ["linear_attention"] * 100_000}, "lists 100,000 layers"),
        ("nemotron_h", {"num_hidden_layers": 3}, "num_hidden_layers is 3, the pattern has 8 layers"),
        ("nemotron_h", {"mlp_hidden_act": "silu"}, "mlp_hidden_act is 'silu'"),
    ],
)
def test_what_changes_the_computation_is_refused(name: str, changed: dict[str, Any], said: str) -> None:
    with pytest.raises(JobError) as error:
        read({"model_type": name, **SMALL[name], **changed})
    assert said in str(error.value)


def test_a_model_with_an_encoder_of_images_is_its_language_model() -> None:
    text = SMALL["qwen3_5_text"] | {"model_type": "qwen3_5_text"}
    whole = read({"model_type": "qwen3_5", "text_config": text, "vision_config": {}, "image_token_id": 7})
    assert whole.model == read(text).model
    assert whole.in_images


def test_its_weights_are_refused_with_the_reason(tmp_path: Path) -> None:
    config = {"model_type": "nemotron_h", **SMALL["nemotron_h"]}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(CheckpointError, match="attention=mamba .*its weights cannot be read"):
        open_folder([tmp_path])


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("deepseek_v4", "hyper-connections"),
        ("gemma4_unified", "without an encoder"),
        ("kimi_k3", "attention residuals"),
        ("glm5_next", "hyper-connections"),
    ],
)
def test_a_newer_kind_is_refused_with_its_reason(kind: str, said: str) -> None:
    assert kind not in READ
    with pytest.raises(JobError, match=said):
        read({"model_type": kind})
    assert said in unknown(kind.replace("_", "-"))
