"""The messages of a block by hand: elements of each tensor that ranks exchange, and how often."""

from __future__ import annotations

from dataclasses import replace

import pytest

from phalanx.blocks.kinds import HALVES, block_kinds, half_block
from phalanx.blocks.operator import Message, place_of
from phalanx.config.layout import Layout
from phalanx.config.model import ModelConfig, MoE

D, HEADS, KV_HEADS, HEAD, TOKENS, EXPERTS, TOP_K = 48, 4, 2, 12, 64, 8, 2
LLAMA = ModelConfig(n_layers=1, d_model=D, n_heads=HEADS, n_kv_heads=KV_HEADS, seq_len=TOKENS, positions="rope")
MIXTURE = replace(LLAMA, moe=MoE(n_experts=EXPERTS, top_k=TOP_K, d_ff=32, aux_loss=0.01))


def sent(model: ModelConfig, layout: Layout, axis: str, slices: int = 1) -> list[Message]:
    """The messages of the first block along one axis, in order, of a micro-batch of two sequences."""
    place, kind = place_of(model, layout, 2, slices=slices), block_kinds(model)[0]
    operators = [operator for half in HALVES for operator in half_block(place, kind, half)]
    return [message for operator in operators for message in operator.messages if message.axis == axis]


@pytest.mark.parametrize("ep", [2, 4])
def test_rows_go_to_their_experts_and_back(ep: int):
    dispatch, combine = (m for m in sent(MIXTURE, Layout(dp_shard=4, ep=ep), "ep") if m.collective == "all_to_all")
    assert dispatch == combine
    assert (dispatch.elements, dispatch.copies) == (2 * TOKENS * TOP_K * D, TOP_K)
    assert [dispatch.times(recompute) for recompute in ("none", "selective", "full")] == [2, 2, 3]


@pytest.mark.parametrize("slices", [1, 4])
def test_ranks_tell_each_other_how_many_rows_each_expert_gets(slices: int):
    [counts] = (m for m in sent(MIXTURE, Layout(dp_shard=4, ep=4), "ep", slices) if m.collective == "all_gather")
    assert (counts.elements, counts.number, counts.times("none")) == (4 * EXPERTS, "index", slices)


def test_context_ranks_add_up_the_loads_of_a_sequence_and_share_choices_where_capacity_drops():
    [loads] = sent(MIXTURE, Layout(cp=4), "cp")
    assert (loads.collective, loads.elements, loads.number) == ("all_reduce", 2 * EXPERTS, "index")
    drops = replace(MIXTURE, moe=replace(MIXTURE.moe, capacity=1.25))
    _, choices = sent(drops, Layout(cp=4), "cp")
    assert (choices.collective, choices.elements, choices.number) == ("all_gather", 2 * TOKENS * TOP_K, "index")


def test_a_slice_sends_the_keys_and_values_of_all_slices_so_far():
    """The first of four slices is sent four times, the last once: ten quarters of a rank's keys and values."""
    whole, in_slices = (sent(LLAMA, Layout(cp=2), "ring", slices) for slices in (1, 4))
    assert [message.elements for message in whole] == [2 * TOKENS // 2 * KV_HEADS * 2 * HEAD] * 2
    assert [message.elements for message in in_slices] == [message.elements * 10 / 4 for message in whole]
    assert [(message.number, message.times("none")) for message in whole] == [("activation", 2), ("wide", 1)]


def test_ulysses_exchanges_queries_keys_values_and_the_output():
    inputs, output = sent(LLAMA, Layout(cp=2, cp_ulysses=2), "ulysses")
    assert inputs.elements == 2 * TOKENS // 2 * (HEADS + 2 * KV_HEADS) * HEAD
    assert output.elements == 2 * TOKENS // 2 * HEADS * HEAD
