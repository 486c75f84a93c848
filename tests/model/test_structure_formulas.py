"""What lies around attention, by formulas written out for one block: places of norms, parallel blocks, gates, soft
caps, scaled embeddings, biases of routers and experts."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from model.kinds import STRUCTURE_KINDS, build, tokens
from phalanx.blocks.parameters import parameter_shapes
from phalanx.model.layers import Activation, soft_cap
from phalanx.model.seeding import initial_value
from phalanx.model.transformer import Block, Transformer

TOLERANCE = {"rtol": 1e-11, "atol": 1e-11}


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt() * weight + bias


def gelu_tanh(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def block_and_input(kind: str) -> tuple[Transformer, Block, dict[str, Tensor], Tensor, Tensor]:
    """Returns a model of a kind, its first block with its parameters, an input, and the rotary table."""
    model = build(STRUCTURE_KINDS[kind])
    block = model.blocks["0"]
    assert isinstance(block, Block)
    x = torch.randn(2, 6, model.config.d_model, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    rotary = model.rotary(torch.arange(6), torch.float64)
    return model, block, dict(block.named_parameters()), x, rotary


def test_norms_after_the_halves():
    """OLMo 2: x + norm(attention(x)), then x + norm(MLP(x))."""
    model, block, w, x, rotary = block_and_input("norms after")
    eps = model.config.norm_eps
    assert not {"attn_norm.weight", "mlp_norm.weight"} & w.keys()
    middle = x + rms(block.attn(x, rotary, None, None), w["attn_post_norm.weight"], eps)
    gate, up = middle @ w["mlp.gate.weight"].T, middle @ w["mlp.up.weight"].T
    wide = (gate / (1 + (-gate).exp()) * up) @ w["mlp.down.weight"].T
    expected = middle + rms(wide, w["mlp_post_norm.weight"], eps)
    torch.testing.assert_close(block(x, rotary, None, None), expected, **TOLERANCE)


def test_norms_before_and_after_with_a_gelu_gate():
    """Gemma 2: x + norm(attention(norm(x))), then the MLP likewise."""
    model, block, w, x, rotary = block_and_input("norms before and after")
    eps = model.config.norm_eps
    attended = block.attn(rms(x, w["attn_norm.weight"], eps), rotary, None, None)
    middle = x + rms(attended, w["attn_post_norm.weight"], eps)
    normed = rms(middle, w["mlp_norm.weight"], eps)
    wide = gelu_tanh(normed @ w["mlp.gate.weight"].T) * (normed @ w["mlp.up.weight"].T)
    expected = middle + rms(wide @ w["mlp.down.weight"].T, w["mlp_post_norm.weight"], eps)
    torch.testing.assert_close(block(x, rotary, None, None), expected, **TOLERANCE)


def test_a_parallel_block_adds_both_halves_of_one_stream():
    """GPT-NeoX: x + attention(norm(x)) + MLP(another norm(x))."""
    model, block, w, x, rotary = block_and_input("parallel block")
    eps = model.config.norm_eps
    attended = block.attn(layer_norm(x, w["attn_norm.weight"], w["attn_norm.bias"], eps), rotary, None, None)
    normed = layer_norm(x, w["mlp_norm.weight"], w["mlp_norm.bias"], eps)
    inner = normed @ w["mlp.up.weight"].T + w["mlp.up.bias"]
    wide = 0.5 * inner * (1 + torch.erf(inner / math.sqrt(2)))
    expected = x + attended + wide @ w["mlp.down.weight"].T + w["mlp.down.bias"]
    torch.testing.assert_close(block(x, rotary, None, None), expected, **TOLERANCE)


def test_scaled_embeddings_and_capped_logits():
    model = build(STRUCTURE_KINDS["norms before and after"])
    config, inputs = model.config, tokens(model.config, 2, 7)
    table = model.embed.weight
    embedded = model.embed_tokens(inputs, torch.arange(7), None)
    torch.testing.assert_close(embedded, table[inputs] * math.sqrt(config.d_model), **TOLERANCE)
    final = rms(model.hidden(inputs), model.final_norm.weight, config.norm_eps)
    expected = config.logit_softcap * torch.tanh(final @ table.T / config.logit_softcap)
    torch.testing.assert_close(model(inputs), expected, **TOLERANCE)
    assert expected.abs().max() > 0.9 * config.logit_softcap  # so that the cap is felt


def test_an_embeddings_factor_has_the_precision_of_the_activations():
    """As transformers' Gemma: √24 = 4.899 becomes 4.906 in bf16."""
    model = build(replace(STRUCTURE_KINDS["norms before and after"], d_model=24, head_dim=6), torch.bfloat16)
    inputs = tokens(model.config, 1, 5)
    factor = torch.tensor(24**0.5, dtype=torch.bfloat16)
    embedded = model.embed_tokens(inputs, torch.arange(5), None)
    assert torch.equal(embedded, model.embed.weight[inputs] * factor)


def test_experts_with_biases_behind_a_router_with_a_bias():
    """gpt-oss: the gates are a softmax over the best logits, bias included."""
    model, block, w, x, _ = block_and_input("clamped experts")
    moe, out = model.config.moe, torch.zeros_like(x)
    for place in [(row, column) for row in range(2) for column in range(6)]:
        token = x[place]
        logits = w["moe.router.weight"] @ token + w["moe.router.logit_bias"]
        best = logits.topk(moe.top_k)
        for gate, expert in zip(best.values.softmax(0), best.indices.tolist(), strict=True):
            inner = {
                name: w[f"moe.experts.{name}.weight"][expert] @ token + w[f"moe.experts.{name}.bias"][expert]
                for name in ("up", "gate")
            }
            hidden = clamped(inner["up"], inner["gate"])
            out[place] += gate * (w["moe.experts.down.weight"][expert] @ hidden + w["moe.experts.down.bias"][expert])
    torch.testing.assert_close(block.get_submodule("moe")(x), out, **TOLERANCE)


def clamped(up: Tensor, gate: Tensor) -> Tensor:
    """transformers' GptOssExperts._apply_gate."""
    gate, up = gate.clamp(max=7.0), up.clamp(min=-7.0, max=7.0)
    return (up + 1) * (gate * torch.sigmoid(gate * 1.702))


def test_a_clamped_gate_and_its_gradients():
    """Beyond the clamps as well, where a third of these values lie."""
    activate = Activation(STRUCTURE_KINDS["clamped experts"])
    generator = torch.Generator().manual_seed(0)
    up, gate, weight = (torch.randn(40, 9, dtype=torch.float64, generator=generator) * scale for scale in (7, 7, 1))
    inputs = up.requires_grad_(), gate.requires_grad_()
    found, expected = activate(*inputs), clamped(*inputs)
    torch.testing.assert_close(found, expected, **TOLERANCE)
    for ours, theirs in zip(*(torch.autograd.grad((y * weight).sum(), inputs) for y in (found, expected)), strict=True):
        torch.testing.assert_close(ours, theirs, **TOLERANCE)


def test_a_soft_cap_and_its_gradient():
    x = torch.linspace(-90, 90, 37, dtype=torch.float64).requires_grad_()
    found, expected = soft_cap(x, 30.0), 30 * torch.tanh(x / 30)
    torch.testing.assert_close(found, expected, **TOLERANCE)
    weight = torch.linspace(1, 2, 37, dtype=torch.float64)
    gradients = [torch.autograd.grad((y * weight).sum(), x)[0] for y in (found, expected)]
    torch.testing.assert_close(*gradients, **TOLERANCE)


@pytest.mark.parametrize("kind", STRUCTURE_KINDS)
def test_norms_start_at_one_and_biases_at_zero(kind: str):
    model = STRUCTURE_KINDS[kind]
    for name, shape in parameter_shapes(model).items():
        value = initial_value(name, shape, model, seed=1)
        if name.endswith("norm.weight"):
            assert torch.equal(value, torch.ones(shape)), name
        elif name.endswith("bias"):
            assert not value.any(), name
        else:
            assert value.std() > 0, name
