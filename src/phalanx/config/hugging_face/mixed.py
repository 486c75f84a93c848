"""The model types of transformers whose layers or positions differ beyond one rule: chunks and windows in a list,
dense layers between experts, queries that grow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from phalanx.config.hugging_face.families import (
    LLAMA_KIND,
    MOST_EXPERTS,
    NO_ATTENTION_BIAS,
    SILU,
    ConfigFamily,
    HeadDim,
    sizes,
)
from phalanx.config.hugging_face.terms import (
    FULL,
    Choice,
    ConfigReader,
    Field,
    Fields,
    Fixed,
    NoRope,
    Rope,
    Windows,
    set_windows,
    shortest,
    shown,
)
from phalanx.config.model import ModelConfig, RopeScaling

_CHUNKED = "chunked_attention"


@dataclass(frozen=True)
class Chunks:
    """Llama 4: attention within chunks, by default in the layers with rotary positions."""

    def read(self, source: ConfigReader, fields: Fields) -> None:
        size = source.take("attention_chunk_size", int, 0 if source.names("attention_chunk_size") else 8192)
        n, every = fields["n_layers"], fields["nope_every"]
        own = [FULL if every and (layer + 1) % every == 0 else _CHUNKED for layer in range(n)]
        kinds = source.take("layer_types", list, []) or own
        if len(kinds) != n:
            source.problem("layer_types", f"lists {len(kinds):,} layers, num_hidden_layers is {n:,}")
        elif unknown := [kind for kind in kinds if kind not in (FULL, _CHUNKED)]:
            source.problem("layer_types", f"holds {shown(unknown[0])}, supported: {FULL}, {_CHUNKED}")
        elif not size and _CHUNKED in kinds:
            source.problem("attention_chunk_size", f"is missing, and layers have {_CHUNKED}")
        fields["window"], fields["window_kind"] = size, "chunks"
        set_windows(fields, [kind == _CHUNKED for kind in kinds], every)

    def write(self, model: ModelConfig) -> Fields:
        kinds = [_CHUNKED if model.window_of(layer) else FULL for layer in range(model.n_layers)]
        return {"attention_chunk_size": model.window or 8192, "layer_types": kinds}


@dataclass(frozen=True)
class Temperature:
    """Llama 4: queries grow in layers without rotary positions."""

    def read(self, source: ConfigReader, fields: Fields) -> None:
        tuned = source.raw("attn_temperature_tuning")
        if not isinstance(tuned, bool | int | None):  # 4 in the first files
            source.problem("attn_temperature_tuning", f"is {shown(tuned)}, expected true or false")
        rate, length = source.take("attn_scale", float, 0.1), source.take("floor_scale", int, 8192, least=1)
        if fields["nope_every"] and (tuned is None or tuned):
            fields |= {"query_growth.rate": rate, "query_growth.length": length}

    def write(self, model: ModelConfig) -> Fields:
        growth = model.query_growth
        tuned = growth.rate > 0
        values = {"attn_scale": growth.rate, "floor_scale": growth.length} if tuned else {}
        return {"attn_temperature_tuning": tuned, **values}


@dataclass(frozen=True)
class ExpertLayers:
    """Llama 4: the layers with experts, a list or every n-th."""

    def read(self, source: ConfigReader, fields: Fields) -> None:
        n, step = fields["n_layers"], source.take("interleave_moe_layer_step", int, 1, least=1)
        listed = source.take("moe_layers", list, [*range(step - 1, n, step)])
        if wrong := [layer for layer in listed if not isinstance(layer, int) or not 0 <= layer < n]:
            source.problem("moe_layers", f"holds {shown(wrong[0])}, expected numbers of layers below {n:,}")
        kinds = ["experts" if layer in listed else "dense" for layer in range(n)]
        if "experts" not in kinds:
            source.problem("moe_layers", "names no layer: supported are models with experts")
        fields["feed_forward"] = ",".join(shortest(kinds))

    def write(self, model: ModelConfig) -> Fields:
        kinds = (model.feed_forward or "experts").split(",")
        return {"moe_layers": [layer for layer in range(model.n_layers) if kinds[layer % len(kinds)] == "experts"]}


@dataclass(frozen=True)
class GrowingRope(Rope):
    """Ministral 3: queries grow in all layers, as the parameters of rotary positions say."""

    def read(self, source: ConfigReader, fields: Fields) -> None:
        super().read(source, fields)
        rope = source.inside("rope_parameters" if source.holds("rope_parameters") else "rope_scaling")
        named = source.holds("rope_parameters") or source.holds("rope_scaling")
        rate = rope.take("llama_4_scaling_beta", float, 0.0 if named else 0.1)
        length = rope.take("original_max_position_embeddings", int, 16384, least=1)
        if rate:
            fields |= {"query_growth.rate": rate, "query_growth.length": length, "query_growth.first": 0}

    def write(self, model: ModelConfig) -> Fields:
        values, growth = super().write(model)["rope_parameters"], model.query_growth
        length = values.get("original_max_position_embeddings", growth.length)
        values |= {"llama_4_scaling_beta": growth.rate, "original_max_position_embeddings": length}
        return {"rope_parameters": values}


_ONE_EXPERT: dict[str, Any] = {"moe.router": "sigmoid", "moe.renormalise": False, "moe.scale_inputs": True}

MIXED: tuple[ConfigFamily, ...] = (
    ConfigFamily(
        "ministral3",
        "Ministral3ForCausalLM",
        LLAMA_KIND,
        (
            *sizes(kv_heads=8, context=262144, eps=1e-5),
            HeadDim(128),
            Windows(layers=False),
            GrowingRope(
                theta=1e6,
                stretched=RopeScaling(kind="yarn", factor=16.0, original_seq_len=16384, magnitude=1.0),
                harmless=frozenset({"llama_4_scaling_beta", "max_position_embeddings"}),
            ),
            SILU,
        ),
        inside="text_config",
        inside_of="mistral3",
    ),
    ConfigFamily(
        "llama4_text",
        "Llama4ForCausalLM",
        LLAMA_KIND | _ONE_EXPERT | {"moe.n_shared": 1},
        (
            *sizes(kv_heads=8, context=131072, eps=1e-5, d_ff=16384, width="intermediate_size_mlp"),
            Field("intermediate_size", "moe.d_ff", int, 8192, lambda model: model.expert_ff_size),
            HeadDim(128),
            Rope(theta=500000.0),
            NoRope(),
            Chunks(),
            Temperature(),
            ExpertLayers(),
            SILU,
            NO_ATTENTION_BIAS,
            Choice("use_qk_norm", "qk_norm", ((True, "unit"), (False, "none")), default=True),
            Field("num_local_experts", "moe.n_experts", int, 16, most=MOST_EXPERTS, least=1),
            Field("num_experts_per_tok", "moe.top_k", int, 1),
            Field("router_aux_loss_coef", "moe.aux_loss", float, 0.001),
            Fixed("router_jitter_noise", (0.0,), 0.0),
        ),
        harmless=frozenset({"for_llm_compressor"}),
        inside="text_config",
        inside_of="llama4",
    ),
)
"""The model_types that are trained and written as those of families.py."""
