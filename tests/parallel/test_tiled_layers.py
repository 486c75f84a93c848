"""Tiles of every layer, embedding and head, with the other techniques: one process's results, and predicted bytes.

A few layouts in every run; all of them with PHALANX_TILES=1 (make tiles).
"""

import dataclasses
import os

import pytest

from parallel import structures, test_predicted_traffic
from parallel.steps import steps
from parallel.test_composition import VOCAB, compare, job_of
from phalanx.check.job import problems_of
from phalanx.config import layout_line
from phalanx.config.job import Optimizer
from phalanx.config.layout import Layout
from phalanx.config.model import MLA, ModelConfig, MoE

DEEPSEEK = dataclasses.replace(
    structures.LLAMA,
    bias=True,
    n_kv_heads=4,
    head_dim=0,
    mla=MLA(q_rank=12, kv_rank=10, rope_head_dim=4, nope_head_dim=6, v_head_dim=6),
    moe=MoE(n_experts=4, top_k=2, d_ff=8, n_shared=1, n_dense_layers=1),
)
MODELS = {
    "gpt": ModelConfig(n_layers=2, d_model=24, n_heads=4, seq_len=8, bias=True, qkv_bias=True),
    "llama": dataclasses.replace(structures.LLAMA, dropout=0.2),
    "deepseek": DEEPSEEK,
    "capped": dataclasses.replace(structures.GEMMA_2, tied=False),
    **structures.STRUCTURES,
}
FEW = [
    ("gpt", "tiles=2,tile=all,tp=2,sp=true,dp_shard=2,recompute=full,accumulation=3,accumulate=sharded"),
    ("llama", "tiles=2,tile=all,dp_shard=2,dp_replicate=2,tp=2"),
    ("neox with experts", "tiles=2,tile=all,dp_shard=2,ep=2,tp=2,sp=true"),
    ("deepseek", "tiles=2,tile=all,pp=2,schedule=zb_h1,dp_shard=2,ep=2,accumulation=3"),
    ("gpt", "tiles=2,tile=all,dp_shard=2,zero=2,bucket_mb=0.004"),
    ("llama", "tiles=3,tile=embedding+head,dp_shard=2,loss_chunk=5,accumulation=2"),
    ("capped", "tiles=4,tile=embedding+head,dp_shard=2,tp=2,sp=true,accumulation=3,accumulate=sharded"),
    ("llama", "tiles=2,tile=embedding+head,pp=2,schedule=dualpipe,dp_shard=2,accumulation=2"),
]
MORE = [
    ("gpt", "tiles=2,tile=all"),
    ("gpt", "tiles=3,tile=attention,dp_shard=2"),
    ("gpt", "tiles=2,tile=all,dp_shard=2,recompute=full,accumulation=2"),
    ("llama", "tiles=2,tile=all,dp_shard=3,accumulation=2"),
    ("llama", "tiles=2,tile=all,dp_shard=2,tp=2,sp=true"),
    ("gpt", "tiles=2,tile=all,dp_shard=2,tp=2"),
    ("llama", "tiles=2,tile=all,tp=4,zero=1,dp_shard=2"),
    ("olmo2", "tiles=2,tile=all,dp_shard=2,tp=2,sp=true,recompute=full"),
    ("gemma2", "tiles=2,tile=all,dp_shard=2,recompute=full"),
    ("neox", "tiles=2,tile=all,dp_shard=2,tp=2,sp=true"),
    ("neox", "tiles=2,tile=attention,dp_shard=2,tp=2,recompute=full"),
    ("gpt-oss", "tiles=2,tile=all,dp_shard=2"),
    ("gpt-oss", "tiles=4,tile=experts,dp_shard=2,ep=2"),
    ("gpt-oss", "tiles=2,tile=all,dp_shard=2,cp=2,ep=4"),
    ("neox with experts", "tiles=2,tile=all,dp_shard=4,ep=2,recompute=full"),
    ("neox with experts", "tiles=2,tile=all,pp=2,dp_shard=2,ep=2,tp=2,accumulation=3,recompute=full"),
    ("gemma2 with experts", "tiles=2,tile=all,dp_shard=2,dp_replicate=2,ep=2"),
    ("deepseek", "tiles=2,tile=all,dp_shard=2,tp=2"),
    ("deepseek", "tiles=2,tile=all,dp_shard=4,ep=2,accumulation=3,micro_batch=1"),
    ("deepseek", "tiles=2,tile=all,dp_shard=2,tp=2,sp=true,ep=2,recompute=full"),
    ("deepseek", "tiles=2,tile=mlp+experts,dp_shard=2,zero=1,ep=2"),
    ("llama", "tiles=2,tile=all,dp_shard=2,cp=2"),
    ("llama", "tiles=2,tile=all,cp=2,cp_ulysses=2,tp=2"),
    ("gpt", "tiles=2,tile=all,pp=2,schedule=zb_h1,dp_shard=2,tp=2,accumulation=3"),
    ("llama", "tiles=2,tile=all,pp=2,schedule=dualpipe,tp=2,sp=true,dp_shard=2,accumulation=2"),
    ("llama", "tiles=5,tile=embedding+head"),
    ("capped", "tiles=7,tile=head,tp=2,loss_chunk=7"),
    ("llama", "tiles=4,tile=embedding+head,tp=4,loss_chunk=3"),
    ("llama", "tiles=2,tile=embedding+head,tp=4,dp_replicate=2"),
    ("llama", "tiles=2,tile=embedding+head,dp_shard=2,zero=1"),
    ("llama", "tiles=3,tile=embedding,dp_shard=2,zero=2,accumulation=2,accumulate=sharded,bucket_mb=0.001"),
    ("llama", "tiles=3,tile=head,dp_shard=3,reshard=false,accumulation=2"),
    ("llama", "tiles=3,tile=embedding+head,dp_shard=2,dp_replicate=2,cp=2"),
    ("capped", "tiles=2,tile=embedding+head,dp_shard=2,cp=2,cp_ulysses=2,tp=2"),
    ("llama", "tiles=2,tile=embedding+head,dp_shard=4,hpz=2,accumulation=3"),
    ("llama", "tiles=3,tile=embedding+head,pp=2,schedule=zb_h1,dp_shard=2,accumulation=3,accumulate=sharded"),
    ("llama", "tiles=2,tile=embedding+head,pp=2,schedule=zb_h1,dp_shard=2,tp=2,accumulation=3,loss_chunk=5"),
    ("llama", "tiles=2,tile=embedding+head,pp=2,schedule=terapipe,pp_slices=2,dp_shard=2,accumulation=2"),
    ("llama", "tiles=2,tile=embedding+head,dp_shard=2,offload=optimizer"),
]
FEW_BYTES = [
    ("GPT", "adamw", "tiles=2,tile=all,dp_shard=2,tp=2,sp=true,recompute=full"),
    ("DEEPSEEK", "muon", "tiles=2,tile=all,dp_shard=2,tp=2,sp=true"),
    ("SWITCH", "adamw", "tiles=2,tile=all,dp_shard=4,ep=2,recompute=full"),
]
MORE_BYTES = [
    ("GPT", "adamw", "tiles=2,tile=all,dp_shard=2,accumulation=2"),
    ("LLAMA", "adamw", "tiles=2,tile=attention,dp_shard=2,recompute=full"),
    ("GPT", "adamw", "tiles=2,tile=all,dp_shard=2,tp=2"),
    ("DROPS", "adamw", "tiles=2,tile=all,tp=2,dp_shard=2,recompute=full"),
    ("ONE_KEY", "adamw", "tiles=3,tile=all,tp=2,sp=true,dp_shard=2"),
    ("SWITCH", "adamw", "tiles=3,tile=experts,dp_shard=2,dp_replicate=2,ep=2"),
    ("DEEPSEEK", "adamw", "tiles=2,tile=all,dp_shard=2,tp=2,ep=2,sp=true,recompute=full"),
    ("DEEPSEEK", "adamw", "tiles=2,tile=mlp,dp_shard=2,zero=1,bucket_mb=0.002"),
    ("SWITCH", "muon", "tiles=2,tile=all,dp_shard=4,ep=2"),
    ("GPT", "muon", "tiles=2,tile=all,dp_shard=2,tp=2,zero=1"),
    ("ONE_KEY", "muon", "tiles=3,tile=all,tp=4"),
    ("DEEP", "adamw", "tiles=2,tile=all,pp=2,accumulation=4,dp_shard=2,schedule=zb_h1,tp=2,recompute=full"),
]
EVERY = bool(os.environ.get("PHALANX_TILES"))


@pytest.fixture(scope="module")
def reference(ranks):
    found = {}

    def of(kind: str):
        if kind not in found:
            found[kind] = ranks(steps, 1, job_of(MODELS[kind], Layout()), VOCAB)[0]
        return found[kind]

    return of


@pytest.mark.parametrize(("kind", "line"), FEW + MORE if EVERY else FEW)
def test_equals_one_process_without_tiles(ranks, reference, kind, line):
    job = job_of(MODELS[kind], layout_line.parse(line))
    assert problems_of(job) == []
    compare(ranks(steps, job.layout.world, job, VOCAB), reference(kind))


@pytest.mark.parametrize(("model", "optimizer", "line"), FEW_BYTES + MORE_BYTES if EVERY else FEW_BYTES)
def test_every_byte(ranks, model, optimizer, line):
    job = test_predicted_traffic.job_of(getattr(test_predicted_traffic, model), layout_line.parse(line))
    test_predicted_traffic.check(ranks, dataclasses.replace(job, optimizer=Optimizer(name=optimizer)))


@pytest.mark.parametrize(
    ("kind", "line", "path", "message"),
    [
        ("gpt", "tiles=2,tile=atention", "layout.tile", "no layers 'atention'; did you mean attention?"),
        ("gpt", "tiles=2,tile=mlp+experts", "layout.tile", "no layers of experts"),
        ("deepseek", "tiles=3,tile=experts", "layout.tiles", "8 / tiles 3 is not an integer; nearest tiles: 1, 2, 4"),
        ("gpt", "tiles=2,tp=2,sp=true,sp_regather=true", "layout.sp_regather", "sp_regather=false, or tiles=1"),
    ],
)
def test_what_does_not_go_is_refused(kind, line, path, message):
    ((where, said),) = problems_of(job_of(MODELS[kind], layout_line.parse(line)))
    assert where == path
    assert message in said
