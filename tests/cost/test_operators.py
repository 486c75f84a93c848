"""The operations of a block against the exact count of FLOPs, for every kind of model and layout."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.blocks.kinds import block, block_kinds
from phalanx.blocks.operator import Operator, Place, place_of
from phalanx.blocks.parameters import (
    block_flops_per_token,
    head_flops_per_token,
    train_flops_per_step,
)
from phalanx.blocks.residual import head
from phalanx.config.clusters import ACCELERATORS
from phalanx.config.layout import Layout
from phalanx.config.presets import PRESETS
from phalanx.cost.frameworks import FRAMEWORKS
from phalanx.cost.kernels import operator_seconds
from phalanx.cost.prediction import hardware_flops_per_step


def flops(operators: Iterable[Operator], place: Place, without: str = "") -> int:
    """Forward FLOPs of the matrix products and of attention without a mask."""
    found = 0
    for operator in operators:
        product = operator.product(place.tp, place.ep)
        found += product.flops if product and operator.name != without else 0
        found += operator.core.flops if operator.core else 0
    return found


@pytest.mark.parametrize("preset", ["gpt2", "llama3-8b", "llama3-70b", "mixtral-8x7b", "deepseek-v3", "tiny-moe"])
def test_a_block_has_the_flops_of_the_model(preset: str) -> None:
    model = replace(PRESETS[preset], vocab_size=32000)
    layer, place = model.n_layers - 1, Place(model, sequences=2)
    tokens = 2 * model.seq_len
    whole = block(place, block_kinds(model)[layer])
    assert flops(whole, place) == pytest.approx(tokens * block_flops_per_token(model, layer))
    assert flops(head(place, 32000), place) == tokens * head_flops_per_token(model)


@given(st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4]))
def test_ranks_share_the_flops(tp: int, cp: int, ep: int) -> None:
    model = PRESETS["mixtral-8x7b"]
    kind = block_kinds(model)[0]
    here, whole = place_of(model, Layout(tp=tp, cp=cp, dp_shard=4, ep=ep)), Place(model)
    shared, alone = (flops(block(place, kind), place, without="router") for place in (here, whole))
    assert tp * cp * shared == pytest.approx(alone)


def test_hardware_flops_count_what_is_computed_twice() -> None:
    model = PRESETS["gpt3-175b"]
    plain = train_flops_per_step(model, 8)
    assert hardware_flops_per_step(model, Layout(), 8) == plain
    full = hardware_flops_per_step(model, Layout(recompute="full"), 8)
    selective = hardware_flops_per_step(model, Layout(recompute="selective"), 8)
    # Narayanan et al. 2021, equation 3 (96 B s l h² …): four forward passes of the blocks, three of the head.
    tokens, h, s, layers, vocab = 8 * 2048, 12288, 2048, 96, 50257
    assert full == pytest.approx(96 * tokens * layers * h**2 * (1 + s / (6 * h)) + 6 * tokens * h * vocab)
    assert plain < selective < 1.03 * plain < full


@pytest.mark.parametrize(("sequences", "kernels"), [(1, 4), (2, 0)])
def test_megatrons_softmax_is_fused_for_multiples_of_four_heads(sequences: int, kernels: int) -> None:
    """Two heads per rank: one sequence has two, two sequences have four (FusedScaleMaskSoftmax.is_kernel_available)."""
    model, device, megatron = PRESETS["gpt3-175b"], ACCELERATORS["a100-80gb"], FRAMEWORKS["megatron-2021"]
    here = place_of(model, Layout(tp=48), sequences)
    every, fused = (
        operator_seconds(device, block(here, block_kinds(model)[0]), framework, "bf16", 48)
        for framework in (megatron, replace(megatron, softmax_heads=1))
    )
    assert every.host_forward - fused.host_forward == pytest.approx(kernels * megatron.kernel_us * 1e-6)
    assert (every.forward > fused.forward) == (every.backward > fused.backward) == bool(kernels)
