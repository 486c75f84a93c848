"""A model with adapters computes W x + alpha / rank · B (A x): as a formula, and as the model with merged weights."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from blocks.test_adapter_weights import MODELS, adapted
from phalanx.config.model import LoRA
from phalanx.errors import ExtensionError
from phalanx.model.layers import Linear
from phalanx.model.moe import GroupedLinear
from phalanx.model.seeding import initial_value, initialise
from phalanx.model.transformer import Transformer

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
