"""What model families change inside attention, each against its definition written down naively: windows per layer,
norms of queries and keys, sinks, scales and caps of scores, partial and scaled rotary positions."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from model.kinds import ATTENTION_KINDS, build, tokens
from phalanx.blocks.parameters import parameter_shapes
from phalanx.config.model import ModelConfig, RopeScaling
from phalanx.model.cache import Cache
from phalanx.model.documents import Documents
from phalanx.model.seeding import Noise
from phalanx.model.transformer import Transformer

NOISE = Noise(seed=1, step=0, sample_ids=[0, 1])


def naive_attention(
    model: ModelConfig, layer: int, weights: dict[str, Tensor], x: Tensor, rows: Tensor | None
) -> Tensor:
    """One layer's attention by its definition: token by token, head by head, (batch, seq, d_model) to the same."""
    size, group = model.head_size, model.n_heads // model.kv_heads
    window = model.window if (layer + 1) % (model.full_every or model.n_layers + 1) else 0

    def project(name: str) -> Tensor:
        return x @ weights[f"{name}.weight"].T + weights.get(f"{name}.bias", torch.zeros(1, dtype=x.dtype))

    q, k, v = (project(name) for name in ("wq", "wk", "wv"))
    if model.qk_norm == "width":
        q, k = (normed(x, weights, name, model) for x, name in ((q, "q_norm"), (k, "k_norm")))
    q, k, v = (heads.unflatten(-1, (-1, size)) for heads in (q, k, v))
    if model.qk_norm == "head":
        q, k = (normed(x, weights, name, model) for x, name in ((q, "q_norm"), (k, "k_norm")))
    q, k = turned(q, model, window), turned(k, model, window)
    out = torch.zeros_like(q)
    for b in range(x.shape[0]):
        for head in range(model.n_heads):
            for i in range(x.shape[1]):
                seen = [
                    j
                    for j in range(i + 1)
                    if (not window or i - j < window) and (rows is None or rows[b, j] == rows[b, i])
                ]
                scores = k[b, seen, head // group] @ q[b, i, head] * (model.attention_scale or size**-0.5)
                if model.attention_softcap:
                    scores = model.attention_softcap * torch.tanh(scores / model.attention_softcap)
                weight = scores.exp() / (scores.exp().sum() + (weights["sinks"][head].exp() if model.sinks else 0))
                out[b, i, head] = weight @ v[b, seen, head // group]
    o = out.flatten(2) @ weights["wo.weight"].T
    return o + weights.get("wo.bias", torch.zeros(1, dtype=x.dtype))


def normed(x: Tensor, weights: dict[str, Tensor], name: str, model: ModelConfig) -> Tensor:
    if model.norm == "layernorm":
        x = x - x.mean(-1, keepdim=True)
    x = x / (x.square().mean(-1, keepdim=True) + model.norm_eps).sqrt() * weights[f"{name}.weight"]
    return x + weights.get(f"{name}.bias", torch.zeros(1, dtype=x.dtype))


def turned(x: Tensor, model: ModelConfig, window: int) -> Tensor:
    """Pair by pair as complex numbers, (batch, seq, heads, size) to the same."""
    size = int(model.head_size * model.rotary_fraction)
    theta, scaling = model.rope_theta, model.rope_scaling
    plain = bool(window and model.window_rope_theta)
    if plain:
        theta = model.window_rope_theta
    out, magnitude = x.clone(), 1.0
    for pair in range(size // 2):
        frequency = theta ** (-2 * pair / size)
        if scaling.kind == "yarn" and scaling.factor > 1 and not plain:
            frequency *= yarn(pair, size, theta, scaling)
            magnitude = scaling.magnitude or 0.1 * math.log(scaling.factor) + 1
        if scaling.kind == "linear" and not plain:
            frequency /= scaling.factor
        z = torch.complex(x[..., pair], x[..., pair + size // 2])
        angle = torch.arange(x.shape[1], dtype=x.dtype) * frequency
        z = z * magnitude * torch.polar(torch.ones_like(angle), angle)[:, None]
        out[..., pair], out[..., pair + size // 2] = z.real, z.imag
    return out


def yarn(pair: int, size: int, theta: float, scaling: RopeScaling) -> float:
    """YaRN's factor of a frequency: 1 for pairs that turn beta_fast times in the original context, 1 / factor for
    those that turn beta_slow times, linear in the pair between them."""

    def pair_with(turns: float) -> float:  # original_seq_len × theta ** (-2 pair / size) = 2 π turns
        return size / 2 * math.log(scaling.original_seq_len / (2 * math.pi * turns), theta)

    low, high = pair_with(scaling.beta_fast), pair_with(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    stretched = min(1.0, max(0.0, (pair - low) / (high - low)))
    return 1 - stretched + stretched / scaling.factor


def layers_of(transformer: Transformer, x: Tensor, rows: Tensor | None) -> list[Tensor]:
    """The attention of every layer, each of the same input."""
    positions, found = torch.arange(x.shape[1]), []
    plain, windowed = (transformer.rotary(positions, x.dtype, windowed=windowed) for windowed in (False, True))
    for layer, block in transformer.blocks.items():
        rotary = windowed if transformer.config.window_of(int(layer)) else plain
        found.append(block.attn(x, rotary, None, None, None if rows is None else Documents(rows)))
    return found


@pytest.mark.parametrize("with_documents", [False, True])
@pytest.mark.parametrize("kind", ATTENTION_KINDS)
def test_attention_and_its_gradients_by_definition(kind, with_documents):
    model = ATTENTION_KINDS[kind]
    transformer = build(model)
    torch.manual_seed(3)
    x = torch.randn(2, 9, model.d_model, dtype=torch.float64, requires_grad=True)
    rows = (torch.rand(2, 12) < 0.3).cumsum(1) if with_documents else None
    given = torch.randn_like(x)
    for layer, found in enumerate(layers_of(transformer, x, rows)):
        own = dict(transformer.blocks[str(layer)].attn.named_parameters())
        expected = naive_attention(model, layer, own, x, rows)
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)
        of = [x, *own.values()]
        for name, a, b in zip(
            ("x", *own), torch.autograd.grad(found, of, given), torch.autograd.grad(expected, of, given), strict=True
        ):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-11, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("kind", ATTENTION_KINDS)
def test_the_description_names_every_parameter(kind):
    model = ATTENTION_KINDS[kind]
    shapes = {name: tuple(p.shape) for name, p in Transformer(model).named_parameters()}
    assert list(shapes.items()) == list(parameter_shapes(model).items())


@pytest.mark.parametrize("kind", ATTENTION_KINDS)
def test_a_cache_gives_what_the_whole_sequence_gives(kind):
    model = ATTENTION_KINDS[kind]
    transformer, inputs = build(model), tokens(model, 2, 12)
    expected, cache, found = transformer(inputs), Cache(model.seq_len), []
    for start, stop in ((0, 6), (6, 8), *((i, i + 1) for i in range(8, 12))):
        found.append(transformer(inputs[:, start:stop], cache=cache))
    torch.testing.assert_close(torch.cat(found, dim=1), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", ATTENTION_KINDS)
def test_dropout_of_almost_nothing_is_none(kind):
    """The step by step form of dropout, whose smallest probability drops no element of so few."""
    model = replace(ATTENTION_KINDS[kind], dropout=2**-16)
    transformer, inputs = build(model), tokens(model, 2, 12)
    dropped, plain = (transformer(inputs, noise=noise) for noise in (NOISE, None))
    torch.testing.assert_close(dropped, plain, rtol=1e-3, atol=1e-3)
