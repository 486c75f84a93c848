from __future__ import annotations

from dataclasses import replace
from math import prod
from statistics import NormalDist

import pytest
import torch
from torch import nn

from model.kinds import KINDS
from phalanx.blocks.parameters import parameter_shapes
from phalanx.config.presets import PRESETS
from phalanx.model import seeding
from phalanx.model.moe import Routing
from phalanx.model.seeding import initial_value, initialise, initialise_part, normal
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
