"""The model types of transformers: the kind of model of each, and the fields of its config.json.

Defaults are those of transformers' configuration classes (release 5.23), since a config.json may leave them out.
"""

from __future__ import annotations

from collections.abc import Mapping

from phalanx.config.hugging_face.kinds import (
    BALANCED,
    GEMMA_KIND,
    GEMMA_TERMS,
    LATENT_KIND,
    LLAMA_KIND,
    MOST_LAYERS,
    NO_ATTENTION_BIAS,
    NO_MTP,
    SILU,
    TANH,
    UNUSED_BALANCING,
    Biases,
    ConfigFamily,
    HeadDim,
    QueryScale,
    SoftCap,
    experts,
    latent,
    many_experts,
    sizes,
)
from phalanx.config.hugging_face.positions import Context, Rope, RopeWithWindows, Windows
from phalanx.config.hugging_face.terms import REQUIRED, Choice, Field, Fixed
from phalanx.config.model import RopeScaling

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
            Field("vocab_size", "vocab_size", int, 262208),
            Field("hidden_size", "d_model", int, 2304),
            Field("intermediate_size", "d_ff", int, 9216, lambda model: model.ff_size),
            Field("num_hidden_layers", "n_layers", int, 26, most=MOST_LAYERS),
            Field("num_attention_heads", "n_heads", int, 8),
            Field("num_key_value_heads", "n_kv_heads", int, 4, lambda model: model.kv_heads),
            Context(default=131072),
            Field("rms_norm_eps", "norm_eps", float, 1e-6),
            Field("tie_word_embeddings", "tied", bool, default=True),
            HeadDim(256),
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
        "glm_moe_dsa",
        "GlmMoeDsaForCausalLM",
        LLAMA_KIND | BALANCED | LATENT_KIND,
        (
            *sizes(context=202752, eps=1e-5),
            *latent(query_rank=Field("q_lora_rank", "mla.q_rank", int, 2048, least=1), nope=192, value=256),
            Rope(latent=True),
            SILU,
            NO_ATTENTION_BIAS,
            Fixed("mlp_bias", (False,), False),
            *many_experts(dense=3, scale=2.5),
        ),
        harmless=UNUSED_BALANCING
        | {"index_topk", "index_head_dim", "index_n_heads", "indexer_types", "mlp_layer_types", "layer_types"}
        | {"index_topk_freq", "index_topk_pattern", "index_skip_topk_offset", "indexer_rope_interleave"},
        notes=(NO_MTP, "sparse attention is full attention here, and its indexer is left out"),
    ),
)
"""The model_types that are read and written. To write a model the first that says all of it is taken."""

BY_TYPE: Mapping[str, ConfigFamily] = {
    name: family
    for family in FAMILIES
    for name in (family.model_type, *family.also, *((family.inside_of,) if family.inside_of else ()))
}
_OTHER_LAYERS = "a kind with layers that are not implemented (state spaces, convolutions, or its own attention)"
_OTHERS = """
mamba mamba2 falcon_mamba jamba bamba zamba zamba2 recurrent_gemma rwkv nemotron_h granitemoehybrid falcon_h1
lfm2 lfm2_moe qwen3_next kimi_linear minimax minimax_m2 llama4 llama4_text gemma gemma3n phi phi3 phimoe falcon
mpt bloom opt gptj gpt_neo codegen stablelm starcoder2 persimmon cohere cohere2 command_r olmoe dbrx arctic
jetmoe granite granitemoe nemotron exaone4 ernie4_5 ernie4_5_moe hunyuan_v1_dense hunyuan_v1_moe dots1 glm glm4
seed_oss smollm3 deepseek_v32 olmo olmo3 qwen3_5 ministral ministral3 baichuan chatglm internlm internlm2 minicpm
minicpm3 gpt_bigcode apertus arcee bitnet xglm exaone modernbert xlnet
bert roberta deberta t5 mt5 bart xlm-roberta electra whisper clip siglip vit
"""
"""Kinds of transformers that are no slip of the pen of a supported one."""
_IMAGES = """
llava llava_next mllama mistral3 pixtral paligemma idefics idefics2 idefics3 internvl qwen2_vl qwen2_5_vl qwen3_vl
qwen3_vl_moe qwen3_5_moe glm4v glm4v_moe kimi_vl kimi_k25 gemma3_vl aya_vision smolvlm
"""
"""Kinds whose language model lies beside an encoder of images."""
_BESIDE_IMAGES = (
    "a language model with an encoder of images, of which only gemma3 is read; give the config.json of the language "
    "model alone"
)

REFUSED: Mapping[str, str] = {
    **dict.fromkeys(_IMAGES.split(), _BESIDE_IMAGES),
    **{name: _OTHER_LAYERS for name in _OTHERS.split() if name not in BY_TYPE},
    "qwen2_moe": "its shared expert has a gate of its own, which is not implemented; qwen3_moe is",
    "deepseek_v2": "its routers choose groups by softmax scores, which is not implemented; deepseek_v3 is",
}
"""Kinds that look supported, and why they are not."""
