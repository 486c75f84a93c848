"""The names of weights in transformers' safetensors, per model_type, beside ours; see `links.py` for how they are used.

Names are patterns: {} stands for the layer, * for every expert in turn. They are those of files on the hub, where
experts are stored one by one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

from phalanx.exchange.links import (
    CONVOLUTIONS,
    GATES_BY_KEY_HEAD,
    HEADS_IN_A_ROW,
    INPUTS_BY_KEY_HEAD,
    INPUTS_IN_A_ROW,
    INTERLEAVED,
    OF_EACH_LAYER,
    SAME,
    STACKED,
    TRANSPOSED,
    Conversion,
    WeightFamily,
    WeightLink,
    equal,
    equal_parts,
    offset,
    per_head,
    rotary_rows,
    then,
)

_KINDS = ("weight", "bias")
_LAYER = "model.layers.{}"


def _each(pairs: Mapping[str, str], kinds: Iterable[str] = ("weight",)) -> tuple[WeightLink, ...]:
    """Returns equal parameters: names without their kind, each with all kinds."""
    return tuple(equal(f"{ours}.{kind}", f"{theirs}.{kind}") for ours, theirs in pairs.items() for kind in kinds)


def _ends() -> tuple[WeightLink, ...]:
    return _each({"embed": "model.embed_tokens", "final_norm": "model.norm", "head": "lm_head"})


def _block(pairs: Mapping[str, str], kinds: Iterable[str] = ("weight",), layer: str = _LAYER) -> tuple[WeightLink, ...]:
    """Returns parameters of every layer."""
    return _each({f"blocks.{{}}.{ours}": f"{layer}.{theirs}" for ours, theirs in pairs.items()}, kinds)


_ATTENTION = _block({f"attn.w{part}": f"self_attn.{part}_proj" for part in "qkvo"}, _KINDS)
_QK_NORM = _block({name: name.replace("attn", "self_attn") for name in ("attn.q_norm", "attn.k_norm")})
_MLP = _block({f"mlp.{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")}, _KINDS)
_NORMS = _block({"attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"})
_NORMS_AFTER = _block({"attn_post_norm": "post_attention_layernorm", "mlp_post_norm": "post_feedforward_layernorm"})
_NORMS_AROUND = (
    *_NORMS_AFTER,
    *_block({"attn_norm": "input_layernorm", "mlp_norm": "pre_feedforward_layernorm"}),
)


def _experts(room: str, names: Mapping[str, str]) -> tuple[WeightLink, ...]:
    """Returns a router and experts that are stored one by one."""
    experts = (
        WeightLink(
            (f"blocks.{{}}.moe.experts.{ours}.weight",), (f"{_LAYER}.{room}.experts.*.{theirs}.weight",), STACKED
        )
        for ours, theirs in names.items()
    )
    return *_block({"moe.router": f"{room}.gate"}), *experts


def _fused_experts(room: str, order: Conversion) -> tuple[WeightLink, ...]:
    """Returns experts whose matrices of a kind are one tensor per layer, as is what joins gate and up."""
    both = tuple(f"blocks.{{}}.moe.experts.{part}.weight" for part in ("gate", "up"))
    return (
        WeightLink(both, (f"{room}.experts.gate_up_proj",), then(order, equal_parts(2, dim=1))),
        WeightLink(("blocks.{}.moe.experts.down.weight",), (f"{room}.experts.down_proj",), order),
    )


_FUSED = _fused_experts(f"{_LAYER}.mlp", SAME)
_QWEN_EXPERTS = _experts("mlp", {part: f"{part}_proj" for part in ("gate", "up", "down")})
_MIXTRAL_EXPERTS = _experts("block_sparse_moe", {"gate": "w1", "up": "w3", "down": "w2"})
_SHARED = (
    *_block({f"moe.shared.{part}": f"mlp.shared_experts.{part}_proj" for part in ("gate", "up", "down")}),
    equal("blocks.{}.moe.router.bias", f"{_LAYER}.mlp.gate.e_score_correction_bias"),
)


def _rotary(
    ours: str, theirs: str, heads: Literal["queries", "keys", "shared", "index", "index key"], kind: str = "weight"
) -> WeightLink:
    return WeightLink((f"blocks.{{}}.{ours}.{kind}",), (f"{_LAYER}.{theirs}.{kind}",), rotary_rows(heads))


_LATENT = (
    *_block(
        {
            "attn.wq_a": "self_attn.q_a_proj",
            "attn.q_norm": "self_attn.q_a_layernorm",
            "attn.kv_norm": "self_attn.kv_a_layernorm",
            "attn.wkv_b": "self_attn.kv_b_proj",
            "attn.wo": "self_attn.o_proj",
        }
    ),
    _rotary("attn.wq_b", "self_attn.q_b_proj", "queries"),
    _rotary("attn.wq", "self_attn.q_proj", "queries"),
    _rotary("attn.wkv_a", "self_attn.kv_a_proj_with_mqa", "shared"),
)


def _plus_one(matches: Iterable[WeightLink]) -> tuple[WeightLink, ...]:
    """Returns the matches with Gemma's norms, which multiply by 1 + w."""
    return tuple(
        WeightLink(each.ours, each.theirs, offset(1.0)) if "norm" in each.ours[0] else each for each in matches
    )


_GEMMA = _plus_one((*_ends(), *_ATTENTION, *_MLP, *_NORMS))
_GEMMA2 = _plus_one((*_ends(), *_ATTENTION, *_MLP, *_NORMS_AROUND))
_LLAMA = (*_ends(), *_ATTENTION, *_MLP, *_NORMS)
_MODULES = _block(
    {
        "join.hidden_norm": "hnorm",
        "join.embed_norm": "enorm",
        "join.proj": "eh_proj",
        "predict_norm": "shared_head.norm",
    }
)
"""Modules for further tokens as DeepSeek-V3 stores them."""
_COPIES = (("embed.weight", f"{_LAYER}.embed_tokens.weight"), ("head.weight", f"{_LAYER}.shared_head.head.weight"))
_OF_INDEX = {"wq": "wq_b", "wk": "wk", "weights": "weights_proj", "norm": "k_norm"}
_INDEX = (
    *_block({f"attn.index.{ours}": f"self_attn.indexer.{theirs}" for ours, theirs in _OF_INDEX.items()}),
    equal("blocks.{}.attn.index.norm.bias", f"{_LAYER}.self_attn.indexer.k_norm.bias"),
)
_INDEX_OF_NEIGHBOURS = (
    *_block({"attn.index.weights": "self_attn.indexer.weights_proj"}),
    _rotary("attn.index.wq", "self_attn.indexer.wq_b", "index"),
    _rotary("attn.index.wk", "self_attn.indexer.wk", "index key"),
    *(_rotary("attn.index.norm", "self_attn.indexer.k_norm", "index key", kind) for kind in _KINDS),
)
"""Where neighbours are pairs in an indexer as well (GLM-5; not in DeepSeek-V3.2)."""
_DEEPSEEK = (*_ends(), *_LATENT, *_MLP, *_QWEN_EXPERTS, *_SHARED, *_NORMS, *_MODULES)


def _gate_and_up(theirs: str) -> WeightLink:
    """Returns the link of gate and up, which are one matrix in theirs."""
    ours = tuple(f"blocks.{{}}.mlp.{part}.weight" for part in ("gate", "up"))
    return WeightLink(ours, (f"{_LAYER}.{theirs}.weight",), equal_parts(2))


_PHI3 = (
    *_ends(),
    *_NORMS,
    *_block({"attn.wo": "self_attn.o_proj", "mlp.down": "mlp.down_proj"}),
    WeightLink(
        tuple(f"blocks.{{}}.attn.w{part}.weight" for part in "qkv"),
        (f"{_LAYER}.self_attn.qkv_proj.weight",),
        HEADS_IN_A_ROW,
    ),
    _gate_and_up("mlp.gate_up_proj"),
)


def _of_kind(kind: str, room: str, links: Mapping[str, tuple[tuple[str, ...], Conversion]]) -> tuple[WeightLink, ...]:
    """Returns the links of matrices of layers with one kind of attention, by the names of theirs."""
    return tuple(
        WeightLink(tuple(f"blocks.{{}}.attn.{name}" for name in ours), (f"{_LAYER}.{room}.{theirs}",), conversion, kind)
        for theirs, (ours, conversion) in links.items()
    )


def _weights(names: str) -> tuple[str, ...]:
    return tuple(f"{name}.weight" for name in names.split())


_QWEN_MODULE = _block(
    {
        "join.hidden_norm": "pre_fc_norm_hidden",
        "join.embed_norm": "pre_fc_norm_embedding",
        "join.proj": "fc",
        "predict_norm": "norm",
    },
    layer="mtp",
)
_QWEN_MIXED = (
    *_plus_one((*_ends(), *_NORMS, *_QK_NORM, *_QWEN_MODULE)),
    *_MLP,
    *_of_kind(
        "gated_heads",
        "self_attn",
        {
            "q_proj.weight": (_weights("wq wg"), per_head(2)),
            **{f"{name[1]}_proj.weight": (_weights(name), SAME) for name in ("wk", "wv", "wo")},
        },
    ),
    *_of_kind(
        "delta",
        "linear_attn",
        {
            "conv1d.weight": (("conv_q", "conv_k", "conv_v"), CONVOLUTIONS),
            "A_log": (("decay",), SAME),
            "dt_bias": (("dt_bias",), SAME),
            "norm.weight": (_weights("norm"), SAME),
            "out_proj.weight": (_weights("wo"), SAME),
        },
    ),
)
"""What Qwen3-Next and Qwen 3.5 share."""
_QWEN_SHARED = _block(
    {
        **{f"moe.shared.{part}": f"mlp.shared_expert.{part}_proj" for part in ("gate", "up", "down")},
        "moe.shared_gate": "mlp.shared_expert_gate",
    }
)
_QWEN3_NEXT = (
    *_QWEN_MIXED,
    *_QWEN_EXPERTS,
    *_QWEN_SHARED,
    *_of_kind(
        "delta",
        "linear_attn",
        {
            "in_proj_qkvz.weight": (_weights("wq wk wv wz"), INPUTS_BY_KEY_HEAD),
            "in_proj_ba.weight": (_weights("wb wa"), GATES_BY_KEY_HEAD),
        },
    ),
)
_QWEN3_5 = (
    *_QWEN_MIXED,
    *_of_kind(
        "delta",
        "linear_attn",
        {
            "in_proj_qkv.weight": (_weights("wq wk wv"), INPUTS_IN_A_ROW),
            **{f"in_proj_{name[1]}.weight": (_weights(name), SAME) for name in ("wz", "wb", "wa")},
        },
    ),
)
_LLAMA4 = (
    *_ends(),
    *_NORMS,
    _rotary("attn.wq", "self_attn.q_proj", "queries"),
    _rotary("attn.wk", "self_attn.k_proj", "keys"),
    *_block({f"attn.w{part}": f"self_attn.{part}_proj" for part in "vo"}),
    *_block({f"mlp.{part}": f"feed_forward.{part}_proj" for part in ("gate", "up", "down")}),
    *_block({f"moe.shared.{part}": f"feed_forward.shared_expert.{part}_proj" for part in ("gate", "up", "down")}),
    *_block({"moe.router": "feed_forward.router"}),
    *_fused_experts(f"{_LAYER}.feed_forward", TRANSPOSED),
)
_GEMMA4 = (
    *_ends(),
    *_ATTENTION,
    *_QK_NORM,
    *_MLP,
    *_NORMS_AROUND,
    equal("blocks.{}.rescale.weight", f"{_LAYER}.layer_scalar"),
    *_block({f"moe.shared.{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")}),
    *_block({"moe.router": "router.proj"}),
    *(
        equal(f"blocks.{{}}.{ours}", f"{_LAYER}.{theirs}")
        for ours, theirs in {
            "moe.router.input_scale": "router.scale",
            "moe.router.gate_scale": "router.per_expert_scale",
            "moe.shared_scale": "pre_feedforward_layernorm.weight",
            "moe.expert_scale": "pre_feedforward_layernorm_2.weight",
            "mlp_post_norm.shared.weight": "post_feedforward_layernorm_1.weight",
            "mlp_post_norm.routed.weight": "post_feedforward_layernorm_2.weight",
            "mlp_post_norm.both.weight": "post_feedforward_layernorm.weight",
        }.items()
    ),
    *_fused_experts(_LAYER, SAME),
    *_each({"layer_inputs.project": "model.per_layer_model_projection"}),
    *_each({"layer_inputs.norm": "model.per_layer_projection_norm"}),
    *_block(
        {
            "layer_input.gate": "per_layer_input_gate",
            "layer_input.out": "per_layer_projection",
            "layer_input.norm": "post_per_layer_input_norm",
        }
    ),
    WeightLink(
        ("blocks.{}.layer_input.table.weight",),
        ("model.embed_tokens_per_layer.weight",),
        OF_EACH_LAYER,
        all_layers=True,
    ),
)
_NEOX_LAYER = "gpt_neox.layers.{}"
_NEOX = (
    *_each({"embed": "gpt_neox.embed_in", "head": "embed_out"}),
    *_each({"final_norm": "gpt_neox.final_layer_norm"}, _KINDS),
    *_block(
        {
            "attn_norm": "input_layernorm",
            "mlp_norm": "post_attention_layernorm",
            "attn.wo": "attention.dense",
            "mlp.up": "mlp.dense_h_to_4h",
            "mlp.down": "mlp.dense_4h_to_h",
        },
        _KINDS,
        _NEOX_LAYER,
    ),
    *(
        WeightLink(
            tuple(f"blocks.{{}}.attn.w{part}.{kind}" for part in "qkv"),
            (f"{_NEOX_LAYER}.attention.query_key_value.{kind}",),
            per_head(),
        )
        for kind in _KINDS
    ),
)

_GPT2_LAYER = "transformer.h.{}"
_GPT2 = (
    *_each({"embed": "transformer.wte", "positions": "transformer.wpe", "head": "lm_head"}),
    *_each({"final_norm": "transformer.ln_f"}, _KINDS),
    *_block({"attn_norm": "ln_1", "mlp_norm": "ln_2"}, _KINDS, _GPT2_LAYER),
    *_block({"attn.wo": "attn.c_proj", "mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj"}, ("bias",), _GPT2_LAYER),
    *(
        WeightLink((f"blocks.{{}}.{ours}.weight",), (f"{_GPT2_LAYER}.{theirs}.weight",), TRANSPOSED)
        for ours, theirs in {"attn.wo": "attn.c_proj", "mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj"}.items()
    ),
    WeightLink(
        tuple(f"blocks.{{}}.attn.w{part}.weight" for part in "qkv"),
        (f"{_GPT2_LAYER}.attn.c_attn.weight",),
        then(TRANSPOSED, equal_parts(3)),
    ),
    WeightLink(
        tuple(f"blocks.{{}}.attn.w{part}.bias" for part in "qkv"), (f"{_GPT2_LAYER}.attn.c_attn.bias",), equal_parts(3)
    ),
)


def _halves(kind: str, conversion: Conversion) -> WeightLink:
    return WeightLink(
        tuple(f"blocks.{{}}.moe.experts.{part}.{kind}" for part in ("gate", "up")),
        (f"{_LAYER}.mlp.experts.gate_up_proj{'' if kind == 'weight' else '_bias'}",),
        conversion,
    )


_GPT_OSS = (
    *_ends(),
    *_ATTENTION,
    *_NORMS,
    equal("blocks.{}.attn.sinks", f"{_LAYER}.self_attn.sinks"),
    equal("blocks.{}.moe.router.weight", f"{_LAYER}.mlp.router.weight"),
    equal("blocks.{}.moe.router.logit_bias", f"{_LAYER}.mlp.router.bias"),
    WeightLink(("blocks.{}.moe.experts.down.weight",), (f"{_LAYER}.mlp.experts.down_proj",), TRANSPOSED),
    equal("blocks.{}.moe.experts.down.bias", f"{_LAYER}.mlp.experts.down_proj_bias"),
    _halves("weight", then(INTERLEAVED, TRANSPOSED)),
    _halves("bias", INTERLEAVED),
)

_BASE = (r"^(layers|embed_tokens(_per_layer)?|norm|per_layer_(model_projection|projection_norm))\.", r"model.\1.")
"""Files of the model without its head leave the prefix out."""
_IN_IMAGES = (
    (r"^(language_model\.)?model\.(language_model\.)?", "model."),
    (r"^language_model\.lm_head\.", "lm_head."),
)
_IMAGES = (r"^(model\.)?vision_(tower|model)\.", r"^(model\.)?multi_modal_projector\.")
_SOUND = (r"^(model\.)?audio_tower\.", r"^(model\.)?embed_(vision|audio)\.")
_VISUAL = r"^(model\.)?visual\."
_MTP_LAYER = "mtp.layers.{}"
_INVERSE_FREQUENCIES = r"\.rotary_emb\.inv_freq$"

WEIGHTS: Mapping[str, WeightFamily] = {
    "llama": WeightFamily(_LLAMA, (_BASE,), (_INVERSE_FREQUENCIES,)),
    "mistral": WeightFamily(_LLAMA, (_BASE, *_IN_IMAGES), (_INVERSE_FREQUENCIES, *_IMAGES)),
    "ministral": WeightFamily(_LLAMA, (_BASE,)),
    "ministral3": WeightFamily(_LLAMA, (_BASE, *_IN_IMAGES), _IMAGES),
    "llama4_text": WeightFamily(_LLAMA4, (_BASE, *_IN_IMAGES), _IMAGES),
    "gemma4_text": WeightFamily(_GEMMA4, (_BASE, *_IN_IMAGES), (*_IMAGES, *_SOUND)),
    "mixtral": WeightFamily((*_ends(), *_ATTENTION, *_NORMS, *_MIXTRAL_EXPERTS), (_BASE,)),
    "minimax_m2": WeightFamily(
        (
            *_ends(),
            *_ATTENTION,
            *_QK_NORM,
            *_NORMS,
            *_MIXTRAL_EXPERTS,
            equal("blocks.{}.moe.router.bias", f"{_LAYER}.block_sparse_moe.e_score_correction_bias"),
        ),
        (_BASE,),
        next_token_layers=True,
    ),
    "qwen2": WeightFamily(_LLAMA, (_BASE,)),
    "qwen3": WeightFamily((*_LLAMA, *_QK_NORM), (_BASE,)),
    "qwen3_moe": WeightFamily((*_ends(), *_ATTENTION, *_QK_NORM, *_QWEN_EXPERTS, *_NORMS), (_BASE,), fused=_FUSED),
    "olmoe": WeightFamily((*_ends(), *_ATTENTION, *_QK_NORM, *_QWEN_EXPERTS, *_NORMS), (_BASE,), fused=_FUSED),
    "seed_oss": WeightFamily(_LLAMA, (_BASE,)),
    "smollm3": WeightFamily(_LLAMA, (_BASE,)),
    "granite": WeightFamily(_LLAMA, (_BASE,)),
    "granitemoehybrid": WeightFamily(
        (
            *_ends(),
            *_ATTENTION,
            *_NORMS,
            *_block({"mlp.down": "shared_mlp.output_linear"}),
            _gate_and_up("shared_mlp.input_linear"),
        ),
        (_BASE,),
    ),
    "phi3": WeightFamily(_PHI3, (_BASE,), (_INVERSE_FREQUENCIES,)),
    "gemma": WeightFamily(_GEMMA, (_BASE,)),
    "gemma2": WeightFamily(_GEMMA2, (_BASE,)),
    "gemma3_text": WeightFamily(
        (*_GEMMA2, *_plus_one(_QK_NORM)),
        (_BASE, *_IN_IMAGES),
        _IMAGES,
    ),
    "gpt2": WeightFamily(_GPT2, ((r"^(h|wte|wpe|ln_f)\.", r"transformer.\1."),), (r"\.attn\.(masked_)?bias$",)),
    "gpt_neox": WeightFamily(
        _NEOX,
        ((r"^(layers|embed_in|final_layer_norm)\.", r"gpt_neox.\1."), (r"^lm_head\.", "embed_out.")),
        (r"\.attention\.(masked_)?bias$", r"\.attention\.rotary_emb\.inv_freq$"),
    ),
    "olmo2": WeightFamily((*_ends(), *_ATTENTION, *_QK_NORM, *_MLP, *_NORMS_AFTER), (_BASE,)),
    "olmo3": WeightFamily((*_ends(), *_ATTENTION, *_QK_NORM, *_MLP, *_NORMS_AFTER), (_BASE,)),
    "qwen3_next": WeightFamily(_QWEN3_NEXT, (_BASE,), fused=_FUSED, module_layer=_MTP_LAYER),
    "qwen3_5_text": WeightFamily(_QWEN3_5, (_BASE, *_IN_IMAGES), (*_IMAGES, _VISUAL), module_layer=_MTP_LAYER),
    "qwen3_5_moe_text": WeightFamily(
        (*_QWEN3_5, *_QWEN_EXPERTS, *_QWEN_SHARED),
        (_BASE, *_IN_IMAGES),
        (*_IMAGES, _VISUAL),
        fused=_FUSED,
        module_layer=_MTP_LAYER,
    ),
    "gpt_oss": WeightFamily(_GPT_OSS, (_BASE,)),
    "deepseek_v3": WeightFamily(
        _DEEPSEEK, (_BASE,), (_INVERSE_FREQUENCIES,), fused=_FUSED, next_token_layers=True, copies=_COPIES
    ),
    "glm4_moe": WeightFamily(
        (*_LLAMA, *_QK_NORM, *_QWEN_EXPERTS, *_SHARED, *_MODULES),
        (_BASE,),
        fused=_FUSED,
        next_token_layers=True,
        copies=_COPIES,
    ),
    "solar_open": WeightFamily((*_ends(), *_ATTENTION, *_QWEN_EXPERTS, *_SHARED, *_NORMS), (_BASE,), fused=_FUSED),
    "deepseek_v32": WeightFamily((*_DEEPSEEK, *_INDEX), (_BASE,), fused=_FUSED, next_token_layers=True, copies=_COPIES),
    "glm_moe_dsa": WeightFamily(
        (*_DEEPSEEK, *_INDEX_OF_NEIGHBOURS), (_BASE,), fused=_FUSED, next_token_layers=True, copies=_COPIES
    ),
}
"""By model_type, with the same keys as the families of config/hugging_face."""
