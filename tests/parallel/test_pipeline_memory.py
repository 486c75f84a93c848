"""What a rank of a pipeline keeps, measured, next to what its schedule says: activations are given up when they may be.

The unit is what a stage keeps of one micro-batch after its forward pass, measured in a step of one micro-batch. A rank
may hold more by what is in transit: results that the next rank has not yet read, and buffers for what comes next, each
as large as one stage's input.
"""

from __future__ import annotations

import gc
from unittest import mock

import pytest
import torch

from parallel.steps import micro_batches
from phalanx.cost.memory import peak_in_flight
from phalanx.job.job import Job
from phalanx.job.layout import Layout
from phalanx.job.model import Model
from phalanx.job.train import Train
from phalanx.parallel import mesh as meshes
from phalanx.parallel.pipeline import Step
from phalanx.schedule.catalogue import build
from phalanx.schedule.check import in_flight
from phalanx.train.memory import _Made
from phalanx.train.step import Stepper

VOCAB = 16
SHAPE = Model(n_layers=8, d_model=16, n_heads=2, seq_len=32, vocab_size=VOCAB, tied=False)
INPUT = 8 * 2 * SHAPE.seq_len * SHAPE.d_model
"""Bytes that travel of a micro-batch of 2 sequences, in float64."""


def live(ranks, layout: Layout) -> tuple[list[int], dict[int, int]]:
    """Bytes that a step has made and still keeps after each of this rank's actions, without gradients of parameters;
    and by stage by how much its first forward pass has added to that."""
    train = Train(global_batch=2 * layout.accumulation, precision="fp64")
    job = Job(model=SHAPE, layout=layout, train=train)
    mesh = meshes.build(layout, "cpu")
    stepper = Stepper(job, mesh, torch.device("cpu"), VOCAB)
    seen, stages, real = [0], dict[int, int](), Step.act
    made = _Made()

    def act(self, action, *, last):
        real(self, action, last=last)
        gc.collect()
        own = {p.grad.untyped_storage()._cdata for p in stepper.replica.objective.parameters() if p.grad is not None}
        kept = sum(size for key, (ref, size) in made.storages.items() if key not in own and not ref.expired())
        if action.kind == "F":
            stages.setdefault(action.stage, kept - seen[-1])
        seen.append(kept)

    for step in range(2):  # the first fills caches
        batches, valid = micro_batches(job, step, mesh.data_rank, VOCAB)
        if step == 0:
            stepper.step(batches, step, valid, 1e-3)
            continue
        with mock.patch.object(Step, "act", act), made:
            stepper.gradients(batches, step, valid)
    return seen[1:], stages


CASES = [
    ("gpipe", 2, 5),
    ("1f1b", 2, 5),
    ("1f1b", 4, 6),
    ("interleaved_1f1b", 2, 4),
    ("zb_h1", 3, 5),
    ("zb_v", 2, 5),
    ("zb_v", 4, 8),
]


@pytest.mark.parametrize(("name", "pp", "micro_batches"), CASES)
def test_a_rank_keeps_what_its_schedule_says(ranks, name, pp, micro_batches):
    layout = Layout(pp=pp, schedule=name, accumulation=micro_batches)
    schedule = build(name, pp, micro_batches)
    alone = ranks(live, pp, Layout(pp=pp, schedule=name, accumulation=1))
    for rank, (seen, stages) in enumerate(ranks(live, pp, layout)):
        each = [float(alone[rank][1].get(stage, 0)) for stage in range(schedule.stages)]
        expected = peak_in_flight(schedule, rank, each)
        print(
            name, pp, rank, micro_batches, each, (max(seen) - expected) / INPUT, max(seen) / expected, seen[-1] / INPUT
        )
