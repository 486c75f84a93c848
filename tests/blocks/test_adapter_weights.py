"""Adapters in the description of blocks: their weights, how ranks cut them, what is frozen, and their FLOPs."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from phalanx.blocks.parameters import (
    count,
    count_trained,
    forward_flops_per_token,
    parameter_shapes,
    train_flops_per_step,
    train_flops_per_token,
    trained_shapes,
    trained_text,
    weight_of,
    weights,
)
from phalanx.config.model import MLA, LoRA, ModelConfig, MoE
from phalanx.model.transformer import Transformer

LLAMA = ModelConfig(
    n_layers=2, d_model=16, n_heads=4, n_kv_heads=2, d_ff=24, vocab_size=20, seq_len=8, positions="rope",
    norm="rmsnorm", activation="swiglu", bias=True, tied=False,
)  # fmt: skip
MODELS = {
    "llama": LLAMA,
    "gpt": ModelConfig(n_layers=2, d_model=16, n_heads=4, vocab_size=20, seq_len=8),
    "parallel block": replace(LLAMA, parallel_block=True),
    "latent": replace(
        LLAMA, n_kv_heads=0, mla=MLA(q_rank=8, kv_rank=8, rope_head_dim=4, nope_head_dim=4, v_head_dim=4)
    ),
    "experts": replace(LLAMA, moe=MoE(n_experts=4, top_k=2, d_ff=12, n_shared=1, n_dense_layers=1, bias_balanced=True)),
}
TARGETS = ["all", "attention", "feed_forward"]


def adapted(model: ModelConfig, rank: int = 3, targets: str = "all") -> ModelConfig:
    return replace(model, lora=LoRA(rank=rank, targets=targets))


@pytest.mark.parametrize("targets", TARGETS)
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS.keys())
def test_the_module_has_the_described_parameters_in_their_order(model, targets):
    model = adapted(model, targets=targets)
    with torch.device("meta"):
        made = Transformer(model)
    held = {name: tuple(parameter.shape) for name, parameter in made.named_parameters()}
    assert list(held.items()) == list(parameter_shapes(model).items())
    trained = {name for name, parameter in made.named_parameters() if parameter.requires_grad}
    assert trained == set(trained_shapes(model))
    assert all(".lora_a." in name or ".lora_b." in name for name in trained)
    assert count_trained(model) == sum(parameter.numel() for parameter in made.parameters() if parameter.requires_grad)


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS.keys())
def test_rank_0_changes_nothing(model):
    described = list(weights(replace(model, lora=LoRA(targets="attention", alpha=3))))
    assert described == list(weights(model))
    assert not any(weight.frozen for weight in described)
    assert count_trained(model) == count(model)
    assert train_flops_per_token(model) == 3 * forward_flops_per_token(model)


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS.keys())
def test_an_adapter_is_cut_with_its_matrix(model):
    """By rows B is cut, by columns A; each rank computes a part of the gradient of the other one."""
    model, seen = adapted(model), 0
    for weight in weights(model):
        if not weight.name.endswith(".lora_a.weight"):
            continue
        seen += 1
        matrix = weight_of(model, weight.name.replace(".lora_a", ""))
        b = weight_of(model, weight.name.replace("lora_a", "lora_b"))
        assert [each.frozen for each in (matrix, weight, b)] == [True, False, False]
        *stack, outputs, inputs = matrix.shape
        assert (weight.shape, b.shape) == ((*stack, 3, inputs), (*stack, outputs, 3))
        for ranks in (1, 2, 4):
            part, whole = matrix.shape_on(ranks), weight.shape_on(ranks)
            assert whole[-1] == part[-1], "A reads what the matrix reads"
            assert b.shape_on(ranks)[-2] == part[-2], "B writes what the matrix writes"
        assert (weight.dim is None) == (matrix.cut != "columns")
        assert (b.dim is None) == (matrix.cut != "rows")
        for each in (weight, b):
            if each.dim is None:
                assert each.is_summed(sp=False) or matrix.gradient == "tokens"
    assert seen


@pytest.mark.parametrize(
    ("targets", "layers"),
    [
        ("attention", {"wq", "wk", "wv", "wo"}),
        ("feed_forward", {"up", "gate", "down"}),
        ("wq, wv", {"wq", "wv"}),
        ("attention,down", {"wq", "wk", "wv", "wo", "down"}),
    ],
)
def test_targets_name_halves_and_layers(targets, layers):
    names = trained_shapes(adapted(LLAMA, targets=targets))
    assert {name.split(".")[3] for name in names} == layers


def test_layers_of_experts_have_names_of_their_own():
    experts = MODELS["experts"]
    names = trained_shapes(adapted(experts, targets="attention,shared.up,mlp.up"))
    assert {name for name in names if "moe" in name} == {
        "blocks.1.moe.shared.up.lora_a.weight",
        "blocks.1.moe.shared.up.lora_b.weight",
    }
    assert not any("router" in name for name in trained_shapes(adapted(experts)))


@given(
    rank=st.integers(1, 12),
    shape=st.tuples(st.integers(1, 3), st.sampled_from([8, 16]), st.sampled_from([12, 40])),
    targets=st.sampled_from(TARGETS),
    sequences=st.integers(1, 3),
)
def test_frozen_matrices_have_no_weight_gradients_to_compute(rank, shape, targets, sequences):
    layers, width, hidden = shape
    plain = replace(LLAMA, n_layers=layers, d_model=width, d_ff=hidden, bias=False)
    model = adapted(plain, rank, targets)
    matrices = [prod(weight.shape) for weight in weights(model) if weight.is_matrix and not weight.frozen]
    frozen = [prod(weight.shape) for weight in weights(plain) if weight.is_matrix and weight.name != "embed.weight"]
    attention = train_flops_per_step(plain, sequences) - 6 * sequences * plain.seq_len * sum(frozen)
    expected = sequences * plain.seq_len * (4 * sum(frozen) + 6 * sum(matrices)) + attention
    assert train_flops_per_step(model, sequences) == expected


def test_the_share_that_is_trained_in_words():
    model = adapted(LLAMA, 1, "wo")
    assert trained_text(model) == f"64 of {count(model):,} parameters ({64 / count(model):.2%})"
