"""The parts of a model around attention, under every technique: norms after the halves, parallel blocks, gates of other
kinds, soft caps, scaled embeddings, biases of routers and experts. Steps equal those of one process in float64 to 1e-9,
and the bytes that ranks send are the predicted ones."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parallel.steps import steps
from parallel.structures import (
    GEMMA_2,
    GEMMA_WITH_EXPERTS,
    GPT_OSS,
    NEOX,
    NEOX_WITH_EXPERTS,
    OLMO_2,
    STRUCTURES,
)
from parallel.test_composition import VOCAB, compare, job_of
from parallel.test_predicted_traffic import check
from parallel.test_predicted_traffic import job_of as sending_job
from phalanx.blocks.kinds import block, block_kinds
from phalanx.blocks.operator import place_of
from phalanx.blocks.parameters import weight_of
from phalanx.check.job import problems_of
from phalanx.config import layout_line
from phalanx.config.layout import Layout

LAYOUTS = {
    "olmo2": ["tp=2,sp=true,sp_regather=true", "dp_shard=2,zero=3,recompute=full", "pp=2,accumulation=3"],
    "gemma2": [
        "tp=4,loss_chunk=7",
        "tp=2,sp=true,recompute=full",
        "dp_shard=2,zero=2,recompute=selective",
        "pp=2,accumulation=3,schedule=zb_h1",
        "cp=2,tp=2,sp=true,loss_chunk=5",
    ],
    "neox": [
        "tp=2",
        "tp=4,sp=true,sp_regather=true",
        "tp=2,sp=true,dp_shard=2,zero=3,recompute=selective",
        "tp=2,pp=2,accumulation=3,schedule=zb_h1",
        "cp=4,cp_ulysses=2",
        "dp_shard=2,zero=2,tiles=2,recompute=full",
    ],
    "gpt-oss": [
        "dp_shard=2,ep=2,tp=2,zero=2",
        "cp=2,ep=2,zero=1,recompute=full",
        "pp=2,accumulation=3,schedule=zb_h1",
    ],
    "neox with experts": ["tp=2,sp=true,recompute=full", "dp_shard=2,ep=2,tp=2,zero=3"],
    "gemma2 with experts": ["tp=2,sp=true,recompute=full", "dp_shard=2,ep=2,zero=3"],
}
WITHOUT_DROPOUT = replace(NEOX_WITH_EXPERTS, dropout=0.0)
SENT = {
    "norms after": (OLMO_2, "tp=2,sp=true,sp_regather=true,recompute=full"),
    "norms before and after": (GEMMA_2, "tp=2,sp=true,loss_chunk=8,dp_shard=2"),
    "norms after experts": (replace(GEMMA_WITH_EXPERTS, dropout=0.0), "tp=2,sp=true,recompute=full"),
    "parallel": (NEOX, "tp=2"),
    "parallel, recomputed": (NEOX, "tp=2,recompute=full"),
    "parallel, its tokens in parts": (NEOX, "tp=4,sp=true,sp_regather=true"),
    "parallel, in parts, recomputed": (NEOX, "tp=2,sp=true,recompute=full"),
    "parallel with dropout": (replace(NEOX, dropout=0.1), "tp=2,sp=true,recompute=full"),
    "parallel in stages": (NEOX, "tp=2,sp=true,pp=2,schedule=zb_h1,accumulation=2"),
    "parallel on a ring": (NEOX, "cp=2,tp=2,sp=true,recompute=selective"),
    "biases of experts": (GPT_OSS, "dp_shard=2,ep=2,tp=2"),
    "parallel with experts": (WITHOUT_DROPOUT, "dp_shard=2,ep=2,tp=2,recompute=full"),
}


@pytest.fixture(scope="module")
def reference(ranks):
    """One process, by kind of model."""
    return {kind: ranks(steps, 1, job_of(model, Layout()), VOCAB)[0] for kind, model in STRUCTURES.items()}


@pytest.mark.parametrize(("kind", "line"), [(kind, line) for kind, lines in LAYOUTS.items() for line in lines])
def test_equals_one_process(ranks, reference, kind, line):
    layout = layout_line.parse(line)
    job = job_of(STRUCTURES[kind], layout)
    assert not problems_of(job)
    compare(ranks(steps, layout.world, job, VOCAB), reference[kind])


@pytest.mark.parametrize(("model", "line"), SENT.values(), ids=SENT.keys())
def test_every_byte(ranks, model, line):
    check(ranks, sending_job(model, layout_line.parse(line)))


@pytest.mark.parametrize("sp", [False, True])
def test_a_parallel_block_sends_half_as_much(sp):
    """One exchange off the residual stream and one onto it, each forward and backward, instead of two of each."""

    def sent(model):
        place = place_of(model, Layout(tp=2, sp=sp), 2)
        messages = [m for operator in block(place, block_kinds(model)[0]) for m in operator.messages]
        return sum(m.elements * m.times("none") for m in messages)

    assert sent(NEOX) == sent(replace(NEOX, parallel_block=False)) / 2


@pytest.mark.parametrize("sp", [False, True])
def test_in_a_parallel_block_ranks_sum_what_each_has_of_norms_and_biases(sp):
    for name in ("attn_norm.weight", "mlp_norm.bias", "attn.wo.bias", "mlp.down.bias"):
        assert weight_of(NEOX, f"blocks.0.{name}").is_summed(sp)
        assert weight_of(replace(NEOX, parallel_block=False), f"blocks.0.{name}").is_summed(sp) == sp
