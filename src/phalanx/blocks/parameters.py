"""Every parameter of a model, by name and shape, from the shape dataclass alone.

The torch module in `phalanx.model` has exactly these parameters (a test compares them), so counting, sharding, memory
and FLOPs can be worked out without building anything. A linear layer's weight is (outputs, inputs).
"""

from __future__ import annotations

from math import prod

from phalanx.config.model import ModelConfig
from phalanx.errors import JobError

Shapes = dict[str, tuple[int, ...]]


def vocabulary(model: ModelConfig, vocab_size: int | None = None) -> int:
    """Tokens in the vocabulary: `vocab_size` (what the tokenizer has) where given, else the model's own.

    Raises JobError when neither says how many."""
    size = vocab_size or model.vocab_size
    if not size:
        raise JobError(
            "model.vocab_size is 0, which means the tokenizer's vocabulary, and no tokenizer is at hand here: "
            "set model.vocab_size to a number of tokens"
        )
    return size


def parameter_shapes(model: ModelConfig, vocab_size: int | None = None) -> Shapes:
    """Name and shape of every parameter, in the order of the module tree. A tied head has no entry of its own."""
    vocab = vocabulary(model, vocab_size)
    shapes: Shapes = {"embed.weight": (vocab, model.d_model)}
    if model.positions == "learned":
        shapes["positions.weight"] = (model.seq_len, model.d_model)
    for layer in range(model.n_layers):
        shapes |= {f"blocks.{layer}.{name}": shape for name, shape in block_shapes(model, layer).items()}
    shapes |= _norm("final_norm", model.d_model, model)
    if not model.tied:
        shapes["head.weight"] = (vocab, model.d_model)
    return shapes


def block_shapes(model: ModelConfig, layer: int) -> Shapes:
    """Name (without the leading `blocks.LAYER.`) and shape of every parameter of one block."""
    attention = _latent_attention(model) if model.mla.kv_rank else _attention(model)
    feed_forward = _experts(model) if model.is_moe_layer(layer) else _mlp("mlp", model.ff_size, model)
    return _norm("attn_norm", model.d_model, model) | attention | _norm("mlp_norm", model.d_model, model) | feed_forward


def count(model: ModelConfig, vocab_size: int | None = None) -> int:
    """Parameters of the model: a tied head once, learned positions included."""
    return sum(prod(shape) for shape in parameter_shapes(model, vocab_size).values())


def count_active(model: ModelConfig, vocab_size: int | None = None) -> int:
    """Parameters that one token uses: as `count`, but of the routed experts only the top_k that the token visits."""
    shapes = parameter_shapes(model, vocab_size)
    return sum(active_size(name, shape, model) for name, shape in shapes.items())


def active_size(name: str, shape: tuple[int, ...], model: ModelConfig) -> int:
    """Elements of one parameter that one token uses."""
    if "moe.experts." in name:
        return prod((model.moe.top_k, *shape[1:]))
    return prod(shape)


def _attention(model: ModelConfig) -> Shapes:
    """Multi-head, grouped-query or multi-query attention."""
    bias = model.bias or model.qkv_bias
    queries = model.n_heads * model.head_size
    keys = model.kv_heads * model.head_size
    return (
        _linear("attn.wq", queries, model.d_model, bias)
        | _linear("attn.wk", keys, model.d_model, bias)
        | _linear("attn.wv", keys, model.d_model, bias)
        | _linear("attn.wo", model.d_model, queries, model.bias)
    )


def _latent_attention(model: ModelConfig) -> Shapes:
    """Multi-head latent attention as in DeepSeek-V3's released model (DeepSeek-V2, section 2.1)."""
    mla, bias = model.mla, model.bias or model.qkv_bias
    queries = model.n_heads * model.head_size
    if mla.q_rank:
        shapes = (
            _linear("attn.wq_a", mla.q_rank, model.d_model, bias)
            | _norm("attn.q_norm", mla.q_rank, model)
            | _linear("attn.wq_b", queries, mla.q_rank, bias)
        )
    else:
        shapes = _linear("attn.wq", queries, model.d_model, bias)
    # One rotary key serves all heads, so it comes straight from the input beside the compressed keys and values.
    return (
        shapes
        | _linear("attn.wkv_a", mla.kv_rank + mla.rope_head_dim, model.d_model, bias)
        | _norm("attn.kv_norm", mla.kv_rank, model)
        | _linear("attn.wkv_b", model.n_heads * (mla.nope_head_dim + mla.v_head_dim), mla.kv_rank, bias)
        | _linear("attn.wo", model.d_model, model.n_heads * mla.v_head_dim, model.bias)
    )


def _mlp(name: str, width: int, model: ModelConfig) -> Shapes:
    shapes = _linear(f"{name}.up", width, model.d_model, model.bias)
    if model.activation == "swiglu":
        shapes |= _linear(f"{name}.gate", width, model.d_model, model.bias)
    return shapes | _linear(f"{name}.down", model.d_model, width, model.bias)


def _experts(model: ModelConfig) -> Shapes:
    """Router, routed experts stacked along a leading dimension, and the shared experts as one wide MLP."""
    moe = model.moe
    shapes = _linear("moe.router", moe.n_experts, model.d_model, moe.bias_balanced)
    one_expert = _mlp("moe.experts", model.expert_ff_size, model)
    shapes |= {name: (moe.n_experts, *shape) for name, shape in one_expert.items()}
    if moe.n_shared:
        shapes |= _mlp("moe.shared", moe.n_shared * model.expert_ff_size, model)
    return shapes


def _linear(name: str, outputs: int, inputs: int, bias: bool) -> Shapes:
    weight: Shapes = {f"{name}.weight": (outputs, inputs)}
    return weight | {f"{name}.bias": (outputs,)} if bias else weight


def _norm(name: str, width: int, model: ModelConfig) -> Shapes:
    weight: Shapes = {f"{name}.weight": (width,)}
    return weight | {f"{name}.bias": (width,)} if model.bias and model.norm == "layernorm" else weight
