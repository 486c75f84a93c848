"""The bytes that ranks send: those that are predicted, and those of the formulas."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Literal

import pytest
import torch

from covering import covering, pairs_of_techniques
from parallel import test_composition, test_context_and_experts, test_pipeline
from parallel.steps import check_bytes, counted_rows, micro_batches, of_step
from phalanx.blocks.parameters import block_shapes, count
from phalanx.check.job import problems_of
from phalanx.config import layout_line
from phalanx.config.job import Job, Optimizer, Train
from phalanx.config.layout import Layout
from phalanx.config.model import MLA, ModelConfig, MoE
from phalanx.cost.traffic import Traffic, step_traffic
from phalanx.data.loader import MicroBatch
from phalanx.parallel import mesh as meshes
from phalanx.parallel.pipeline import PipeDream
from phalanx.partition import derived as batch
from phalanx.partition.cut import stages_of
from phalanx.partition.derived import schedule_of
from phalanx.schedule.catalogue import build
from phalanx.train.drivers import Asynchronous, UnflushedSteps
from phalanx.train.step import StepInputs, Stepper

# What is predicted that ranks send in a step is what they send: every byte, on every axis and by every collective.


Precision = Literal["fp64", "fp32", "bf16", "fp8"]
Gradients = Literal["same", "fp32"]
VOCAB = 29
"""A prime: nothing divides by the ranks, so that padding is at work everywhere."""
SEQUENCES = 2
"""In a micro-batch."""
GPT = ModelConfig(n_layers=3, d_model=24, n_heads=4, seq_len=16, tied=True)
LLAMA = ModelConfig(
    n_layers=2, d_model=20, n_heads=4, n_kv_heads=2, head_dim=6, d_ff=36, seq_len=16,
    norm="rmsnorm", positions="rope", activation="swiglu", bias=False, tied=False,
)  # fmt: skip
DEEP = dataclasses.replace(LLAMA, n_layers=4)
ONE_KEY = dataclasses.replace(LLAMA, n_kv_heads=1)
DROPS = dataclasses.replace(GPT, dropout=0.1)
MISTRAL = dataclasses.replace(LLAMA, window=5)
MIXTRAL = dataclasses.replace(LLAMA, moe=MoE(n_experts=4, top_k=2, d_ff=12, aux_loss=0.01), n_layers=3)
SWITCH = dataclasses.replace(
    MIXTRAL,
    moe=MoE(
        n_experts=4,
        top_k=1,
        d_ff=12,
        capacity=1.25,
        renormalise=False,
        n_dense_layers=1,
        n_shared=1,
        bias_balanced=True,
    ),
)
DEEPSEEK = dataclasses.replace(
    SWITCH, mla=MLA(q_rank=12, kv_rank=10, rope_head_dim=4, nope_head_dim=6, v_head_dim=5), n_kv_heads=4, bias=True
)
DROPPING = dataclasses.replace(SWITCH, dropout=0.1)


def counted(ranks, job: Job) -> tuple[Traffic, tuple[float, float], float]:
    """Returns the traffic of one step in this rank's ledger, or the mean where steps differ; the number of rows that
    the rank exchanged with other ranks' experts; and the number of parts of a step that its replica computed."""
    mesh = meshes.build(job.layout, "cpu")
    stepper = Stepper(job, mesh, torch.device("cpu"), VOCAB)
    steps = job.layout.sync_every if job.layout.independent_replicas > 1 else 1
    share = 1.0
    mesh.ledger.clear()
    with counted_rows(job.layout) as rows:
        if isinstance(stepper.replica.runner, PipeDream):
            steps = 3
            stream(job, stepper, steps)
        elif job.layout.sync == "asp":
            steps = 3
            share = served(job, stepper, steps) / steps
        else:
            for step in range(steps):
                batches, valid = micro_batches(job, step, mesh.data_rank, VOCAB)
                stepper.step(StepInputs(batches, step, valid, 1e-2))
    return mesh.ledger.traffic(steps), of_step(job, rows, steps), share


def stream(job: Job, stepper: Stepper, steps: int) -> None:
    """A run of steps without a flush."""
    assert isinstance(stepper.replica.runner, PipeDream)
    steps_on = UnflushedSteps(stepper, stepper.replica.runner)
    for step in range(steps):
        batches, valid = micro_batches(job, step, stepper.mesh.data_rank, VOCAB)
        following, _ = micro_batches(job, step + 1, stepper.mesh.data_rank, VOCAB)
        more = (lambda more=following: more) if step + 1 < steps else None
        steps_on.step(StepInputs(batches, step, valid, 1e-2), more)


def served(job: Job, stepper: Stepper, steps: int) -> int:
    """Asynchronous steps, with a synchronization before the last. How many parts of them this replica computed."""
    replicas, mesh, parts = job.layout.dp_replicate, stepper.mesh, list[int]()

    def read(part: int) -> list[MicroBatch]:
        parts.append(part)
        rank = part % replicas * job.layout.dp_shard + mesh.coordinates["dp_shard"]
        return micro_batches(job, part // replicas, rank, VOCAB)[0]

    replica = Asynchronous(stepper)
    for first, until in ((0, steps - 1), (steps - 1, steps)):
        replica.round(first, until, read=read, chunk_tokens=lambda _: 1, lr=lambda _: 1e-2)
    pushes = len(parts) if replica.replica else steps * replicas - len(parts)
    assert mesh.ledger.entries["dp_replicate", "send"].calls == 2 * pushes, "a gradient or parameters, and their header"
    return len(parts)


def job_of(model: ModelConfig, layout: Layout, precision: Precision = "fp32", gradients: Gradients = "same") -> Job:
    micro = layout.accumulation or 1
    layout = dataclasses.replace(layout, accumulation=micro, micro_batch=layout.micro_batch or SEQUENCES)
    size = layout.micro_batch * micro * layout.data_ranks
    return Job(model=model, layout=layout, train=Train(global_batch=size, precision=precision, gradients=gradients))


def check(ranks, job: Job) -> None:
    """Compare every rank's bytes."""
    assert not problems_of(job)
    found = ranks(counted, job.layout.processes, job)
    check_bytes(job, VOCAB, [each[:2] for each in found], [share for _, _, share in found])


DATA = [
    (GPT, "dp_replicate=3,accumulation=2"),
    (GPT, "dp_replicate=2,accumulation=2,data_parallel=threads"),
    (GPT, "dp_shard=3,zero=1,accumulation=2"),
    (GPT, "dp_shard=3,zero=2,accumulation=2"),
    (GPT, "dp_shard=3,zero=2,accumulation=2,accumulate=sharded"),
    (GPT, "dp_shard=3,accumulation=2"),
    (LLAMA, "dp_shard=3,accumulation=2,accumulate=sharded,recompute=full"),
    (LLAMA, "dp_shard=4,accumulation=2,reshard=false"),
    (GPT, "dp_shard=2,prefetch=0,accumulation=2"),
    (GPT, "dp_replicate=2,dp_shard=2,zero=1"),
    (GPT, "dp_replicate=2,dp_shard=2,zero=2,accumulate=sharded,accumulation=2"),
    (GPT, "dp_replicate=2,dp_shard=2,accumulation=2"),
    (GPT, "dp_replicate=2,dp_shard=2,accumulation=2,accumulate=sharded"),
    (GPT, "dp_shard=2,tiles=2,accumulation=2"),
    (LLAMA, "dp_shard=2,tiles=3,recompute=full"),
    (DROPS, "dp_shard=2,tiles=3,recompute=full"),
    (DROPS, "dp_shard=2,tiles=3,recompute_cut=1*none+1*full+1*none"),
    (GPT, "dp_shard=2,tiles=2,zero=1"),
]
TENSOR = [
    (GPT, "tp=2,accumulation=2"),
    (GPT, "tp=4,loss_chunk=8"),
    (LLAMA, "tp=4"),
    (ONE_KEY, "tp=2"),
    (ONE_KEY, "tp=2,sp=true,dp_shard=2"),
    (GPT, "tp=2,sp=true,sp_regather=true,recompute=selective"),
    (GPT, "tp=2,sp=true,sp_regather=true,recompute=mlp"),
    (GPT, "tp=2,sp=true,recompute_cut=1*mlp+1*products+1*none"),
    (GPT, "tp=2,sp=true,sp_regather=true,recompute=full"),
    (GPT, "tp=2,sp=true,sp_regather=true,recompute_cut=1*full+1*selective+1*none"),
    (GPT, "tp=2,sp=true,recompute_cut=2*none+1*full"),
    (DROPS, "tp=2,sp=true,recompute=full"),
    (GPT, "tp=2,recompute=full,loss_chunk=8"),
    (LLAMA, "tp=4,sp=true"),
    (LLAMA, "tp=2,sp=true,dp_replicate=2"),
    (GPT, "tp=2,sp=true,dp_shard=2,zero=1"),
    (DEEPSEEK, "tp=2"),
    (DEEPSEEK, "tp=2,sp=true,sp_regather=true"),
    (DEEPSEEK, "tp=2,recompute=full"),
    (DROPPING, "tp=2,recompute=full"),
    (MIXTRAL, "tp=2,sp=true,sp_regather=true"),
]
CONTEXT = [
    (LLAMA, "cp=2"),
    (LLAMA, "cp=4,zero=1"),
    (LLAMA, "cp=2,recompute=selective"),
    (LLAMA, "cp=2,recompute=full"),
    (LLAMA, "cp=2,cp_ulysses=2"),
    (LLAMA, "cp=2,cp_ulysses=2,recompute=selective"),
    (DROPS, "cp=2,cp_ulysses=2,recompute=selective"),
    (LLAMA, "cp=4,cp_ulysses=4"),
    (LLAMA, "cp=4,cp_ulysses=2"),
    (LLAMA, "cp=4,cp_ulysses=2,cp_inner=ring"),
    (LLAMA, "cp=2,tp=2,sp=true"),
    (MIXTRAL, "cp=2"),
    (SWITCH, "cp=2,recompute=full"),
    (SWITCH, "cp=2,cp_ulysses=2,recompute_cut=1*selective+1*full+1*none"),
    (DEEPSEEK, "cp=4,cp_ulysses=2"),
    (GPT, "dp_replicate=2,cp=2"),
    (MISTRAL, "cp=4,recompute=selective"),
    (MISTRAL, "cp=4,cp_ulysses=2"),
    (dataclasses.replace(DEEPSEEK, window=2), "cp=2,recompute=full"),
]
EXPERTS = [
    (SWITCH, "dp_shard=4,ep=2"),
    (SWITCH, "dp_shard=4,ep=2,zero=2,accumulation=2,accumulate=sharded"),
    (SWITCH, "dp_shard=4,ep=2,recompute=full"),
    (SWITCH, "dp_shard=2,ep=2,recompute_cut=2*full+1*none"),
    (SWITCH, "dp_shard=4,ep=2,reshard=false,accumulation=2"),
    (SWITCH, "dp_shard=4,ep=4,dispatch=tokens,recompute=full"),
    (SWITCH, "cp=2,ep=2"),
    (SWITCH, "cp=2,ep=2,cp_ulysses=2,zero=1,recompute=full"),
    (SWITCH, "dp_shard=2,ep=2,tp=2,sp=true"),
    (SWITCH, "tp=4,sp=true,ep=4,etp=1,micro_batch=3"),
    (SWITCH, "cp=2,tp=2,sp=true,ep=4,etp=1,recompute=full"),
    (MIXTRAL, "dp_shard=4,ep=4,tp=2,sp=true,etp=1,hpz=2"),
    (DEEPSEEK, "dp_shard=2,ep=2,tp=2,recompute=full"),
    (SWITCH, "dp_replicate=2,dp_shard=2,ep=2,zero=1"),
    # Experts that only replicas share: edp is one rank.
    (SWITCH, "dp_replicate=2,dp_shard=2,ep=2"),
    (SWITCH, "dp_replicate=2,dp_shard=2,ep=2,accumulation=2,accumulate=sharded"),
    (SWITCH, "dp_replicate=2,dp_shard=2,ep=2,zero=2,accumulation=2,accumulate=sharded"),
]
PIPELINES = [
    (GPT, "pp=3,accumulation=4,schedule=gpipe"),
    (GPT, "pp=2,accumulation=4,schedule=zb_h1,tp=2,sp=true"),
    (DEEP, "pp=2,accumulation=4,schedule=interleaved_1f1b,recompute=full,tp=2"),
    (DEEP, "pp=2,accumulation=4,schedule=zb_v"),
    (DEEP, "pp=2,accumulation=4,schedule=interleaved_1f1b,tp=2,recompute_cut=1*full+1*none+1*full+1*none"),
    (DEEP, "pp=2,accumulation=2,schedule=terapipe,pp_slices=2"),
    (DEEP, "pp=2,accumulation=2,schedule=terapipe,pp_slices=2,cp=2"),
    (dataclasses.replace(DEEP, window=3), "pp=2,accumulation=2,schedule=terapipe,pp_slices=2,cp=2"),
    (DEEP, "pp=2,accumulation=2,schedule=terapipe,pp_slices=2,cp=2,cp_ulysses=2,recompute=selective"),
    (DEEP, "pp=2,accumulation=2,schedule=terapipe,pp_slices=2,tp=2,sp=true"),
    (GPT, "pp=2,accumulation=3,dp_replicate=2"),
    (GPT, "pp=2,accumulation=3,dp_shard=2,zero=1"),
    (GPT, "pp=2,accumulation=3,dp_shard=2,zero=2,accumulate=sharded"),
    (GPT, "pp=2,accumulation=3,dp_shard=2"),
    (GPT, "pp=2,accumulation=3,dp_shard=2,accumulate=sharded"),
    (GPT, "pp=2,accumulation=3,dp_replicate=2,dp_shard=2,accumulate=sharded"),
    (DEEP, "pp=2,accumulation=4,dp_shard=2,reshard=false"),
    (DEEP, "pp=2,accumulation=4,dp_shard=2,schedule=interleaved_1f1b"),
    (DEEP, "pp=2,accumulation=4,dp_shard=2,schedule=zb_h1"),
    (DEEP, "pp=2,accumulation=4,dp_shard=2,schedule=zb_h1,accumulate=sharded"),
    (DEEP, "pp=2,accumulation=4,dp_shard=2,schedule=zb_v"),
    (DEEP, "pp=2,accumulation=4,dp_shard=2,schedule=dualpipe"),
    (DEEP, "pp=2,accumulation=4,dp_shard=2,schedule=interleaved_1f1b,prefetch=0"),
    (dataclasses.replace(SWITCH, n_layers=4), "pp=2,accumulation=2,dp_shard=2,ep=2"),
    (dataclasses.replace(GPT, n_layers=4), "pp=2,accumulation=4,schedule=interleaved_1f1b,tp=2,sp=true"),
    (GPT, "pp=2,accumulation=2,dp_shard=2,tiles=2,recompute=full"),
    (DEEP, "pp=2,accumulation=4,dp_shard=2,schedule=dualpipe,tiles=2"),
    (DEEP, "pp=2,accumulation=4,schedule=dualpipe,tiles=2"),
]


OTHERS = [
    (GPT, "dp_replicate=2,sync=local_sgd,sync_every=2"),
    (GPT, "dp_replicate=2,dp_shard=2,sync=diloco,sync_every=3,zero=1"),
    (GPT, "dp_replicate=2,dp_shard=2,sync=local_sgd,sync_every=2"),
    (GPT, "dp_replicate=2,tp=2,sync=local_sgd,sync_every=2"),
    (GPT, "dp_replicate=2,pp=2,sync=diloco,sync_every=2,accumulation=2"),
    (GPT, "dp_replicate=3,sync=asp,accumulation=2"),
    (MIXTRAL, "dp_replicate=2,sync=asp"),
    (GPT, "dp_replicate=2,dp_shard=2,sync=asp,zero=1,tiles=2"),
    (LLAMA, "dp_replicate=2,dp_shard=2,sync=asp,accumulation=2"),
    (GPT, "dp_replicate=2,tp=2,sp=true,sync=asp"),
    (GPT, "pp=3,schedule=pipedream,accumulation=4"),
    (GPT, "pp=2,schedule=pipedream,accumulation=2,dp_replicate=2"),
    (GPT, "pp=2,schedule=pipedream,accumulation=2,tp=2,sp=true"),
    (MIXTRAL, "dp_shard=2,ep=2"),
    (MIXTRAL, "dp_shard=4,ep=4,recompute=full,zero=1"),
    (MIXTRAL, "dp_shard=2,tp=2,sp=true,ep=4,etp=1,recompute=full,dispatch=tokens"),
    (MIXTRAL, "cp=4,ep=2,cp_ulysses=2"),
    (MIXTRAL, "dp_shard=4,ep=4,redundant_experts=1,recompute=full,zero=2"),
    (MIXTRAL, "dp_shard=2,ep=2,tp=2,redundant_experts=2"),
    (MIXTRAL, "dp_shard=2,ep=2,pp=2,accumulation=2,redundant_experts=1"),
    (MIXTRAL, "dp_shard=2,cp=2,ep=4,redundant_experts=1,dispatch=tokens,recompute=full"),
    (MIXTRAL, "dp_shard=2,ep=2,pp=2,accumulation=2"),
    (dataclasses.replace(MIXTRAL, moe=dataclasses.replace(MIXTRAL.moe, n_dense_layers=2)), "dp_shard=2,ep=2,pp=3"),
    (MIXTRAL, "dp_shard=2,ep=2,tp=2,sp=true,accumulation=2"),
]


CASES = covering(DATA + TENSOR + CONTEXT + EXPERTS + PIPELINES + OTHERS)


COUNTED = {"llama": LLAMA, "gpt": GPT, "dense": LLAMA, "mixtral": MIXTRAL, "capacity": SWITCH, "deepseek": DEEPSEEK}
ELSEWHERE = [
    *((COUNTED[kind], layout) for kind, layout in test_composition.CASES),
    *((MISTRAL, layout) for layout in test_composition.WINDOWED),
    *((COUNTED[kind], line) for kind, line in test_context_and_experts.CASES),
    *(
        (DEEP if kind == "llama" else GPT, layout)
        for kind, layout in test_pipeline.CASES
        if test_pipeline.is_exact(layout)
    ),
]
"""Cases like those whose bytes are compared together with the results."""


ALONE = pairs_of_techniques(DATA + TENSOR + CONTEXT + EXPERTS + PIPELINES + OTHERS, ELSEWHERE)


@pytest.mark.parametrize(("model", "line"), ALONE, ids=[line for _, line in ALONE])
def test_every_byte(ranks, model, line):
    check(ranks, job_of(model, layout_line.parse(line)))


MUON = [
    (LLAMA, "dp_shard=4,zero=2,bucket_mb=0.01,accumulation=2,accumulate=sharded"),
    (ONE_KEY, "tp=4"),
    (DEEPSEEK, "dp_shard=4,ep=2,zero=1,bucket_mb=0.002"),
    (MIXTRAL, "dp_shard=2,tp=2,sp=true,ep=2,etp=1,zero=1,bucket_mb=0.002"),
    (GPT, "pp=2,schedule=pipedream,accumulation=2,tp=2"),
    (GPT, "dp_replicate=2,dp_shard=2,sync=diloco,sync_every=2"),
]


@pytest.mark.parametrize(("model", "line"), MUON, ids=[line for _, line in MUON])
def test_pieces_of_matrices(ranks, model, line):
    """An optimizer that updates whole matrices sends their pieces to owners and back. More layouts are compared
    together with their results (tests/train/optimizers)."""
    job = dataclasses.replace(job_of(model, layout_line.parse(line)), optimizer=Optimizer(name="muon"))
    check(ranks, job)


WIDTHS: list[tuple[str, Precision, Gradients]] = [
    ("dp_replicate=2", "bf16", "fp32"),
    ("dp_replicate=2,dp_shard=2,zero=1", "bf16", "fp32"),
    ("dp_replicate=2,sync=local_sgd,sync_every=2", "bf16", "same"),
    ("dp_replicate=2,dp_shard=2,sync=asp", "bf16", "fp32"),
    ("tp=2,sp=true,dp_shard=2,zero=1", "bf16", "fp32"),
    ("tp=2,dp_shard=2", "bf16", "fp32"),
    ("cp=2", "bf16", "same"),
    ("pp=2,accumulation=2,dp_shard=2", "bf16", "fp32"),
    ("cp=2,tp=2", "fp64", "same"),
    ("dp_shard=2,zero=2", "fp64", "fp32"),
]


@pytest.mark.parametrize(("line", "precision", "gradients"), WIDTHS)
def test_in_other_precisions(ranks, line, precision, gradients):
    job = job_of(LLAMA, layout_line.parse(line), precision, gradients)
    check(ranks, job)
    if "dp_shard" in line and "tp=2" in line:
        check(ranks, dataclasses.replace(job, optimizer=Optimizer(name="muon")))


# What is predicted is what the formulas say: D are the parameters' bytes, P the ranks.

SHAPE = ModelConfig(n_layers=3, d_model=24, n_heads=4, seq_len=12, vocab_size=24, tied=False)
"""Every size divides by 2, 3 and 4: no padding blurs the formulas."""
WIDTH = 8
"""Bytes of an element in float64."""
D = WIDTH * count(SHAPE)
BLOCKS = SHAPE.n_layers * WIDTH * sum(torch.Size(shape).numel() for shape in block_shapes(SHAPE, 0).values())
BATCH = 12
STATUS = 3 * 8
"""Loss, norm and stop, summed over all ranks once a step."""


def predicted(layout: Layout, shape: ModelConfig, rank: int = 0) -> dict[str, dict[str, float]]:
    """Bytes that a rank sends in one step: `test_every_byte` compares them with those of real steps."""
    job = Job(model=shape, layout=layout, train=Train(global_batch=BATCH, precision="fp64"))
    equation = batch.solve(BATCH, layout)
    stages = None
    if layout.pp > 1:
        stages = stages_of(shape, layout, schedule_of(layout, equation.accumulation).stages, shape.vocab_size)
    found = step_traffic(
        shape, layout, equation, precision="fp64", vocab=shape.vocab_size, stages=stages, rank=rank,
        optimizer=job.optimizer,
    )  # fmt: skip
    return {axis: {name: size for name, size in by.items() if size} for axis, by in found.items() if any(by.values())}


def sent(layout: Layout, shape: ModelConfig = SHAPE) -> dict[str, dict[str, float]]:
    """The same on every rank, without what is no part of the formulas."""
    first, *others = (predicted(layout, shape, rank) for rank in range(layout.world))
    assert all(other == first for other in others)
    world = first.pop("world")
    assert world == {"all_reduce": pytest.approx(2 * STATUS * (layout.world - 1) / layout.world)}
    return first


def traffic(ranks, layout: Layout) -> dict[str, dict[str, float]]:
    """Bytes that this rank sends in one step, which is not the first."""
    job = Job(model=SHAPE, layout=layout, train=Train(global_batch=BATCH, precision="fp64"))
    mesh = meshes.build(layout, "cpu")
    stepper = Stepper(job, mesh, torch.device("cpu"), SHAPE.vocab_size)
    for step in range(2):
        mesh.ledger.clear()
        batches, valid = micro_batches(job, step, mesh.data_rank, SHAPE.vocab_size)
        stepper.step(StepInputs(batches, step, valid, 1e-2))
    return {axis: {name: size for name, size in by.items() if size} for axis, by in mesh.ledger.traffic().items()}


@pytest.mark.parametrize(
    "layout",
    [
        Layout(dp_shard=2),
        Layout(dp_shard=2, zero=1, accumulation=3),
        Layout(tp=2, sp=True),
        Layout(pp=2, tp=2, accumulation=3),
    ],
    ids=Layout.line,
)
def test_the_second_step_sends_what_the_formulas_say_too(ranks, layout):
    for rank, found in enumerate(ranks(traffic, layout.world, layout)):
        expected = predicted(layout, SHAPE, rank)
        exactly = {
            axis: {name: pytest.approx(size, 1e-13) for name, size in by.items()} for axis, by in expected.items()
        }
        assert {axis: by for axis, by in found.items() if by} == exactly


def part(ranks: int) -> float:
    return (ranks - 1) / ranks


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_ddp_sends_2d_whatever_is_accumulated(size, accumulation):
    layout = Layout(dp_replicate=size, accumulation=accumulation if BATCH % (size * accumulation) == 0 else 1)
    assert sent(layout) == {"dp_replicate": {"all_reduce": pytest.approx(2 * D * part(size))}}


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("zero", [1, 2])
def test_zero_1_and_2_send_2d_in_one_reduce_scatter_and_one_all_gather(size, zero):
    for accumulation in (1, 3 if size < 3 else 1):
        layout = Layout(dp_shard=size, zero=zero, accumulation=accumulation)
        expected = {"reduce_scatter": pytest.approx(D * part(size)), "all_gather": pytest.approx(D * part(size))}
        assert sent(layout) == {"dp_shard": expected}


@pytest.mark.parametrize("size", [2, 4])
def test_zero_3_sends_3d_but_keeps_what_the_backward_pass_needs_at_once(size):
    gathered = 2 * D - (D - BLOCKS)  # the head's group is not given up between forward and backward
    expected = {"reduce_scatter": pytest.approx(D * part(size)), "all_gather": pytest.approx(gathered * part(size))}
    assert sent(Layout(dp_shard=size)) == {"dp_shard": expected}


def test_zero_3_without_resharding_sends_2d():
    expected = {"reduce_scatter": pytest.approx(D / 2), "all_gather": pytest.approx(D / 2)}
    assert sent(Layout(dp_shard=2, reshard=False)) == {"dp_shard": expected}


@pytest.mark.parametrize("accumulation", [2, 3])
def test_accumulation_does_not_multiply_gradient_traffic(accumulation):
    once = sent(Layout(dp_shard=2))["dp_shard"]
    local = sent(Layout(dp_shard=2, accumulation=accumulation))["dp_shard"]
    assert local["reduce_scatter"] == once["reduce_scatter"]
    for zero in (2, 3):
        layout = Layout(dp_shard=2, zero=zero, accumulation=accumulation, accumulate="sharded")
        assert sent(layout)["dp_shard"]["reduce_scatter"] == accumulation * once["reduce_scatter"]


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_hybrid_sharding_reduces_shares_between_the_replicas(zero):
    found = sent(Layout(dp_replicate=2, dp_shard=2, zero=zero))
    assert found["dp_replicate"] == {"all_reduce": pytest.approx(2 * (D / 2) / 2)}
    assert found["dp_shard"]["reduce_scatter"] == pytest.approx(D / 2)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_tensor_parallel_sends_8bsh_a_block(size, accumulation):
    layout = Layout(tp=size, accumulation=accumulation)
    micro = batch.solve(BATCH, layout).micro_batch
    tokens = micro * SHAPE.seq_len
    stream = WIDTH * tokens * SHAPE.d_model
    blocks = SHAPE.n_layers * 8 * stream
    around = 4 * stream  # after the embedding, and before the head on the way back
    loss = 2 * 3 * WIDTH * tokens  # of every token the largest logit, the sum and the chosen one
    total = accumulation * (blocks + around + loss) * part(size)
    assert sent(layout) == {"tp": {"all_reduce": pytest.approx(total)}}


def test_sequence_parallel_sends_no_more():
    plain = sent(Layout(tp=2))["tp"]
    shares = sent(Layout(tp=2, sp=True))["tp"]
    tokens = BATCH * SHAPE.seq_len
    stream = WIDTH * tokens * SHAPE.d_model
    assert shares["all_gather"] == shares["reduce_scatter"] == (4 * SHAPE.n_layers + 2) * stream / 2
    # What is left: the loss, and once a step the gradients of norms, biases and positions.
    whole = SHAPE.n_layers * 6 * SHAPE.d_model + 2 * SHAPE.d_model + SHAPE.seq_len * SHAPE.d_model
    assert shares["all_reduce"] == pytest.approx(2 * (3 * WIDTH * tokens + WIDTH * whole) / 2)
    assert sum(shares.values()) == pytest.approx(plain["all_reduce"] + WIDTH * whole)


def test_gathering_again_costs_two_more_all_gathers_a_block():
    once = sent(Layout(tp=2, sp=True))["tp"]
    again = sent(Layout(tp=2, sp=True, sp_regather=True))["tp"]
    stream = WIDTH * BATCH * SHAPE.seq_len * SHAPE.d_model
    assert again["all_gather"] - once["all_gather"] == pytest.approx(SHAPE.n_layers * 2 * stream / 2)


def test_fewer_key_value_heads_than_ranks_add_one_sum_of_their_gradients():
    shape = dataclasses.replace(SHAPE, n_kv_heads=2, bias=False)
    plain = sent(Layout(tp=4), dataclasses.replace(shape, n_kv_heads=4))
    grouped = sent(Layout(tp=4), shape)
    heads = shape.n_layers * 2 * WIDTH * shape.head_size * shape.d_model  # a key and a value head on each pair of ranks
    assert grouped["tp"]["all_reduce"] - plain["tp"]["all_reduce"] == pytest.approx(2 * heads * part(2))


LONG = dataclasses.replace(SHAPE, seq_len=24, n_kv_heads=2, bias=False, positions="rope")


@pytest.mark.parametrize("size", [2, 3])
def test_a_ring_sends_keys_and_values_forward_and_those_and_their_gradients_back(size):
    found = sent(Layout(cp=size, zero=1), LONG)
    keys = WIDTH * BATCH * LONG.seq_len * LONG.kv_heads * LONG.head_size  # of a layer and whole sequences
    forward = 2 * part(size) * keys
    assert found["cp"] == {"send": pytest.approx(LONG.n_layers * 3 * forward)}
    # The state is sharded over these ranks, as over those of dp_shard.
    parameters = WIDTH * count(LONG)
    assert found["dp_shard_cp"] == {
        "reduce_scatter": pytest.approx(parameters * part(size)),
        "all_gather": pytest.approx(parameters * part(size)),
    }


def test_ulysses_sends_queries_keys_values_and_outputs_each_way():
    found = sent(Layout(cp=2, cp_ulysses=2, zero=1), LONG)
    tokens = WIDTH * BATCH * LONG.seq_len / 2  # of a rank
    once = tokens * LONG.head_size * (2 * LONG.n_heads + 2 * LONG.kv_heads) / 2
    assert found["cp"] == {"all_to_all": pytest.approx(LONG.n_layers * 2 * once)}


def test_both_send_less_each():
    found = sent(Layout(cp=4, cp_ulysses=2, zero=1), LONG)["cp"]
    tokens = WIDTH * BATCH * LONG.seq_len / 4
    exchanged = tokens * LONG.head_size * (2 * LONG.n_heads + 2 * LONG.kv_heads) / 2
    rotated = 2 * tokens * 2 * LONG.head_size * LONG.kv_heads / 2
    assert found["all_to_all"] == pytest.approx(LONG.n_layers * 2 * exchanged)
    assert found["send"] == pytest.approx(LONG.n_layers * 3 * rotated)


@pytest.mark.parametrize(("size", "ep"), [(2, 2), (4, 2), (4, 4)])
def test_experts_get_rows_twice_and_their_gradients_twice(size, ep):
    """In the capacity form, whose rows are known beforehand: as many for each expert as it may take."""
    moe = MoE(n_experts=4, top_k=2, d_ff=24, capacity=1.0)
    shape = dataclasses.replace(SHAPE, bias=False, moe=moe, n_layers=2)
    found = sent(Layout(dp_shard=size, ep=ep, zero=1), shape)
    rows = moe.n_experts * BATCH // size * SHAPE.seq_len * moe.top_k // moe.n_experts
    assert found["ep"] == {"all_to_all": pytest.approx(4 * 2 * WIDTH * rows * SHAPE.d_model * part(ep))}
    experts = 2 * WIDTH * 4 * 2 * 24 * SHAPE.d_model
    dense = WIDTH * count(shape) - experts
    assert found["dp_shard"]["reduce_scatter"] == pytest.approx(dense * part(size))
    assert found.get("edp", {}).get("reduce_scatter", 0) == pytest.approx(experts / ep * part(size // ep))


def crossings(layout: Layout, micro_batches: int) -> list[int]:
    """By rank, the messages that it sends in a step, by the placement of the stages alone."""
    found = [0] * layout.pp
    schedule = build(layout.schedule, layout.pp, micro_batches, slices=layout.pp_slices)
    for micro in range(micro_batches):
        places = [schedule.rank_of(stage, micro) for stage in range(schedule.stages)]
        for here, there in itertools.pairwise(places):
            if here != there:
                found[here] += 1  # of the forward pass
                found[there] += 1  # of the backward pass
    return found


@pytest.mark.parametrize(
    "layout",
    [
        Layout(pp=2, accumulation=4),
        Layout(pp=3, schedule="zb_h1", accumulation=6),
        Layout(pp=2, schedule="interleaved_1f1b", accumulation=3),
        Layout(pp=2, schedule="zb_v", accumulation=4),
        Layout(pp=2, schedule="dualpipe", accumulation=4),
        Layout(pp=3, schedule="terapipe", pp_slices=4, accumulation=2),
        Layout(pp=2, tp=2, sp=True, accumulation=3),
        Layout(pp=2, tp=2, accumulation=3),
    ],
    ids=Layout.line,
)
def test_a_pipeline_sends_every_micro_batch_over_every_boundary_once_each_way(layout):
    shape = dataclasses.replace(SHAPE, n_layers=4)
    boundary = WIDTH * BATCH // layout.accumulation * shape.seq_len * shape.d_model // (layout.tp if layout.sp else 1)
    inner = layout.world // layout.pp
    for rank in range(layout.world):
        found = predicted(layout, shape, rank)
        assert found["pp"]["send"] == crossings(layout, layout.accumulation)[rank // inner] * boundary
        copies = 2 * WIDTH * count(shape) / 2 if layout.schedule == "dualpipe" else 0
        assert found["pp"].get("all_reduce", 0) == pytest.approx(copies)


@pytest.mark.parametrize("size", [2, 3])
def test_a_tied_embedding_is_summed_over_both_ends(size):
    shape = dataclasses.replace(SHAPE, tied=True)
    embedding = WIDTH * shape.vocab_size * shape.d_model
    layout = Layout(pp=size, accumulation=2)
    sums = [predicted(layout, shape, rank)["pp"].get("all_reduce", 0) for rank in range(size)]
    assert sums == [pytest.approx(embedding), *[0] * (size - 2), pytest.approx(embedding)]
