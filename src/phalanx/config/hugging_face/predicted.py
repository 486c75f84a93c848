"""The model types of transformers with layers of several kinds. Those with gated delta nets are trained and written;
sparse attention, state space models and experts in latents are read as shapes to predict and plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from phalanx.config.hugging_face.families import (
    BALANCED,
    BY_TYPE,
    FAMILIES,
    LLAMA_KIND,
    MOST_EXPERTS,
    MOST_LAYERS,
    NO_ATTENTION_BIAS,
    NO_MTP,
    SILU,
    ConfigFamily,
    HeadDim,
    by_type,
    sizes,
)
from phalanx.config.hugging_face.mixed import MIXED
from phalanx.config.hugging_face.terms import (
    FULL,
    REQUIRED,
    ConfigReader,
    Context,
    Field,
    Fields,
    Fixed,
    ReadOnly,
    Rope,
    Written,
    shortest,
    shown,
)
from phalanx.config.model import ModelConfig

_LINEAR = "linear_attention"
UNREAD = frozenset({"mrope_section", "mrope_interleaved"})
"""Fields of rope parameters that concern images: the three positions of a token of text are the same."""


@dataclass(frozen=True)
class LayersWithState:
    """Qwen: gated delta nets, and attention in every n-th layer."""

    def read(self, source: ConfigReader, fields: Fields) -> None:
        every, n = source.take("full_attention_interval", int, 4, least=1), fields["n_layers"]
        listed = source.take("layer_types", list, [])
        kinds = listed or [FULL if (layer + 1) % every == 0 else _LINEAR for layer in range(n)]
        if len(kinds) != n:
            source.problem("layer_types", f"lists {len(kinds):,} layers, num_hidden_layers is {n:,}")
            return
        if unknown := [kind for kind in kinds if kind not in (_LINEAR, FULL)]:
            source.problem("layer_types", f"holds {shown(unknown[0])}, supported: {FULL}, {_LINEAR}")
        fields["attention"] = ",".join(shortest(["delta" if kind == _LINEAR else "gated_heads" for kind in kinds]))

    def write(self, model: ModelConfig) -> Fields:
        kinds = model.attention.split(",")
        names = [kinds[layer % len(kinds)] for layer in range(model.n_layers)]
        return {"layer_types": [_LINEAR if name == "delta" else FULL for name in names]}


@dataclass(frozen=True)
class SharedExperts:
    """The width of the shared experts, as so many of the routed ones' size."""

    theirs: str

    def read(self, source: ConfigReader, fields: Fields) -> None:
        width, one = source.take(self.theirs, int), fields["moe.d_ff"]
        fields["moe.n_shared"], rest = divmod(width, max(1, one))
        if rest:
            source.problem(self.theirs, f"is {width:,}, supported: a multiple of moe_intermediate_size {one:,}")

    def write(self, model: ModelConfig) -> Fields:
        return {self.theirs: model.moe.n_shared * model.expert_ff_size}


_SYMBOLS = {"M": "mamba", "*": "heads", "E": "experts", "-": "dense"}
_TYPES = {"mamba": "M", _LINEAR: "M", "attention": "*", FULL: "*", "moe": "E", "mlp": "-"}


@dataclass(frozen=True)
class HybridLayers(ReadOnly):
    """Nemotron-H: every layer is Mamba-2, attention, an MLP or experts. A block here is one of the first two with one
    of the last two after it, if there is one."""

    def read(self, source: ConfigReader, fields: Fields) -> None:
        listed = source.take("layers_block_type", list, source.take("layer_types", list, []))
        pattern = source.take("hybrid_override_pattern", str, "".join(_TYPES.get(str(kind), "?") for kind in listed))
        if len(pattern) > MOST_LAYERS:
            source.problem("hybrid_override_pattern", f"has {len(pattern):,} layers, expected at most {MOST_LAYERS:,}")
            pattern = "*-"
        unknown = sorted(set(pattern) - set(_SYMBOLS))
        if unknown or not pattern:
            name = "hybrid_override_pattern" if source.holds("hybrid_override_pattern") else "layers_block_type"
            found = shown(unknown[0]) if unknown else "nothing"
            source.problem(name, f"holds {found}, supported: {', '.join(_TYPES)}, or {' '.join(_SYMBOLS)}")
            pattern = "*-"
        if (stated := source.take("num_hidden_layers", int, len(pattern))) != len(pattern):
            source.problem("num_hidden_layers", f"is {stated:,}, the pattern has {len(pattern):,} layers")
        blocks = list[tuple[str, str]]()
        for symbol in pattern:
            kind = _SYMBOLS[symbol]
            if symbol in "M*":
                blocks.append((kind, "none"))
            elif blocks and blocks[-1][1] == "none":
                blocks[-1] = blocks[-1][0], kind
            else:
                blocks.append(("none", kind))
        fields["n_layers"] = len(blocks)
        fields["attention"] = ",".join(shortest([attention for attention, _ in blocks]))
        fields["feed_forward"] = ",".join(shortest([wide for _, wide in blocks]))
        if "M" not in pattern:
            fields["mamba.n_heads"] = 0
        if "E" not in pattern:
            fields.update(dict.fromkeys(("moe.n_experts", "moe.n_shared", "moe.latent"), 0))


def _delta() -> tuple[Field, ...]:
    return (
        Field("linear_num_value_heads", "delta.n_heads", int, 32, least=1),
        Field("linear_num_key_heads", "delta.key_heads", int, 16, least=1),
        Field("linear_key_head_dim", "delta.key_head_dim", int, 128, least=1),
        Field("linear_value_head_dim", "delta.head_dim", int, 128, least=1),
        Field("linear_conv_kernel_dim", "delta.conv", int, 4, least=1),
    )


_QWEN: dict[str, Any] = LLAMA_KIND | {"qk_norm": "head"}
_QWEN_TERMS = (
    HeadDim(256),
    Rope(fraction=0.25, partial="used", harmless=UNREAD),
    SILU,
    NO_ATTENTION_BIAS,
    *_delta(),
    LayersWithState(),
    Fixed("attn_output_gate", (True,), True),
)
_QWEN_EXPERTS = (
    Field("num_experts", "moe.n_experts", int, most=MOST_EXPERTS, least=1, also=("num_local_experts",)),
    Field("num_experts_per_tok", "moe.top_k", int),
    Field("moe_intermediate_size", "moe.d_ff", int, REQUIRED, lambda model: model.expert_ff_size),
    Field("router_aux_loss_coef", "moe.aux_loss", float, 0.0),
    SharedExperts("shared_expert_intermediate_size"),
    Fixed("decoder_sparse_step", (1,), 1),
    Fixed("mlp_only_layers", ([],), []),
)
_QWEN_UNUSED = frozenset(
    (
        *("mamba_ssm_dtype", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "mtp_num_layers"),
        *("use_sliding_window", "max_window_layers", "sliding_window", "intermediate_size", "full_attention_interval"),
        *("router_aux_loss_coef", "norm_topk_prob", "num_nextn_predict_layers"),
    )
)
_MTP: dict[str, Any] = {"mtp_join": "mtp.fc.weight", "most_modules": 1}
"""Qwen's module for a further token, which stands apart from the layers."""
_MAMBA_UNUSED = frozenset(
    (
        *("expand", "num_logits_to_keep", "rescale_prenorm_residual", "residual_in_fp32", "use_mamba_kernels"),
        *("mamba_ssm_cache_dtype", "time_step_min", "time_step_max", "time_step_floor", "time_step_limit", "norm_eps"),
        *("rope_theta", "rope_parameters", "rope_scaling", "partial_rotary_factor", "moe_shared_expert_overlap"),
        *("mtp_layers_block_type", "mtp_hybrid_override_pattern", "n_shared_experts", "ssm_cfg", "mamba_dt_init_floor"),
    )
)

WITH_DELTAS: tuple[ConfigFamily, ...] = (
    ConfigFamily(
        "qwen3_next",
        "Qwen3NextForCausalLM",
        _QWEN | {"moe.renormalise": True, "moe.shared_gate": True},
        (
            *sizes(kv_heads=2, context=32768, d_ff=5632),
            *_QWEN_TERMS,
            *_QWEN_EXPERTS,
            Fixed("norm_topk_prob", (True,), True),
        ),
        harmless=_QWEN_UNUSED,
        notes=(NO_MTP,),
        mtp_field="num_nextn_predict_layers",
        **_MTP,
    ),
    ConfigFamily(
        "qwen3_5_text",
        "Qwen3_5ForCausalLM",
        _QWEN,
        (*sizes(kv_heads=4, context=32768, d_ff=12288), *_QWEN_TERMS),
        harmless=_QWEN_UNUSED,
        inside="text_config",
        inside_of="qwen3_5",
        notes=(NO_MTP,),
        mtp_field="mtp_num_hidden_layers",
        **_MTP,
    ),
    ConfigFamily(
        "qwen3_5_moe_text",
        "Qwen3_5MoeForCausalLM",
        _QWEN | {"moe.renormalise": True, "moe.shared_gate": True},
        (*sizes(kv_heads=2, context=32768, d_ff=0), *_QWEN_TERMS, *_QWEN_EXPERTS),
        harmless=_QWEN_UNUSED,
        inside="text_config",
        inside_of="qwen3_5_moe",
        notes=(NO_MTP,),
        mtp_field="mtp_num_hidden_layers",
        **_MTP,
    ),
)
"""The model types with gated delta nets, which are trained and written as those of families.py."""
TRAINED_FAMILIES = (*FAMILIES, *MIXED, *WITH_DELTAS)
"""All that are trained and written. To write a model the first that says all of it is taken."""
TRAINED: Mapping[str, ConfigFamily] = {**by_type((*MIXED, *WITH_DELTAS)), **BY_TYPE}
"""Every model type that is trained and written."""

PREDICTED: tuple[ConfigFamily, ...] = (
    ConfigFamily(
        "nemotron_h",
        "NemotronHForCausalLM",
        {"norm": "rmsnorm", "positions": "none", "activation": "relu2", "bias": False} | BALANCED,
        (
            Field("vocab_size", "vocab_size", int),
            Field("hidden_size", "d_model", int),
            Field("intermediate_size", "d_ff", int, 21504),
            Field("num_attention_heads", "n_heads", int, 32),
            Field("num_key_value_heads", "n_kv_heads", int, 8),
            Context(default=4096),
            Field("layer_norm_epsilon", "norm_eps", float, 1e-5),
            Field("tie_word_embeddings", "tied", bool, default=False),
            HeadDim(128),
            *(Fixed(f"{part}_bias", (False,), False) for part in ("attention", "mlp", "use", "mamba_proj")),
            Fixed("use_conv_bias", (True,), True),
            Fixed("mlp_hidden_act", ("relu2",), "relu2"),
            Fixed("mamba_hidden_act", ("silu",), "silu"),
            Field("ssm_state_size", "mamba.state", int, 128, least=1),
            Field("mamba_num_heads", "mamba.n_heads", int, 128, least=1),
            Field("mamba_head_dim", "mamba.head_dim", int, 64, least=1),
            Field("n_groups", "mamba.groups", int, 8, least=1),
            Field("conv_kernel", "mamba.conv", int, 4, least=1),
            Field("chunk_size", "mamba.chunk", int, 128, least=1),
            Field("n_routed_experts", "moe.n_experts", int, 8, also=("num_experts", "num_local_experts")),
            Field("num_experts_per_tok", "moe.top_k", int, 2),
            Field("moe_intermediate_size", "moe.d_ff", int, 7688),
            Field("moe_latent_size", "moe.latent", int, 0),
            Field("n_group", "moe.n_groups", int, 1),
            Field("topk_group", "moe.top_groups", int, 1),
            Field("routed_scaling_factor", "moe.route_scale", float, 1.0),
            Field("norm_topk_prob", "moe.renormalise", bool, default=True),
            SharedExperts("moe_shared_expert_intermediate_size"),
            Fixed("sliding_window", (None,), None),
            Written("num_nextn_predict_layers", 0),
            HybridLayers(),
        ),
        harmless=_MAMBA_UNUSED,
        notes=(NO_MTP,),
    ),
)
"""The model types that are read only."""
