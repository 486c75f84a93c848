"""What model families change inside attention, under every layout: as one process computes it, in float64 to 1e-9, and
every byte that a rank sends as predicted."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from parallel import steps as parallel_steps
from parallel.test_composition import LLAMA, VOCAB, compare
from phalanx.blocks.kinds import block_kinds, model_for
from phalanx.check.job import problems_of
from phalanx.comm.axis import Ledger
from phalanx.config import layout_line
from phalanx.config.job import Data, Job, Optimizer, Train
from phalanx.config.layout import Layout
from phalanx.config.model import MLA, RopeScaling
from phalanx.cost.traffic import Traffic, step_traffic
from phalanx.model.transformer import Transformer
from phalanx.parallel import mesh as meshes
from phalanx.parallel.mesh import Mesh
from phalanx.parallel.parameter_shards import wholes
from phalanx.partition import derived as batch
from phalanx.partition.cut import stages_of
from phalanx.partition.derived import schedule_of

BATCH, COUNT = 4, 2
PLAIN = dataclasses.replace(LLAMA, seq_len=16, dropout=0.0)
MIXED = dataclasses.replace(
    PLAIN,
    d_model=48,
    n_heads=4,
    n_kv_heads=2,
    attention="latent,heads",
    mla=MLA(q_rank=16, kv_rank=8, rope_head_dim=4, nope_head_dim=8, v_head_dim=10),
)
"""Layers of latent attention and of plain heads, each with the head sizes of its kind."""
YARN = RopeScaling(kind="yarn", factor=4.0, original_seq_len=16, beta_fast=2.0, truncate=False)
MODELS = {
    # Gemma's and Qwen 3's parts together.
    "capped": dataclasses.replace(
        PLAIN,
        window=5,
        full_every=2,
        qk_norm="head",
        attention_softcap=2.0,
        attention_scale=0.5,
        rope_scaling=YARN,
        window_rope_theta=100.0,
        rotary_fraction=0.5,
    ),
    # OLMo 2's norms, and gpt-oss's sinks and windows.
    "sinks": dataclasses.replace(PLAIN, window=6, full_every=2, qk_norm="width", sinks=True, qkv_bias=True),
    "dropout": dataclasses.replace(
        PLAIN, window=3, full_every=2, dropout=0.2, qk_norm="width", sinks=True, attention_softcap=2.0
    ),
    "layernorm": dataclasses.replace(
        PLAIN, norm="layernorm", bias=True, qk_norm="head", sinks=True, attention_softcap=2.0, n_kv_heads=1
    ),
    "mixed": MIXED,
}
CASES = [
    ("capped", "tp=2,sp=true,recompute=full,accumulation=2"),
    ("capped", "cp=4,recompute=selective"),
    ("capped", "cp=2,cp_ulysses=2,tp=2,sp=true,sp_regather=true"),
    ("capped", "pp=2,schedule=terapipe,pp_slices=2,cp=2,accumulation=2"),
    ("capped", "dp_shard=2,tp=2,recompute=selective"),
    ("sinks", "tp=4,sp=true"),
    ("sinks", "tp=4,recompute=full"),
    ("sinks", "cp=2,tp=2,pp=2,schedule=zb_h1,accumulation=2"),
    ("sinks", "cp=4,cp_ulysses=2,cp_inner=ring,recompute=full"),
    ("sinks", "dp_shard=2,cp=2,zero=3"),
    ("dropout", "cp=4,cp_ulysses=2,zero=1"),
    ("dropout", "tp=2,sp=true,cp=2"),
    ("layernorm", "tp=4,accumulation=2"),
    ("layernorm", "cp=4,cp_ulysses=2,zero=2"),
    ("mixed", "tp=2,sp=true,pp=2,accumulation=2"),
    ("mixed", "tp=2,pp=2,accumulation=2,schedule=zb_h1,recompute=full"),
    ("mixed", "cp=2,zero=1"),
    ("mixed", "cp=4,cp_ulysses=2,zero=3"),
    ("mixed", "dp_shard=2,tp=2,zero=1,recompute=full"),
]
DOCUMENTS = ("sinks", "dropout")
"""Kinds whose attention does not cross documents."""


def job_of(kind: str, layout: Layout) -> Job:
    return Job(
        model=MODELS[kind],
        layout=layout,
        data=Data(document_mask=kind in DOCUMENTS),
        train=Train(global_batch=BATCH, precision="fp64"),
        optimizer=Optimizer(clip=0.5),
    )


def counted_steps(ranks: Any, job: Job) -> tuple[Any, Traffic]:
    """Two steps, and the bytes of each, without those of reading out gradients and parameters."""
    ledgers: list[Ledger] = []

    def kept(*arguments: Any) -> Mesh:
        mesh = meshes.build(*arguments)
        ledgers.append(mesh.ledger)
        return mesh

    def uncounted(*arguments: Any) -> Any:
        with ledgers[0].untracked():
            yield from wholes(*arguments)

    with (
        mock.patch.object(parallel_steps, "meshes", SimpleNamespace(build=kept)),
        mock.patch.object(parallel_steps, "wholes", uncounted),
    ):
        results = parallel_steps.steps(ranks, job, VOCAB, COUNT)
    return results, ledgers[0].traffic(COUNT)


@pytest.fixture(scope="module")
def reference(ranks):
    """One process, by kind of model."""
    return {kind: ranks(parallel_steps.steps, 1, job_of(kind, Layout()), VOCAB, COUNT)[0] for kind in MODELS}


@pytest.mark.parametrize(("kind", "line"), CASES)
def test_equals_one_process_and_sends_what_is_predicted(ranks, reference, kind, line):
    job = job_of(kind, layout_line.parse(line))
    assert problems_of(job) == []
    found = ranks(counted_steps, job.layout.world, job)
    compare([results for results, _ in found], reference[kind])
    check_bytes(job, [traffic for _, traffic in found])


def check_bytes(job: Job, found: list[Traffic]) -> None:
    layout, equation = job.layout, batch.solve(job.train.global_batch, job.layout)
    stages = None
    if layout.pp > 1:
        stages = stages_of(job.model, layout, schedule_of(layout, equation.accumulation).stages, VOCAB)
    for rank, sent in enumerate(found):
        expected = step_traffic(job.model, layout, equation, precision="fp64", vocab=VOCAB, stages=stages, rank=rank)
        assert sent == {axis: pytest.approx(by, 1e-13) for axis, by in expected.items()}, f"rank {rank}"


def test_head_sizes_belong_to_the_kind_of_a_layer():
    of_kinds = [model_for(MIXED, kind.attention) for kind in block_kinds(MIXED)]
    sizes = [(own.head_size, own.v_head_size, own.rotary_size) for own in of_kinds]
    assert sizes[:2] == [(12, 10, 4), (8, 8, 8)]
    shapes = {name: tuple(weight.shape) for name, weight in Transformer(MIXED, VOCAB).named_parameters()}
    assert (shapes["blocks.0.attn.wo.weight"], shapes["blocks.1.attn.wo.weight"]) == ((48, 40), (48, 32))
