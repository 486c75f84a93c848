"""GGUF files of small transformers models, written as llama.cpp's converter (convert_hf_to_gguf.py) writes them: names
by the gguf package's own table, and the converter's changes to tensors."""

import re

import gguf
import torch

MODEL_TYPES = {"gptneox": "gpt_neox", "gemma3": "gemma3_text", "qwen3moe": "qwen3_moe", "deepseek2": "deepseek_v3"}
"""Names of transformers for llama.cpp's architectures, where they differ."""
ARCHITECTURES = {theirs: ours for ours, theirs in MODEL_TYPES.items()} | dict.fromkeys(("mistral", "mixtral"), "llama")


def write(path, model, config, metadata=None, quantised=None, joined=False):
    """Writes a transformers model; `metadata` are further values, `quantised` the type of all matrices, and `joined`
    stores latent attention as converters did until 2025."""
    kind = ARCHITECTURES.get(config.model_type, config.model_type)
    writer = gguf.GGUFWriter(path, kind)
    for key, value in (_metadata(config, joined) | (metadata or {})).items():
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        add.get(type(value), writer.add_array)(
            key if "." in key and key.split(".")[0] in _ROOTS else f"{kind}.{key}", value
        )
    arch = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == kind)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    for name, tensor in _tensors(model, config, joined):
        stem, _, suffix = name.rpartition(".")
        values = tensor.detach().float().contiguous().numpy()
        target = f"{names.get_name(stem)}.{suffix}"
        if quantised is not None and values.ndim > 1:
            writer.add_tensor(target, gguf.quantize(values, quantised), raw_dtype=quantised)
        else:
            writer.add_tensor(target, values)
    for each in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        each()


_ROOTS = ("tokenizer", "general", "split")


def _metadata(config, joined):
    """Returns the numbers of a configuration by llama.cpp's keys."""

    def get(*names):
        return next((value for name in names if (value := getattr(config, name, None)) is not None), None)

    rope = getattr(config, "rope_parameters", None) or {}
    full = rope.get("full_attention", rope)
    heads = config.num_attention_heads
    head = get("head_dim") or config.hidden_size // heads
    values = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": get("intermediate_size", "n_inner") or 4 * config.hidden_size,
        "attention.head_count": heads,
        "attention.head_count_kv": get("num_key_value_heads"),
        "attention.layer_norm_rms_epsilon": get("rms_norm_eps"),
        "attention.layer_norm_epsilon": get("layer_norm_epsilon", "layer_norm_eps"),
        "rope.freq_base": full.get("rope_theta"),
        "rope.dimension_count": int(head * full.get("partial_rotary_factor", 1)) if full else None,
        "attention.key_length": head if get("head_dim") else None,
        "attention.value_length": head if get("head_dim") else None,
        "attn_logit_softcapping": get("attn_logit_softcapping"),
        "final_logit_softcapping": get("final_logit_softcapping"),
        "attention.sliding_window": get("sliding_window"),
        "use_parallel_residual": get("use_parallel_residual"),
        "expert_count": get("num_local_experts", "num_experts", "n_routed_experts"),
        "expert_feed_forward_length": get("moe_intermediate_size"),
        "expert_used_count": get("num_experts_per_tok"),
    }
    if config.model_type == "deepseek_v3":
        values |= _latent(config, rope, joined)
    return {key: value for key, value in values.items() if value is not None}


def _latent(config, rope, joined):
    """Returns what llama.cpp's converter writes of latent attention and of DeepSeek-V3's experts."""
    key, value = config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim
    if joined:
        sizes = {"attention.key_length": key, "attention.value_length": value}
    else:
        sizes = {
            "attention.head_count_kv": 1,
            "attention.key_length": config.kv_lora_rank + config.qk_rope_head_dim,
            "attention.value_length": config.kv_lora_rank,
            "attention.key_length_mla": key,
            "attention.value_length_mla": value,
        }
    values = sizes | {
        "attention.q_lora_rank": config.q_lora_rank,
        "attention.kv_lora_rank": config.kv_lora_rank,
        "rope.dimension_count": config.qk_rope_head_dim,
        "leading_dense_block_count": config.first_k_dense_replace,
        "expert_shared_count": config.n_shared_experts,
        "expert_weights_scale": config.routed_scaling_factor,
        "expert_weights_norm": config.norm_topk_prob,
        "expert_gating_func": 2,
        "expert_group_count": config.n_group,
        "expert_group_used_count": config.topk_group,
    }
    if rope.get("rope_type") == "yarn":
        values |= {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": float(rope["factor"]),
            "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
            "rope.scaling.yarn_log_multiplier": 0.1 * rope["mscale_all_dim"],
        }
    return values


def _tensors(model, config, joined):
    kind, heads = config.model_type, config.num_attention_heads
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if kind == "gpt2" and re.search(r"(c_attn|c_proj|c_fc)\.weight$", name):
            yield name, tensor.T
        elif kind in ("llama", "mistral", "mixtral") and re.search(r"[qk]_proj\.weight$", name):
            n = heads if "q_proj" in name else config.num_key_value_heads
            yield name, tensor.reshape(n, 2, -1, tensor.shape[1]).swapaxes(1, 2).reshape(tensor.shape)
        elif kind == "gpt_neox" and "query_key_value" in name:
            yield name, tensor.unflatten(0, (heads, 3, -1)).transpose(0, 1).flatten(0, 2)
        elif kind.startswith("gemma") and name.endswith("norm.weight"):
            yield name, tensor + 1
        elif name.endswith("experts.gate_up_proj"):
            for part, half in zip(("gate_proj", "up_proj"), tensor.chunk(2, dim=1), strict=True):
                yield name.replace("gate_up_proj", f"{part}.weight"), half
        elif name.endswith("kv_b_proj.weight") and not joined:
            keys, values = tensor.unflatten(0, (heads, -1)).split((config.qk_nope_head_dim, config.v_head_dim), 1)
            yield name.replace("kv_b_proj", "k_b_proj"), keys.transpose(1, 2)
            yield name.replace("kv_b_proj", "v_b_proj"), values
        elif name.endswith("e_score_correction_bias"):
            yield name.replace("_bias", ".bias"), tensor
        elif name.endswith("experts.down_proj"):
            yield f"{name}.weight", tensor
        else:
            yield name, tensor


def vocabulary():
    """Returns the metadata of a byte-level tokenizer with three merges and one special token."""
    from tokenizers import pre_tokenizers

    tokens = ["<|end|>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "Ġt", "he", "Ġthe"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] + [1] * (len(tokens) - 1),
        "tokenizer.ggml.merges": ["Ġ t", "h e", "Ġt he"],
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.chat_template": "{{ messages }}",
    }


def pieces():
    """Returns the metadata of a small tokenizer of SentencePiece's kind, with bytes, a control token and a user's."""
    plain = [
        *"\u2581abcdehilnorstw,.",
        "he",
        "\u2581t",
        "\u2581the",
        "th",
        "er",
        "\u2581\u2581",
        "lo",
        "llo",
        "hello",
        "ello",
    ]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *plain, "\n\n"]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(rank) for rank in range(len(plain))] + [0.0],
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(plain) + [4],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


def randomised(model):
    """Fills every tensor with random multiples of 2⁻¹², which a float32 holds even after 1 is added to them."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.state_dict().values():
            noise = torch.randint(-800, 800, parameter.shape, generator=generator) / 4096
            parameter.copy_(((parameter + noise) * 4096).round() / 4096)
    return model.eval()
