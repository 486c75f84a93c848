"""Steps of a job's model on the ranks of a test: loss, every gradient and every parameter, whole on rank 0."""

from __future__ import annotations

import numpy as np
import torch

from phalanx.config.job import IGNORE, Job
from phalanx.data.loader import MicroBatch
from phalanx.parallel import mesh as meshes
from phalanx.parallel.parameter_shards import wholes
from phalanx.partition import derived as batch
from phalanx.train.step import StepInputs, Stepper

CPU = torch.device("cpu")


def micro_batches(job: Job, step: int, data_rank: int, vocab: int) -> tuple[list[MicroBatch], int]:
    """This data rank's micro-batches of a step, and the valid tokens of the whole batch, which rows share unevenly."""
    equation = batch.solve(job.train.global_batch, job.layout)
    tokens = np.random.default_rng(step).integers(vocab, size=(equation.global_batch, job.model.seq_len + 1))
    targets = tokens[:, 1:].copy()
    targets[1, 3 - step % 3 :] = IGNORE
    size = equation.micro_batch
    first = data_rank * size * equation.accumulation
    starts = range(first, first + size * equation.accumulation, size)
    # Documents of uneven length, where attention is not to cross from one to another.
    documents = (tokens[:, :-1] < vocab // 3).cumsum(1) if job.data.document_mask else None
    batches = [
        MicroBatch(
            tokens[a : a + size, :-1],
            targets[a : a + size],
            np.arange(a, a + size),
            None if documents is None else documents[a : a + size],
        )
        for a in starts
    ]
    return batches, int((targets != IGNORE).sum())


def steps(ranks, job: Job, vocab: int, count: int = 2, device: torch.device = CPU):
    """Losses, norms, the gradients of the last step and the parameters after it. Tensors on rank 0 only."""
    mesh = meshes.build(job.layout, device.type)
    stepper = Stepper(job, mesh, device, vocab)
    shards = stepper.replica.shards
    shown, gradients = [], {}
    real = stepper.optimizer.square_norm

    def square_norm(scale):
        trained = [f for f in shards if not f.frozen]
        stepper.optimizer.residence.settle()  # gradients may be on their way
        found = {f.name: f.gradient for f in trained}
        # Copies: clipping works in place.
        gradients.update((name, t.clone()) for name, t in wholes(trained, found, mesh, ranks.rank == 0))
        return real(scale)

    stepper.optimizer.square_norm = square_norm
    mesh.ledger.clear()
    for step in range(count):
        batches, valid = micro_batches(job, step, mesh.data_rank, vocab)
        seen = stepper.step(StepInputs(batches, step, valid, 1e-2))
        shown.append((seen.loss, seen.grad_norm))
    parameters = dict(wholes(shards, {f.name: f.value for f in shards}, mesh, ranks.rank == 0))
    return shown, gradients, parameters


def worst(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], floor: float) -> float:
    """The largest difference of any tensor, relative to its largest element or to `floor`.

    A key bias has no influence, so its gradient is rounding noise, which Adam turns into a little of a step: `floor` is
    what such noise is compared with."""
    assert found.keys() == expected.keys()
    return max(
        float((found[name] - tensor).abs().max() / tensor.abs().max().clamp(min=floor))
        for name, tensor in expected.items()
    )
