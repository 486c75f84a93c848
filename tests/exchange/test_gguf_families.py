"""Models in GGUF files compute what transformers computes, in float64."""

import pytest
import torch

pytest.importorskip("gguf")
transformers = pytest.importorskip("transformers")

from exchange import gguf_files  # noqa: E402
from families.counterparts import InFloat64  # noqa: E402
from phalanx.errors import CheckpointError  # noqa: E402
from phalanx.exchange.gguf import GgufModel  # noqa: E402
from phalanx.model.transformer import Transformer  # noqa: E402

SMALL = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
# The root of a width of 64 is exact: transformers rounds it to float32.
GEMMA = SMALL | {"hidden_size": 64, "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 8}
DEEPSEEK = SMALL | {
    "num_key_value_heads": 4,
    "q_lora_rank": 12,
    "kv_lora_rank": 10,
    "qk_rope_head_dim": 6,
    "qk_nope_head_dim": 8,
    "v_head_dim": 7,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 12,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
}
MODELS = {
    "llama": SMALL | {"tie_word_embeddings": True},
    "mistral": SMALL | {"head_dim": 16, "sliding_window": None},
    "mixtral": SMALL | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2": SMALL,
    "qwen3": SMALL | {"head_dim": 16},
    "qwen3moe": SMALL
    | {"head_dim": 16, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "norm_topk_prob": True},
    "gemma": SMALL | {"hidden_size": 64, "head_dim": 16},
    "gemma2": GEMMA,
    "gemma3": GEMMA | {"num_hidden_layers": 7},
    "gpt2": {"vocab_size": 96, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "gptneox": SMALL | {"rotary_pct": 0.25, "head_dim": None, "num_key_value_heads": None},
    "olmo2": SMALL,
    "deepseek2": DEEPSEEK,
    "deepseek2-joined": DEEPSEEK,
    "deepseek2-yarn": DEEPSEEK
    | {
        "q_lora_rank": None,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 16,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    },
}


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_those_of_transformers(name, tmp_path):
    values = MODELS[name]
    kind = name.partition("-")[0]
    model_type = gguf_files.MODEL_TYPES.get(kind, kind)
    tokens = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    config = transformers.AutoConfig.for_model(model_type, **values, **tokens)
    config._attn_implementation = config._experts_implementation = "eager"
    with InFloat64():
        theirs = transformers.AutoModelForCausalLM.from_config(config)
    gguf_files.write(tmp_path / "model.gguf", gguf_files.randomised(theirs), config, joined=name.endswith("joined"))

    model = GgufModel(tmp_path / "model.gguf")
    ours = Transformer(model.model).double()
    with torch.no_grad():
        for parameter_name, parameter in ours.named_parameters():
            parameter.copy_(model.read(parameter_name))
        tokens = torch.randint(0, 96, (2, 24), generator=torch.Generator().manual_seed(1))
        with InFloat64():
            expected = theirs.double()(tokens).logits
    assert expected.std() > 0.01
    torch.testing.assert_close(ours(tokens), expected, rtol=0, atol=1e-9)


def test_what_deepseek_s_files_may_not_say_is_named(tmp_path):
    config = transformers.AutoConfig.for_model("deepseek_v3", **DEEPSEEK)
    theirs = transformers.AutoModelForCausalLM.from_config(config)
    for change, message in (
        ({"expert_gating_func": 1}, "choose groups by softmax scores"),
        ({"attention.key_length_mla": 6}, "6 elements per head, of which 6 are rotated"),
    ):
        gguf_files.write(tmp_path / "model.gguf", theirs, config, change)
        with pytest.raises(CheckpointError, match=message):
            GgufModel(tmp_path / "model.gguf")
    gguf_files.write(tmp_path / "model.gguf", theirs, config, {"expert_group_count": 1, "expert_group_used_count": 1})
    [note] = GgufModel(tmp_path / "model.gguf").notes
    assert "tokens choose among all experts" in note
