"""The model types of transformers: the kind of model of each, and the fields of its config.json (families.yaml)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from phalanx.config.hugging_face import terms
from phalanx.config.hugging_face.terms import (
    FULL,
    MOST_EXPERTS,
    MOST_LAYERS,
    REQUIRED,
    SLIDING,
    ConfigReader,
    Context,
    Field,
    Fields,
    Fixed,
    Term,
    Written,
    layer_types,
    shown,
)
from phalanx.config.model import ModelConfig, RopeScaling
from phalanx.config.values import yaml_data

_CHUNKED, _LINEAR = "chunked_attention", "linear_attention"


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
        terms.set_windows(fields, [kind == _CHUNKED for kind in kinds], every)

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
        fields["feed_forward"] = ",".join(terms.shortest(kinds))

    def write(self, model: ModelConfig) -> Fields:
        kinds = (model.feed_forward or "experts").split(",")
        return {"moe_layers": [layer for layer in range(model.n_layers) if kinds[layer % len(kinds)] == "experts"]}


@dataclass(frozen=True)
class GrowingRope(terms.Rope):
    """Ministral 3: queries grow in all layers, as the parameters of rotary positions say."""

    def read(self, source: ConfigReader, fields: Fields) -> None:
        super().read(source, fields)
        rope = source.inside("rope_parameters" if source.holds("rope_parameters") else "rope_scaling")
        # Where one of the two is named, transformers has no value in place of what it does not say.
        named = source.holds("rope_parameters") or source.holds("rope_scaling")
        rate = rope.take("llama_4_scaling_beta", float, REQUIRED if named else 0.1)
        length = rope.take("original_max_position_embeddings", int, REQUIRED if named else 16384, least=1)
        if rate:
            fields |= {"query_growth.rate": rate, "query_growth.length": length, "query_growth.first": 0}

    def write(self, model: ModelConfig) -> Fields:
        values, growth = super().write(model)["rope_parameters"], model.query_growth
        length = values.get("original_max_position_embeddings", growth.length)
        values |= {"llama_4_scaling_beta": growth.rate, "original_max_position_embeddings": length}
        return {"rope_parameters": values}


@dataclass(frozen=True)
class LastIsFull(terms.Windows):
    """Gemma 4: the last layer attends to all keys, whatever the rule of the others is."""

    def read(self, source: ConfigReader, fields: Fields) -> None:
        super().read(source, fields)
        n, listed = fields["n_layers"], source.holds("layer_types")
        if listed and fields["window"] and source.raw("layer_types")[-1:] == [SLIDING]:
            source.problem("layer_types", f"ends with {SLIDING}, of which transformers makes {FULL}: say so")
        if not listed and fields["window"]:
            windowed = [layer + 1 < n and (layer + 1) % self.full_every != 0 for layer in range(n)]
            terms.set_windows(fields, windowed, self.full_every)


@dataclass(frozen=True)
class FullHeads:
    """Gemma 4: the heads of layers without a window, as two fields or for each layer."""

    def read(self, source: ConfigReader, fields: Fields) -> None:
        shared = source.take("attention_k_eq_v", bool, False)
        size = source.take("global_head_dim", int, 512, least=1)
        keys = source.take("num_global_key_value_heads", int, 0) if shared else 0
        source.seen.add("num_global_key_value_heads")
        if source.names("per_layer_config"):  # null is for no layer, too
            size, keys = self._each(source, fields)
        own = fields["head_dim"] or fields["d_model"] // max(1, fields["n_heads"])
        fields["values_are_keys"] = shared
        if shared or (size, keys or fields["n_kv_heads"]) != (own, fields["n_kv_heads"]):
            fields |= {"wide.head_dim": size, "wide.n_kv_heads": keys}

    def _each(self, source: ConfigReader, fields: Fields) -> tuple[int, int]:
        """Returns the size of heads and the key/value heads that all layers without a window have."""
        parts, given = source.inside("per_layer_config"), source.raw("per_layer_config")
        # Padded with zeros to the digits of the last layer.
        names = {name.lstrip("0") or "0": name for name in given} if isinstance(given, dict) else {}
        shape = ModelConfig(**{name: fields[name] for name in ("n_layers", "window", "full_every")})
        shape = replace(shape, window_pattern=fields.get("window_pattern", ""))
        found = set[tuple[int, int]]()
        for layer, kind in enumerate(terms.layer_types(shape)):
            part = parts.inside(name := names.get(str(layer), str(layer)))
            size = part.take("head_dim", int, fields["head_dim"] or fields["d_model"] // max(1, fields["n_heads"]))
            heads = size, part.take("num_key_value_heads", int, fields["n_kv_heads"])
            if kind == FULL:
                found.add(heads)
            elif parts.raw(name):
                parts.problem(name, f"is for a layer with a window, supported: those with {FULL}")
            terms.refuse_unknown(part)
        terms.refuse_unknown(parts)
        if len(found) > 1:
            source.problem("per_layer_config", "has heads of several sizes for layers that attend to all keys")
        return max(found, default=(512, 0))

    def write(self, model: ModelConfig) -> Fields:
        wide, shared = model.wide, model.values_are_keys
        size, keys = wide.head_dim or model.head_size, (wide.head_dim and wide.n_kv_heads) or model.kv_heads
        values: Fields = {"attention_k_eq_v": shared, "global_head_dim": size}
        if shared:
            return values | {"num_global_key_value_heads": keys}
        if keys == model.kv_heads:
            return values
        layers = (layer for layer in range(model.n_layers) if not model.window_of(layer))
        each = {str(layer): {"head_dim": size, "num_key_value_heads": keys} for layer in layers}
        return values | {"per_layer_config": each}


@dataclass(frozen=True)
class ProportionalRope:
    """Gemma 4: positions of layers without a window, of which some pairs stand still, and of those with one."""

    def read(self, source: ConfigReader, fields: Fields) -> None:
        named = source.holds("rope_parameters")
        parameters = source.inside("rope_parameters")
        full, window = parameters.inside(FULL), parameters.inside(SLIDING)
        fields["rope_theta"] = full.take("rope_theta", float, 1e6)
        base = window.take("rope_theta", float, 1e4)
        fields["window_rope_theta"] = base if fields["window"] else 0.0
        if not named or full.raw("rope_type") == "proportional":
            share, factor = full.take("partial_rotary_factor", float, 1.0 if named else 0.25), 1.0
            factor = full.take("factor", float, 1.0)
            if not 0.01 <= share <= 1:
                full.problem("partial_rotary_factor", f"is {share:g}, expected at most 1 and at least 0.01")
            if factor < 1:
                full.problem("factor", f"is {factor:g}, expected at least 1")
            fields["rotary_pairs"] = share
            fields["rope_scaling"] = RopeScaling("linear", factor) if factor > 1 else RopeScaling()
        else:
            fields["rope_scaling"] = terms.scaling(full, fields["seq_len"])
        if terms.scaling(window, fields["seq_len"]).factor > 1:
            window.problem("factor", "stretches layers with a window, which keep their positions here")
        for part in (parameters, full, window):
            terms.refuse_unknown(part, frozenset({"partial_rotary_factor"}))  # of other types, which turn whole heads

    def write(self, model: ModelConfig) -> Fields:
        full = terms.rope_values(model)
        if model.rotary_pairs < 1 and full["rope_type"] in ("default", "linear"):
            full |= {"rope_type": "proportional", "partial_rotary_factor": model.rotary_pairs}
        window = {"rope_theta": model.window_rope_theta or model.rope_theta, "rope_type": "default"}
        return {"rope_parameters": {FULL: full, SLIDING: window}}


@dataclass(frozen=True)
class DenseFirst:
    """GLM-5, DeepSeek-V3.2: the layers without experts are the first ones, also where mlp_layer_types lists them."""

    def read(self, source: ConfigReader, fields: Fields) -> None:
        n, kinds = fields["n_layers"], source.take("mlp_layer_types", list, [])
        first = next((layer for layer, kind in enumerate(kinds) if kind != "dense"), len(kinds))
        if kinds and kinds != ["dense"] * first + ["sparse"] * (n - first):
            source.problem("mlp_layer_types", f"is not dense, then sparse, for each of the {n:,} num_hidden_layers")
        elif kinds and source.holds("first_k_dense_replace") and min(n, fields["moe.n_dense_layers"]) != first:
            source.problem("mlp_layer_types", f"has {first} dense layers, first_k_dense_replace is another number")
        elif kinds:
            fields["moe.n_dense_layers"] = first

    def write(self, model: ModelConfig) -> Fields:
        return {}


@dataclass(frozen=True)
class ExpertsBesideMLP:
    """Gemma 4: in place of the MLP one beside experts. Here its width is that of so many shared experts."""

    def read(self, source: ConfigReader, fields: Fields) -> None:
        names, on = ("num_experts", "top_k_experts", "moe_intermediate_size"), "enable_moe_block"
        if not source.take(on, bool, False):
            source.seen |= set(names)
            return
        n, top_k, width = (source.take(name, int, most=MOST_EXPERTS, least=1) for name in names)
        shared, rest = divmod(fields["d_ff"], width)
        if rest or not shared:
            source.problem(
                "intermediate_size", f"is {fields['d_ff']:,}, supported: a multiple of moe_intermediate_size {width:,}"
            )
        fields |= {"moe.n_experts": n, "moe.top_k": top_k, "moe.d_ff": width, "moe.n_shared": shared}
        fields["moe.own_norms"] = True

    def write(self, model: ModelConfig) -> Fields:
        moe = model.moe
        if not moe.n_experts:
            return {"enable_moe_block": False}
        width = model.expert_ff_size
        sizes = {"moe_intermediate_size": width, "intermediate_size": moe.n_shared * width}
        return {"enable_moe_block": True, "num_experts": moe.n_experts, "top_k_experts": moe.top_k, **sizes}


@dataclass(frozen=True)
class SharedLayers:
    """Gemma 4 E2B and E4B: the last layers share keys, and may have MLPs of twice the width."""

    def read(self, source: ConfigReader, fields: Fields) -> None:
        fields["shared_keys"] = source.take("num_kv_shared_layers", int, 0)
        fields["double_mlp"] = source.take("use_double_wide_mlp", bool, False) and fields["shared_keys"] > 0
        if fields["double_mlp"] and fields.get("moe.n_experts"):
            source.problem("use_double_wide_mlp", "is true, supported beside experts: false")

    def write(self, model: ModelConfig) -> Fields:
        return {"num_kv_shared_layers": model.shared_keys, "use_double_wide_mlp": model.double_mlp}


@dataclass(frozen=True)
class LayerEmbeddings:
    """Gemma 4 E2B and E4B: each layer has an embedding of its own, for all tokens."""

    def read(self, source: ConfigReader, fields: Fields) -> None:
        tokens = source.take("vocab_size_per_layer_input", int, 262144)
        fields["layer_embedding"] = source.take("hidden_size_per_layer_input", int, 256)
        if fields["layer_embedding"] and tokens != fields["vocab_size"]:
            source.problem(
                "vocab_size_per_layer_input", f"is {tokens:,}, supported: vocab_size {fields['vocab_size']:,}"
            )

    def write(self, model: ModelConfig) -> Fields:
        return {"hidden_size_per_layer_input": model.layer_embedding, "vocab_size_per_layer_input": model.vocab_size}


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
        fields["attention"] = ",".join(
            terms.shortest(["delta" if kind == _LINEAR else "gated_heads" for kind in kinds])
        )

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
_MIXED_TYPES = {"mamba": "M", _LINEAR: "M", "attention": "*", FULL: "*", "moe": "E", "mlp": "-"}


@dataclass(frozen=True)
class HybridLayers(terms.ReadOnly):
    """Nemotron-H: every layer is Mamba-2, attention, an MLP or experts. A block here is one of the first two with one
    of the last two after it, if there is one."""

    def read(self, source: ConfigReader, fields: Fields) -> None:
        listed = source.take("layers_block_type", list, source.take("layer_types", list, []))
        pattern = source.take(
            "hybrid_override_pattern", str, "".join(_MIXED_TYPES.get(str(kind), "?") for kind in listed)
        )
        if len(pattern) > MOST_LAYERS:
            source.problem("hybrid_override_pattern", f"has {len(pattern):,} layers, expected at most {MOST_LAYERS:,}")
            pattern = "*-"
        unknown = sorted(set(pattern) - set(_SYMBOLS))
        if unknown or not pattern:
            name = "hybrid_override_pattern" if source.holds("hybrid_override_pattern") else "layers_block_type"
            found = shown(unknown[0]) if unknown else "nothing"
            source.problem(name, f"holds {found}, supported: {', '.join(_MIXED_TYPES)}, or {' '.join(_SYMBOLS)}")
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
        fields["attention"] = ",".join(terms.shortest([attention for attention, _ in blocks]))
        fields["feed_forward"] = ",".join(terms.shortest([wide for _, wide in blocks]))
        if "M" not in pattern:
            fields["mamba.n_heads"] = 0
        if "E" not in pattern:
            fields.update(dict.fromkeys(("moe.n_experts", "moe.n_shared", "moe.latent"), 0))


@dataclass(frozen=True)
class ConfigFamily:
    """A kind of model in transformers."""

    model_type: str
    architecture: str
    """The class of the causal language model, as `architectures` names it."""
    kind: Mapping[str, Any]
    """Our fields that are the same for all models of the family."""
    terms: tuple[Term, ...]
    """In the order in which they are read: sizes before what depends on them."""
    harmless: frozenset[str] = frozenset()
    """Fields of this family without effect on the numbers."""
    also: tuple[str, ...] = ()
    """Other model_types of the same kind."""
    inside: str = ""
    """Where the fields of the language model stand in a model that reads images, too: text_config, under the
    model_type `inside_of`."""
    inside_of: str = ""
    notes: tuple[str, ...] = ()
    """Facts that the shape does not express; reported on import."""
    mtp_field: str = ""
    """The number of modules for further tokens, in config.json; empty where they have no names. Whether there are any,
    files say: transformers ignores their weights, and leaves the number when it writes files without them."""
    mtp_join: str = ""
    """The name of the matrix that joins, of the module whose number as a layer is {}."""
    most_modules: int = MOST_LAYERS
    """Modules that have names of their own."""


@dataclass(frozen=True)
class HeadDim:
    """The size of a head; by default the width divided by the heads."""

    default: int = 0
    absent: int | None = None
    """The size where the field is absent, if it is another than that of null."""

    def read(self, source: ConfigReader, fields: Fields) -> None:
        default = self.default if self.absent is None or source.names("head_dim") else self.absent
        size = source.take("head_dim", int, default, least=1)
        fields["head_dim"] = 0 if size * fields["n_heads"] == fields["d_model"] else size

    def write(self, model: ModelConfig) -> Fields:
        return {"head_dim": model.head_size}


@dataclass(frozen=True)
class Biases:
    """Llama: biases in attention and in the MLP, everywhere or nowhere."""

    def read(self, source: ConfigReader, fields: Fields) -> None:
        attention, mlp = source.take("attention_bias", bool, False), source.take("mlp_bias", bool, False)
        fields["bias"] = attention
        if attention != mlp:
            source.problem("mlp_bias", f"is {shown(mlp)}, attention_bias is {shown(attention)}; supported: both equal")

    def write(self, model: ModelConfig) -> Fields:
        return {"attention_bias": model.bias, "mlp_bias": model.bias}


@dataclass(frozen=True)
class QueryScale:
    """Gemma: scores are divided by the root of query_pre_attn_scalar."""

    def read(self, source: ConfigReader, fields: Fields) -> None:
        scalar = source.take("query_pre_attn_scalar", float, 256.0)
        head = fields["head_dim"] or fields["d_model"] // max(1, fields["n_heads"])
        if not scalar:
            source.problem("query_pre_attn_scalar", "is 0, expected more")
        else:
            fields["attention_scale"] = 0.0 if scalar == head else scalar**-0.5

    def write(self, model: ModelConfig) -> Fields:
        scalar = model.attention_scale**-2 if model.attention_scale else model.head_size
        return {"query_pre_attn_scalar": round(scalar)}  # transformers takes whole ones only


@dataclass(frozen=True)
class SoftCap:
    """A soft cap, null without one."""

    theirs: str
    ours: str
    default: float

    def read(self, source: ConfigReader, fields: Fields) -> None:
        absent = 0.0 if source.names(self.theirs) else self.default
        fields[self.ours] = source.take(self.theirs, float, absent)
        if source.states(self.theirs, 0):
            source.problem(self.theirs, "is 0, by which transformers divides; supported: null, or more")

    def write(self, model: ModelConfig) -> Fields:
        return {self.theirs: getattr(model, self.ours) or None}


_HARMLESS = """
architectures auto_map dtype torch_dtype transformers_version _name_or_path name_or_path _attn_implementation_autoset
_attn_implementation attn_implementation use_cache cache_implementation model_type bos_token_id eos_token_id
pad_token_id sep_token_id unk_token_id decoder_start_token_id attention_dropout hidden_dropout classifier_dropout
attention_probs_dropout_prob hidden_dropout_prob _num_labels
initializer_range pretraining_tp output_attentions output_hidden_states output_router_logits return_dict
return_dict_in_generate chunk_size_feed_forward problem_type finetuning_task id2label label2id num_labels
task_specific_params is_decoder is_encoder_decoder gradient_checkpointing ignore_index tokenizer_class prefix
torchscript transformers.js_config license head_type do_sample temperature top_p top_k max_length max_new_tokens
max_sequence_length
"""
HARMLESS = frozenset(_HARMLESS.split())
"""Fields that change neither shape nor numbers of a model in training mode without dropout. The first conversions of
Llama wrote max_sequence_length, which transformers does not read."""
OWN_VALUES: Mapping[str, Callable[[ModelConfig], Any]] = {
    **dict.fromkeys(("use_qk_norm", "qk_norm", "qk_layernorm"), lambda model: model.qk_norm != "none"),
    **dict.fromkeys(("use_bias", "attention_bias", "mlp_bias"), lambda model: model.bias),
    **dict.fromkeys(("qkv_bias", "use_qkv_bias"), lambda model: model.bias or model.qkv_bias),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), lambda model: model.moe.n_experts),
    "shared_expert_intermediate_size": lambda model: model.moe.n_shared * model.expert_ff_size,
    "lm_head_bias": lambda model: False,
    **dict.fromkeys(("full_attn_mod", "interpolate_factor"), lambda model: 1),  # Phi-4's own program
    "use_sliding_window": lambda model: model.window > 0,
    "layer_types": layer_types,
    "use_parallel_residual": lambda model: model.parallel_block,
}
"""Fields that only some kinds have, with what their value would be for a model: elsewhere they must have it."""


def sizes(
    *,
    kv_heads: int = 0,
    absent_kv_heads: int | None = None,
    tied: bool = False,
    context: int = 2048,
    eps: float = 1e-6,
    d_ff: Any = REQUIRED,
    width: str = "intermediate_size",
    experts: bool = False,
):
    """Returns the sizes that most families name alike; kv_heads 0 stands for as many as heads; `width` is the name of
    the MLP's; with `experts` it is theirs."""
    return (
        Field("vocab_size", "vocab_size", int, least=1),
        Field("hidden_size", "d_model", int, least=1),
        Field(width, "d_ff", int, d_ff, "expert_ff_size" if experts else "ff_size", least=int(d_ff != 0)),
        Field("num_hidden_layers", "n_layers", int, most=MOST_LAYERS, least=1),
        Field("num_attention_heads", "n_heads", int, least=1),
        Field("num_key_value_heads", "n_kv_heads", int, kv_heads, _kv_heads, least=1, absent=absent_kv_heads),
        Context(default=context),
        Field("rms_norm_eps", "norm_eps", float, eps),
        Field("tie_word_embeddings", "tied", bool, tied),
    )


def gemma_sizes(*, vocabulary: int, layers: int):
    """Returns the sizes of Gemma 3 and 4, which a config.json may all leave out."""
    return (
        Field("vocab_size", "vocab_size", int, vocabulary, least=1),
        Field("hidden_size", "d_model", int, 2304, least=1),
        Field("intermediate_size", "d_ff", int, 9216, "ff_size", least=1),
        Field("num_hidden_layers", "n_layers", int, layers, most=MOST_LAYERS, least=1),
        Field("num_attention_heads", "n_heads", int, 8, least=1),
        Field("num_key_value_heads", "n_kv_heads", int, 4, "kv_heads", least=1),
        Context(default=131072),
        Field("rms_norm_eps", "norm_eps", float, 1e-6),
        Field("tie_word_embeddings", "tied", bool, default=True),
        HeadDim(256),
    )


def _kv_heads(model: ModelConfig) -> int:
    return model.n_heads if model.mla.kv_rank else model.kv_heads


def experts(count: str, *, renormalised: bool | None = None, width: bool = True, chosen: Any = REQUIRED):
    """Returns experts as Mixtral and Qwen name them."""
    ff = (Field("moe_intermediate_size", "moe.d_ff", int, REQUIRED, "expert_ff_size", least=1),)
    gates = (Field("norm_topk_prob", "moe.renormalise", bool, renormalised),)
    return (
        Field(count, "moe.n_experts", int, most=MOST_EXPERTS, least=1, also=("num_experts", "num_local_experts")),
        Field("num_experts_per_tok", "moe.top_k", int, chosen),
        Field("router_aux_loss_coef", "moe.aux_loss", float, 0.0),
        *(ff if width else ()),
        *(gates if renormalised is not None else ()),
    )


def many_experts(
    *, groups: int = 1, chosen_groups: int = 1, dense: int | None = None, scale: float = 1.0, shared: int = 1
):
    """Returns the experts of DeepSeek-V3 and what follows it."""
    return (
        Field(
            "n_routed_experts",
            "moe.n_experts",
            int,
            most=MOST_EXPERTS,
            least=1,  # layers of these kinds would route to no expert
            also=("num_experts", "num_local_experts"),
        ),
        Field("num_experts_per_tok", "moe.top_k", int, 8),
        Field("moe_intermediate_size", "moe.d_ff", int, REQUIRED, "expert_ff_size", least=1),
        Field("n_shared_experts", "moe.n_shared", int, shared),
        Fixed("first_k_dense_replace", (0,), 0, "every layer of this kind has experts")
        if dense is None
        else Field("first_k_dense_replace", "moe.n_dense_layers", int, dense, most=MOST_LAYERS),
        Field("n_group", "moe.n_groups", int, groups),
        Field("topk_group", "moe.top_groups", int, chosen_groups),
        Field("routed_scaling_factor", "moe.route_scale", float, scale),
        Field("norm_topk_prob", "moe.renormalise", bool, True),
        Fixed("scoring_func", ("sigmoid",), "sigmoid"),
        Fixed("topk_method", ("noaux_tc",), "noaux_tc"),
        Fixed("moe_layer_freq", (1,), 1),
        Written("num_nextn_predict_layers", 0),
    )


def latent(*, rank: int = 0, nope: int = 128, value: int = 128):
    """Returns latent attention; `rank` is that of queries, 0 stands for 1536, or for none where the field is null."""
    query = Field("q_lora_rank", "mla.q_rank", int, rank, least=1)
    optional = Field("q_lora_rank", "mla.q_rank", int, 0, lambda model: model.mla.q_rank or None, least=1, absent=1536)
    return (
        query if rank else optional,
        Field("kv_lora_rank", "mla.kv_rank", int, 512, least=1),
        Field("qk_rope_head_dim", "mla.rope_head_dim", int, 64),
        Field("qk_nope_head_dim", "mla.nope_head_dim", int, nope),
        Field("v_head_dim", "mla.v_head_dim", int, value),
        Fixed("rope_interleave", (True,), True),
    )


def chosen_keys(*, heads: int):
    """Returns the terms of an indexer in every layer."""
    return (
        Field("index_topk", "sparse.top_k", int, 2048, least=1),
        Field("index_n_heads", "sparse.index_heads", int, heads, least=1),
        Field("index_head_dim", "sparse.index_head_dim", int, 128, least=1),
        Fixed("mlp_bias", (False,), False),
    )


NO_MTP = "modules for further tokens are left out (one more of model.n_layers with model.mtp=1 is one)"
_MAKERS: Mapping[str, Any] = {**vars(terms), **globals()}
_TYPES = {"int": int, "float": float, "bool": bool, "str": str}


def _flat(written: Any) -> Iterator[Any]:
    """Yields the items of a list, and of the lists in it."""
    for each in written if isinstance(written, list) else [written]:
        yield from _flat(each) if isinstance(each, list) else [each]


def _argument(written: Any) -> Any:
    if isinstance(written, list):  # an empty list is the value of a field
        return tuple(map(_argument, written)) or written
    if isinstance(written, dict):
        return RopeScaling(**written)
    return _TYPES.get(written, written) if isinstance(written, str) else written


def _terms(written: Any) -> Iterator[Term]:
    """Yields terms from names and arguments: [Rope, HeadDim: 128, Context: [n_positions, 1024, {exact: true}]]."""
    for each in _flat(written):
        name, given = next(iter(each.items())) if isinstance(each, dict) else (each, [])
        given = given if isinstance(given, list) else [given]
        named = given[-1] if given and isinstance(given[-1], dict) else {}
        values = map(_argument, given[:-1] if named else given)
        made = _MAKERS[name](*values, **{key: _argument(value) for key, value in named.items()})
        yield from made if isinstance(made, tuple) else [made]


def _family(model_type: str, stated: dict[str, Any]) -> ConfigFamily:
    more: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in stated.items()}
    architecture, kind, found = more.pop("class"), more.pop("kind"), tuple(_terms(stated["terms"]))
    more |= {"terms": found, "harmless": frozenset(_flat(stated.get("harmless", [])))}
    return ConfigFamily(model_type, architecture, kind, **more)


def by_type(families: Iterable[ConfigFamily]) -> dict[str, ConfigFamily]:
    """Returns families by every model type that they are read under."""
    return {
        name: family
        for family in families
        for name in (family.model_type, *family.also, *((family.inside_of,) if family.inside_of else ()))
    }


_STORED = yaml_data(__file__, "families.yaml")
FAMILIES, _MIXED, WITH_DELTAS, PREDICTED = (
    tuple(_family(*each) for each in _STORED[part].items()) for part in ("plain", "mixed", "deltas", "predicted")
)
TRAINED_FAMILIES = (*FAMILIES, *_MIXED, *WITH_DELTAS)
"""All that are trained and written. To write a model the first that says all of it is taken."""
BY_TYPE: Mapping[str, ConfigFamily] = by_type(FAMILIES)
TRAINED: Mapping[str, ConfigFamily] = {**by_type((*_MIXED, *WITH_DELTAS)), **BY_TYPE}
"""Every model type that is trained and written."""
READ: Mapping[str, ConfigFamily] = {**TRAINED, **by_type(PREDICTED)}
"""Every model type that is read, those that are predicted and not trained last."""
_OTHER_LAYERS = "a kind with layers that are not implemented (state spaces, convolutions, or its own attention)"
_OTHERS = """
mamba mamba2 falcon_mamba jamba bamba zamba zamba2 recurrent_gemma rwkv granitemoehybrid falcon_h1
lfm2 lfm2_moe minimax gemma3n phi phi3 phimoe falcon
mpt bloom opt gptj gpt_neo codegen stablelm starcoder2 persimmon cohere cohere2 command_r olmoe dbrx arctic
jetmoe granitemoe nemotron exaone4 ernie4_5 ernie4_5_moe hunyuan_v1_dense hunyuan_v1_moe dots1 glm glm4
olmo baichuan chatglm internlm internlm2 minicpm
minicpm3 gpt_bigcode apertus arcee bitnet xglm exaone modernbert xlnet
bert roberta deberta t5 mt5 bart xlm-roberta electra whisper clip siglip vit
"""
"""Kinds of transformers that are no slip of the pen of a supported one."""
_IMAGES = """
llava llava_next mllama pixtral paligemma idefics idefics2 idefics3 internvl qwen2_vl qwen2_5_vl qwen3_vl
qwen3_vl_moe glm4v glm4v_moe kimi_vl kimi_k25 gemma3_vl aya_vision smolvlm
"""
"""Kinds whose language model lies beside an encoder of images."""
_BESIDE_IMAGES = (
    "a language model with an encoder of images, of which gemma3 and mistral3 are read; give the config.json of the "
    "language model alone"
)

REFUSED: Mapping[str, str] = {
    **dict.fromkeys(_IMAGES.split(), _BESIDE_IMAGES),
    **{name: _OTHER_LAYERS for name in _OTHERS.split() if name not in BY_TYPE},
    **dict.fromkeys(
        ("deepseek_v4",),
        "its attention to compressed keys, hyper-connections and hash-routed experts are neither priced nor trained; "
        "deepseek_v32 is trained",
    ),
    **dict.fromkeys(
        ("gemma4_unified", "gemma4_unified_text"),
        "its image and audio patches join the text without an encoder, which is not implemented; gemma4 is trained",
    ),
    **dict.fromkeys(
        ("kimi_k3", "kimi_linear"),
        "its linear attention decays per channel, and its attention residuals (K3), are neither priced nor trained; "
        "qwen3_next is priced",
    ),
    "glm5_next": "its hyper-connections and linear attention are neither priced nor trained; glm_moe_dsa is trained",
    "qwen2_moe": "its shared expert has a gate of its own, which is not implemented; qwen3_moe is",
    "deepseek_v2": "its routers choose groups by softmax scores, which is not implemented; deepseek_v3 is",
}
"""Kinds that look supported, and why they are not."""
