"""Reads the arguments of Megatron Core, which Megatron-LM, Primus, Megatron-Bridge and NeMo share, as a job."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from phalanx.config.layout import Layout
from phalanx.config.presets import PRESETS, named
from phalanx.foreign.frame import Fields, ForeignJob
from phalanx.foreign.python_config import literal
from phalanx.foreign.shared import PIPELINES, RECOMPUTES, whole

VOCABULARIES = {
    "GPT2BPETokenizer": 50257,
    "Llama2Tokenizer": 32000,
    "deepseek-ai/DeepSeek-V2": 102400,
    "deepseek-ai/DeepSeek-V2-Lite": 102400,
    "mistralai/Mixtral-8x22B-v0.1": 32000,
    "meta-llama/Llama-4-Scout-17B-16E": 202048,
    "meta-llama/Llama-4-Maverick-17B-128E": 202048,
}
"""Tokens of tokenizers that belong to one vocabulary, and of models on the hub that are no presets (config.json)."""
ETP = "expert_tensor_parallel_size"
_FP32 = ("fp32", "torch.float32", "float32")


def core(fields: Fields) -> None:
    """Sets what the arguments mean together."""
    fields.taken.update(name for name, meaning in fields.table.names.items() if meaning.rule)
    fields.exclude(*_EXCLUSIVE)
    _precision(fields)
    _optimizer(fields)
    tp, pp = fields.take("tensor_model_parallel_size", int, 1), fields.take("pipeline_model_parallel_size", int, 1)
    _shape(fields)
    _experts(fields)
    layers = _layers(fields)
    _vocabulary(fields, tp)
    _ranks(fields, tp)
    chunks = _pipeline(fields, max(pp, 1), layers)
    _recompute(fields, layers, max(pp, 1) * chunks)
    _offload(fields)
    kind = fields.choice("cuda_graph_impl", "none", ("none", "local", "transformer_engine", "full_iteration"))
    scope = fields.take("cuda_graph_scope", object, None) or fields.take("cuda_graph_modules", object, "")
    if kind != "none":
        words = set(re.findall("[a-z_]+", f"{scope}"))
        found = "layers" if "moe_router" not in words else "attention and router" if "attn" in words else "router"
        fields.recipe["graphs"] = "iteration" if "full_iteration" in {*words, kind} else found


_EXCLUSIVE = (
    ("fp16", "bf16"),
    ("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank"),
    ("num_layers_per_virtual_pipeline_stage", "pipeline_model_parallel_layout"),
    ("num_virtual_stages_per_pipeline_rank", "pipeline_model_parallel_layout"),
    ("swiglu", "squared_relu"),
    ("use_torch_fsdp2", "use_megatron_fsdp"),
    *(("fp8_format", "fp4_format"), ("fp8", "fp4"), ("train_iters", "train_samples")),
    *(("lr_warmup_fraction", "lr_warmup_iters"), ("lr_warmup_fraction", "lr_warmup_samples")),
)
"""Arguments that Megatron-LM refuses together."""


def _precision(fields: Fields) -> None:
    fp16, bf16 = fields.on("fp16"), fields.on("bf16")
    narrow = fields.word("fp8_format", "fp8")
    for name in ("fp8_format", "fp8"):
        fields.choice(name, "", ("e4m3", "hybrid", "none", "false"), "train.precision")
    if narrow and "model.lora.rank" in fields.settings:
        fields.set("train.precision", "bf16", ("fp8_format", "fp8", "fp8_recipe"), "products in 8 bits are priced")
        fields.recipe["products"] = "fp8"
    elif narrow:
        fields.set("train.precision", "fp8", ("fp8_format", "fp8"))
        kinds = dict.fromkeys(("delayed", "tensorwise", "custom"), "tensorwise")
        kinds |= {"mxfp8": "mxfp8", "blockwise": "rowwise"}
        recipe = fields.choice("fp8_recipe", "delayed", kinds, "train.fp8_scaling")
        scaling = kinds[recipe]
        how = "" if recipe in ("tensorwise", "mxfp8") else f"{recipe} scaling is priced alike"
        fields.set("train.fp8_scaling", scaling, "fp8_recipe", how)
        for name in filter(fields.on, ("fp8_param", "fp8_param_gather")):
            fields.leave(name, "parameters are gathered in 16 bits in the prediction")
    elif fp16 or bf16:
        fields.set("train.precision", "fp16" if fp16 else "bf16", "fp16" if fp16 else "bf16")
    else:
        fields.set("train.precision", "fp32", ("fp16", "bf16"), "neither bf16 nor fp16")
    if fields.word("fp4_format", "fp4"):
        fields.recipe["products"] = "fp4"
    if fields.on("fp8_dot_product_attention", "fp8_multi_head_attention"):
        fields.recipe["fp8_attention"] = True
    sums = fields.on("grad_reduce_in_bf16") or not fields.take("grad_reduce_in_fp32", bool, True)
    sums = sums or fp16 or fields.take("main_grads_dtype", str, "fp32") not in _FP32
    fields.recipe |= {"gradient_bytes": 0 if sums else 4, "step_gradient_bytes": 4 if sums else 0}


_OPTIMIZERS = {"adam": "adamw", "adamw": "adamw", "sgd": "sgd", "muon": "muon", "dist_muon": "muon", "lion": "lion"}
_DECAYS = {"cosine": "cosine", "linear": "linear", "constant": "constant", "WSD": "wsd"}


def _optimizer(fields: Fields) -> None:
    name = fields.take("optimizer", str, "adam")
    if name in _OPTIMIZERS:
        fields.set("optimizer.name", _OPTIMIZERS[name], "optimizer")
    else:
        fields.leave("optimizer", "it is not known; adamw is predicted")
    if _OPTIMIZERS.get(name, "adamw") in ("adamw", "lion"):
        betas = (fields.take("adam_beta1", float, 0.9), fields.take("adam_beta2", float, 0.999))
        fields.set("optimizer.betas", betas, ("adam_beta1", "adam_beta2"))
    moments = {fields.take(each, str, "fp32") for each in ("exp_avg_dtype", "exp_avg_sq_dtype")}
    if moments <= {"bf16", "fp16", "torch.bfloat16", "torch.float16"}:
        how = "moments of two bytes"
        fields.set("optimizer.state", "bf16", ("exp_avg_dtype", "exp_avg_sq_dtype"), how)
    elif not moments <= {*_FP32}:
        fields.leave("exp_avg_dtype", "these moments are predicted in fp32")
    if fields.take("main_params_dtype", str, "fp32") not in _FP32:
        fields.leave("main_params_dtype", "master weights are predicted in fp32")
    lr, least = fields.take("lr", float, 0.0), fields.take("min_lr", float, 0.0)
    if lr > 0 and 0 <= least <= lr:
        fields.set("optimizer.min_lr_ratio", least / lr, "min_lr", "min_lr / lr")
    style = fields.take("lr_decay_style", str, "linear")
    if style in _DECAYS:
        fields.set("optimizer.schedule", _DECAYS[style], "lr_decay_style")
    else:
        fields.leave("lr_decay_style", f"no schedule here is this one; known: {', '.join(_DECAYS)}", affects=False)


def _shape(fields: Fields) -> None:
    width, heads = fields.take("hidden_size", int, 0), fields.take("num_attention_heads", int, 0)
    swiglu, quick = fields.on("swiglu"), fields.on("quick_geglu")
    gated = swiglu or quick or fields.on("gated_linear_unit")
    function = fields.take("activation_func", str, "").rpartition(".")[2]
    if function not in ("", "silu", "gelu", "swiglu", "squared_relu", "fast_gelu", "openai_gelu", "quick_gelu") or (
        function == "silu" and not gated
    ):
        fields.unknown_value(
            "activation_func", ("gelu", "squared_relu", "silu with gated_linear_unit"), "model.activation"
        )
    squared = fields.on("squared_relu") or "squared_relu" in function
    tanh = fields.on("openai_gelu") or "fast_gelu" in function or "openai_gelu" in function
    names = ("swiglu", "quick_geglu", "squared_relu", "openai_gelu", "gated_linear_unit", "activation_func")
    if quick or "quick_gelu" in function:
        fields.set("model.activation", "swiglu_clamped", (*names, "activation_func_clamp_value"))
    elif squared:
        fields.set("model.activation", "relu2", names)
    elif gated:
        fields.set("model.activation", "geglu" if tanh or function == "gelu" else "swiglu", names)
    elif "model.preset" not in fields.settings:
        fields.set("model.activation", "gelu_tanh" if tanh else "gelu", names)
    if not fields.put("model.d_ff", "ffn_hidden_size", 0) and width and "model.preset" not in fields.settings:
        ff = int(4 * width * 2 / 3 / 64) * 64 if swiglu else 4 * width
        fields.set("model.d_ff", ff, "ffn_hidden_size", "by Megatron's rule")
    groups = fields.take("num_query_groups", int, 0)
    if groups and fields.take("group_query_attention", bool, "group_query_attention" not in fields.stated):
        fields.set("model.n_kv_heads", groups, ("num_query_groups", "group_query_attention"))
    latent, size = fields.on("multi_latent_attention"), fields.take("kv_channels", int, 0)
    if size and not latent and heads * size != width:
        fields.set("model.head_dim", size, "kv_channels")
    if latent:
        for theirs, (ours, default) in _MLA.items():
            fields.set(f"model.mla.{ours}", fields.take(theirs, int, default), theirs)
    elif fields.on("qk_layernorm"):
        fields.set("model.qk_norm", "head", "qk_layernorm")
    _chosen_keys(fields)
    if fields.on("use_rotary_position_embeddings"):
        fields.set("model.positions", "rope", "use_rotary_position_embeddings")
    if "seq_length" not in fields.stated:
        fields.put("model.seq_len", "encoder_seq_length", 0)
    sides = re.findall(r"-?[0-9]+", str(fields.take("window_size", object, "")))
    if sides and 0 <= int(sides[0]) + 1 < fields.take("seq_length", int, 2**62):
        fields.set("model.window", int(sides[0]) + 1, "window_size", "keys before a query, and its own")
        fields.put("model.full_every", "window_attn_skip_freq", 0)


_MLA = {
    "kv_lora_rank": ("kv_rank", 512),
    "q_lora_rank": ("q_rank", 0),
    "qk_head_dim": ("nope_head_dim", 128),
    "qk_pos_emb_head_dim": ("rope_head_dim", 64),
    "v_head_dim": ("v_head_dim", 128),
}
"""Arguments of latent attention with their fields and Megatron Core's defaults."""


_INDEXER = {"top_k": "dsa_indexer_topk", "index_heads": "dsa_indexer_n_heads", "index_head_dim": "dsa_indexer_head_dim"}
"""Fields of sparse attention and its arguments, which have no defaults there."""


def _chosen_keys(fields: Fields) -> None:
    """Sets attention to the keys that an indexer chooses (DeepSeek-V3.2)."""
    name, rest = "experimental_attention_variant", ("dsa_indexer_use_sparse_loss", "dsa_indexer_topk_freq")
    variant, of_preset = fields.word(name), whole(fields, "model.sparse.top_k", 0)
    if variant != "dsa" and (variant or not of_preset):
        fields.leave(name, "this kind of attention is not read; that of the other arguments is predicted")
        fields.leave((*_INDEXER.values(), "dsa_indexer_loss_coeff", *rest), "no layer has an indexer", affects=False)
        return
    for ours, theirs in _INDEXER.items():
        if not fields.put(f"model.sparse.{ours}", theirs, 0) and not of_preset:
            fields.need(f"model.sparse.{ours}", f"{theirs} of the indexer that {name}=dsa asks for")
    loss, how = "dsa_indexer_loss_coeff", "" if fields.on(rest[0]) else "over the chosen keys here, over all there"
    fields.set("model.sparse.index_loss", fields.take(loss, float, 0.0), loss, how)
    if fields.take(rest[1], int, 1) > 1:
        fields.leave(rest[1], "every layer is predicted with an indexer of its own")


def preset_of(name: str) -> str:
    """Returns the preset that a framework's name of a model means: "llama31_405b", "Llama3Config8B",
    "meta-llama/Llama-3.2-1B"; "" for an unknown one."""
    name = re.sub(r"\.(yaml|py)$", "", name)
    name = re.sub(r"^([A-Za-z_]\w*\.)+(?=[A-Z]\w*$)", "", name)  # the modules of a class
    plain = re.sub(r"_(pretrain|sft|peft|finetune)_.*|(Config|ModelProvider|Provider)", "", name)
    plain = re.sub(r"(?i)^llama3([123])(?=_|[0-9]+b|$)", r"llama3.\1-", plain)  # llama31_405b, Llama31Config405B
    plain = re.sub(r"^GPT(?=175B)", "gpt3-", plain)
    found = named(plain)
    return found if found in PRESETS else ""


def start_from(fields: Fields, name: str, model: str) -> bool:
    """Sets the shape of a known model, which what the file states overrides; returns whether it is known."""
    fields.model = model
    if preset := preset_of(model):
        fields.set("model.preset", preset, name, "the shape of this model")
    return bool(preset)


def _experts(fields: Fields) -> None:
    count, moe = fields.take("num_experts", int, 0) or fields.take("num_moe_experts", int, 0), "model.moe."
    if count or whole(fields, f"{moe}n_experts", 0):
        kind = fields.choice(
            "moe_token_dispatcher_type", "allgather", ("allgather", "alltoall", "alltoall_seq", "flex")
        )
        backend = fields.choice("moe_flex_dispatcher_backend", "deepep", ("deepep", "hybridep"))
        deep = fields.on("moe_enable_deepep", "use_turbo_deepep") or kind == "flex"
        hybrid = kind == "flex" and backend == "hybridep"
        fields.recipe["dispatcher"] = backend if hybrid else "deepep" if deep else "all-to-all"
        if kind == "allgather" and "moe_token_dispatcher_type" in fields.stated:
            fields.leave("moe_token_dispatcher_type", "an all-to-all is predicted")
        if fields.on("overlap_moe_expert_parallel_comm"):
            fields.recipe["overlaps"] = True
    if not count:
        return
    fields.set(f"{moe}n_experts", count, ("num_experts", "num_moe_experts"))
    top = fields.take("moe_router_topk", int, 2)
    fields.set(f"{moe}top_k", top, "moe_router_topk")
    width, dense = fields.put(f"{moe}d_ff", "moe_ffn_hidden_size", 0), whole(fields, "model.d_ff", 0)
    if shared := fields.take("moe_shared_expert_intermediate_size", int, 0):
        several, rest = divmod(shared, width or dense or shared)
        if rest or not several:
            fields.leave("moe_shared_expert_intermediate_size", "it is no multiple of an expert's width")
        else:
            fields.set(f"{moe}n_shared", several, "moe_shared_expert_intermediate_size", "of an expert's width each")
    fields.put(f"{moe}shared_gate", "moe_shared_expert_gate", False)
    scores = fields.take("moe_router_score_function", str, "softmax")
    before = fields.take("moe_router_pre_softmax", bool, False)
    if scores in ("softmax", "sigmoid"):
        fields.set(f"{moe}router", scores, "moe_router_score_function")
    else:
        fields.leave("moe_router_score_function", "it is priced as a softmax", affects=False)
    names = ("moe_router_pre_softmax", "moe_router_score_function")
    fields.set(f"{moe}renormalise", (scores == "sigmoid" or not before) and top > 1, names)
    fields.put(f"{moe}route_scale", "moe_router_topk_scaling_factor", 0.0)
    fields.put(f"{moe}z_loss", "moe_z_loss_coeff", 0.0)
    fields.put(f"{moe}capacity", "moe_expert_capacity_factor", 0.0)
    fields.put(f"{moe}latent", "moe_latent_size", 0)
    if fields.put(f"{moe}n_groups", "moe_router_num_groups", 1) > 1:
        fields.set(f"{moe}top_groups", fields.take("moe_router_group_topk", int, 1), "moe_router_group_topk")
    if fields.put(f"{moe}bias_balanced", "moe_router_enable_expert_bias", False):
        rate = fields.take("moe_router_bias_update_rate", float, 1e-3)
        fields.set(f"{moe}bias_rate", rate, "moe_router_bias_update_rate")
    share = fields.take("moe_aux_loss_coeff", float, 0.0)
    if share and "aux_loss" in str(fields.take("moe_router_load_balancing_type", object, "aux_loss")):
        fields.set(f"{moe}aux_loss", share, ("moe_aux_loss_coeff", "moe_router_load_balancing_type"))


def frequencies(text: str) -> list[int] | int:
    """Returns a pattern of layers: a whole number, or a list such as ([0]*3+[1]*58). Raises ValueError."""
    wrong = f"expected a number or a list of zeros and ones such as [0]*3+[1]*58, found {text[:80]!r}"

    found = literal(text) if len(text) < 10_000 else None
    if not (type(found) is int and found > 0) and not (
        isinstance(found, list) and found and all(type(each) is int and each in (0, 1) for each in found)
    ):
        raise ValueError(wrong)
    return found


def _layers(fields: Fields) -> int:
    """Sets number and kinds of the layers, and returns the number without the modules for further tokens."""
    several = ("num_layers", "encoder_num_layers", "decoder_num_layers")
    count = fields.first(*several)
    if pattern := fields.word("hybrid_layer_pattern", "hybrid_override_pattern"):
        return _hybrid(fields, pattern)
    more = fields.take("mtp_num_layers", int, 0)
    own = whole(fields, "model.n_layers", 0) - whole(fields, "model.mtp", 0)  # of a preset
    if count or (more and own > 0):
        count = count or own
        names = (*several, *(["mtp_num_layers"] if more else []))
        fields.set("model.n_layers", count + more, names, f"with {more} for further tokens" if more else "")
    if more:
        fields.set("model.mtp", more, "mtp_num_layers")
        weight = fields.take("mtp_loss_scaling_factor", float, 0.1)
        fields.set("train.mtp_weight", weight, ["mtp_num_layers", "mtp_loss_scaling_factor"])
    found = fields.take("moe_layer_freq", object, None)
    count = count or whole(fields, "model.n_layers", 0) - whole(fields, "model.mtp", 0)
    if "model.moe.n_experts" not in fields.settings or found is None:
        return count
    try:
        freq = frequencies(str(found))
    except ValueError as error:
        fields.problems.append(f"{fields.origin('moe_layer_freq')}: {error}")
        return count
    kinds = [int(layer % freq == 0) for layer in range(min(freq, 1000))] if isinstance(freq, int) else freq
    if isinstance(freq, list) and count and len(freq) != count:
        fields.problems.append(f"{fields.origin('moe_layer_freq')}: lists {len(freq)} layers, num_layers is {count}")
    elif isinstance(freq, list) and sorted(kinds) == kinds:
        fields.set("model.moe.n_dense_layers", kinds.count(0), "moe_layer_freq", "dense layers first")
    elif not all(kinds):
        fields.set("model.feed_forward", ["experts" if each else "dense" for each in kinds], "moe_layer_freq")
    return count


_SYMBOLS = {"M": "mamba", "*": "heads", "-": "dense", "E": "experts"}


def _hybrid(fields: Fields, pattern: str) -> int:
    """Sets the blocks of a hybrid: a layer of Mamba-2 or attention with the MLP or experts after it."""
    names = ("hybrid_layer_pattern", "hybrid_override_pattern")
    pattern = pattern.partition("/")[0].replace("|", "")
    if len(pattern) > 1000 or set(pattern) - set(_SYMBOLS):
        at = fields.origin(next(each for each in names if fields.has(each)))
        fields.problems.append(f"{at}: holds {pattern[:80]!r}, supported: layers of {' '.join(_SYMBOLS)}")
        return 0
    pairs = re.findall(r"([M*]?)([-E]?)", pattern)
    blocks = [(_SYMBOLS.get(one, "none"), _SYMBOLS.get(two, "none")) for one, two in pairs if one or two]
    fields.set("model.n_layers", len(blocks), (*names, "num_layers"), "blocks of a mixer and what follows it")
    fields.set("model.attention", ",".join(each for each, _ in blocks), names)
    fields.set("model.feed_forward", ",".join(each for _, each in blocks), names)
    size = fields.take("mamba_head_dim", int, 64)
    count = fields.take("mamba_num_heads", int, 0) or 2 * fields.take("hidden_size", int, 0) // max(1, size)
    groups, state = fields.take("mamba_num_groups", int, 8), fields.take("mamba_state_dim", int, 128)
    rows = (("n_heads", count, "num_heads"), ("head_dim", size, "head_dim"))
    for ours, value, theirs in (*rows, ("groups", groups, "num_groups"), ("state", state, "state_dim")):
        fields.set(f"model.mamba.{ours}", value, f"mamba_{theirs}")
    if fields.take("mtp_num_layers", int, 0):
        fields.leave("mtp_num_layers", "modules for further tokens are not read beside a pattern")
    return len(blocks)


def _vocabulary(fields: Fields, tp: int) -> None:
    """Sets the rows of the embedding: the tokens, rounded up to a multiple of a number for every tensor rank."""
    multiple, padded = fields.take("make_vocab_size_divisible_by", int, 128), fields.take("padded_vocab_size", int, 0)
    kind, model = fields.take("tokenizer_type", str, ""), fields.take("tokenizer_model", str, "")
    tokens, how = fields.take("vocab_size", int, 0), ""
    fields.model = fields.model or model
    if not kind and "merge_file" in fields.stated:
        kind = "GPT2BPETokenizer"
    if not tokens and model and (preset := named(model)) in PRESETS:
        tokens, how = PRESETS[preset].vocab_size, f"those of {model}"
    elif not tokens and (whose := next((each for each in (model, kind) if each in VOCABULARIES), "")):
        tokens, how = VOCABULARIES[whose], f"those of {whose}"
    names = ("vocab_size", "padded_vocab_size", "make_vocab_size_divisible_by", "tokenizer_type", "tokenizer_model")
    if multiple < 1 or tp < 1:
        fields.problems.append(f"{fields.origin('make_vocab_size_divisible_by')}: expected a positive number")
    elif padded:
        fields.set("model.vocab_size", padded, ("padded_vocab_size", *names))
    elif tokens:
        each = multiple * tp if fields.take("should_pad_vocab", bool, True) else 1
        rows = -(-(tokens + fields.take("vocab_extra_ids", int, 0)) // each) * each
        padding = f"{tokens:,} rounded up to a multiple of {multiple} × tp {tp}" if rows != tokens else ""
        fields.set("model.vocab_size", rows, names, "; ".join(filter(None, (how, padding))))
    elif "model.preset" not in fields.settings:
        fields.need("model.vocab_size", "the number of tokens, which the tokenizer has")


def _ranks(fields: Fields, tp: int) -> None:
    if tp > 1 and fields.on("sequence_parallel"):
        fields.set("layout.sp", True, "sequence_parallel")
        fields.set("layout.sp_regather", True, "sequence_parallel", "Megatron gathers again in the backward pass")
    cp, kind = fields.take("context_parallel_size", int, 1), str(fields.take("cp_comm_type", object, "p2p"))
    parts = re.findall("[0-9]+", str(fields.take("hierarchical_context_parallel_sizes", object, "")))
    if cp > 1 and "a2a" in kind:
        inner = int(parts[0]) if "p2p" in kind and parts else cp
        fields.set("layout.cp_ulysses", inner, ("cp_comm_type", "hierarchical_context_parallel_sizes"))
    elif cp > 1 and "p2p" not in kind:
        fields.leave("cp_comm_type", "a ring is predicted")
    experts = whole(fields, "model.moe.n_experts", 0) > 0
    ep, etp = fields.take("expert_model_parallel_size", int, 1), fields.take(ETP, int, 0) or tp
    _data(fields, experts and ep > 1)
    if not experts:
        return
    if etp == 1 and tp > 1 and ep % tp == 0:
        if fields.on("sequence_parallel") and "model.moe.capacity" not in fields.settings:
            fields.set("layout.ep", ep, "expert_model_parallel_size")
            fields.set("layout.etp", 1, ETP)
            return
        how = f"expert ranks among them the {tp} tensor ranks: {ep} / {tp}"
        fields.set("layout.ep", ep // tp, ("expert_model_parallel_size", ETP), how)
        return
    fields.set("layout.ep", ep, "expert_model_parallel_size")
    if etp != tp:
        fields.leave(ETP, f"tp {tp} cuts experts in the prediction")


_STRATEGIES = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}


def _data(fields: Fields, cuts_experts: bool) -> None:
    """Sets data parallelism: the rest of the devices, which replicate, or shard the optimizer's state or all of it."""
    fsdp = fields.on("use_megatron_fsdp", "use_custom_fsdp")
    if fields.on("use_torch_fsdp2"):
        names, zero = ("use_torch_fsdp2",), 3
        # FSDP2 keeps shards of gradients in the type of the parameters.
        fields.recipe |= {"gradient_bytes": 0, "step_gradient_bytes": 4}
    elif fsdp:
        names = ("data_parallel_sharding_strategy", "use_megatron_fsdp", "use_custom_fsdp")
        zero = _STRATEGIES[fields.choice(names[0], "no_shard", _STRATEGIES, "layout.zero")]
    else:
        names, zero = ("use_distributed_optimizer",), int(fields.on("use_distributed_optimizer"))
    how = "world size / (tp × pp × cp)"
    if not zero and not cuts_experts:
        fields.set("layout.dp_replicate", -1, names, how)
        fields.set("layout.zero", 1, names, "nothing is sharded")
        return
    fields.put("layout.dp_replicate", "num_distributed_optimizer_instances", 1)
    fields.set("layout.dp_shard", -1, names, how)
    fields.set("layout.zero", zero or 1, names, "" if zero else "experts need ranks that shard")
    if zero == 3 and fields.on("torch_fsdp2_no_reshard_after_forward"):
        fields.set("layout.reshard", False, "torch_fsdp2_no_reshard_after_forward")


_ENDS = ("decoder_{}_pipeline_num_layers", "num_layers_in_{}_pipeline_stage")


def _pipeline(fields: Fields, pp: int, layers: int) -> int:
    """Sets schedule and cut, and returns the stages per rank."""
    if pp == 1:
        return 1
    each = fields.take("num_layers_per_virtual_pipeline_stage", int, 0)
    virtual = ("num_virtual_stages_per_pipeline_rank", "virtual_pipeline_model_parallel_size")
    chunks = fields.first(*virtual) or 1
    text = fields.take("pipeline_model_parallel_layout", object, None)
    ends = [fields.first(*(form.format(end) for form in _ENDS)) for end in ("first", "last")]
    cuts = tuple(form.format(end) for form in _ENDS for end in ("first", "last"))
    sums = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
    sizes = layout_sizes(text) if text else []
    names = ("num_layers_per_virtual_pipeline_stage", *virtual)
    if sizes:
        chunks, cuts = len(sizes) // pp, ("pipeline_model_parallel_layout",)
    elif each > 0 and layers:
        if layers % pp or (layers // pp) % each:
            at = fields.origin("num_layers_per_virtual_pipeline_stage")
            fields.problems.append(f"{at}: {layers} layers / {pp} stages / {each} is not an integer")
            return 1
        chunks = layers // pp // each
    if chunks > 1:
        fields.set("layout.schedule", "interleaved_1f1b", names)
        fields.set("layout.pp_chunks", chunks, names, f"{layers} layers / pp {pp} / {each}" if each else "")
    else:
        chunks = 1
        fields.set("layout.schedule", "1f1b", names)
    more = whole(fields, "model.mtp", 0)
    if sizes and "model.preset" in fields.settings and not more and 0 < (extra := sum(sizes) - layers) <= 2:
        more, how = extra, "modules for further tokens, by the stages"
        fields.set("model.mtp", more, cuts, how)
        fields.set("model.n_layers", layers + more, cuts, how)
    if not sizes and chunks == 1:
        lead, tail = (int(fields.on(name)) for name in sums)
        sizes = _uneven(pp, layers, ends, lead, tail, more)
    if sizes and len(sizes) == pp * chunks and min(sizes) > 0 and sum(sizes) == layers + more:
        fields.set("layout.pp_cut", "+".join(map(str, sizes)), (*cuts, *sums))
    elif layers % (pp * chunks) or any(ends) or text:
        stated = [name for name in (*cuts, *sums) if name in fields.stated]
        fields.leave(next(iter(stated), "pipeline_model_parallel_size"), "stages are cut as evenly as possible")
    return chunks


def _uneven(pp: int, layers: int, ends: Sequence[int], lead: int, tail: int, more: int) -> list[int]:
    """Returns the layers of every stage; [] if all have the same number, or if they do not add up."""
    if lead or tail:
        each, rest = divmod(layers + lead + tail, pp)
        sizes = [each - lead, *[each] * (pp - 2), each - tail]
    elif any(ends) or more:
        inner = pp - sum(map(bool, ends))
        each, rest = divmod(layers - sum(ends), inner) if inner else (0, layers - sum(ends))
        sizes = [ends[0] or each, *[each] * (pp - 2), ends[1] or each]
    else:
        return []
    return [] if rest or min(sizes) < 0 else [*sizes[:-1], sizes[-1] + more]


def layout_sizes(text: Any) -> list[int]:
    """Returns the layers of every stage of a layout such as "Et*3|(tt|)*29,m|L"; [] if it is not understood."""
    if isinstance(text, list) and all(isinstance(each, list) for each in text):
        found = [sum(str(name) in ("decoder", "mtp") for name in stage) for stage in text]
        return found if all(found) else []
    written = "|".join(map(str, text)) if isinstance(text, list) else re.sub(r"[,\s'\"]", "", str(text))
    for pattern in (r"\(([^()]*)\)\*([0-9]{1,3})", r"([A-Za-z])\*([0-9]{1,3})") * 2:
        if len(written) > 10_000:
            return []
        written = re.sub(pattern, lambda found: found[1] * int(found[2]), written)
    stages = written.split("|")
    return [] if any(set(stage) - set("EtmL") for stage in stages) else [len(re.findall("[tm]", s)) for s in stages]


def _recompute(fields: Fields, layers: int, stages: int) -> None:
    old = ("recompute_activations", "activations_checkpoint_method", "checkpoint_activations")
    names = ("recompute_granularity", *old, "recompute_method", "recompute_num_layers", "recompute_modules")
    mode = fields.choice(names[0], "", ("full", "selective", "none", "null"), "layout.recompute")
    mode = mode or ("selective" if fields.on(old[0]) else "")
    if fields.word(old[1]) or fields.on(old[2]):
        mode = "full"
    modules = fields.take("recompute_modules", object, None)
    modules = modules if isinstance(modules, list) else re.findall(r"[a-z_]+", str(modules or "core_attn"))
    method = fields.choice("recompute_method", "", ("uniform", "block", "none", "null"), "layout.recompute")
    count = fields.take("recompute_num_layers", int, 0)
    if mode == "full" and method == "block" and layers % stages == 0 and 0 < count < layers // stages:
        more = whole(fields, "model.mtp", 0)
        runs = [f"{count}*full", f"{layers // stages - count}*none"] * stages + [f"{more}*none"] * bool(more)
        fields.set("layout.recompute_cut", "+".join(runs), names, f"the first {count} layers of each stage")
    elif mode == "full":
        fields.set("layout.recompute", "full", names)
        if method == "uniform" and count > 1:
            fields.leave("recompute_num_layers", f"the input of every layer is kept, not of every {count}th")
    elif mode == "selective":
        fields.set("layout.recompute", "selective" if "core_attn" in modules else "none", names)
    others = [str(each) for each in modules if each != "core_attn"] if mode == "selective" else []
    if fields.on("moe_layer_recompute"):
        others.append("moe")
    if others:
        fields.recipe["recomputes"] = others


def _offload(fields: Fields) -> None:
    parts = list[str]()
    if fields.on("optimizer_cpu_offload"):
        parts.append("optimizer")
        if fields.take("optimizer_offload_fraction", float, 1.0) != 1.0:
            fields.leave("optimizer_offload_fraction", "all of the state is predicted to leave")
    if fields.on("cpu_offloading") and fields.take("cpu_offloading_activations", bool, True):
        parts.append("activations")
        fields.put("layout.offload_blocks", "cpu_offloading_num_layers", 0)
        if fields.on("cpu_offloading_weights"):
            fields.leave("cpu_offloading_weights", "weights stay in the prediction")
    if parts:
        names = ("optimizer_cpu_offload", "cpu_offloading", "cpu_offloading_activations")
        fields.set("layout.offload", "+".join(parts), names)


def written(theirs: ForeignJob, layout: Layout) -> Mapping[str, Any]:
    """Returns the arguments that give a layout, beside those of plain names; None for those that are left out."""
    layers, chunks = int(theirs.value("num_layers", 0) or 0), 0
    if layout.schedule == "interleaved_1f1b" and layout.pp > 1:
        chunks = layout.pp_chunks or 2
    by_layers, size = "num_layers_per_virtual_pipeline_stage", "virtual_pipeline_model_parallel_size"
    name = size if size in theirs.stated else "num_virtual_stages_per_pipeline_rank"
    if by_layers in theirs.stated and layers and chunks and layers % (layout.pp * chunks) == 0:
        virtual: dict[str, Any] = {by_layers: layers // layout.pp // chunks}
    else:
        virtual = {by_layers: None, name: chunks or None}
    mode = layout.recompute if layout.recompute in ("selective", "full") else None
    whole = str(theirs.value(ETP, "")) == "1"
    ep = layout.ep * (layout.tp if whole and not layout.folds else 1)
    found = {
        "sequence_parallel": layout.sp or None,
        "recompute_granularity": mode,
        "recompute_method": "uniform" if mode == "full" else None,
        "recompute_num_layers": 1 if mode == "full" else None,
        "use_distributed_optimizer": layout.dp_shard > 1 or None,
        "num_distributed_optimizer_instances": layout.dp_replicate
        if layout.dp_replicate > 1 < layout.dp_shard
        else None,
        **virtual,
    }
    if any(theirs.value(name) for name in ("use_torch_fsdp2", "use_megatron_fsdp", "use_custom_fsdp", "fsdp")):
        del found["use_distributed_optimizer"]
    experts = theirs.value("num_experts") or theirs.value("num_moe_experts")
    degrees = {"expert_model_parallel_size": ep} | ({ETP: 1} if layout.folds else {})
    return found | (degrees if experts else {})


COVERS = frozenset(
    (
        *("sp", "sp_regather", "recompute", "dp_shard", "dp_replicate", "zero", "ep", "etp", "schedule", "pp_chunks"),
        *("cp_ulysses", "accumulation"),
    )
)
"""Fields of a layout that `written` gives."""
_LESS = ("hpz", "quantise_weights", "quantise_gradients", "tiles", "loss_chunk", "cp_ulysses", "sync", "offload")
FIXED: dict[str, Any] = {"zero": 1, "compression": "none", **{name: getattr(Layout(), name) for name in _LESS}}
"""Fields of a layout that Megatron Core does not choose, with what it does."""
CHOOSES = PIPELINES | RECOMPUTES
