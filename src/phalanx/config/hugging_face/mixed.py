"""Terms of model types whose layers or positions differ beyond one rule: chunks and windows in a list, dense layers
between experts, queries that grow, heads of two sizes, layers with a state."""

from __future__ import annotations

from dataclasses import dataclass, replace

from phalanx.config.hugging_face import terms
from phalanx.config.hugging_face.terms import FULL, MOST_EXPERTS, MOST_LAYERS, SLIDING, ConfigReader, Fields, shown
from phalanx.config.model import ModelConfig, RopeScaling

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
        size, keys = source.take("global_head_dim", int, 512), source.take("num_global_key_value_heads", int, 0)
        keys = keys if shared else 0
        if source.holds("per_layer_config"):
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
_TYPES = {"mamba": "M", _LINEAR: "M", "attention": "*", FULL: "*", "moe": "E", "mlp": "-"}


@dataclass(frozen=True)
class HybridLayers(terms.ReadOnly):
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
        fields["attention"] = ",".join(terms.shortest([attention for attention, _ in blocks]))
        fields["feed_forward"] = ",".join(terms.shortest([wide for _, wide in blocks]))
        if "M" not in pattern:
            fields["mamba.n_heads"] = 0
        if "E" not in pattern:
            fields.update(dict.fromkeys(("moe.n_experts", "moe.n_shared", "moe.latent"), 0))
