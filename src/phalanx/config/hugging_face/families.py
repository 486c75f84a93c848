"""The model types of transformers: the kind of model of each, and the fields of its config.json.

Defaults are those of transformers' configuration classes (release 5.23), since a config.json may leave them out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from phalanx.config.hugging_face.terms import (
    REQUIRED,
    AllEqual,
    AttentionMultiplier,
    Choice,
    ConfigReader,
    Context,
    Field,
    Fields,
    Fixed,
    LongRope,
    NoRope,
    PlainHeads,
    Rope,
    RopeWithWindows,
    RotaryDim,
    Term,
    Windows,
    Written,
    layer_types,
    shown,
)
from phalanx.config.model import ModelConfig, RopeScaling

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

LLAMA_KIND: dict[str, Any] = {"norm": "rmsnorm", "positions": "rope", "activation": "swiglu", "bias": False}
SILU = Fixed("hidden_act", ("silu", "swish"), "silu")
MULTIPLIERS = (
    AttentionMultiplier(),
    Field("embedding_multiplier", "embedding_multiplier", float, 1.0),
    Field("residual_multiplier", "residual_multiplier", float, 1.0),
    Field("logits_scaling", "logit_divisor", float, 1.0),
)
"""What Granite multiplies numbers with."""
NO_ATTENTION_BIAS = Fixed("attention_bias", (False,), False, "without biases of the output and the MLP")


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
        Field(width, "d_ff", int, d_ff, lambda model: model.expert_ff_size if experts else model.ff_size),
        Field("num_hidden_layers", "n_layers", int, most=MOST_LAYERS),
        Field("num_attention_heads", "n_heads", int),
        Field("num_key_value_heads", "n_kv_heads", int, kv_heads, _kv_heads, absent=absent_kv_heads),
        Context(default=context),
        Field("rms_norm_eps", "norm_eps", float, eps),
        Field("tie_word_embeddings", "tied", bool, tied),
    )


def gemma_sizes(vocabulary: int, layers: int):
    """Returns the sizes of Gemma 3 and 4, which a config.json may all leave out."""
    return (
        Field("vocab_size", "vocab_size", int, vocabulary),
        Field("hidden_size", "d_model", int, 2304),
        Field("intermediate_size", "d_ff", int, 9216, lambda model: model.ff_size),
        Field("num_hidden_layers", "n_layers", int, layers, most=MOST_LAYERS),
        Field("num_attention_heads", "n_heads", int, 8),
        Field("num_key_value_heads", "n_kv_heads", int, 4, lambda model: model.kv_heads),
        Context(default=131072),
        Field("rms_norm_eps", "norm_eps", float, 1e-6),
        Field("tie_word_embeddings", "tied", bool, default=True),
        HeadDim(256),
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


_EACH_CHOOSES = "every layer has an indexer of its own"


def chosen_keys(*, heads: int):
    """Returns the terms of an indexer in every layer."""
    return (
        Field("index_topk", "sparse.top_k", int, 2048, least=1),
        Field("index_n_heads", "sparse.index_heads", int, heads, least=1),
        Field("index_head_dim", "sparse.index_head_dim", int, 128, least=1),
        Fixed("mlp_bias", (False,), False),
    )


UNUSED_BALANCING = frozenset(
    (
        *("aux_loss_alpha", "seq_aux", "ep_size", "num_mtp_layers", "qk_head_dim"),
        "head_dim",
    )
)
NO_MTP = "modules for further tokens are left out (one more of model.n_layers with model.mtp=1 is one)"
LAYERS_AFTER: dict[str, Any] = {"mtp_field": "num_nextn_predict_layers", "mtp_join": "model.layers.{}.eh_proj.weight"}
"""Modules for further tokens as DeepSeek-V3 stores them: as layers after the last one."""

GEMMA_KIND = LLAMA_KIND | {"activation": "geglu", "scaled_embedding": True}
GEMMA_TERMS = (
    Fixed("use_bidirectional_attention", (False,), False),
    NO_ATTENTION_BIAS,
)
TANH = ("gelu_pytorch_tanh", "gelu_new", "gelu_fast")


FAMILIES: tuple[ConfigFamily, ...] = (
    ConfigFamily(
        "llama",
        "LlamaForCausalLM",
        LLAMA_KIND,
        (
            *sizes(),
            HeadDim(),
            Rope(),
            SILU,
            Biases(),
        ),
        harmless=frozenset({"rope_interleaved", "is_llama_config"}),
    ),
    ConfigFamily(
        "mistral",
        "MistralForCausalLM",
        LLAMA_KIND,
        (*sizes(kv_heads=8, context=131072), HeadDim(), Windows(default=4096, layers=False), Rope(), SILU),
        inside="text_config",
        inside_of="mistral3",
    ),
    ConfigFamily(
        "ministral",
        "MinistralForCausalLM",
        LLAMA_KIND,
        (*sizes(kv_heads=8, context=131072), HeadDim(), Windows(default=4096), Rope(), SILU),
    ),
    ConfigFamily(
        "mixtral",
        "MixtralForCausalLM",
        LLAMA_KIND | {"moe.renormalise": True},
        (
            *sizes(kv_heads=8, context=131072, eps=1e-5, experts=True),
            HeadDim(),
            Windows(layers=False),
            Rope(theta=1e6),
            SILU,
            *experts("num_local_experts", width=False, chosen=2),
            Fixed("router_jitter_noise", (0.0,), 0.0),
        ),
    ),
    ConfigFamily(
        "qwen2",
        "Qwen2ForCausalLM",
        LLAMA_KIND | {"qkv_bias": True},
        (
            *sizes(context=32768, absent_kv_heads=32),
            HeadDim(),
            Windows(default=4096, switch="use_sliding_window"),
            Rope(),
            SILU,
        ),
        harmless=frozenset({"use_mrope"}),
    ),
    ConfigFamily(
        "qwen3",
        "Qwen3ForCausalLM",
        LLAMA_KIND | {"qk_norm": "head"},
        (
            *sizes(context=32768, absent_kv_heads=32),
            HeadDim(128),
            Windows(default=4096, switch="use_sliding_window"),
            Rope(),
            SILU,
            NO_ATTENTION_BIAS,
        ),
    ),
    ConfigFamily(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        LLAMA_KIND | {"qk_norm": "head"},
        (
            *sizes(kv_heads=4, context=32768),
            HeadDim(128),
            Windows(default=4096, switch="use_sliding_window", layers=False),
            Rope(),
            SILU,
            NO_ATTENTION_BIAS,
            *experts("num_experts", renormalised=False),
            Fixed("decoder_sparse_step", (1,), 1),
            Fixed("mlp_only_layers", ([],), []),
        ),
    ),
    ConfigFamily(
        "gemma",
        "GemmaForCausalLM",
        GEMMA_KIND,
        (
            *sizes(kv_heads=0, tied=True, context=8192),
            HeadDim(256),
            Rope(),
            # Released with gelu, and trained with the tanh form, which hidden_activation then named.
            Fixed("hidden_act", (*TANH, "gelu"), "gelu_pytorch_tanh"),
            Fixed("hidden_activation", TANH, "gelu_pytorch_tanh"),
            *GEMMA_TERMS,
        ),
    ),
    ConfigFamily(
        "gemma2",
        "Gemma2ForCausalLM",
        GEMMA_KIND | {"norm_place": "both"},
        (
            *sizes(kv_heads=4, tied=True, context=8192),
            HeadDim(256),
            Windows(default=4096, full_every=2),
            Rope(),
            Fixed("hidden_activation", TANH, "gelu_pytorch_tanh"),
            *GEMMA_TERMS,
            QueryScale(),
            SoftCap("attn_logit_softcapping", "attention_softcap", 50.0),
            SoftCap("final_logit_softcapping", "logit_softcap", 30.0),
        ),
        harmless=frozenset({"hidden_act"}),
    ),
    ConfigFamily(
        "gemma3_text",
        "Gemma3ForCausalLM",
        GEMMA_KIND | {"norm_place": "both", "qk_norm": "head"},
        (
            *gemma_sizes(262208, 26),
            Windows(default=4096, full_every=6),
            RopeWithWindows(),
            Fixed("hidden_activation", TANH, "gelu_pytorch_tanh"),
            *GEMMA_TERMS,
            QueryScale(),
            Fixed("attn_logit_softcapping", (None,), None, "transformers reads it and caps nothing"),
            SoftCap("final_logit_softcapping", "logit_softcap", 0.0),
        ),
        harmless=frozenset({"hidden_act", "_sliding_window_pattern"}),  # layer_types stand beside it
        inside="text_config",
        inside_of="gemma3",
    ),
    ConfigFamily(
        "gpt2",
        "GPT2LMHeadModel",
        {"norm": "layernorm", "positions": "learned", "bias": True},
        (
            Field("vocab_size", "vocab_size", int),
            Field("n_embd", "d_model", int),
            Field("n_layer", "n_layers", int, most=MOST_LAYERS),
            Field("n_head", "n_heads", int),
            Field("n_inner", "d_ff", int, 0, lambda model: model.ff_size),
            Context("n_positions", 1024, exact=True),
            Field("layer_norm_epsilon", "norm_eps", float, 1e-5),
            Field("tie_word_embeddings", "tied", bool, default=True),
            Choice(
                "activation_function",
                "activation",
                (("gelu_new", "gelu_tanh"), ("gelu_pytorch_tanh", "gelu_tanh"), ("gelu", "gelu")),
                default="gelu_new",
            ),
            Fixed("scale_attn_weights", (True,), True),
            Fixed("scale_attn_by_inverse_layer_idx", (False,), False),
            Fixed("add_cross_attention", (False,), False),
        ),
        harmless=frozenset(
            (
                *("resid_pdrop", "embd_pdrop", "attn_pdrop", "n_ctx", "reorder_and_upcast_attn", "summary_type"),
                *("summary_use_proj", "summary_activation", "summary_proj_to_labels", "summary_first_dropout"),
            )
        ),
    ),
    ConfigFamily(
        "gpt_neox",
        "GPTNeoXForCausalLM",
        {"norm": "layernorm", "positions": "rope", "bias": True},
        (
            Field("vocab_size", "vocab_size", int),
            Field("hidden_size", "d_model", int),
            Field("intermediate_size", "d_ff", int, REQUIRED, lambda model: model.ff_size),
            Field("num_hidden_layers", "n_layers", int, most=MOST_LAYERS),
            Field("num_attention_heads", "n_heads", int),
            Context(default=2048),
            Field("layer_norm_eps", "norm_eps", float, 1e-5),
            Field("tie_word_embeddings", "tied", bool, default=False),
            Field("use_parallel_residual", "parallel_block", bool, default=True),
            Rope(fraction=0.25, theta_name="rotary_emb_base", fraction_name="rotary_pct", partial="used"),
            Choice(
                "hidden_act",
                "activation",
                (("gelu", "gelu"), *((name, "gelu_tanh") for name in TANH)),
                default="gelu",
            ),
            Fixed("attention_bias", (True,), True),
        ),
    ),
    ConfigFamily(
        "olmo2",
        "Olmo2ForCausalLM",
        LLAMA_KIND | {"norm_place": "after", "qk_norm": "width"},
        (*sizes(eps=1e-5), HeadDim(), Rope(), SILU, NO_ATTENTION_BIAS),
    ),
    ConfigFamily(
        "olmo3",
        "Olmo3ForCausalLM",
        LLAMA_KIND | {"norm_place": "after", "qk_norm": "width"},
        (
            *sizes(eps=1e-5),
            HeadDim(),
            Windows(default=4096, full_every=4),
            RopeWithWindows(theta=500000.0, window_theta=500000.0, one_base=True),
            SILU,
            NO_ATTENTION_BIAS,
        ),
    ),
    ConfigFamily(
        "olmoe",
        "OlmoeForCausalLM",
        LLAMA_KIND | {"qk_norm": "width"},
        (
            *sizes(context=4096, eps=1e-5, d_ff=2048, experts=True),
            PlainHeads(),
            Rope(),
            SILU,
            NO_ATTENTION_BIAS,
            Fixed("clip_qkv", (None,), None, "queries, keys and values are not clipped here"),
            *experts("num_experts", renormalised=False, width=False, chosen=8),
        ),
    ),
    ConfigFamily(
        "seed_oss",
        "SeedOssForCausalLM",
        LLAMA_KIND,
        (
            *sizes(kv_heads=8, context=524288, d_ff=27648),
            HeadDim(128),
            Rope(),
            SILU,
            Field("attention_bias", "qkv_bias", bool, default=True),
            Fixed("attention_out_bias", (False,), False),
            Fixed("mlp_bias", (False,), False),
        ),
        harmless=frozenset({"residual_dropout"}),
    ),
    ConfigFamily(
        "smollm3",
        "SmolLM3ForCausalLM",
        LLAMA_KIND,
        (
            *sizes(kv_heads=4, tied=True, context=32768),
            HeadDim(),
            Rope(theta=2e6),
            NoRope(),
            SILU,
            Biases(),
            Fixed("use_sliding_window", (False,), False),
            AllEqual("layer_types", ("full_attention",), "without windows"),
        ),
    ),
    ConfigFamily(
        "granite",
        "GraniteForCausalLM",
        LLAMA_KIND,
        (*sizes(d_ff=11008), HeadDim(), Rope(), SILU, Biases(), *MULTIPLIERS),
    ),
    ConfigFamily(
        "granitemoehybrid",
        "GraniteMoeHybridForCausalLM",
        LLAMA_KIND,
        (
            *sizes(d_ff=1024, width="shared_intermediate_size"),
            HeadDim(),
            Choice("position_embedding_type", "positions", ((None, "none"), ("rope", "rope"), ("nope", "none"))),
            Rope(),
            SILU,
            NO_ATTENTION_BIAS,
            *MULTIPLIERS,
            Fixed("num_local_experts", (0,), 8, "models without experts"),
            Written("mamba_n_heads", 1),  # has to divide a width, even without such layers
            AllEqual("layer_types", ("full_attention", "attention"), "models without Mamba-2", required=True),
        ),
        harmless=frozenset(
            (
                *(f"mamba_{part}" for part in ("chunk_size", "conv_bias", "d_conv", "d_head", "d_state", "expand")),
                *("mamba_n_groups", "mamba_proj_bias", "intermediate_size", "router_aux_loss_coef"),
                *(
                    "num_experts_per_tok",
                    "normalization_function",
                    "time_step_limit",
                    "init_method",
                    "layers_block_type",
                ),
            )
        ),
    ),
    ConfigFamily(
        "phi3",
        "Phi3ForCausalLM",
        LLAMA_KIND,
        (
            *sizes(context=4096, eps=1e-5, d_ff=8192),
            HeadDim(),
            Windows(layers=False),
            LongRope(partial="used"),
            SILU,
            NO_ATTENTION_BIAS,
        ),
        harmless=frozenset({"resid_pdrop", "embd_pdrop"}),
    ),
    ConfigFamily(
        "minimax_m2",
        "MiniMaxM2ForCausalLM",
        LLAMA_KIND | BALANCED | {"qk_norm": "width", "moe.renormalise": True},
        (
            *sizes(kv_heads=8, context=196608, d_ff=1536, experts=True),
            HeadDim(128),
            Rope(theta=5e6, partial="used"),
            RotaryDim(),
            SILU,
            NO_ATTENTION_BIAS,
            *experts("num_local_experts", width=False, chosen=8),
            Fixed("router_jitter_noise", (0.0,), 0.0),
            Fixed("scoring_func", ("sigmoid",), "sigmoid"),
            Fixed("use_routing_bias", (True,), True),
            Fixed("qk_norm_type", ("per_layer",), "per_layer"),
            Fixed("shared_intermediate_size", (0,), 0, "without shared experts"),
            AllEqual("attn_type_list", (1,), "softmax attention"),
            *(Fixed(f"layernorm_{part}_beta", (1.0,), 1.0) for part in ("full_attention", "linear_attention", "mlp")),
        ),
        harmless=frozenset({"mlp_intermediate_size", "shared_moe_mode", "use_mtp", "num_mtp_modules"})
        | {"mtp_transformer_layers"},
        notes=(NO_MTP,),
    ),
    ConfigFamily(
        "gpt_oss",
        "GptOssForCausalLM",
        LLAMA_KIND
        | {"activation": "swiglu_clamped", "bias": True, "sinks": True, "moe.router_bias": True}
        | {"moe.renormalise": True},
        (
            *sizes(kv_heads=8, context=131072, eps=1e-5, experts=True),
            HeadDim(64),
            Windows(default=128, full_every=2),
            Rope(
                theta=150000.0,
                stretched=RopeScaling(kind="yarn", factor=32.0, original_seq_len=4096, truncate=False),
            ),
            SILU,
            Fixed("attention_bias", (True,), True),
            Fixed("swiglu_limit", (7.0,), 7.0),
            Fixed("swiglu_alpha", (1.702,), 1.702),
            *experts("num_local_experts", width=False, chosen=4),
        ),
        harmless=frozenset({"initial_context_length", "experts_per_token"}),
    ),
    ConfigFamily(
        "deepseek_v3",
        "DeepseekV3ForCausalLM",
        LLAMA_KIND | BALANCED | LATENT_KIND,
        (
            *sizes(context=4096),
            *latent(
                query_rank=Field(
                    "q_lora_rank", "mla.q_rank", int, 0, lambda model: model.mla.q_rank or None, absent=1536
                )
            ),
            Rope(latent=True),
            SILU,
            NO_ATTENTION_BIAS,
            *many_experts(groups=8, chosen_groups=4, dense=3, scale=2.5),
        ),
        harmless=UNUSED_BALANCING,
        also=("kimi_k2",),
        notes=(NO_MTP,),
        **LAYERS_AFTER,
    ),
    ConfigFamily(
        "glm4_moe",
        "Glm4MoeForCausalLM",
        LLAMA_KIND | BALANCED,
        (
            *sizes(kv_heads=8, context=131072, eps=1e-5),
            HeadDim(),
            Rope(fraction=0.5, partial="used"),
            SILU,
            Field("attention_bias", "qkv_bias", bool, default=False),
            Choice("use_qk_norm", "qk_norm", ((False, "none"), (True, "head")), default=False),
            *many_experts(dense=1),
        ),
        harmless=UNUSED_BALANCING - {"head_dim"},
        notes=(NO_MTP,),
        **LAYERS_AFTER,
    ),
    ConfigFamily(
        "solar_open",
        "SolarOpenForCausalLM",
        LLAMA_KIND | BALANCED,
        (
            *sizes(kv_heads=8, context=131072, eps=1e-5, d_ff=10240),
            HeadDim(128),
            Rope(theta=1e6, partial="refused"),
            SILU,
            NO_ATTENTION_BIAS,
            *many_experts(),
        ),
        harmless=UNUSED_BALANCING - {"head_dim"},
    ),
    ConfigFamily(
        "deepseek_v32",
        "DeepseekV32ForCausalLM",
        LLAMA_KIND | BALANCED | LATENT_KIND,
        (
            *sizes(context=163840),
            *latent(query_rank=Field("q_lora_rank", "mla.q_rank", int, 1536, least=1)),
            Rope(latent=True),
            SILU,
            NO_ATTENTION_BIAS,
            *chosen_keys(heads=64),
            *many_experts(groups=8, chosen_groups=4, dense=3, scale=2.5),
        ),
        harmless=UNUSED_BALANCING | {"mlp_layer_types", "layer_types"},
        notes=(NO_MTP,),
        **LAYERS_AFTER,
    ),
    ConfigFamily(
        "glm_moe_dsa",
        "GlmMoeDsaForCausalLM",
        LLAMA_KIND | BALANCED | LATENT_KIND,
        (
            *sizes(context=202752, eps=1e-5),
            *latent(query_rank=Field("q_lora_rank", "mla.q_rank", int, 2048, least=1), nope=192, value=256),
            Rope(latent=True),
            SILU,
            NO_ATTENTION_BIAS,
            *chosen_keys(heads=32),
            Fixed("indexer_rope_interleave", (True,), True),
            AllEqual("indexer_types", ("full",), _EACH_CHOOSES),
            Fixed("index_topk_freq", (1,), 1, _EACH_CHOOSES),
            Fixed("index_topk_pattern", (None,), None, _EACH_CHOOSES),
            *many_experts(dense=3, scale=2.5),
        ),
        harmless=UNUSED_BALANCING | {"mlp_layer_types", "layer_types", "index_skip_topk_offset"},
        notes=(NO_MTP,),
        **LAYERS_AFTER,
    ),
)
"""The model_types that are read and written, whose layers are alike or follow one rule."""


def by_type(families: Iterable[ConfigFamily]) -> dict[str, ConfigFamily]:
    """Returns families by every model type that they are read under."""
    return {
        name: family
        for family in families
        for name in (family.model_type, *family.also, *((family.inside_of,) if family.inside_of else ()))
    }


BY_TYPE: Mapping[str, ConfigFamily] = by_type(FAMILIES)
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
