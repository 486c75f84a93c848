"""Each family as transformers implements it: its configuration from ours, and where each parameter is found.

A parameter of ours is a linear function of one of transformers': a part, a permutation or a transpose of it. The same
function takes gradients over. Names are patterns, {} stands for the layer.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import log
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from phalanx.config.model import ModelConfig

Convert = Callable[[Tensor, ModelConfig], Tensor]
Source = str | tuple[str, Convert]


class InFloat64(TorchFunctionMode):
    """Makes float64 of every float32 that the code asks for: transformers computes softmax, norms, rotary tables and
    routers in float32 whatever the type of its weights."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        func = torch.Tensor.double if func is torch.Tensor.float else func
        wide = [torch.float64 if value is torch.float32 else value for value in args]
        named = {name: torch.float64 if value is torch.float32 else value for name, value in (kwargs or {}).items()}
        return func(*wide, **named)


@dataclass(frozen=True)
class Counterpart:
    """A family in transformers."""

    module: str
    """transformers.models.MODULE."""
    configuration: str
    model: str
    config: Callable[[ModelConfig], dict[str, Any]]
    """The configuration's arguments, as the hub's config.json names them."""
    names: Mapping[str, Source]
    """Transformers' parameter for each of ours, with the function that makes ours of it."""
    norm_offset: float = 0.0
    """Added to transformers' norm weights."""
    unused: str = r"$^"
    """Parameters without a counterpart here: a regular expression."""
    small: dict[str, Any] = field(default_factory=dict)
    """Fields that differ in the small model."""

    def build(self, model: ModelConfig, device: str = "cpu") -> nn.Module:
        """Returns transformers' model of our shape, with eager attention, without an auxiliary loss."""
        where = f"transformers.models.{self.module}"
        configuration = getattr(importlib.import_module(f"{where}.configuration_{self.module}"), self.configuration)
        built = getattr(importlib.import_module(f"{where}.modeling_{self.module}"), self.model)
        values = {**_shape(model), **self.config(model), "pad_token_id": None, "bos_token_id": None}
        config = configuration(**values, eos_token_id=None, use_cache=False, attn_implementation="eager")
        config._experts_implementation = "eager"
        with torch.device(device):
            return built(config)

    def take(self, tensors: Mapping[str, Tensor], name: str, model: ModelConfig) -> Tensor:
        """Returns our parameter `name` (or its gradient) from transformers' tensors."""
        source, convert = self.source(name)
        return tensors[source] if convert is None else convert(tensors[source], model)

    def source(self, name: str) -> tuple[str, Convert | None]:
        """Returns the name of transformers' parameter behind ours, and the function that makes ours of it."""
        layer = re.search(r"\d+", name)
        found = self.names[re.sub(r"\d+", "{}", name, count=1)]
        source, convert = found if isinstance(found, tuple) else (found, None)
        return source.format(layer[0] if layer else ""), convert


def _shape(model: ModelConfig) -> dict[str, Any]:
    """Returns what all configurations name alike."""
    return {
        "hidden_size": model.d_model,
        "intermediate_size": model.ff_size,
        "num_hidden_layers": model.n_layers,
        "num_attention_heads": model.n_heads,
        "num_key_value_heads": model.kv_heads,
        "vocab_size": model.vocab_size,
        "max_position_embeddings": max(model.seq_len, int(model.rope_scaling.original_seq_len)),
        "tie_word_embeddings": model.tied,
        "rms_norm_eps": model.norm_eps,
        "rope_parameters": rope(model),
    }


def rope(model: ModelConfig) -> dict[str, Any]:
    """Returns rope_parameters."""
    scaling, values = model.rope_scaling, {"rope_theta": model.rope_theta, "rope_type": "default"}
    if model.rotary_fraction < 1:
        values["partial_rotary_factor"] = model.rotary_fraction
    if scaling.factor == 1:
        return values
    values |= {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind == "llama3":
        values |= {"low_freq_factor": scaling.low_freq_factor, "high_freq_factor": scaling.high_freq_factor}
    if scaling.kind == "yarn":
        values |= {"beta_fast": scaling.beta_fast, "beta_slow": scaling.beta_slow, "truncate": scaling.truncate}
    return values | {"original_max_position_embeddings": scaling.original_seq_len}


def _mixture(model: ModelConfig) -> dict[str, Any]:
    """Returns the fields of DeepSeek's and GLM's experts."""
    moe = model.moe
    return {
        "moe_intermediate_size": model.expert_ff_size,
        "n_routed_experts": moe.n_experts,
        "num_experts_per_tok": moe.top_k,
        "n_shared_experts": moe.n_shared,
        "first_k_dense_replace": moe.n_dense_layers,
        "n_group": moe.n_groups,
        "topk_group": moe.top_groups,
        "routed_scaling_factor": moe.route_scale,
        "norm_topk_prob": moe.renormalise,
        "num_mtp_layers": 0,
    }


def _latent(model: ModelConfig) -> dict[str, Any]:
    mla = model.mla
    return {
        "q_lora_rank": mla.q_rank,
        "kv_lora_rank": mla.kv_rank,
        "qk_rope_head_dim": mla.rope_head_dim,
        "qk_nope_head_dim": mla.nope_head_dim,
        "v_head_dim": mla.v_head_dim,
    }


def _gemma(model: ModelConfig) -> dict[str, Any]:
    return {
        "head_dim": model.head_size,
        "query_pre_attn_scalar": round(model.attention_scale**-2) if model.attention_scale else model.head_size,
        "sliding_window": model.window,
        "layer_types": layer_types(model),
        "final_logit_softcapping": model.logit_softcap or None,
        "attn_logit_softcapping": model.attention_softcap or None,
    }


def _gemma3_rope(model: ModelConfig) -> dict[str, Any]:
    window = {"rope_theta": model.window_rope_theta, "rope_type": "default"}
    return {"rope_parameters": {"full_attention": rope(model), "sliding_attention": window}}


def layer_types(model: ModelConfig) -> list[str]:
    """Returns the kind of attention of every layer."""
    kinds = ("full_attention", "sliding_attention")
    return [kinds[model.window_of(layer) > 0] for layer in range(model.n_layers)]


def _yarn_of_deepseek(model: ModelConfig) -> dict[str, Any]:
    """mscale and mscale_all_dim as in Kimi K2's release."""
    return {"rope_parameters": rope(model) | {"mscale": 1.0, "mscale_all_dim": 1.0}}


# Parts of parameters that are stored together.


def first_half(fused: Tensor, model: ModelConfig) -> Tensor:
    """Returns the first half of the rows of every expert."""
    return fused.chunk(2, dim=-2)[0]


def second_half(fused: Tensor, model: ModelConfig) -> Tensor:
    """Returns the second half of the rows of every expert."""
    return fused.chunk(2, dim=-2)[1]


def transposed(weight: Tensor, model: ModelConfig) -> Tensor:
    """Returns (experts, outputs, inputs) of (experts, inputs, outputs)."""
    return weight.mT


def every_second(start: int, *, transpose: bool) -> Convert:
    """Returns the function that takes every second column, and transposes."""

    def convert(fused: Tensor, model: ModelConfig) -> Tensor:
        part = fused[..., start::2]
        return part.mT if transpose else part

    return convert


def of_each_head(index: int) -> Convert:
    """Returns the function that takes a third of the rows of each head: queries, keys or values."""

    def convert(fused: Tensor, model: ModelConfig) -> Tensor:
        return fused.unflatten(0, (model.n_heads, 3, model.head_size))[:, index].flatten(0, 1)

    return convert


def _halves_apart(rows: Tensor) -> Tensor:
    """Returns rows whose rotary pairs are neighbours, with pairs half of the rows apart."""
    return torch.cat((rows[..., 0::2, :], rows[..., 1::2, :]), dim=-2)


def queries_apart(weight: Tensor, model: ModelConfig) -> Tensor:
    """Pairs the rotary rows of every head as we do."""
    parts = [model.mla.nope_head_dim, model.mla.rope_head_dim]
    plain, turned = weight.unflatten(0, (model.n_heads, -1)).split(parts, dim=1)
    return torch.cat((plain, _halves_apart(turned)), dim=1).flatten(0, 1)


def keys_apart(weight: Tensor, model: ModelConfig) -> Tensor:
    """Pairs the rotary rows of the shared key as we do."""
    plain, turned = weight.split([model.mla.kv_rank, model.mla.rope_head_dim])
    return torch.cat((plain, _halves_apart(turned)))


# Tables of names.

_ENDS: dict[str, Source] = {
    "embed.weight": "model.embed_tokens.weight",
    "final_norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}
_MLP: dict[str, Source] = {
    f"blocks.{{}}.mlp.{ours}.weight": f"model.layers.{{}}.mlp.{ours}_proj.weight" for ours in ("gate", "up", "down")
}
_ATTENTION: dict[str, Source] = {
    f"blocks.{{}}.attn.w{part}.{kind}": f"model.layers.{{}}.self_attn.{part}_proj.{kind}"
    for part in "qkvo"
    for kind in ("weight", "bias")
}
_QK_NORM: dict[str, Source] = {
    f"blocks.{{}}.attn.{name}.weight": f"model.layers.{{}}.self_attn.{name}.weight" for name in ("q_norm", "k_norm")
}
_NORMS: dict[str, Source] = {
    "blocks.{}.attn_norm.weight": "model.layers.{}.input_layernorm.weight",
    "blocks.{}.mlp_norm.weight": "model.layers.{}.post_attention_layernorm.weight",
}
_POST_NORMS: dict[str, Source] = {
    "blocks.{}.attn_post_norm.weight": "model.layers.{}.post_attention_layernorm.weight",
    "blocks.{}.mlp_post_norm.weight": "model.layers.{}.post_feedforward_layernorm.weight",
}
_EXPERTS: dict[str, Source] = {
    "blocks.{}.moe.router.weight": "model.layers.{}.mlp.gate.weight",
    "blocks.{}.moe.experts.gate.weight": ("model.layers.{}.mlp.experts.gate_up_proj", first_half),
    "blocks.{}.moe.experts.up.weight": ("model.layers.{}.mlp.experts.gate_up_proj", second_half),
    "blocks.{}.moe.experts.down.weight": "model.layers.{}.mlp.experts.down_proj",
}
_SHARED: dict[str, Source] = {
    f"blocks.{{}}.moe.shared.{ours}.weight": f"model.layers.{{}}.mlp.shared_experts.{ours}_proj.weight"
    for ours in ("gate", "up", "down")
} | {"blocks.{}.moe.router.bias": "model.layers.{}.mlp.gate.e_score_correction_bias"}
_LATENT: dict[str, Source] = {
    "blocks.{}.attn.wq_a.weight": "model.layers.{}.self_attn.q_a_proj.weight",
    "blocks.{}.attn.q_norm.weight": "model.layers.{}.self_attn.q_a_layernorm.weight",
    "blocks.{}.attn.wq_b.weight": ("model.layers.{}.self_attn.q_b_proj.weight", queries_apart),
    "blocks.{}.attn.wkv_a.weight": ("model.layers.{}.self_attn.kv_a_proj_with_mqa.weight", keys_apart),
    "blocks.{}.attn.kv_norm.weight": "model.layers.{}.self_attn.kv_a_layernorm.weight",
    "blocks.{}.attn.wkv_b.weight": "model.layers.{}.self_attn.kv_b_proj.weight",
    "blocks.{}.attn.wo.weight": "model.layers.{}.self_attn.o_proj.weight",
}
_LLAMA = _ENDS | _ATTENTION | _MLP | _NORMS
_DEEPSEEK = _ENDS | _LATENT | _MLP | _EXPERTS | _SHARED | _NORMS
_GEMMA = (
    _ENDS
    | _ATTENTION
    | _MLP
    | _POST_NORMS
    | {
        "blocks.{}.attn_norm.weight": "model.layers.{}.input_layernorm.weight",
        "blocks.{}.mlp_norm.weight": "model.layers.{}.pre_feedforward_layernorm.weight",
    }
)
_KINDS = ("weight", "bias")
_NEOX: dict[str, Source] = (
    {"embed.weight": "gpt_neox.embed_in.weight", "head.weight": "lm_head.weight"}
    | {f"final_norm.{kind}": f"gpt_neox.final_layer_norm.{kind}" for kind in _KINDS}
    | {f"blocks.{{}}.attn_norm.{kind}": f"gpt_neox.layers.{{}}.input_layernorm.{kind}" for kind in _KINDS}
    | {f"blocks.{{}}.mlp_norm.{kind}": f"gpt_neox.layers.{{}}.post_attention_layernorm.{kind}" for kind in _KINDS}
    | {
        f"blocks.{{}}.attn.w{part}.{kind}": (
            f"gpt_neox.layers.{{}}.attention.query_key_value.{kind}",
            of_each_head(index),
        )
        for index, part in enumerate("qkv")
        for kind in _KINDS
    }
    | {f"blocks.{{}}.attn.wo.{kind}": f"gpt_neox.layers.{{}}.attention.dense.{kind}" for kind in _KINDS}
    | {f"blocks.{{}}.mlp.up.{kind}": f"gpt_neox.layers.{{}}.mlp.dense_h_to_4h.{kind}" for kind in _KINDS}
    | {f"blocks.{{}}.mlp.down.{kind}": f"gpt_neox.layers.{{}}.mlp.dense_4h_to_h.{kind}" for kind in _KINDS}
)
_GPT_OSS: dict[str, Source] = (
    _ENDS
    | _ATTENTION
    | _NORMS
    | {
        "blocks.{}.attn.sinks": "model.layers.{}.self_attn.sinks",
        "blocks.{}.moe.router.weight": "model.layers.{}.mlp.router.weight",
        "blocks.{}.moe.router.logit_bias": "model.layers.{}.mlp.router.bias",
        "blocks.{}.moe.experts.down.weight": ("model.layers.{}.mlp.experts.down_proj", transposed),
        "blocks.{}.moe.experts.down.bias": "model.layers.{}.mlp.experts.down_proj_bias",
    }
    | {
        f"blocks.{{}}.moe.experts.{part}.{kind}": (
            f"model.layers.{{}}.mlp.experts.gate_up_proj{'' if kind == 'weight' else '_bias'}",
            every_second(start, transpose=kind == "weight"),
        )
        for start, part in enumerate(("gate", "up"))
        for kind in _KINDS
    }
)

_SMALL_LLAMA3 = {"rope_scaling": {"original_seq_len": 16}}
_SMALL_EXPERTS = {"n_experts": 8, "top_k": 3, "d_ff": 12, "aux_loss": 0.0}
_SMALL_LATENT = {"q_rank": 12, "kv_rank": 10, "rope_head_dim": 6, "nope_head_dim": 8, "v_head_dim": 7}

COUNTERPARTS: dict[str, Counterpart] = {
    "llama3.1-8b": Counterpart(
        "llama",
        "LlamaConfig",
        "LlamaForCausalLM",
        lambda model: {"head_dim": model.head_size},
        _LLAMA,
        small=_SMALL_LLAMA3,
    ),
    "llama3.2-1b": Counterpart(
        "llama",
        "LlamaConfig",
        "LlamaForCausalLM",
        lambda model: {"head_dim": model.head_size},
        _LLAMA,
        small=_SMALL_LLAMA3,
    ),
    "mistral-7b": Counterpart(
        "mistral",
        "MistralConfig",
        "MistralForCausalLM",
        lambda model: {"sliding_window": model.window or None, "head_dim": model.head_size},
        _LLAMA,
        small={"window": 7},
    ),
    "mixtral-8x7b": Counterpart(
        "mixtral",
        "MixtralConfig",
        "MixtralForCausalLM",
        lambda model: {
            "num_local_experts": model.moe.n_experts,
            "num_experts_per_tok": model.moe.top_k,
            "sliding_window": None,
        },
        _ENDS | _ATTENTION | _EXPERTS | _NORMS,
        small={"moe": {"aux_loss": 0.0}},
    ),
    "qwen2.5-7b": Counterpart("qwen2", "Qwen2Config", "Qwen2ForCausalLM", lambda _: {}, _LLAMA),
    "qwen3-8b": Counterpart(
        "qwen3", "Qwen3Config", "Qwen3ForCausalLM", lambda model: {"head_dim": model.head_size}, _LLAMA | _QK_NORM
    ),
    "qwen3-30b-a3b": Counterpart(
        "qwen3_moe",
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        lambda model: {
            "head_dim": model.head_size,
            "num_experts": model.moe.n_experts,
            "num_experts_per_tok": model.moe.top_k,
            "moe_intermediate_size": model.expert_ff_size,
            "norm_topk_prob": model.moe.renormalise,
        },
        _ENDS | _ATTENTION | _QK_NORM | _EXPERTS | _NORMS,
        small={"moe": _SMALL_EXPERTS},
    ),
    "gemma2-27b": Counterpart(
        "gemma2",
        "Gemma2Config",
        "Gemma2ForCausalLM",
        _gemma,
        _GEMMA,
        norm_offset=1.0,
        small={"window": 7, "attention_softcap": 2.0, "logit_softcap": 3.0},
    ),
    "gemma3-27b": Counterpart(
        "gemma3",
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        lambda model: _gemma(model) | _gemma3_rope(model),
        _GEMMA | _QK_NORM,
        norm_offset=1.0,
        small={"window": 7, "n_layers": 6},
    ),
    "olmo2-32b": Counterpart(
        "olmo2", "Olmo2Config", "Olmo2ForCausalLM", lambda _: {}, _ENDS | _ATTENTION | _QK_NORM | _MLP | _POST_NORMS
    ),
    "gpt-neox-20b": Counterpart(
        "gpt_neox",
        "GPTNeoXConfig",
        "GPTNeoXForCausalLM",
        lambda model: {"layer_norm_eps": model.norm_eps, "hidden_act": "gelu"},
        _NEOX,
        small={"n_kv_heads": 4, "head_dim": 0, "d_model": 64, "d_ff": 96},
    ),
    "gpt-oss-20b": Counterpart(
        "gpt_oss",
        "GptOssConfig",
        "GptOssForCausalLM",
        lambda model: {
            "head_dim": model.head_size,
            "num_local_experts": model.moe.n_experts,
            "num_experts_per_tok": model.moe.top_k,
            "sliding_window": model.window,
            "layer_types": layer_types(model),
            "intermediate_size": model.expert_ff_size,
        },
        _GPT_OSS,
        small={"window": 7, "moe": _SMALL_EXPERTS, "rope_scaling": {"original_seq_len": 64}},
    ),
    "deepseek-v3": Counterpart(
        "deepseek_v3",
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        lambda model: _mixture(model) | _latent(model),
        _DEEPSEEK,
        small={"moe": _SMALL_EXPERTS | {"n_groups": 4, "top_groups": 2, "n_dense_layers": 1}, "mla": _SMALL_LATENT},
    ),
    "kimi-k2": Counterpart(
        "deepseek_v3",
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        lambda model: _mixture(model) | _latent(model) | _yarn_of_deepseek(model),
        _DEEPSEEK,
        small={
            "moe": _SMALL_EXPERTS,
            "mla": _SMALL_LATENT,
            "rope_scaling": {"original_seq_len": 64},
            "attention_scale": 14**-0.5 * (0.1 * log(32) + 1) ** 2,
        },
    ),
    "glm-4.5": Counterpart(
        "glm4_moe",
        "Glm4MoeConfig",
        "Glm4MoeForCausalLM",
        lambda model: (
            _mixture(model)
            | {"head_dim": model.head_size, "use_qk_norm": model.qk_norm == "head", "attention_bias": model.qkv_bias}
        ),
        _LLAMA | _QK_NORM | _EXPERTS | _SHARED,
        small={"moe": _SMALL_EXPERTS | {"n_dense_layers": 1}},
    ),
    # With as many selected keys as there are, its sparse attention is full. Its inner norms have an eps of their own.
    "glm-5": Counterpart(
        "glm_moe_dsa",
        "GlmMoeDsaConfig",
        "GlmMoeDsaForCausalLM",
        lambda model: _mixture(model) | _latent(model) | {"index_topk": model.seq_len},
        _DEEPSEEK,
        unused=r"\.indexer\.",
        small={"moe": _SMALL_EXPERTS | {"n_dense_layers": 1}, "mla": _SMALL_LATENT, "norm_eps": 1e-6},
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
    for part in ("moe", "mla", "rope_scaling"):
        if part in sizes:
            sizes[part] = replace(getattr(model, part), **sizes[part])
    return replace(model, **sizes)
