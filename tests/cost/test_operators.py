"""The operations of a block against the exact count of FLOPs, for every kind of model and layout."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.blocks.flops import (
    block_flops_per_token,
    head_flops_per_token,
    train_flops_per_step,
)
from phalanx.config.layout import Layout
from phalanx.config.presets import PRESETS
from phalanx.cost.flops import hardware_flops_per_step
from phalanx.cost.time.operators import block, head


@pytest.mark.parametrize("preset", ["gpt2", "llama3-8b", "llama3-70b", "mixtral-8x7b", "deepseek-v3", "tiny-moe"])
def test_a_block_has_the_flops_of_the_model(preset: str) -> None:
    model = replace(PRESETS[preset], vocab_size=32000)
    layer = model.n_layers - 1
    tokens = 2 * model.seq_len
    assert block(model, layer, Layout(), 2).flops == pytest.approx(tokens * block_flops_per_token(model, layer))
    assert head(model, Layout(), 2).flops == tokens * head_flops_per_token(model)


@given(st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4]))
def test_ranks_share_the_flops(tp: int, cp: int, ep: int) -> None:
    model = PRESETS["mixtral-8x7b"]
    shared = block(model, 0, Layout(tp=tp, cp=cp, dp_shard=4, ep=ep), 1)
    router = sum(2 * p.m * p.n * p.k for p in shared.products if p.name == "router")
    whole = block(model, 0, Layout(), 1)
    alone = sum(2 * p.m * p.n * p.k for p in whole.products if p.name == "router")
    assert tp * cp * (shared.flops - router) == pytest.approx(whole.flops - alone)


def test_memory_bound_work_is_cut_by_sequence_parallelism() -> None:
    model = PRESETS["llama3-8b"]
    plain, cut = ({s.name: s.forward for s in block(model, 0, Layout(tp=4, sp=sp), 1).streams} for sp in (False, True))
    assert cut["norms"] == plain["norms"] / 4
    assert cut["mlp.activation"] == plain["mlp.activation"]


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
