"""Each family as transformers implements it, built from our shape by the tables of src: config/hugging_face and
exchange. A parameter of ours is a linear function of theirs, which takes gradients over, too."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from math import log
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.config.hugging_face import config_json
from phalanx.config.model import ModelConfig
from phalanx.exchange.hugging_face import WEIGHTS
from phalanx.exchange.links import links
from phalanx.verify.exchange import InFloat64


@dataclass(frozen=True)
class Counterpart:
    """A family in transformers."""

    model_type: str
    small: dict[str, Any] = field(default_factory=dict)
    """Fields that differ in the small model."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Fields of their configuration beyond those of ours."""

    def build(self, model: ModelConfig, device: str = "cpu", values: Mapping[str, Any] | None = None) -> nn.Module:
        """Returns transformers' model of our shape, or of the `values` of a config.json, with eager attention, without
        an auxiliary loss. Its weights are whatever memory held: a test draws them."""
        from transformers import AutoConfig, AutoModelForCausalLM
        from transformers.initialization import no_init_weights

        values = deepcopy(dict(values or config_json.write(model, self.model_type)[1])) | self.extra
        tokens = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))
        config = AutoConfig.for_model(**values, **tokens, use_cache=False)
        config._experts_implementation = "eager"
        with torch.device(device), no_init_weights():
            built = AutoModelForCausalLM.from_config(
                config, attn_implementation="eager", dtype=torch.get_default_dtype()
            )
        built.tie_weights()
        return built.eval()  # GPT-2 has dropout

    def in_float64(self, model: ModelConfig, values: Mapping[str, Any] | None = None) -> nn.Module:
        """Returns the same, whose parameters and constants are float64."""
        with InFloat64():
            return self.build(model, values=values).double()

    def stored(self, theirs: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns tensors of their model by the names and shapes that they have in files."""
        from transformers.core_model_loading import revert_weight_conversion

        return revert_weight_conversion(theirs, dict(tensors))

    def take(self, stored: Mapping[str, Tensor], model: ModelConfig) -> dict[str, Tensor]:
        """Returns our parameters from tensors of files."""
        return {
            name: tensor
            for link in links(model, WEIGHTS[self.model_type])
            for name, tensor in zip(
                link.ours, link.conversion.ours([stored[name] for name in link.theirs], model), strict=True
            )
        }


_SMALL_LLAMA3 = {"rope_scaling": {"original_seq_len": 16}}
_SMALL_EXPERTS = {"n_experts": 8, "top_k": 3, "d_ff": 12, "aux_loss": 0.0}
_SMALL_LATENT = {"q_rank": 12, "kv_rank": 10, "rope_head_dim": 6, "nope_head_dim": 8, "v_head_dim": 7}
_SMALL_INDEX = {"top_k": 9, "index_heads": 12, "index_head_dim": 10}
_SMALL_DELTA = {"n_heads": 4, "key_heads": 2, "key_head_dim": 6, "head_dim": 5}

_SMALL_LLAMA4: dict[str, Any] = {"n_layers": 4, "window": 7, "query_growth": {"length": 6}}

_SMALL_GEMMA4: dict[str, Any] = {"window": 7, "n_layers": 6, "logit_softcap": 3.0}
_SMALL_GEMMA4["wide"] = {"head_dim": 24, "n_kv_heads": 1}

COUNTERPARTS: dict[str, Counterpart] = {
    "llama3.1-8b": Counterpart("llama", _SMALL_LLAMA3),
    "llama3.2-1b": Counterpart("llama", _SMALL_LLAMA3),
    "mistral-7b": Counterpart("mistral", {"window": 7}),
    "mixtral-8x7b": Counterpart("mixtral", {"moe": {"aux_loss": 0.0}}),
    "qwen2.5-7b": Counterpart("qwen2"),
    "qwen3-8b": Counterpart("qwen3"),
    "qwen3-30b-a3b": Counterpart("qwen3_moe", {"moe": _SMALL_EXPERTS}),
    "gemma2-27b": Counterpart("gemma2", {"window": 7, "attention_softcap": 2.0, "logit_softcap": 3.0}),
    "gemma3-27b": Counterpart("gemma3_text", {"window": 7, "n_layers": 6}),
    "gemma4-31b": Counterpart("gemma4_text", _SMALL_GEMMA4),
    "gemma4-26b-a4b": Counterpart(
        "gemma4_text", _SMALL_GEMMA4 | {"moe": {"n_experts": 8, "top_k": 3, "d_ff": 12, "n_shared": 4}}
    ),
    "gemma4-e2b": Counterpart(
        "gemma4_text",
        _SMALL_GEMMA4 | {"full_every": 3, "wide": {"head_dim": 24}, "shared_keys": 3, "layer_embedding": 6},
        # Without it transformers 5.23 fails where layers share keys and have no embeddings of their own.
        extra={"output_hidden_states": True},
    ),
    "gpt2": Counterpart("gpt2", {"n_kv_heads": 0}),
    "olmo2-32b": Counterpart("olmo2"),
    "olmo3-32b": Counterpart("olmo3", {"window": 7, "rope_scaling": {"original_seq_len": 64}}),
    "gpt-neox-20b": Counterpart("gpt_neox", {"n_kv_heads": 4, "head_dim": 0, "d_model": 64, "d_ff": 96}),
    "olmoe-1b-7b": Counterpart("olmoe", {"moe": _SMALL_EXPERTS}),
    "seed-oss-36b": Counterpart("seed_oss"),
    "smollm3-3b": Counterpart("smollm3", {"nope_every": 2}),
    "granite3-8b": Counterpart("granite"),
    "llama4-scout-17b-16e": Counterpart(
        "llama4_text",
        _SMALL_LLAMA4
        | {
            "qk_norm": "unit",
            "rope_scaling": {"original_seq_len": 16, "factor": 4.0},
            "moe": {"n_experts": 4, "d_ff": 12, "aux_loss": 0.0},
        },
    ),
    "llama4-maverick-17b-128e": Counterpart(
        "llama4_text", _SMALL_LLAMA4 | {"moe": {"n_experts": 4, "top_k": 2, "d_ff": 12, "aux_loss": 0.0}}
    ),
    "ministral-8b": Counterpart("ministral", {"window": 7, "n_layers": 5}),
    "ministral3-8b": Counterpart(
        "ministral3",
        {"rope_scaling": {"original_seq_len": 8, "factor": 4.0}, "query_growth": {"length": 8}},
    ),
    "granite4-micro": Counterpart("granitemoehybrid", {"positions": "none"}),
    "phi3-mini": Counterpart("phi3", {"window": 7}),
    "phi4-14b": Counterpart(
        "phi3",
        {
            "rope_scaling": {
                "kind": "longrope",
                "factor": 4.0,
                "original_seq_len": 64,
                "short": (1.0, 1.1, 1.3, 1.7),
                "long": (1.0, 3.0, 7.0, 9.0),
            }
        },
    ),
    "minimax-m2": Counterpart("minimax_m2", {"moe": _SMALL_EXPERTS}),
    "qwen3-next-80b-a3b": Counterpart("qwen3_next", {"n_layers": 4, "moe": _SMALL_EXPERTS, "delta": _SMALL_DELTA}),
    "qwen3.5-9b": Counterpart("qwen3_5_text", {"n_layers": 4, "delta": _SMALL_DELTA}),
    "qwen3.5-35b-a3b": Counterpart(
        "qwen3_5_moe_text", {"n_layers": 4, "moe": _SMALL_EXPERTS, "delta": _SMALL_DELTA, "seq_len": 80}
    ),
    "gpt-oss-20b": Counterpart(
        "gpt_oss", {"window": 7, "moe": _SMALL_EXPERTS, "rope_scaling": {"original_seq_len": 64}}
    ),
    "deepseek-v3": Counterpart(
        "deepseek_v3",
        {"moe": _SMALL_EXPERTS | {"n_groups": 4, "top_groups": 2, "n_dense_layers": 1}, "mla": _SMALL_LATENT},
    ),
    "kimi-k2": Counterpart(
        "deepseek_v3",
        {
            "moe": _SMALL_EXPERTS,
            "mla": _SMALL_LATENT,
            "rope_scaling": {"original_seq_len": 64},
            "attention_scale": 14**-0.5 * (0.1 * log(32) + 1) ** 2,
        },
    ),
    "glm-4.5": Counterpart("glm4_moe", {"moe": _SMALL_EXPERTS | {"n_dense_layers": 1}}),
    "solar-open-100b": Counterpart("solar_open", {"moe": _SMALL_EXPERTS}),
    "glm-5": Counterpart(
        "glm_moe_dsa",
        {
            "moe": _SMALL_EXPERTS | {"n_dense_layers": 1},
            "mla": _SMALL_LATENT | {"norm_eps": 1e-6},
            "sparse": _SMALL_INDEX,
        },
    ),
    "deepseek-v3.2": Counterpart(
        "deepseek_v32",
        {
            "moe": _SMALL_EXPERTS | {"n_groups": 4, "top_groups": 2, "n_dense_layers": 1},
            "mla": _SMALL_LATENT,
            "sparse": _SMALL_INDEX,
            "rope_scaling": {"original_seq_len": 64, "kind": "yarn", "factor": 32.0},
            "attention_scale": 14**-0.5 * (0.1 * log(32) + 1) ** 2,
        },
    ),
}
"""By the preset whose kind the small model has."""


def small_model(model: ModelConfig, fields: Mapping[str, Any]) -> ModelConfig:
    """Returns a small model of the same kind."""
    sizes: dict[str, Any] = {
        "n_layers": min(3, model.n_layers),
        "d_model": 32,
        "n_heads": 4,
        "n_kv_heads": 4 if model.mla.kv_rank else 2,
        "head_dim": 0 if model.mla.kv_rank or not model.head_dim else 16,
        "d_ff": 48,
        "vocab_size": 50,
        "seq_len": 24,
    } | fields
    for part in ("moe", "mla", "sparse", "delta", "rope_scaling", "query_growth", "wide"):
        if part in sizes:
            sizes[part] = replace(getattr(model, part), **sizes[part])
    return replace(model, **sizes)
