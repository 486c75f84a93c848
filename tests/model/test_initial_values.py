"""Initial values, noise and adapters."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from statistics import NormalDist

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from blocks.test_parameters import MODELS, adapted
from model.kinds import KINDS, build, tokens
from phalanx.blocks.parameters import parameter_shapes
from phalanx.config.model import LoRA
from phalanx.config.presets import PRESETS
from phalanx.errors import ExtensionError
from phalanx.model import seeding
from phalanx.model.layers import Linear
from phalanx.model.moe import GroupedLinear, Routing
from phalanx.model.seeding import Noise, dropout, initial_value, initialise, initialise_part, normal, perturbed
from phalanx.model.transformer import Block, Transformer
from phalanx.parallel.parameter_shards import ParameterShard
from phalanx.partition.tensor_slices import TensorSlice

GPT2 = KINDS["gpt2"]


def initialised(dtype: torch.dtype = torch.float32, seed: int = 1) -> dict[str, torch.Tensor]:
    transformer = Transformer(GPT2).to(dtype)
    initialise(transformer, GPT2, seed)
    return dict(transformer.named_parameters())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_data_type_only_rounds(dtype: torch.dtype):
    for (name, one), other in zip(initialised().items(), initialised(dtype).values(), strict=True):
        assert torch.equal(one.to(dtype), other), name


def test_a_part_of_the_model_starts_as_it_does_in_the_whole():
    """A pipeline stage that holds the second block only, built on the meta device."""
    with torch.device("meta"):
        stage = nn.ModuleDict({"blocks": nn.ModuleDict({"1": Block(GPT2, 1, Routing())})})
    stage = stage.to_empty(device="cpu")
    initialise(stage, GPT2, seed=1)
    whole = initialised()
    for name, parameter in stage.named_parameters():
        assert torch.equal(parameter, whole[name]), name


def test_seed_and_name_decide():
    one, other = initialised(seed=1), initialised(seed=2)
    assert not torch.equal(one["embed.weight"], other["embed.weight"])
    assert not torch.equal(one["blocks.0.attn.wq.weight"], one["blocks.1.attn.wq.weight"])
    assert not torch.equal(one["blocks.0.attn.wq.weight"], one["blocks.0.attn.wk.weight"])


def test_torch_global_generator_is_left_alone():
    transformer = Transformer(GPT2)
    state = torch.get_rng_state()
    initialise(transformer, GPT2, seed=1)
    assert torch.equal(state, torch.get_rng_state())


def test_distributions():
    model = replace(PRESETS["gpt2"], n_layers=8, init_std=0.03)
    shapes = parameter_shapes(model)
    for name, std in (
        ("embed.weight", 0.03),
        ("positions.weight", 0.03),
        ("blocks.3.attn.wq.weight", 0.03),
        ("blocks.3.mlp.up.weight", 0.03),
        ("blocks.3.attn.wo.weight", 0.03 / 4),
        ("blocks.3.mlp.down.weight", 0.03 / 4),
    ):
        value = initial_value(name, shapes[name], model, seed=1)
        assert value.shape == shapes[name]
        assert value.std().item() == pytest.approx(std, rel=0.01), name
        assert abs(value.mean().item()) < std / 100, name


def test_stacked_experts_are_drawn_as_any_matrix():
    model = replace(PRESETS["tiny-deepseek"], n_layers=8)
    shapes = parameter_shapes(model, 65)
    for part, std in (("experts.up", 0.02), ("experts.down", 0.02 / 4), ("shared.down", 0.02 / 4), ("router", 0.02)):
        name = f"blocks.1.moe.{part}.weight"
        assert initial_value(name, shapes[name], model, seed=1).std().item() == pytest.approx(std, rel=0.1), name
    experts = initial_value("blocks.1.moe.experts.up.weight", (8, 64, 64), model, seed=1)
    assert not torch.equal(experts[0], experts[1])


@pytest.mark.parametrize("preset", ["gpt2", "llama3-8b", "deepseek-v3"])
def test_norms_start_at_one_and_biases_at_zero(preset: str):
    model = PRESETS[preset]
    for name, shape in parameter_shapes(replace(model, n_layers=4)).items():
        if len(shape) > 1:
            continue
        expected = torch.zeros(shape) if name.endswith(".bias") else torch.ones(shape)
        assert torch.equal(initial_value(name, shape, model, seed=1), expected), name


def test_the_first_loss_is_that_of_guessing():
    model = replace(PRESETS["tiny"], vocab_size=50)
    transformer = Transformer(model)
    initialise(transformer, model, seed=1)
    logits = transformer(torch.randint(0, 50, (4, 64), generator=torch.Generator().manual_seed(0)))
    assert logits.std().item() < 0.5


@pytest.mark.parametrize("key", [0, -(2**63), 2**63 - 1, 123_456_789])
def test_numbers_are_those_of_the_generator_in_plain_integers(key: int):
    """SplitMix64 and the inverse of the normal distribution, element by element."""
    places, mask = [0, 1, 2, 1000, 2**31, 2**33 + 5, 2**40], 2**64 - 1
    found = normal(torch.tensor(places), key)
    for place, number in zip(places, found.tolist(), strict=True):
        x = (place * 0x9E3779B97F4A7C15 + key) & mask
        x = ((x ^ x >> 30) * 0xBF58476D1CE4E5B9) & mask
        x = ((x ^ x >> 27) * 0x94D049BB133111EB) & mask
        x ^= x >> 31
        tail = ((x >> 32 & 0x7FFFFFFF) + 1) / 2**32
        distance = -NormalDist().inv_cdf(tail) if tail < 0.5 else 0.0
        assert number == pytest.approx(distance if x & 1 else -distance, abs=3e-5)


def test_numbers_are_normal_and_independent():
    count = 2**20
    z = normal(torch.arange(count), 7).double()
    # Each within 5 standard errors of its expectation.
    for power, expected, error in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert (z**power).mean().item() == pytest.approx(expected, abs=5 * (error / count) ** 0.5)
    for distance in (1, 2, 64, 1024):
        assert (z[distance:] * z[:-distance]).mean().item() == pytest.approx(0, abs=5 / count**0.5)
    other = normal(torch.arange(count), 8).double()
    assert (z * other).mean().item() == pytest.approx(0, abs=5 / count**0.5)


@pytest.mark.parametrize("chunk", [2**15, 100])
@pytest.mark.parametrize("name", ["embed.weight", "blocks.0.attn.wo.weight", "blocks.1.mlp.up.weight"])
@pytest.mark.parametrize("dim", [None, 0, 1])
def test_a_shard_is_drawn_as_it_lies_in_the_whole(monkeypatch, name: str, dim: int | None, chunk: int):
    """A part that begins at element 37 of a padded slice, that of the last of four tensor ranks."""
    monkeypatch.setattr(seeding, "CHUNK", chunk)
    whole = tuple(dict(initialised())[name].shape)
    size = -(-whole[dim] // 4) + 1 if dim is not None else 0
    part = TensorSlice(whole) if dim is None else TensorSlice(whole, dim, 3 * size, size)
    held = torch.full((prod(part.shape) - 50,), torch.nan)
    shard = ParameterShard(name, (part,), 0, 37, held)
    initialise_part(held, name, whole, GPT2, 1, shard.places)
    expected = torch.empty_like(held)
    ParameterShard(name, (part,), 0, 37, expected).assign(initial_value(name, whole, GPT2, 1))
    assert torch.equal(held, expected)
    assert part.padding == (dim is not None)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
@pytest.mark.parametrize("split", [(4,), (2, 2), (1, 3), (1, 1, 1, 1)])
def test_any_split_of_a_batch_gives_the_same_logits(kind: str, split: tuple[int, ...]):
    model = replace(KINDS[kind], dropout=0.25)
    transformer, inputs, samples = build(model), tokens(model, 4, 10), (11, 7, 3, 1000)
    whole = transformer(inputs, noise=Noise(1, 2, samples))
    parts, start = [], 0
    for size in split:
        rows = slice(start, start + size)
        parts.append(transformer(inputs[rows], noise=Noise(1, 2, samples[rows])))
        start += size
    torch.testing.assert_close(torch.cat(parts), whole, rtol=1e-12, atol=1e-12)


def test_every_kind_of_site_drops():
    """With one sample alone differing, each site's mask shows in what the model computes."""
    model = replace(KINDS["gpt2"], dropout=0.5)
    transformer, inputs = build(model), tokens(model, 1, 10)
    sites: list[str] = []

    class Recorder(Noise):
        def _drawn(self, site: str, *rest, **more):
            sites.append(site)
            return super()._drawn(site, *rest, **more)

    transformer(inputs, noise=Recorder(1, 2, (3,), embeddings=0.1))
    block = ("attn.probabilities", "attn.residual", "mlp.residual")
    assert sites == ["embed.noise", "embed", *(f"blocks.{layer}.{site}" for layer in range(2) for site in block)]


def test_each_part_of_the_key_changes_the_mask():
    ones = torch.ones(1, 16, 16)
    base = Noise(1, 2, (3,)).dropout(ones, 0.5, "a")
    assert torch.equal(base, Noise(1, 2, (3,)).dropout(ones, 0.5, "a"))
    for noise, site in (
        (Noise(9, 2, (3,)), "a"),
        (Noise(1, 9, (3,)), "a"),
        (Noise(1, 2, (9,)), "a"),
        (Noise(1, 2, (3,)), "b"),
    ):
        differing = (noise.dropout(ones, 0.5, site) != base).float().mean().item()
        assert 0.3 < differing < 0.7


def test_masks_do_not_depend_on_the_data_type():
    noise = Noise(1, 2, (3, 4))
    masks = [
        noise.dropout(torch.ones(2, 5, 7, dtype=dtype), 0.3, "a") != 0
        for dtype in (torch.float64, torch.float32, torch.bfloat16)
    ]
    assert torch.equal(masks[0], masks[1])
    assert torch.equal(masks[0], masks[2])


def test_a_shard_of_the_heads_meets_its_part_of_the_mask():
    probabilities = torch.ones(2, 6, 5, 5)
    whole = Noise(1, 2, (3, 4)).dropout_heads(probabilities, 0.4, "a", n_heads=6)
    for part in range(3):
        here = slice(2 * part, 2 * part + 2)
        shard = Noise(1, 2, (3, 4), heads=(part, 3)).dropout_heads(probabilities[:, here], 0.4, "a", n_heads=6)
        assert torch.equal(shard, whole[:, here])


def test_noise_on_embeddings_is_uniform_and_the_same_in_every_type():
    noise = Noise(1, 2, (3, 4), embeddings=0.25)
    zeros = torch.zeros(2, 64, 32, dtype=torch.float64)
    found = noise.perturbed(zeros)
    assert 0.249 < found.abs().max() < 0.25
    assert found.mean().abs() < 0.01
    assert found.std().item() == pytest.approx(0.25 / 3**0.5, rel=0.02)
    for dtype in (torch.float32, torch.bfloat16):
        torch.testing.assert_close(noise.perturbed(zeros.to(dtype)), found.to(dtype))
    places = torch.tensor([1, 5, 6])
    part = replace(noise, places=places, seq_len=64).perturbed(zeros[:, :3])
    assert torch.equal(part, found[:, places])
    assert torch.equal(perturbed(zeros, None), zeros)


@settings(max_examples=40)
@given(samples=st.integers(1, 6), each=st.integers(1, 4), parts=st.integers(1, 5))
def test_a_part_of_the_tokens_meets_its_part_of_the_mask(samples: int, each: int, parts: int):
    """Tokens are in the order (sample, position), so a part may begin and end within a sample."""
    ids, width = range(7, 7 + samples), 3
    whole = Noise(1, 2, ids).dropout(torch.ones(samples, each * parts, width), 0.4, "a")
    found = [
        Noise(1, 2, ids, tokens=(part, parts)).dropout(torch.ones(samples, each, width), 0.4, "a").flatten(0, 1)
        for part in range(parts)
    ]
    assert torch.equal(torch.cat(found), whole.flatten(0, 1))


@settings(deadline=None, max_examples=20)
@given(p=st.floats(0.01, 0.95), shape=st.sampled_from([(2, 200, 151), (3, 4, 100, 99), (1, 100_003)]))
def test_the_share_dropped_is_p_and_the_mean_is_kept(p: float, shape: tuple[int, ...]):
    x = torch.ones(shape, dtype=torch.float64, requires_grad=True)
    y = Noise(5, 0, range(shape[0])).dropout(x, p, "a")
    deviation = 5 * (p * (1 - p) / x.numel()) ** 0.5  # five standard deviations
    assert abs((y == 0).double().mean().item() - p) < deviation + 2**-16
    assert abs(y.mean().item() - 1) < deviation / (1 - p) + 1e-12
    y.sum().backward()
    assert torch.equal(x.grad, y)


def test_neighbouring_elements_are_independent():
    """Four elements share one 64-bit draw: none may follow from another."""
    kept = (Noise(1, 2, (3,)).dropout(torch.ones(1, 400_000), 0.5, "a")[0] != 0).double().view(-1, 4)
    correlation = torch.corrcoef(kept.T)
    assert (correlation - torch.eye(4, dtype=torch.float64)).abs().max() < 0.015


def test_without_noise_or_probability_nothing_happens():
    x = torch.randn(2, 3)
    assert dropout(x, 0.5, None, "a") is x
    assert dropout(x, 0.0, Noise(1, 2, (3, 4)), "a") is x


def test_the_module_mode_does_not_matter():
    model = replace(KINDS["gpt2"], dropout=0.5)
    transformer, inputs, noise = build(model), tokens(model, 2, 10), Noise(1, 2, (3, 4))
    assert torch.equal(transformer.train()(inputs, noise=noise), transformer.eval()(inputs, noise=noise))
    assert torch.equal(transformer.train()(inputs), transformer.eval()(inputs))


def test_a_batch_of_another_size_than_the_sample_ids_is_refused():
    with pytest.raises(ValueError, match=r"mask \(1, 3\) for activations \(2, 3\)"):
        Noise(1, 2, (3,)).dropout(torch.ones(2, 3), 0.5, "a")


@pytest.mark.parametrize("spans", [2, 3, 4])
@pytest.mark.parametrize("parts", [1, 2])
def test_slices_of_sequences_meet_the_masks_of_whole_ones(spans: int, parts: int):
    """Also where tensor ranks have a part of the tokens: of a slice as of a whole sequence."""
    samples, tokens, width = 3, 24, 5
    whole = Noise(1, 2, (4, 5, 6)).dropout(torch.ones(samples, tokens, width), 0.4, "a")
    for span, expected in enumerate(whole.split(tokens // spans, 1)):
        flat = expected.flatten(0, 1)
        places = torch.arange(tokens * span // spans, tokens * (span + 1) // spans)
        mine = [
            Noise(1, 2, (4, 5, 6), tokens=(part, parts), places=places, seq_len=tokens).dropout(
                torch.ones(samples, tokens // spans // parts, width), 0.4, "a"
            )
            for part in range(parts)
        ]
        assert torch.equal(torch.cat([each.flatten(0, 1) for each in mine]), flat)


@pytest.mark.parametrize("spans", [1, 2, 4])
@pytest.mark.parametrize("parts", [1, 2])
def test_slices_of_queries_meet_the_masks_of_all_keys_so_far(spans: int, parts: int):
    heads, tokens = 4, 8
    whole = Noise(1, 2, (4, 5)).dropout_heads(torch.ones(2, heads, tokens, tokens), 0.4, "a", heads)
    for span in range(spans):
        first, last = tokens * span // spans, tokens * (span + 1) // spans
        for part in range(parts):
            mine = range(heads * part // parts, heads * (part + 1) // parts)
            noise = Noise(1, 2, (4, 5), heads=(part, parts), places=torch.arange(first, last), seq_len=tokens)
            found = noise.dropout_heads(torch.ones(2, len(mine), last - first, last), 0.4, "a", heads)
            assert torch.equal(found, whole[:, mine.start : mine.stop, first:last, :last])


# A model with adapters computes W x + alpha / rank · B (A x): as a formula, and as the model with merged weights.

TOKENS = torch.arange(16).view(2, 8) % 20


def filled(model, seed=1):
    """The model with initial weights, and adapters that have an effect."""
    made = Transformer(model).double()
    initialise(made, model, seed)
    generator = torch.Generator().manual_seed(5)
    for name, parameter in made.named_parameters():
        if ".lora_b." in name:
            parameter.data.normal_(0, 0.1, generator=generator)
    return made


def test_a_linear_layer_adds_the_product_of_two_small_ones():
    layer = Linear(6, 5).double()
    layer.add_adapter(2, 1.5)
    layer.double()
    x = torch.randn(3, 6, dtype=torch.float64)
    a, b = layer.lora_a.weight, layer.lora_b.weight
    expected = x @ (layer.weight + 1.5 * b @ a).T + layer.bias
    torch.testing.assert_close(layer(x), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("sizes", [(2, 0, 3), (2, 2, 2)])
def test_so_do_the_layers_of_experts_each_with_its_own(sizes):
    layer = GroupedLinear(3, 6, 5, bias=True)
    layer.add_adapter(2, 0.5)
    layer = layer.double()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    rows = torch.randn(sum(sizes), 6, dtype=torch.float64)
    expected = []
    for expert, part in enumerate(rows.split(sizes)):
        a, b = layer.lora_a.weight[expert], layer.lora_b.weight[expert]
        expected.append(part @ (layer.weight[expert] + 0.5 * b @ a).T + layer.bias[expert])
    torch.testing.assert_close(
        layer(rows, torch.tensor(sizes).cumsum(0).int() if 0 in sizes else None),
        torch.cat(expected),
        rtol=1e-12,
        atol=1e-12,
    )


@pytest.mark.parametrize("targets", ["all", "attention"])
@pytest.mark.parametrize("plain", MODELS.values(), ids=MODELS.keys())
def test_the_merged_model_gives_the_same_logits(plain, targets):
    model = adapted(plain, rank=3, targets=targets)
    made, merged = filled(model), Transformer(plain).double()
    values = dict(made.named_parameters())
    with torch.no_grad():
        for name, parameter in merged.named_parameters():
            parameter.copy_(values[name])
            layer = name.removesuffix(".weight")
            if (a := values.get(f"{layer}.lora_a.weight")) is not None:
                parameter.add_(values[f"{layer}.lora_b.weight"] @ a, alpha=model.lora.alpha / 3)
        torch.testing.assert_close(made(TOKENS), merged(TOKENS), rtol=1e-10, atol=1e-12)


def test_an_adapter_begins_without_effect_and_the_base_is_that_of_the_plain_model():
    plain = MODELS["llama"]
    made, base = Transformer(adapted(plain)).double(), Transformer(plain).double()
    initialise(made, adapted(plain), 3)
    initialise(base, plain, 3)
    with torch.no_grad():
        assert torch.equal(made(TOKENS), base(TOKENS))
    a = initial_value("blocks.1.attn.wq.lora_a.weight", (300, 64), adapted(plain), 3)
    assert a.std().item() == pytest.approx((3 * 64) ** -0.5, rel=0.02)
    assert not torch.equal(a, initial_value("blocks.0.attn.wq.lora_a.weight", (300, 64), adapted(plain), 3))


@pytest.mark.parametrize("plain", [MODELS["gpt"], MODELS["experts"]], ids=["gpt", "experts"])
def test_frozen_weights_have_no_gradients_and_every_adapter_has(plain):
    made = filled(adapted(plain))
    made(TOKENS).square().mean().backward()
    for name, parameter in made.named_parameters():
        assert (parameter.grad is not None) == (".lora_" in name), name


def test_a_target_must_be_a_linear_layer():
    """The router of a package may be a matrix of another module; its description says what it is."""
    model = replace(MODELS["llama"], lora=LoRA(rank=2, targets="wq"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("phalanx.model.transformer.lora.targets", lambda *_: ["core"])
        with pytest.raises(ExtensionError, match="core of its module must be a Linear"):
            Transformer(model)
