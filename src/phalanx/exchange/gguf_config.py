"""The metadata of a GGUF file as the shape of a model.

Each architecture of llama.cpp fixes the kind of its layers, which its metadata do not repeat; the metadata are numbers.
Sources: docs/gguf.md of github.com/ggml-org/ggml for the keys; src/llama-model.cpp of github.com/ggml-org/llama.cpp for
what an architecture fixes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal

from phalanx.check.job import problems_of
from phalanx.config.job import Job
from phalanx.config.model import MLA, ModelConfig, MoE, RopeScaling
from phalanx.errors import CheckpointError
from phalanx.exchange.gguf import GgufFile, exact_decimal
from phalanx.nearest import did_you_mean

_LLAMA: dict[str, Any] = {"norm": "rmsnorm", "positions": "rope", "activation": "swiglu", "bias": False}
_GEMMA = _LLAMA | {"activation": "geglu", "scaled_embedding": True}
_GPT: dict[str, Any] = {"norm": "layernorm", "positions": "learned", "activation": "gelu_tanh", "bias": True}
ARCHITECTURES: Mapping[str, dict[str, Any]] = {
    "llama": _LLAMA,
    "qwen2": _LLAMA | {"qkv_bias": True},
    "qwen3": _LLAMA | {"qk_norm": "head"},
    "qwen3moe": _LLAMA | {"qk_norm": "head"},
    "gemma": _GEMMA,
    "gemma2": _GEMMA | {"norm_place": "both", "full_every": 2},
    "gemma3": _GEMMA | {"norm_place": "both", "qk_norm": "head", "full_every": 6, "window_rope_theta": 10000.0},
    "gpt2": _GPT,
    "gptneox": _GPT | {"positions": "rope", "activation": "gelu", "parallel_block": True},
    "olmo2": _LLAMA | {"norm_place": "after", "qk_norm": "width"},
    "deepseek2": _LLAMA,
}
"""Fields of the model that llama.cpp's architectures fix. Mistral and Mixtral are llama."""
_LATENT = ("deepseek2",)
"""Architectures with latent attention."""
_OWN_SCALE = {("gemma2", 46), ("gemma3", 62)}
"""Architectures with the layers whose scores are divided by √(d_model / n_heads): the 27B models."""
_IGNORED = {"vocab_size", "tensor_data_layout", "rope.scaling.finetuned", "attention.causal"}
"""Keys that say nothing that the tensors do not."""
_GATES: Mapping[int, Literal["softmax", "sigmoid"]] = {0: "softmax", 1: "softmax", 2: "sigmoid"}
"""Functions of routers by their numbers; 0 is not stated."""


class _Values:
    """The numbers of an architecture. Every key that is used is noted, and every problem collected."""

    def __init__(self, metadata: Mapping[str, Any], architecture: str):
        prefix = f"{architecture}."
        self.left = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
        self.prefix, self.problems = prefix, list[str]()

    def take(self, key: str, default: Any = None) -> Any:
        """Returns a value, or the one value that a list repeats for every layer. Without a `default` its absence is a
        problem, and so is another type than that of the default: without one it is a whole number."""
        stated, kind = key in self.left, int if default is None else type(default)
        value = self.left.pop(key, default)
        if isinstance(value, list) and value and all(each == value[0] for each in value):
            value = value[0]
        if kind is bool and value in (0, 1):
            value = bool(value)
        if not isinstance(value, kind) or (isinstance(value, float) and not math.isfinite(value)):
            found = f"is {str(value)[:60]}, expected one {kind.__name__} for all layers"
            self.problems.append(f"{self.prefix}{key} {found if stated else 'is missing'}")
            return 1 if default is None else default
        return exact_decimal(value) if isinstance(value, float) else value


def architecture_of(file: GgufFile) -> str:
    """Returns a file's architecture. Raises CheckpointError for one that is not read."""
    name = file.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        hint = did_you_mean(name, ARCHITECTURES) if isinstance(name, str) else ""
        raise CheckpointError(
            f"{file.path}: architecture {name!r} is not read{hint}; known: {', '.join(ARCHITECTURES)}"
        )
    return name


def model_of(file: GgufFile) -> ModelConfig:
    """Returns the shape of a file's model. `rope_freqs` is not in it: `gguf_model.py` compares that tensor.

    Raises CheckpointError with every key that is missing, or that is not understood."""
    architecture = architecture_of(file)
    kind = dict(ARCHITECTURES[architecture])
    values = _Values(file.metadata, architecture)
    heads = values.take("attention.head_count")
    width, layers = values.take("embedding_length"), values.take("block_count")
    experts, latent = values.take("expert_count", 0), architecture in _LATENT
    if latent:
        fields = kind | {"mla": _latent(values), "n_kv_heads": heads}
        head = fields["mla"].nope_head_dim + fields["mla"].rope_head_dim
    else:
        head = values.take("attention.key_length", width // max(heads, 1))
        value_head = values.take("attention.value_length", head)
        if head != value_head:
            values.problems.append(f"keys have {head} elements per head and values {value_head}; they must be equal")
        fields = kind | {
            "n_kv_heads": values.take("attention.head_count_kv", heads),
            "head_dim": 0 if head * heads == width else head,
        }
    of_norm = "attention.layer_norm_rms_epsilon" if kind["norm"] == "rmsnorm" else "attention.layer_norm_epsilon"
    fields |= {
        "n_layers": layers,
        "d_model": width,
        "n_heads": heads,
        "d_ff": values.take("feed_forward_length", 0 if experts else None),
        "vocab_size": file.tensors["token_embd.weight"].shape[0] if "token_embd.weight" in file.tensors else 1,
        "seq_len": values.take("context_length"),
        "norm_eps": values.take(of_norm, math.nan),
        "tied": is_tied(file),
        "attention_softcap": values.take("attn_logit_softcapping", 0.0),
        "logit_softcap": values.take("final_logit_softcapping", 0.0),
        "attention_scale": values.take("attention.scale", 0.0),
        "qkv_bias": kind.get("qkv_bias", False) or (not kind["bias"] and "blk.0.attn_q.bias" in file.tensors),
    }
    if (architecture, layers) in _OWN_SCALE:
        fields["attention_scale"] = (width / max(heads, 1)) ** -0.5
    if "parallel_block" in kind:
        fields["parallel_block"] = bool(values.take("use_parallel_residual", True))
    fields |= _windows(values, kind) | _experts(values, experts, file, latent=latent)
    if kind["positions"] == "rope":
        fields |= _rotary(values, head, latent=latent)
    unknown = [f"{values.prefix}{key} is not understood" for key in values.left if key not in _IGNORED]
    model = ModelConfig(**fields)
    wrong = values.problems or _shape_problems(model)
    if problems := [*wrong, *unknown]:
        raise CheckpointError(f"{file.path} does not describe a model that is read: {'; '.join(problems)}")
    return model


def is_tied(file: GgufFile) -> bool:
    """Returns whether the head is the embedding: it is not stored, or, as by old converters of GPT-2, stored twice."""
    head, embedding = "output.weight", "token_embd.weight"
    return head not in file.tensors or (embedding in file.tensors and file.same_bytes(head, embedding))


def _shape_problems(model: ModelConfig) -> list[str]:
    """Returns what is wrong with a shape: numbers out of range, or that do not go together."""
    return [f"{path}: {message}" for path, message in problems_of(Job(model=model)) if path.startswith("model.")]


def _windows(values: _Values, kind: Mapping[str, Any]) -> dict[str, Any]:
    window = values.take("attention.sliding_window", 0)
    pattern = values.left.pop("attention.sliding_window_pattern", kind.get("full_every", 0))
    if isinstance(pattern, list):  # for each layer, whether it has a window
        every = pattern.index(False) + 1 if False in pattern else 0
        full = [bool(every and (layer + 1) % every == 0) for layer in range(len(pattern))]
        if full != [not each for each in pattern]:
            name = "attention.sliding_window_pattern"
            values.problems.append(f"{values.prefix}{name}: the layers without window are not every n-th")
        pattern = every
    base = values.take("rope.freq_base_swa", kind.get("window_rope_theta", 0.0))
    return {"window": window, "full_every": pattern if window else 0, "window_rope_theta": base if window else 0.0}


def _latent(values: _Values) -> MLA:
    """Returns the sizes of latent attention. Files that store keys and values from the latent apart (`_mla` keys) state
    key_length and value_length as they are in the latent."""
    rotated, rank = values.take("rope.dimension_count"), values.take("attention.kv_lora_rank")
    key, value = (values.take(f"attention.{name}_length") for name in ("key", "value"))
    key = values.take("attention.key_length_mla", key)
    values.left.pop("attention.head_count_kv", None)  # 1 for the latent, or that of the heads
    if key <= rotated:
        values.problems.append(f"keys have {key} elements per head, of which {rotated} are rotated: none is left")
    return MLA(
        q_rank=values.take("attention.q_lora_rank", 0),
        kv_rank=rank,
        rope_head_dim=rotated,
        nope_head_dim=max(key - rotated, 1),
        v_head_dim=values.take("attention.value_length_mla", value),
    )


def _experts(values: _Values, experts: int, file: GgufFile, *, latent: bool) -> dict[str, Any]:
    if not experts:
        values.left.pop("expert_used_count", None)
        return {}
    gate, groups = values.take("expert_gating_func", 0), values.take("expert_group_count", 1)
    if gate not in _GATES:
        values.problems.append(f"{values.prefix}expert_gating_func is {gate}; known: {', '.join(map(str, _GATES))}")
    elif groups > 1 and _GATES[gate] == "softmax":
        values.problems.append(
            f"{values.prefix}expert_group_count is {groups}: routers that choose groups by softmax "
            "scores (DeepSeek-V2) are not read"
        )
    moe = MoE(
        n_experts=experts,
        top_k=values.take("expert_used_count"),
        d_ff=values.take("expert_feed_forward_length", 0),
        n_shared=values.take("expert_shared_count", 0),
        n_dense_layers=values.take("leading_dense_block_count", 0),
        router=_GATES.get(gate, "softmax"),
        renormalise=values.take("expert_weights_norm", not latent),
        route_scale=values.take("expert_weights_scale", 1.0) or 1.0,
        n_groups=groups,
        top_groups=values.take("expert_group_used_count", 1),
        bias_balanced=any(name.endswith(".exp_probs_b.bias") for name in file.tensors),
    )
    return {"moe": moe}


def _rotary(values: _Values, head: int, *, latent: bool) -> dict[str, Any]:
    fields: dict[str, Any] = {"rope_theta": values.take("rope.freq_base", 10000.0)}
    if not latent:
        rotated = values.take("rope.dimension_count", head)
        fields["rotary_fraction"] = rotated / head if head else 1.0
    kind = values.take("rope.scaling.type", "none")
    factor = values.take("rope.scaling.factor", values.take("rope.scale_linear", 1.0))
    if kind == "none" or factor == 1:
        return fields
    if kind not in ("linear", "yarn"):
        values.problems.append(f"{values.prefix}rope.scaling.type is {kind!r}; known: none, linear, yarn")
        return fields
    scaling = RopeScaling(kind=kind, factor=factor)
    if kind == "yarn":
        scaling = dataclasses.replace(
            scaling,
            original_seq_len=values.take("rope.scaling.original_context_length"),
            beta_fast=values.take("rope.scaling.yarn_beta_fast", 32.0),
            beta_slow=values.take("rope.scaling.yarn_beta_slow", 1.0),
        )
        # A tenth of mscale_all_dim, which enlarges the scores; mscale is the same, so rotated parts keep their size.
        if latent and (growth := values.take("rope.scaling.yarn_log_multiplier", 0.0)):
            scaling = dataclasses.replace(scaling, magnitude=1.0)
            fields["attention_scale"] = (growth * math.log(factor) + 1) ** 2 / head**0.5
    values.left.pop("rope.scaling.original_context_length", None)
    return fields | {"rope_scaling": scaling}
