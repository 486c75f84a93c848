"""Context and expert parallelism composed with everything else equal one process in float64 to 1e-9."""

import dataclasses

import pytest

from covering import pairs_of_techniques
from parallel.steps import steps
from parallel.test_composition import CASES as PLAIN_CASES
from parallel.test_composition import GPT, LLAMA, VOCAB, compare_and_check_bytes
from phalanx.check.job import problems_of
from phalanx.config import layout_line
from phalanx.config.job import Data, Job, Optimizer, Train
from phalanx.config.layout import Layout
from phalanx.config.model import MLA, ModelConfig, MoE

BATCH = 8
DENSE = dataclasses.replace(LLAMA, n_layers=2, seq_len=16)
MIXTRAL = dataclasses.replace(
    LLAMA, n_layers=2, seq_len=16, moe=MoE(n_experts=4, top_k=2, d_ff=16, aux_loss=0.02, z_loss=0.01)
)
CAPACITY = dataclasses.replace(
    GPT,
    seq_len=16,
    dropout=0.1,
    moe=MoE(n_experts=4, top_k=2, d_ff=16, n_shared=1, capacity=1.0, aux_loss=0.1, n_dense_layers=1),
)
DEEPSEEK = dataclasses.replace(
    LLAMA,
    n_layers=2,
    n_kv_heads=0,
    seq_len=16,
    moe=MoE(
        n_experts=8,
        top_k=3,
        d_ff=16,
        n_shared=1,
        n_dense_layers=1,
        router="sigmoid",
        bias_balanced=True,
        route_scale=2.5,
        n_groups=4,
        top_groups=2,
        aux_loss=0.01,
    ),
    mla=MLA(q_rank=16, kv_rank=8, rope_head_dim=4, nope_head_dim=8, v_head_dim=6),
)
MODELS = {"dense": DENSE, "mixtral": MIXTRAL, "capacity": CAPACITY, "deepseek": DEEPSEEK}
TABLE = [
    ("dense", "cp=2,zero=1,accumulation=2"),
    ("dense", "cp=4,zero=2,recompute=selective"),
    ("dense", "cp=2,cp_ulysses=2,accumulate=sharded,accumulation=2"),
    ("dense", "cp=4,cp_ulysses=2,recompute=full"),
    ("dense", "cp=4,cp_ulysses=2,cp_inner=ring,loss_chunk=7"),
    ("dense", "dp_replicate=2,dp_shard=2,cp=2"),
    ("dense", "cp=2,tp=2,pp=2,sp=true,sp_regather=true,accumulation=2"),
    ("dense", "cp=4,cp_ulysses=2,pp=2,schedule=zb_h1,accumulation=2,zero=2"),
    ("dense", "cp=2,pp=2,schedule=terapipe,pp_slices=2,accumulation=2"),
    ("mixtral", "dp_replicate=2,accumulation=2"),
    ("mixtral", "dp_shard=4,ep=2"),
    ("mixtral", "dp_shard=2,ep=2,tp=2,sp=true,zero=1,accumulation=2"),
    ("mixtral", "cp=2,dp_shard=2,ep=4,zero=2"),
    ("mixtral", "pp=2,dp_shard=2,ep=2,schedule=zb_h1,accumulation=2"),
    ("capacity", "cp=2,cp_ulysses=2,ep=2"),
    ("capacity", "dp_shard=2,tp=2,ep=2,recompute=full"),
    ("capacity", "cp=4,ep=2,zero=1"),
    # No two ranks of a replica hold the same experts: only the replicas sum their gradients.
    ("mixtral", "dp_replicate=2,dp_shard=2,ep=2,zero=2,accumulate=sharded,accumulation=2"),
    ("mixtral", "dp_replicate=2,dp_shard=2,ep=2,zero=3,accumulate=sharded,accumulation=2"),
    ("mixtral", "dp_replicate=2,dp_shard=2,ep=2,pp=2,zero=2,accumulate=sharded,schedule=zb_h1,accumulation=2"),
    ("deepseek", "tp=4,sp=true"),
    ("deepseek", "cp=2,dp_replicate=2,ep=2,recompute=selective"),
    ("deepseek", "dp_shard=2,cp=2,tp=2,ep=2,zero=2"),
    ("deepseek", "dp_shard=2,pp=2,tp=2,ep=2,sp=true,schedule=dualpipe,accumulation=2"),
    # Tensor ranks hold whole experts, of which each rank along dp_shard × cp has some in turn.
    ("mixtral", "tp=2,sp=true,ep=2,etp=1,recompute=full"),
    ("deepseek", "dp_shard=2,tp=2,sp=true,ep=4,etp=1,zero=1,accumulation=2"),
    ("deepseek", "dp_shard=2,cp=2,tp=2,sp=true,ep=8,etp=1,ep_node=2,sp_regather=true"),
    ("mixtral", "dp_shard=4,ep=4,ep_node=2,accumulation=2"),
    ("mixtral", "dp_replicate=2,dp_shard=2,tp=2,sp=true,ep=4,etp=1,zero=2,recompute=mlp"),
    ("deepseek", "dp_shard=2,pp=2,tp=2,sp=true,ep=2,etp=1,schedule=zb_h1,accumulation=2"),
    ("mixtral", "dp_shard=2,ep=2,redundant_experts=2,accumulation=2"),
    ("deepseek", "dp_shard=4,ep=4,ep_node=2,redundant_experts=1,zero=2,recompute=full"),
    ("mixtral", "dp_shard=2,tp=2,sp=true,ep=4,etp=1,redundant_experts=2,zero=1,recompute=mlp"),
    ("capacity", "dp_shard=2,cp=2,ep=4,redundant_experts=2,dispatch=tokens,zero=1"),
    ("deepseek", "dp_shard=2,pp=2,tp=2,ep=2,redundant_experts=1,schedule=zb_h1,accumulation=2"),
    ("capacity", "dp_shard=2,tp=2,sp=true,ep=4,etp=1,ep_overlap=true,micro_batch=4"),
    ("mixtral", "dp_shard=2,tp=2,sp=true,ep=2,ep_overlap=true,micro_batch=2,recompute=full,dispatch=tokens"),
    ("mixtral", "dp_shard=2,pp=2,tp=2,ep=2,ep_overlap=true,micro_batch=2,schedule=zb_h1,accumulation=2,zero=2"),
]
ONE_AFTER_THE_OTHER = [
    ("mixtral", "cp=2,cp_ulysses=2,tp=2,pp=2,ep=2,accumulation=2"),
    ("mixtral", "dp_shard=2,cp=2,pp=2,ep=4,accumulation=2"),
]
"""In the same processes: torch keeps meshes that are equal to earlier ones."""
CASES = [*pairs_of_techniques(TABLE, [*PLAIN_CASES, *ONE_AFTER_THE_OTHER]), *ONE_AFTER_THE_OTHER]


def job_of(model: ModelConfig, layout: Layout, documents: bool) -> Job:
    return Job(
        model=model,
        layout=layout,
        data=Data(document_mask=documents),
        train=Train(global_batch=BATCH, precision="fp64"),
        optimizer=Optimizer(clip=0.5),
    )


@pytest.fixture(scope="module")
def reference(ranks):
    """One process, by kind of model; the dense one has documents."""
    return {kind: ranks(steps, 1, job_of(model, Layout(), kind == "dense"), VOCAB)[0] for kind, model in MODELS.items()}


@pytest.mark.parametrize(("kind", "line"), CASES)
def test_equals_one_process(ranks, reference, kind, line):
    job = job_of(MODELS[kind], layout_line.parse(line), kind == "dense")
    assert problems_of(job) == []
    compare_and_check_bytes(ranks, job, reference[kind])


@pytest.mark.parametrize(("kind", "line"), [TABLE[3], TABLE[12]])
def test_lower_precisions_stay_close(ranks, reference, kind, line):
    job = job_of(MODELS[kind], layout_line.parse(line), kind == "dense")
    job = dataclasses.replace(job, train=dataclasses.replace(job.train, precision="bf16"))
    shown, _, _ = ranks(steps, job.layout.world, job, VOCAB)[0]
    for found, wanted in zip(shown, reference[kind][0], strict=True):
        assert found == pytest.approx(wanted, rel=3e-2)
