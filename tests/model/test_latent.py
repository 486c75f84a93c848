from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from generate.texts import generate
from model.kinds import MOE_AND_MLA, build, tokens
from phalanx.config.model import MLA, ModelConfig, RopeScaling
from phalanx.model.attention import LatentAttention
from phalanx.model.cache import Cache
from phalanx.model.documents import Documents
from phalanx.model.layers import rotary_frequencies

_LATENT = {
    "compressed queries": MOE_AND_MLA["deepseek"],
    "plain queries, biases, LayerNorm": MOE_AND_MLA["latent"],
    "values larger than keys": replace(
        MOE_AND_MLA["latent"], mla=MLA(kv_rank=4, rope_head_dim=2, nope_head_dim=3, v_head_dim=9)
    ),
}
latent = pytest.mark.parametrize("model", _LATENT.values(), ids=_LATENT.keys())


def attention(model: ModelConfig) -> LatentAttention:
    attn = build(model).blocks["0"].attn
    assert isinstance(attn, LatentAttention)
    return attn


@latent
def test_attention_equals_a_reference_written_in_loops(model: ModelConfig):
    attn = attention(model)
    x = torch.randn(2, 9, model.d_model, dtype=torch.float64)
    rotary = build(model).rotary(torch.arange(9), torch.float64)
    expected = np.stack([reference(attn, model, sequence.numpy()) for sequence in x])
    np.testing.assert_allclose(attn(x, rotary, None, None).detach().numpy(), expected, rtol=1e-10, atol=1e-10)


def reference(attn: LatentAttention, model: ModelConfig, x: np.ndarray) -> np.ndarray:
    """DeepSeek-V2, equations 9 to 19 with the norms of its released code: one position and head at a time."""
    weights = {name: p.detach().numpy() for name, p in attn.named_parameters()}
    mla, heads, seq = model.mla, model.n_heads, len(x)

    def linear(name: str, x: np.ndarray) -> np.ndarray:
        return x @ weights[f"{name}.weight"].T + weights.get(f"{name}.bias", 0.0)

    def norm(name: str, x: np.ndarray) -> np.ndarray:
        if model.norm == "layernorm":
            x = x - x.mean(-1, keepdims=True)
        y = x / np.sqrt((x * x).mean(-1, keepdims=True) + model.norm_eps)
        return y * weights[f"{name}.weight"] + weights.get(f"{name}.bias", 0.0)

    def turn(part: np.ndarray, position: int) -> np.ndarray:
        out, half = part.copy(), mla.rope_head_dim // 2
        for pair in range(half):
            angle = position / model.rope_theta ** (2 * pair / mla.rope_head_dim)
            a, b = part[pair], part[pair + half]
            out[pair] = a * math.cos(angle) - b * math.sin(angle)
            out[pair + half] = b * math.cos(angle) + a * math.sin(angle)
        return out

    q = linear("wq_b", norm("q_norm", linear("wq_a", x))) if mla.q_rank else linear("wq", x)
    q = q.reshape(seq, heads, mla.nope_head_dim + mla.rope_head_dim)
    compressed = linear("wkv_a", x)
    kv = linear("wkv_b", norm("kv_norm", compressed[:, : mla.kv_rank])).reshape(seq, heads, -1)
    shared_key = np.array([turn(token, position) for position, token in enumerate(compressed[:, mla.kv_rank :])])
    out = np.zeros((seq, heads, mla.v_head_dim))
    for position in range(seq):
        for head in range(heads):
            plain = q[position, head, : mla.nope_head_dim]
            turned = turn(q[position, head, mla.nope_head_dim :], position)
            scores = np.array(
                [
                    (plain @ kv[key, head, : mla.nope_head_dim] + turned @ shared_key[key])
                    / math.sqrt(mla.nope_head_dim + mla.rope_head_dim)
                    for key in range(position + 1)
                ]
            )
            exponentials = np.exp(scores - scores.max())
            out[position, head] = exponentials / exponentials.sum() @ kv[: position + 1, head, mla.nope_head_dim :]
    return linear("wo", out.reshape(seq, -1))


@latent
def test_a_layer_computes_with_the_heads_that_its_weights_have(model: ModelConfig):
    """Two halves of the heads, as tensor parallelism would hold them, add up to the whole attention."""
    model = replace(model, bias=False)
    x = torch.randn(2, 9, model.d_model, dtype=torch.float64)
    rotary = build(model).rotary(torch.arange(9), torch.float64)
    whole, parts = attention(model)(x, rotary, None, None), []
    for half in range(2):
        attn = attention(model)
        for linear in (attn.wq_b if attn.compresses_queries else attn.wq, attn.wkv_b):
            linear.weight = torch.nn.Parameter(linear.weight.chunk(2, dim=0)[half])
        attn.wo.weight = torch.nn.Parameter(attn.wo.weight.chunk(2, dim=1)[half])
        parts.append(attn(x, rotary, None, None))
    torch.testing.assert_close(parts[0] + parts[1], whole, rtol=1e-12, atol=1e-12)


@latent
def test_what_is_cached_are_whole_keys_and_values(model: ModelConfig):
    attn, x = attention(model), torch.randn(1, 6, model.d_model, dtype=torch.float64)
    rotary = build(model).rotary(torch.arange(6), torch.float64)
    cache = Cache(6)
    attn(x, rotary, None, cache)
    keys, values = cache.extend(attn.layer, torch.empty(1, 4, 0, model.head_size), torch.empty(1, 4, 0, 1))
    assert (keys.shape[1], keys.shape[3]) == (model.n_heads, model.head_size)
    assert (values.shape[1], values.shape[3]) == (model.n_heads, model.mla.v_head_dim)


@pytest.mark.parametrize("name", MOE_AND_MLA)
def test_greedy_text_equals_one_forward_pass_a_token(name: str):
    model = MOE_AND_MLA[name]
    transformer, inputs = build(model), tokens(model, 3, 3)
    expected = inputs
    for _ in range(10):
        best = transformer(expected[:, -model.seq_len :])[:, -1].argmax(dim=-1)
        expected = torch.cat((expected, best[:, None]), dim=1)
    assert torch.equal(generate(transformer, inputs, max_new_tokens=10, temperature=0), expected)


def test_only_the_rotary_part_has_frequencies():
    model = MOE_AND_MLA["deepseek"]
    assert rotary_frequencies(model, torch.device("cpu")).tolist() == pytest.approx([1.0, 10_000**-0.5])
    stretched = replace(model, rope_scaling=RopeScaling(kind="linear", factor=2.0))
    assert rotary_frequencies(stretched, torch.device("cpu")).tolist() == pytest.approx([0.5, 10_000**-0.5 / 2])


@pytest.mark.parametrize("name", ["deepseek", "latent"])
def test_distances_are_all_that_positions_say(name: str):
    transformer, inputs = build(MOE_AND_MLA[name]), tokens(MOE_AND_MLA[name], 1, 8)
    shifted = transformer(inputs, positions=torch.arange(100, 108))
    torch.testing.assert_close(shifted, transformer(inputs), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["deepseek", "latent"])
def test_documents_in_one_sequence_are_as_each_alone(name: str):
    model = replace(MOE_AND_MLA[name])
    transformer, inputs = build(model), tokens(model, 1, 10)
    documents = Documents(torch.tensor([[0] * 4 + [1] * 6]))
    whole = transformer(inputs, documents=documents)
    torch.testing.assert_close(whole[:, 4:], transformer(inputs[:, 4:]), rtol=1e-9, atol=1e-9)
