"""hpZ: a second copy of ZeRO-3's parameters inside a node changes which links carry gathers, and nothing else."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

from cost.exact_state import second_copy_bytes
from parallel.steps import micro_batches, steps
from parallel.test_composition import compare
from parallel.test_predicted_traffic import DEEP, DROPS, GPT, LLAMA, SWITCH, VOCAB, check, job_of
from phalanx.config import layout_line
from phalanx.config.job import Job, Optimizer, Train
from phalanx.config.layout import Layout
from phalanx.config.model import ModelConfig
from phalanx.cost.traffic import step_traffic
from phalanx.parallel import fsdp
from phalanx.parallel import mesh as meshes
from phalanx.parallel.fsdp import ShardedReplica
from phalanx.partition import derived as batch
from phalanx.partition.cut import stages_of
from phalanx.partition.derived import schedule_of
from phalanx.train.step import StepInputs, Stepper

LAYOUTS = [
    (GPT, "dp_shard=4,hpz=2"),
    (GPT, "dp_shard=4,hpz=2,accumulation=3,accumulate=sharded,prefetch=0"),
    (LLAMA, "dp_shard=6,hpz=3,accumulation=2,recompute=full"),
    (DROPS, "dp_shard=4,hpz=2,tiles=3,recompute=full"),
    (GPT, "dp_replicate=2,dp_shard=4,hpz=2,accumulation=2"),
    (LLAMA, "dp_shard=2,cp=2,hpz=2"),
    (LLAMA, "dp_shard=4,tp=2,sp=true,hpz=2,recompute=selective"),
    (DEEP, "dp_shard=4,pp=2,hpz=2,accumulation=4"),
    (DEEP, "dp_shard=4,pp=2,hpz=2,accumulation=4,schedule=zb_v"),
    (DEEP, "dp_shard=4,pp=2,hpz=2,accumulation=4,schedule=interleaved_1f1b,recompute=full"),
    (SWITCH, "dp_shard=8,ep=2,hpz=4,accumulation=2"),
    (SWITCH, "dp_shard=4,ep=2,hpz=2"),
]


EVERY = bool(os.environ.get("PHALANX_ZERO_PLUS_PLUS"))
"""Whether all layouts are tried: `make zero-plus-plus`."""


def some(cases: list[tuple[ModelConfig, str]], *few: int) -> pytest.MarkDecorator:
    """Parametrizes a test by all cases, or by a few of them."""
    chosen = cases if EVERY else [cases[number] for number in few]
    return pytest.mark.parametrize(("model", "line"), chosen, ids=[line for _, line in chosen])


@some(LAYOUTS, 1, 3, 11)
def test_every_byte(ranks, model, line):
    check(ranks, job_of(model, layout_line.parse(line)))


def test_later_gathers_stay_in_the_node():
    """Only the first gather of a step leaves the node, however many micro-batches there are."""
    layout = layout_line.parse("dp_shard=4,accumulation=3")
    plain, near = (
        step_traffic(LLAMA, changed, batch.solve(24, changed), vocab=VOCAB)
        for changed in (layout, layout_line.parse(layout.line() + ",hpz=2"))
    )
    once = plain["dp_shard"]["reduce_scatter"]
    assert near["dp_shard"] == {"all_gather": once, "reduce_scatter": once}
    # A ring over 2 of 4 ranks sends (2-1)/2 of the bytes instead of (4-1)/4.
    assert near["hpz"]["all_gather"] == pytest.approx((plain["dp_shard"]["all_gather"] - once) * 2 / 3)


def job_64(model: ModelConfig, layout: Layout, sequences: int = 48) -> Job:
    train = Train(global_batch=sequences, precision="fp64")
    return Job(model=model, layout=layout, train=train, optimizer=Optimizer(clip=0.5))


EXACT = [LAYOUTS[number] for number in (1, 2, 3, 4, 6, 9)] + [(LLAMA, "cp=4,hpz=2,accumulation=2")]


@some(EXACT, 0, 2, 6)
def test_equals_one_process(ranks, model, line):
    layout = layout_line.parse(line)
    expected = ranks(steps, 1, job_64(model, Layout()), VOCAB)[0]
    compare(ranks(steps, layout.world, job_64(model, layout), VOCAB), expected)


def copied_bytes(ranks, job: Job) -> tuple[int, int, int]:
    """The most bytes of second copies at a time on this rank in a step, those after it, and its pipeline rank."""
    mesh = meshes.build(job.layout, "cpu")
    stepper = Stepper(job, mesh, torch.device("cpu"), VOCAB)
    assert isinstance(stepper.replica, ShardedReplica)
    gathers = stepper.replica.gathers
    most, keep = 0, fsdp.Gather._arrived

    def held() -> int:
        return sum(each.copy.nbytes for each in gathers if each.copy is not None)

    def counting(self: fsdp.Gather, whole: Tensor, numbers: Tensor) -> None:
        nonlocal most
        keep(self, whole, numbers)
        most = max(most, held())

    fsdp.Gather._arrived = counting
    try:
        batches, valid = micro_batches(job, 0, mesh.data_rank, VOCAB)
        stepper.step(StepInputs(batches, 0, valid, 1e-2))
        after = held()
        stepper.replica.loss(stepper.tensors(batches[0], 0, validates=True))
    finally:
        fsdp.Gather._arrived = keep
    return most, after + held(), mesh.coordinates["pp"]


MEASURED = [LAYOUTS[number] for number in (1, 5, 6, 7, 10)]


@some(MEASURED, 0)
def test_memory(ranks, model, line):
    """The second copy is as large as predicted, and gone when the optimizer begins."""
    job = job_of(model, layout_line.parse(line))
    layout, stages = job.layout, [[range(model.n_layers)]] * job.layout.pp
    if layout.pp > 1:
        schedule = schedule_of(layout, layout.accumulation)
        cut = stages_of(model, layout, schedule.stages, VOCAB)
        stages = [[cut[stage] for stage in schedule.stages_on(rank)] for rank in range(layout.pp)]
    for most, left, pp in ranks(copied_bytes, layout.world, job):
        assert most == second_copy_bytes(model, layout, vocab=VOCAB, stages=stages[pp])
        assert left == 0
