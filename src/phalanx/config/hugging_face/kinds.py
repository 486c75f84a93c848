"""Groups of config.json's fields that several families of transformers share.

Defaults are those of transformers' configuration classes (release 5.23), since a config.json may leave them out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from phalanx.config.hugging_face.positions import Context, layer_types
from phalanx.config.hugging_face.terms import REQUIRED, ConfigReader, Field, Fields, Fixed, Term, Written, shown
from phalanx.config.model import ModelConfig

MOST_LAYERS, MOST_EXPERTS = 10_000, 65_536


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


@dataclass(frozen=True)
class HeadDim:
    """The size of a head; by default the width divided by the heads."""

    default: int = 0

    def read(self, source: ConfigReader, fields: Fields) -> None:
        """Sets head_dim, 0 where it follows from the width."""
        size = source.take("head_dim", int, self.default)
        fields["head_dim"] = 0 if size * fields["n_heads"] == fields["d_model"] else size

    def write(self, model: ModelConfig) -> Fields:
        """Returns head_dim."""
        return {"head_dim": model.head_size}


@dataclass(frozen=True)
class Biases:
    """Llama: biases in attention and in the MLP, everywhere or nowhere."""

    def read(self, source: ConfigReader, fields: Fields) -> None:
        """Sets bias."""
        attention, mlp = source.take("attention_bias", bool, False), source.take("mlp_bias", bool, False)
        fields["bias"] = attention
        if attention != mlp:
            source.problem("mlp_bias", f"is {shown(mlp)}, attention_bias is {shown(attention)}; supported: both equal")

    def write(self, model: ModelConfig) -> Fields:
        """Returns both."""
        return {"attention_bias": model.bias, "mlp_bias": model.bias}


@dataclass(frozen=True)
class QueryScale:
    """Gemma: scores are divided by the root of query_pre_attn_scalar."""

    def read(self, source: ConfigReader, fields: Fields) -> None:
        """Sets attention_scale, 0 where it is that of the head's size."""
        scalar = source.take("query_pre_attn_scalar", float, 256.0)
        head = fields["head_dim"] or fields["d_model"] // max(1, fields["n_heads"])
        if not scalar:
            source.problem("query_pre_attn_scalar", "is 0, expected more")
        else:
            fields["attention_scale"] = 0.0 if scalar == head else scalar**-0.5

    def write(self, model: ModelConfig) -> Fields:
        """Returns query_pre_attn_scalar."""
        scalar = model.attention_scale**-2 if model.attention_scale else model.head_size
        return {"query_pre_attn_scalar": round(scalar)}  # transformers takes whole ones only


@dataclass(frozen=True)
class SoftCap:
    """A soft cap, null without one."""

    theirs: str
    ours: str
    default: float

    def read(self, source: ConfigReader, fields: Fields) -> None:
        """Sets the cap; 0 where the configuration says null."""
        absent = 0.0 if source.names(self.theirs) else self.default
        fields[self.ours] = source.take(self.theirs, float, absent)

    def write(self, model: ModelConfig) -> Fields:
        """Returns the cap or null."""
        return {self.theirs: getattr(model, self.ours) or None}


HARMLESS = frozenset(
    (
        *("architectures", "auto_map", "dtype", "torch_dtype", "transformers_version", "_name_or_path", "name_or_path"),
        *(
            "_attn_implementation_autoset",
            "_attn_implementation",
            "attn_implementation",
            "use_cache",
            "cache_implementation",
            "model_type",
        ),
        *("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "unk_token_id", "decoder_start_token_id"),
        *("attention_dropout", "hidden_dropout", "classifier_dropout", "initializer_range", "pretraining_tp"),
        *(
            "output_attentions",
            "output_hidden_states",
            "output_router_logits",
            "return_dict",
            "return_dict_in_generate",
        ),
        *("chunk_size_feed_forward", "problem_type", "finetuning_task", "id2label", "label2id", "num_labels"),
        *("task_specific_params", "is_decoder", "is_encoder_decoder", "gradient_checkpointing", "ignore_index"),
        *(
            "tokenizer_class",
            "return_dict_in_generate",
            "prefix",
            "torchscript",
            "transformers.js_config",
            "license",
            "head_type",
        ),
        *("do_sample", "temperature", "top_p", "top_k", "max_length", "max_new_tokens"),
        "max_sequence_length",  # written by the first conversions of Llama; transformers does not read it
    )
)
"""Fields that change neither shape nor numbers of a model in training mode without dropout."""
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

LLAMA_KIND: dict[str, Any] = {"norm": "rmsnorm", "positions": "rope", "activation": "swiglu", "bias": False}
SILU = Fixed("hidden_act", ("silu", "swish"), "silu")
NO_ATTENTION_BIAS = Fixed("attention_bias", (False,), False, "without biases of the output and the MLP")


def sizes(
    *,
    kv_heads: int = 0,
    absent_kv_heads: int | None = None,
    tied: bool = False,
    context: int = 2048,
    eps: float = 1e-6,
    d_ff: Any = REQUIRED,
    experts: bool = False,
):
    """Returns the sizes that most families name alike; kv_heads 0 stands for as many as heads; with `experts`
    intermediate_size is theirs."""
    return (
        Field("vocab_size", "vocab_size", int),
        Field("hidden_size", "d_model", int),
        Field("intermediate_size", "d_ff", int, d_ff, lambda model: model.expert_ff_size if experts else model.ff_size),
        Field("num_hidden_layers", "n_layers", int, most=MOST_LAYERS),
        Field("num_attention_heads", "n_heads", int),
        Field("num_key_value_heads", "n_kv_heads", int, kv_heads, _kv_heads, absent=absent_kv_heads),
        Context(default=context),
        Field("rms_norm_eps", "norm_eps", float, eps),
        Field("tie_word_embeddings", "tied", bool, tied),
    )


def _kv_heads(model: ModelConfig) -> int:
    return model.n_heads if model.mla.kv_rank else model.kv_heads


def experts(count: str, *, renormalised: bool | None = None, width: bool = True, chosen: Any = REQUIRED):
    """Returns experts as Mixtral and Qwen name them."""
    ff = (Field("moe_intermediate_size", "moe.d_ff", int, REQUIRED, lambda model: model.expert_ff_size),)
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
        Field("moe_intermediate_size", "moe.d_ff", int, REQUIRED, lambda model: model.expert_ff_size),
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


BALANCED: dict[str, Any] = {"moe.router": "sigmoid", "moe.bias_balanced": True}
LATENT_KIND: dict[str, Any] = {"mla.norm_eps": 1e-6}
"""The compressions have norms with transformers' default, whatever rms_norm_eps is."""


def latent(*, query_rank: Field, nope: int = 128, value: int = 128):
    return (
        query_rank,
        Field("kv_lora_rank", "mla.kv_rank", int, 512, least=1),
        Field("qk_rope_head_dim", "mla.rope_head_dim", int, 64),
        Field("qk_nope_head_dim", "mla.nope_head_dim", int, nope),
        Field("v_head_dim", "mla.v_head_dim", int, value),
        Fixed("rope_interleave", (True,), True),
    )


UNUSED_BALANCING = frozenset(
    (
        *("aux_loss_alpha", "seq_aux", "ep_size", "num_mtp_layers", "qk_head_dim"),
        "head_dim",
    )
)
NO_MTP = "modules that predict a second token are left out"

GEMMA_KIND = LLAMA_KIND | {"activation": "geglu", "scaled_embedding": True}
GEMMA_TERMS = (
    Fixed("use_bidirectional_attention", (False,), False),
    NO_ATTENTION_BIAS,
)
TANH = ("gelu_pytorch_tanh", "gelu_new", "gelu_fast")
