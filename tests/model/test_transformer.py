"""The transformer: its parts against formulas written out, rotary positions and seeds."""

from __future__ import annotations

import cmath
import math
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from model.kinds import KINDS, MOE_AND_MLA, STRUCTURE_KINDS, build, tokens
from phalanx.blocks.kinds import untrained
from phalanx.blocks.parameters import count, parameter_shapes
from phalanx.config.model import MLA, ModelConfig, MoE, RopeScaling
from phalanx.config.presets import PRESETS
from phalanx.errors import JobError
from phalanx.model.cache import Cache
from phalanx.model.layers import Activation, RMSNorm, rotary_frequencies, rotary_table, rotate, soft_cap
from phalanx.model.seeding import Noise, derive_seed, initial_value
from phalanx.model.transformer import Block, Transformer

kinds = pytest.mark.parametrize("model", KINDS.values(), ids=KINDS.keys())
_ALL = KINDS | MOE_AND_MLA | STRUCTURE_KINDS
all_kinds = pytest.mark.parametrize("model", _ALL.values(), ids=_ALL.keys())


@kinds
def test_logits_equal_those_of_a_reference_written_in_loops(model: ModelConfig):
    transformer = build(model)
    inputs = tokens(model, 2, 10)
    expected = np.stack([reference_logits(transformer, model, row.tolist()) for row in inputs])
    np.testing.assert_allclose(transformer(inputs).detach().numpy(), expected, rtol=1e-10, atol=1e-10)


@all_kinds
def test_step_by_step_attention_equals_the_fused_kernel(model: ModelConfig):
    # So small a probability rounds to dropping nothing, but takes the path that dropout takes.
    transformer, inputs = build(replace(model, dropout=1e-9)), tokens(model, 2, 10)
    with_noise = transformer(inputs, noise=Noise(1, 0, (0, 1)))
    torch.testing.assert_close(with_noise, transformer(inputs), rtol=1e-12, atol=1e-12)


@all_kinds
def test_a_future_token_changes_no_past_logits(model: ModelConfig):
    transformer, inputs = build(model), tokens(model, 1, 10)
    changed = inputs.clone()
    changed[0, 6] = (changed[0, 6] + 1) % model.vocab_size
    before, after = transformer(inputs)[0], transformer(changed)[0]
    torch.testing.assert_close(before[:6], after[:6], rtol=0, atol=1e-13)
    assert (before[6:] - after[6:]).abs().amax(dim=-1).min() > 1e-6


def test_grouped_queries_equal_repeated_keys_and_values():
    model = KINDS["llama"]
    grouped, full = build(model), build(replace(model, n_kv_heads=model.n_heads))
    weights = dict(grouped.state_dict())
    for name in list(weights):
        if name.endswith(("wk.weight", "wv.weight")):
            heads = weights[name].unflatten(0, (model.kv_heads, model.head_size))
            weights[name] = heads.repeat_interleave(model.n_heads // model.kv_heads, dim=0).flatten(0, 1)
    full.load_state_dict(weights)
    inputs = tokens(model, 2, 10)
    torch.testing.assert_close(grouped(inputs), full(inputs), rtol=1e-12, atol=1e-12)


def test_a_layer_computes_with_the_heads_that_its_weights_have():
    """Two halves of the heads, as tensor parallelism would hold them, add up to the whole attention."""
    model = KINDS["llama"]
    block, x = build(model).blocks["0"], torch.randn(2, 10, model.d_model, dtype=torch.float64)
    rotary = build(model).rotary(torch.arange(10), torch.float64)
    whole = block.attn(x, rotary, None, None)
    parts = []
    for half in range(2):
        attn = build(model).blocks["0"].attn
        for name in ("wq", "wk", "wv"):
            linear = getattr(attn, name)
            linear.weight = torch.nn.Parameter(linear.weight.chunk(2, dim=0)[half])
        attn.wo.weight = torch.nn.Parameter(attn.wo.weight.chunk(2, dim=1)[half])
        parts.append(attn(x, rotary, None, None))
    torch.testing.assert_close(parts[0] + parts[1], whole, rtol=1e-12, atol=1e-12)


@all_kinds
def test_a_cache_gives_the_logits_of_the_whole_context(model: ModelConfig):
    transformer, inputs = build(model), tokens(model, 2, 12)
    cache, pieces = Cache(12), []
    for start, stop in ((0, 5), (5, 6), (6, 9), (9, 12)):
        pieces.append(transformer(inputs[:, start:stop], cache=cache))
    assert cache.length == 12
    torch.testing.assert_close(torch.cat(pieces, dim=1), transformer(inputs), rtol=1e-9, atol=1e-9)


def test_positions_place_the_tokens():
    """A rotary model knows distances only, so a shift changes nothing; a gap does."""
    transformer, inputs = build(KINDS["llama"]), tokens(KINDS["llama"], 1, 8)
    here = transformer(inputs)
    shifted = transformer(inputs, positions=torch.arange(100, 108))
    torch.testing.assert_close(shifted, here, rtol=1e-9, atol=1e-9)
    gap = transformer(inputs, positions=torch.tensor([0, 1, 2, 3, 14, 15, 16, 17]))
    torch.testing.assert_close(gap[:, :4], here[:, :4])
    assert (gap[:, 4:] - here[:, 4:]).abs().max() > 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@kinds
def test_lower_precisions_stay_near_float64(model: ModelConfig, dtype: torch.dtype):
    inputs = tokens(model, 2, 10)
    exact = build(model)(inputs)
    logits = build(model).to(dtype)(inputs)
    assert logits.dtype == dtype
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 6e-2}[dtype]
    assert (logits - exact).norm() / exact.norm() < tolerance


@all_kinds
def test_recomputing_the_blocks_repeats_the_masks(model: ModelConfig):
    model = replace(model, dropout=0.3)
    noise, inputs = Noise(1, 5, (8, 9)), tokens(model, 2, 10)
    transformer, recomputed = build(model), build(model)
    for block in recomputed.blocks.values():
        forward = block.forward
        block.forward = lambda *args, forward=forward: checkpoint(
            forward, *args, use_reentrant=False, preserve_rng_state=False
        )
    for each in (transformer, recomputed):
        each(inputs, noise=noise).square().sum().backward()
    for one, other in zip(transformer.parameters(), recomputed.parameters(), strict=True):
        assert (one.grad is not None) == one.requires_grad
        assert one.grad is None or torch.equal(one.grad, other.grad)


@kinds
def test_every_parameter_gets_a_gradient(model: ModelConfig):
    transformer = build(model)
    transformer(tokens(model, 2, 12)).square().sum().backward()
    for name, parameter in transformer.named_parameters():
        assert parameter.grad is not None, name
        if not name.endswith("wk.bias"):  # a constant added to all keys' scores leaves the softmax as it is,
            assert parameter.grad.abs().max() > 1e-8, name  # except through the rotation, so no bound is given


@all_kinds
def test_parameters_are_those_of_the_shape_in_their_order(model: ModelConfig):
    with torch.device("meta"):
        transformer = Transformer(model)
    found = {name: tuple(parameter.shape) for name, parameter in transformer.named_parameters()}
    assert list(found.items()) == list(parameter_shapes(model).items())
    assert list(transformer.state_dict()) == list(found)


@pytest.mark.parametrize("name", [name for name, model in PRESETS.items() if not untrained(model)])
def test_presets_build_on_the_meta_device(name: str):
    preset = PRESETS[name]
    shared = {"shared_keys": 2, "full_every": 2} if preset.shared_keys else {}
    model = replace(preset, n_layers=min(4, preset.n_layers), **shared)
    with torch.device("meta"):
        transformer = Transformer(model, vocab_size=model.vocab_size or 65)
    assert sum(p.numel() for p in transformer.parameters()) == count(model, model.vocab_size or 65)


@settings(deadline=None, max_examples=60)
@given(
    n_layers=st.integers(1, 3),
    n_kv_heads=st.sampled_from([0, 1, 2]),
    head_dim=st.sampled_from([0, 2, 6]),
    d_ff=st.sampled_from([0, 20]),
    norm=st.sampled_from(["layernorm", "rmsnorm"]),
    positions=st.sampled_from(["learned", "rope"]),
    activation=st.sampled_from(["gelu", "gelu_tanh", "swiglu"]),
    bias=st.booleans(),
    qkv_bias=st.booleans(),
    tied=st.booleans(),
    moe=st.builds(
        MoE,
        n_experts=st.sampled_from([0, 4]),
        d_ff=st.sampled_from([0, 12]),
        n_shared=st.integers(0, 2),
        n_dense_layers=st.integers(0, 1),
        bias_balanced=st.booleans(),
        capacity=st.sampled_from([0.0, 0.7]),
    ),
    mla=st.builds(
        MLA,
        q_rank=st.sampled_from([0, 5]),
        kv_rank=st.sampled_from([0, 3]),
        rope_head_dim=st.just(2),
        nope_head_dim=st.just(3),
        v_head_dim=st.just(4),
    ),
)
def test_shapes_equal_the_module_for_any_small_model(**fields):
    model = ModelConfig(d_model=16, n_heads=4, vocab_size=11, seq_len=6, **fields)
    if model.mla.kv_rank:
        model = replace(model, positions="rope")
    transformer = Transformer(model)
    found = {name: tuple(parameter.shape) for name, parameter in transformer.named_parameters()}
    assert list(found.items()) == list(parameter_shapes(model).items())
    assert transformer(torch.zeros(1, 6, dtype=torch.long)).shape == (1, 6, 11)


def test_the_tokenizer_gives_the_vocabulary_where_the_model_leaves_it_open():
    model = replace(KINDS["gpt2"], vocab_size=0)
    assert Transformer(model, vocab_size=65).embed.num_embeddings == 65
    with pytest.raises(JobError, match=r"set model\.vocab_size to a number of tokens"):
        Transformer(model)


def test_shapes_that_make_no_sense_are_refused_all_at_once():
    model = replace(KINDS["gpt2"], moe=MoE(n_experts=4, top_k=5), mla=MLA(kv_rank=8))
    with pytest.raises(JobError) as caught:
        Transformer(model)
    assert len(caught.value.problems) == 2
    assert "model.moe.top_k: must lie between 1 and n_experts 4, is 5" in str(caught.value)
    assert "model.positions: latent attention needs rotary positions: rope, is learned" in str(caught.value)


def test_more_tokens_than_learned_positions_are_refused():
    model = KINDS["gpt2"]
    with pytest.raises(JobError, match="13 tokens, but the model has 12 learned positions"):
        build(model)(tokens(model, 1, 13))
    build(KINDS["llama"])(tokens(KINDS["llama"], 1, 13))


def reference_logits(transformer: Transformer, model: ModelConfig, sequence: list[int]) -> np.ndarray:
    """Logits (seq, vocab) of one sequence, one position, head and pair of elements at a time, in numpy's float64."""
    weights = {name: p.detach().double().numpy() for name, p in transformer.named_parameters()}
    size, group = model.head_size, model.n_heads // model.kv_heads

    def linear(name: str, x: np.ndarray) -> np.ndarray:
        y = np.einsum("oi,...i->...o", weights[f"{name}.weight"], x)
        return y + weights[f"{name}.bias"] if f"{name}.bias" in weights else y

    def norm(name: str, x: np.ndarray) -> np.ndarray:
        if model.norm == "layernorm":
            x = x - x.mean(-1, keepdims=True)
        y = x / np.sqrt((x * x).mean(-1, keepdims=True) + model.norm_eps) * weights[f"{name}.weight"]
        return y + weights[f"{name}.bias"] if f"{name}.bias" in weights else y

    def activate(layer: int, x: np.ndarray) -> np.ndarray:
        up = linear(f"blocks.{layer}.mlp.up", x)
        if model.activation == "swiglu":
            gate = linear(f"blocks.{layer}.mlp.gate", x)
            return gate / (1 + np.exp(-gate)) * up
        if model.activation == "gelu_tanh":
            return 0.5 * up * (1 + np.tanh(math.sqrt(2 / math.pi) * (up + 0.044715 * up**3)))
        return up * np.vectorize(lambda value: 0.5 * (1 + math.erf(value / math.sqrt(2))))(up)

    def turn(head: np.ndarray, position: int) -> np.ndarray:
        out = head.copy()
        for pair in range(size // 2):
            angle = position * reference_frequency(model, pair)
            a, b = head[pair], head[pair + size // 2]
            out[pair] = a * math.cos(angle) - b * math.sin(angle)
            out[pair + size // 2] = b * math.cos(angle) + a * math.sin(angle)
        return out

    x = weights["embed.weight"][sequence]
    if model.positions == "learned":
        x = x + weights["positions.weight"][: len(sequence)]
    for layer in range(model.n_layers):
        h = norm(f"blocks.{layer}.attn_norm", x)
        q, k, v = (
            linear(f"blocks.{layer}.attn.{name}", h).reshape(len(sequence), -1, size) for name in ("wq", "wk", "wv")
        )
        if model.positions == "rope":
            q, k = (
                np.array([[turn(head, position) for head in token] for position, token in enumerate(each)])
                for each in (q, k)
            )
        out = np.zeros_like(q)
        for position in range(len(sequence)):
            for head in range(model.n_heads):
                scores = [q[position, head] @ k[s, head // group] / math.sqrt(size) for s in range(position + 1)]
                exponentials = np.exp(np.array(scores) - max(scores))
                out[position, head] = exponentials / exponentials.sum() @ v[: position + 1, head // group]
        x = x + linear(f"blocks.{layer}.attn.wo", out.reshape(len(sequence), -1))
        x = x + linear(f"blocks.{layer}.mlp.down", activate(layer, norm(f"blocks.{layer}.mlp_norm", x)))
    head = weights["embed.weight" if model.tied else "head.weight"]
    return norm("final_norm", x) @ head.T


def reference_frequency(model: ModelConfig, pair: int) -> float:
    """Radians per position, as the Llama 3.1 release words its rule: by wavelength."""
    frequency = 1 / model.rope_theta ** (2 * pair / model.head_size)
    scaling = model.rope_scaling
    if scaling.factor == 1:
        return frequency
    if scaling.kind == "linear":
        return frequency / scaling.factor
    wavelength = 2 * math.pi / frequency
    if wavelength < scaling.original_seq_len / scaling.high_freq_factor:
        return frequency
    if wavelength > scaling.original_seq_len / scaling.low_freq_factor:
        return frequency / scaling.factor
    smooth = (scaling.original_seq_len / wavelength - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    return (1 - smooth) * frequency / scaling.factor + smooth * frequency


# What lies around attention, by formulas written out for one block: places of norms, parallel blocks, gates, soft
# caps, scaled embeddings, biases of routers and experts.

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
        if name.endswith("scale") or ("norm" in name and name.endswith("weight")) or "rescale" in name:
            assert torch.equal(value, torch.ones(shape)), name
        elif name.endswith("bias"):
            assert not value.any(), name
        else:
            assert value.std() > 0, name


CPU = torch.device("cpu")


@pytest.mark.parametrize("weighted", [True, False])
def test_rms_norms_on_a_cpu_are_torch_s(weighted):
    torch.manual_seed(1)
    norm, x = RMSNorm(12, eps=1e-5, elementwise_affine=weighted).double(), torch.randn(2, 5, 12, dtype=torch.float64)
    inputs = [x.requires_grad_(), *(torch.nn.init.normal_(parameter) for parameter in norm.parameters())]
    found, expected = norm(x), torch.nn.functional.rms_norm(x, (12,), norm.weight, 1e-5)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    of_norm, of_torch = (torch.autograd.grad(y, inputs, x.detach().cos()) for y in (found, expected))
    torch.testing.assert_close(of_norm, of_torch, rtol=1e-12, atol=1e-12)


def test_the_gradient_of_a_rotation_is_the_compiler_s(monkeypatch):
    table = torch.rand(5, 3, dtype=torch.float64)
    table = torch.stack((table.cos(), table.sin())).unsqueeze(-2)
    x = torch.randn(2, 5, 4, 8, dtype=torch.float64, requires_grad=True)  # a quarter of each head stays
    gradients = []
    for compiling in (False, True):
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda compiling=compiling: compiling)
        gradients += torch.autograd.grad(rotate(x, table), x, x.detach().cos())
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["llama", "llama 3.1", "linear scaling"])
def test_rotation_multiplies_pairs_half_a_head_apart_by_a_unit_complex_number(name: str):
    model = KINDS[name]
    x = torch.randn(1, 5, 3, model.head_size, dtype=torch.float64)
    positions = torch.tensor([0, 1, 7, 1000, 100_000])
    turned = rotate(x, rotary_table(model, positions, x.dtype))
    half = model.head_size // 2
    for row, position in enumerate(positions.tolist()):
        for head in range(3):
            for pair in range(half):
                before = complex(x[0, row, head, pair].item(), x[0, row, head, pair + half].item())
                after = before * cmath.exp(1j * position * reference_frequency(model, pair))
                assert turned[0, row, head, pair].item() == pytest.approx(after.real, abs=1e-9)
                assert turned[0, row, head, pair + half].item() == pytest.approx(after.imag, abs=1e-9)


@pytest.mark.parametrize("name", ["llama3-8b", "llama3-405b"])
def test_frequencies_of_llama_3(name: str):
    model = PRESETS[name]
    expected = [reference_frequency(model, pair) for pair in range(model.head_size // 2)]
    torch.testing.assert_close(rotary_frequencies(model, CPU), torch.tensor(expected, dtype=torch.float64))


def test_llama_3_scaling_keeps_fast_pairs_and_stretches_slow_ones():
    plain = PRESETS["llama3-8b"]
    stretched = replace(plain, rope_scaling=RopeScaling(factor=8.0))
    ratio = rotary_frequencies(plain, CPU) / rotary_frequencies(stretched, CPU)
    torch.testing.assert_close(ratio[:28], torch.ones(28, dtype=torch.float64))
    torch.testing.assert_close(ratio[-28:], torch.full((28,), 8.0, dtype=torch.float64))
    assert (ratio.diff() >= -1e-12).all()


def test_the_table_is_precise_even_for_bfloat16_activations():
    model = ModelConfig(positions="rope")
    positions = torch.tensor([131_071])
    table = rotary_table(model, positions, torch.bfloat16)
    assert table.dtype == torch.float32
    exact = rotary_table(model, positions, torch.float64)
    torch.testing.assert_close(table.double(), exact, rtol=0, atol=1e-7)
    assert rotate(torch.ones(1, 1, 4, model.head_size, dtype=torch.bfloat16), table).dtype == torch.bfloat16


def test_streams_stay_as_they_are():
    """A change here changes every run that is resumed or repeated."""
    assert derive_seed(1337, "init", "embed.weight") == 13_559_255_888_090_162_834


def test_every_part_of_the_key_counts():
    keys = list(product((1, 2), ("init", "dropout"), ("a", "b"), (0, 1)))
    assert len({derive_seed(*key) for key in keys}) == len(keys)
    assert all(0 <= derive_seed(*key) < 2**64 for key in keys)
