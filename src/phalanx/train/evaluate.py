"""Validation: the mean loss over samples of the validation split, independent of the layout."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx.data.loader import ShardData, evaluation_batches
from phalanx.launch.watchdog import heartbeat
from phalanx.parallel.data import Replica
from phalanx.parallel.mesh import Mesh
from phalanx.parallel.micro import MicroTensors
from phalanx.parallel.preferences import PairFacts
from phalanx.partition import derived as batch
from phalanx.train.step import Stepper


@dataclass(frozen=True)
class Validation:
    """The result of a validation."""

    loss: float
    """Mean per valid token, in nats, or per preference pair; over the sources of a mixture by their weights."""
    sources: dict[str, float]
    """The loss of each source of a mixture, by path."""
    pairs: PairFacts | None


def validate(stepper: Stepper, data: ShardData, step: int, stops: Callable[[], bool]) -> Validation | None:
    """Validates on the samples of `data`, source by source. A collective; returns None as `validation_loss` does."""
    mesh, replica, job = stepper.mesh, stepper.replica, stepper.job
    micro_batch = batch.solve(job.train.global_batch, job.layout).micro_batch
    parts, losses = data.parts(job.train.eval_samples), []
    for _, _, part, samples in parts:
        batches = evaluation_batches(
            part, samples=samples, micro_batch=micro_batch, rank=mesh.data_rank, ranks=mesh.data_ranks
        )
        tensors = (stepper.tensors(micro, step, validates=True) for micro in batches)
        loss = validation_loss(replica, mesh, tensors, stepper.device, stops)
        if loss is None:
            return None
        losses.append(loss)
    mean = sum(weight * loss for (_, weight, _, _), loss in zip(parts, losses, strict=True))
    sources = {name: loss for (name, _, _, _), loss in zip(parts, losses, strict=True) if name}
    return Validation(mean, sources, pair_facts(replica, mesh, stepper.device))


def validation_loss(
    replica: Replica,
    mesh: Mesh,
    batches: Iterable[MicroTensors],
    device: torch.device,
    stops: Callable[[], bool] = lambda: False,
) -> float | None:
    """Returns the loss per valid token, in nats, or per preference pair, over the batches of all data ranks: one sum
    divided by one count.

    Returns None on every rank as soon as `stops` holds on one of them: a validation may take longer than the time that
    is left. The ranks agree on it while they compute a batch."""
    total = torch.zeros(2, dtype=torch.float64, device=device)
    for micro in batches:
        heartbeat.beat()
        stopping = torch.tensor([stops()], dtype=torch.float32, device=device)
        agreed = mesh.axis("world").all_reduce(stopping)
        loss: Tensor = replica.loss(micro)
        agreed.wait()
        if stopping.item():
            return None
        total += torch.stack((loss.double(), replica.objective.counted(micro)))
    # Only pipeline ranks with the last stage know the loss, but all of them know the tokens.
    total *= total.new_tensor([mesh.owns_loss, mesh.owns_loss and mesh.coordinates["pp"] == 0])
    mesh.axis("world").all_reduce(total).wait()
    return (total[0] / total[1].clamp(min=1)).item()


def pair_facts(replica: Replica, mesh: Mesh, device: torch.device) -> PairFacts | None:
    """Returns the facts of the preference pairs that a validation has seen; None of other data. A collective."""
    if (pairs := replica.objective.pairs) is None:
        return None
    sums = pairs.take(torch.zeros((), device=device)) * mesh.owns_loss
    mesh.axis("world").all_reduce(sums).wait()
    return PairFacts.of(sums)
