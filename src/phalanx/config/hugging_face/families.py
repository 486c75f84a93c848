"""The model types of transformers: the kind of model of each, and the fields of its config.json (families.yaml)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from phalanx.config.hugging_face import mixed, terms
from phalanx.config.hugging_face.terms import (
    MOST_EXPERTS,
    MOST_LAYERS,
    REQUIRED,
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

    def read(self, source: ConfigReader, fields: Fields) -> None:
        size = source.take("head_dim", int, self.default)
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

    def write(self, model: ModelConfig) -> Fields:
        return {self.theirs: getattr(model, self.ours) or None}


_HARMLESS = """
architectures auto_map dtype torch_dtype transformers_version _name_or_path name_or_path _attn_implementation_autoset
_attn_implementation attn_implementation use_cache cache_implementation model_type bos_token_id eos_token_id
pad_token_id sep_token_id unk_token_id decoder_start_token_id attention_dropout hidden_dropout classifier_dropout
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
        Field("vocab_size", "vocab_size", int),
        Field("hidden_size", "d_model", int),
        Field(width, "d_ff", int, d_ff, "expert_ff_size" if experts else "ff_size"),
        Field("num_hidden_layers", "n_layers", int, most=MOST_LAYERS),
        Field("num_attention_heads", "n_heads", int),
        Field("num_key_value_heads", "n_kv_heads", int, kv_heads, _kv_heads, absent=absent_kv_heads),
        Context(default=context),
        Field("rms_norm_eps", "norm_eps", float, eps),
        Field("tie_word_embeddings", "tied", bool, tied),
    )


def gemma_sizes(*, vocabulary: int, layers: int):
    """Returns the sizes of Gemma 3 and 4, which a config.json may all leave out."""
    return (
        Field("vocab_size", "vocab_size", int, vocabulary),
        Field("hidden_size", "d_model", int, 2304),
        Field("intermediate_size", "d_ff", int, 9216, "ff_size"),
        Field("num_hidden_layers", "n_layers", int, layers, most=MOST_LAYERS),
        Field("num_attention_heads", "n_heads", int, 8),
        Field("num_key_value_heads", "n_kv_heads", int, 4, "kv_heads"),
        Context(default=131072),
        Field("rms_norm_eps", "norm_eps", float, 1e-6),
        Field("tie_word_embeddings", "tied", bool, default=True),
        HeadDim(256),
    )


def _kv_heads(model: ModelConfig) -> int:
    return model.n_heads if model.mla.kv_rank else model.kv_heads


def experts(count: str, *, renormalised: bool | None = None, width: bool = True, chosen: Any = REQUIRED):
    """Returns experts as Mixtral and Qwen name them."""
    ff = (Field("moe_intermediate_size", "moe.d_ff", int, REQUIRED, "expert_ff_size"),)
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
        Field("moe_intermediate_size", "moe.d_ff", int, REQUIRED, "expert_ff_size"),
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
    optional = Field("q_lora_rank", "mla.q_rank", int, 0, lambda model: model.mla.q_rank or None, absent=1536)
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
_MAKERS: Mapping[str, Any] = {**vars(terms), **vars(mixed), **globals()}
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
