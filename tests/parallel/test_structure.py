"""The parts of a model around attention equal one process in float64 to 1e-9 under every technique: norms after the
halves, parallel blocks, gates of other kinds, soft caps, scaled embeddings, biases of routers and experts."""

from __future__ import annotations

import pytest

from parallel.steps import steps
from parallel.structures import STRUCTURES
from parallel.test_composition import VOCAB, compare, job_of
from phalanx.check.job import problems_of
from phalanx.config import layout_line
from phalanx.config.layout import Layout

LAYOUTS = {
    "olmo2": ["tp=2", "tp=2,sp=true,sp_regather=true", "dp_shard=2,zero=3,recompute=full", "pp=2,accumulation=3"],
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
        "tp=2,sp=true,recompute=full",
        "tp=2,sp=true,dp_shard=2,zero=3,recompute=selective",
        "tp=2,pp=2,accumulation=3,schedule=zb_h1",
        "cp=4,cp_ulysses=2",
        "dp_shard=2,zero=2,tiles=2,recompute=full",
    ],
    "gpt-oss": [
        "tp=2,sp=true",
        "dp_shard=2,ep=2",
        "dp_shard=2,ep=2,tp=2,zero=2",
        "cp=2,ep=2,zero=1,recompute=full",
        "pp=2,accumulation=3,schedule=zb_h1",
    ],
    "neox with experts": ["tp=2,sp=true,recompute=full", "dp_shard=2,ep=2,tp=2,zero=3", "cp=2,ep=2"],
    "gemma2 with experts": ["tp=2,sp=true,recompute=full", "dp_shard=2,ep=2,zero=3"],
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
