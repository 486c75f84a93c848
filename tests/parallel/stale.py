"""Steps of a pipeline without a flush on the ranks of a test, and one process with the same stale gradients."""

from __future__ import annotations

import torch

from parallel.steps import micro_batches
from phalanx.config.job import Job
from phalanx.parallel import mesh as meshes
from phalanx.parallel.parameter_shards import wholes
from phalanx.parallel.pipeline import PipeDream, version
from phalanx.train.drivers import UnflushedSteps
from phalanx.train.step import StepInputs, Stepper

LR = 1e-2


def streamed(ranks, job: Job, vocab: int, runs: list[int]):
    """Runs of so many steps, each without a flush. Every step that was shown, and the parameters, whole on rank 0."""
    mesh = meshes.build(job.layout, "cpu")
    stepper = Stepper(job, mesh, torch.device("cpu"), vocab)
    assert isinstance(stepper.replica.runner, PipeDream)
    stream = UnflushedSteps(stepper, stepper.replica.runner)
    shown, step = [], 0
    for run in runs:
        for left in reversed(range(run)):
            batches, valid = micro_batches(job, step, mesh.data_rank, vocab)
            more = (
                (lambda following=step + 1: micro_batches(job, following, mesh.data_rank, vocab)[0]) if left else None
            )
            shown += stream.step(StepInputs(batches, step, valid, LR), more)
            step += 1
        assert not stream.pipeline.running, "no micro-batch is in flight after a flush"
    shards = stepper.replica.shards
    parameters = dict(wholes(shards, {f.name: f.value for f in shards}, mesh, ranks.rank == 0))
    return [(number, seen.loss, seen.grad_norm) for number, seen in shown], parameters


def emulated(ranks, job: Job, vocab: int, runs: list[int]):
    """The same on one process: each step's gradients are taken at the weights before the last update of its run."""
    mesh = meshes.build(job.layout, "cpu")
    stepper = Stepper(job, mesh, torch.device("cpu"), vocab)
    weights = [f.value for f in stepper.replica.shards]
    shown, step = [], 0
    for run in runs:
        versions = [[w.detach().clone() for w in weights]]
        for batch in range(run):
            batches, valid = micro_batches(job, step, 0, vocab)
            put(weights, versions[version(batch)])
            loss = stepper.gradients(batches, step, valid)
            put(weights, versions[batch])
            norm = stepper.optimizer.square_norm().sqrt()
            stepper.optimizer.step(LR, norm)
            stepper.replica.clear()
            versions.append([w.detach().clone() for w in weights])
            step += 1
            shown.append((step, float(loss / valid), float(norm)))
    return shown, {f.name: f.value.detach() for f in stepper.replica.shards}


@torch.no_grad()
def put(weights: list[torch.Tensor], values: list[torch.Tensor]) -> None:
    """Give parameters other values."""
    for weight, value in zip(weights, values, strict=True):
        weight.copy_(value)
