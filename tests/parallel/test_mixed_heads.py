"""Layers of latent attention and of plain heads in one model, each with the head sizes of its kind."""

from __future__ import annotations

import pytest

from parallel.steps import steps
from parallel.test_composition import VOCAB, compare, job_of
from phalanx.blocks.kinds import block_kinds, model_for
from phalanx.check.job import problems_of
from phalanx.config import layout_line
from phalanx.config.layout import Layout
from phalanx.config.model import MLA, ModelConfig
from phalanx.model.transformer import Transformer

MIXED = ModelConfig(
    n_layers=4,
    d_model=48,
    n_heads=4,
    seq_len=16,
    vocab_size=VOCAB,
    attention="latent,heads",
    positions="rope",
    norm="rmsnorm",
    activation="swiglu",
    bias=False,
    tied=False,
    mla=MLA(q_rank=16, kv_rank=8, rope_head_dim=4, nope_head_dim=8, v_head_dim=10),
)


def test_head_sizes_belong_to_the_kind_of_a_layer():
    sizes = [
        (own.head_size, own.v_head_size, own.rotary_size)
        for own in (model_for(MIXED, kind.attention) for kind in block_kinds(MIXED))
    ]
    assert sizes == [(12, 10, 4), (12, 12, 12)] * 2
    shapes = {name: tuple(weight.shape) for name, weight in Transformer(MIXED).named_parameters()}
    assert (shapes["blocks.0.attn.wo.weight"], shapes["blocks.1.attn.wo.weight"]) == ((48, 40), (48, 48))


@pytest.mark.parametrize(
    "line", ["tp=2", "pp=2,accumulation=3", "cp=2,zero=1", "tp=2,pp=2,accumulation=3,schedule=zb_h1,recompute=full"]
)
def test_training_equals_one_process(ranks, line):
    layout = layout_line.parse(line)
    (one,) = ranks(steps, 1, job_of(MIXED, Layout()), VOCAB)
    job = job_of(MIXED, layout)
    assert not problems_of(job)
    compare(ranks(steps, layout.world, job, VOCAB), one)
