"""The parts of a model in words, as `phalanx models` prints them."""

from __future__ import annotations

from phalanx.config.model import ModelConfig
from phalanx.units import counted


def attention(model: ModelConfig) -> str:
    """Returns the kind of attention, with its sinks and soft cap: "grouped, 32 heads on 8"."""
    heads = model.n_heads
    if model.mla.kv_rank:
        kind = f"latent, {heads} heads"
    elif model.kv_heads == heads:
        kind = f"{heads} heads"
    else:
        kind = f"grouped, {heads} heads on {model.kv_heads}"
    wide, with_wide = model.wide, sum("wide_heads" in name for name in _attentions(model))
    layers = counted(model.shared_keys, "layer")
    shared = f" on {wide.n_kv_heads or model.kv_heads}"
    extras = [
        (with_wide > 0, f"{wide.head_dim} wide{shared} in {with_wide} of {model.n_layers} layers"),
        (model.values_are_keys, "values that are keys there" if with_wide else "values that are keys"),
        (model.shared_keys > 0, f"keys of earlier layers in the last {layers}"),
        (model.sinks, "sinks"),
        (model.attention_softcap > 0, f"soft cap {model.attention_softcap:g}"),
        (model.qk_norm != "none", "normalised queries and keys"),
        (model.query_growth.rate > 0, "growing queries"),
        (model.sparse.top_k > 0, f"to {model.sparse.top_k:,} keys"),
    ]
    layers = _attentions(model)
    states = [
        f"{name} in {layers.count(kind)} of {model.n_layers} layers"
        for kind, name in (("delta", "gated delta nets"), ("mamba", "Mamba-2"))
        if kind in layers
    ]
    return ", ".join([*states, kind, *(name for present, name in extras if present)])


def _attentions(model: ModelConfig) -> list[str]:
    """Returns the kind of attention of every layer, nothing for the usual one."""
    pattern = model.attention.split(",")
    if not (model.attention or model.mla.kv_rank):
        pattern = list(model.heads_by_layer)
    return [pattern[layer % len(pattern)] for layer in range(model.n_layers)]


def windows(model: ModelConfig) -> str:
    """Returns which layers have a window; nothing without one: "window 4,096 in 13 of 26 layers"."""
    if not model.window:
        return ""
    having = sum(model.window_of(layer) > 0 for layer in range(model.n_layers))
    where = "all" if having == model.n_layers else f"{having} of {model.n_layers}"
    kind = "chunks of" if model.window_kind == "chunks" else "window"
    return f"{kind} {model.window:,} in {where} layers"


def norm(model: ModelConfig) -> str:
    """Returns the kind of normalisation and its place: "rmsnorm before and after"."""
    place = {"before": "before", "after": "after", "both": "before and after"}[model.norm_place]
    return f"{model.norm} {place}"


def feed_forward(model: ModelConfig) -> str:
    """Returns the kind of MLP or of experts: "swiglu, 8 of 128 experts + 1 shared"."""
    moe, kind = model.moe, model.activation
    if model.double_mlp:
        kind += f", twice as wide in the last {counted(model.shared_keys, 'layer')}"
    if model.layer_embedding:
        kind += f", embeddings of {model.layer_embedding} in each layer"
    if model.parallel_block:
        kind += " beside attention"
    if not moe.n_experts:
        return kind
    shared = f" + {moe.n_shared} shared" if moe.n_shared else ""
    latent = f" in latents of {moe.latent:,}" if moe.latent else ""
    return f"{kind}, {moe.top_k} of {moe.n_experts} experts{latent}{shared}"


def positions(model: ModelConfig) -> str:
    """Returns the kind of positions: "rotary, base 500,000, llama3 × 8 from 8,192 tokens"."""
    if model.positions == "learned":
        return f"learned, {model.seq_len:,}"
    if model.positions == "none":
        return "none"
    parts = ["rotary", f"base {model.rope_theta:,.0f}"]
    if model.window_rope_theta:
        parts.append(f"{model.window_rope_theta:,.0f} in windows")
    if model.rotary_fraction < 1:
        parts.append(f"{model.rotary_size} of {model.head_size} elements")
    if model.rotary_pairs < 1:
        parts.append(f"{model.rotary_pairs:g} of the pairs")
    if model.nope_every:
        parts.append(f"none in one layer of {model.nope_every}")
    scaling = model.rope_scaling
    if scaling.factor > 1:
        origin = f" from {scaling.original_seq_len:,} tokens" if scaling.kind != "linear" else ""
        parts.append(f"{scaling.kind} × {scaling.factor:g}{origin}")
    return ", ".join(parts)
