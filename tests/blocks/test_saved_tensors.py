"""Tensors that attention saves only under some layouts and frameworks, in bytes per token, by hand."""

from __future__ import annotations

from phalanx.blocks.kinds import block, block_kinds
from phalanx.blocks.operator import PHALANX, MemoryProfile, place_of
from phalanx.config.layout import Layout
from phalanx.config.model import ModelConfig

HEADS, KV_HEADS, HEAD, TOKENS, WIDTH = 8, 2, 6, 64, 2
LLAMA = ModelConfig(
    n_layers=1, d_model=HEADS * HEAD, n_heads=HEADS, n_kv_heads=KV_HEADS, seq_len=TOKENS, positions="rope"
)


def saved(layout: Layout, profile: MemoryProfile = PHALANX) -> dict[str, float]:
    place = place_of(LLAMA, layout, width=WIDTH, profile=profile)
    return {one.operator: one.size for op in block(place, block_kinds(LLAMA)[0]) for one in op.saved}


def test_unfused_attention_gives_every_query_head_keys_and_values_of_its_own():
    """The projections' keys and values stay, and copies for the six heads that had none."""
    found = saved(Layout(), MemoryProfile(scores="always"))
    assert found["keys, values"] == 2 * KV_HEADS * HEAD * WIDTH
    assert found["keys, values of each head"] == 2 * (HEADS - KV_HEADS) * HEAD * WIDTH
    assert found["softmax"] == HEADS * TOKENS * WIDTH
    assert "keys, values of each head" not in saved(Layout())


def test_ulysses_saves_the_output_before_its_exchange():
    assert saved(Layout(cp=2, cp_ulysses=2))["exchange"] == HEADS * HEAD * WIDTH
    assert "exchange" not in saved(Layout(cp=2))


def test_keys_and_values_are_saved_for_every_rank_that_shares_the_heads():
    """Two key/value heads on four tensor ranks are four heads."""
    assert saved(Layout(tp=4))["keys, values"] == 2 * 4 * HEAD * WIDTH
    assert saved(Layout(cp=8, cp_ulysses=8))["keys, values"] == 2 * 8 * HEAD * WIDTH
