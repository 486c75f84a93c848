"""Validation: the mean loss over samples of the validation split, independent of the layout."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save
from torch import Tensor

from phalanx.comm.agree import on_rank_zero
from phalanx.config.corpora import PAIR, has_pairs
from phalanx.data.files import write_atomic
from phalanx.data.loader import MicroBatch, ShardData, evaluation_batches
from phalanx.errors import StoppedError
from phalanx.launch.watchdog import heartbeat
from phalanx.launch.watchdog.heartbeat import Phase
from phalanx.parallel.data import Replica
from phalanx.parallel.mesh import Mesh
from phalanx.parallel.objective import MicroTensors, PairFacts, PairLoss
from phalanx.partition import derived as batch
from phalanx.train.callbacks import Callback, Done
from phalanx.train.requests import Milestones, StopRequest
from phalanx.train.run_directory import REFERENCE, RunDirectory
from phalanx.train.state import TrainState
from phalanx.train.step import Stepper
from phalanx.units import counted
from phalanx.units import seconds as as_time


@dataclass(frozen=True)
class Validation:
    """The result of a validation."""

    loss: float
    """Mean per valid token, in nats, or per preference pair; over the sources of a mixture by their weights. Of
    completions minus the mean reward: the lowest is the best."""
    sources: dict[str, float]
    """The loss of each source of a mixture, by path."""
    facts: PairFacts | RewardFacts | None


@dataclass(frozen=True)
class RewardFacts:
    """Means over the likeliest completions of validation prompts, with the names they have in metrics.jsonl."""

    reward: float
    length: float
    """Tokens per completion."""


Validate = Callable[[Stepper, ShardData, int, Callable[[], bool]], Validation | None]


class Validator(Callback):
    """Validates on `data`, if there is any, after the steps of `milestones`."""

    def __init__(
        self,
        state: TrainState,
        data: ShardData | None,
        milestones: Milestones,
        stop: StopRequest,
        record: Callable[[int, Validation, float], None],
        validate: Validate,
    ):
        self.state, self.data, self.milestones, self.stop, self.record = state, data, milestones, stop, record
        self.validate = validate

    def after_step(self, done: Done) -> None:
        if self.data is None or done.stops or not self.milestones.validates(done.number):
            return
        stepper, began = self.state.stepper, time.perf_counter()
        with heartbeat.within(Phase.VALIDATION):
            with stepper.mesh.ledger.untracked():
                found = self.validate(stepper, self.data, done.number, lambda: self.stop.requested)
            if found is None:  # a request to stop came meanwhile
                done.stops = True
                return
            self.state.validated(found.loss)
            self.record(done.number, found, time.perf_counter() - began)


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
    total[0] *= mesh.owns_loss
    total[1] *= mesh.owns_loss and mesh.coordinates["pp"] == 0
    mesh.axis("world").all_reduce(total).wait()
    return (total[0] / total[1].clamp(min=1)).item()


def pair_facts(replica: Replica, mesh: Mesh, device: torch.device) -> PairFacts | None:
    """Returns the facts of the preference pairs that a validation has seen; None of other data. A collective."""
    if not isinstance(pairs := replica.objective.compared, PairLoss):
        return None
    sums = pairs.take(torch.zeros((), device=device)) * mesh.owns_loss
    mesh.axis("world").all_reduce(sums).wait()
    return PairFacts.of(sums)


log = logging.getLogger(__name__)

PROGRESS_S = 10.0
"""Seconds between lines of progress."""


def refer(
    stepper: Stepper,
    directory: RunDirectory,
    fingerprint: str,
    splits: Iterable[ShardData | None],
    stop: StopRequest,
    start: Callable[[], None],
) -> bool:
    """Gives the pairs of every split their log-probabilities: those of the run directory, or by the initial weights,
    which a new model has after `start`. Returns whether it started. All ranks call it, before the model has other
    weights; it does nothing for other data.

    Raises StoppedError if a request to stop comes while they are computed, RunError if they cannot be written."""
    job = stepper.job
    if not has_pairs(job.data) or job.model.reward:
        return False
    pairs = [data for data in splits if data is not None]
    identity = {"data": fingerprint, "seed": job.train.seed, "model": repr(job.model)}
    micro_batch = batch.solve(job.train.global_batch, job.layout).micro_batch
    return _Reference(stepper, directory, identity, micro_batch, stop, start).attach(pairs)


@dataclass
class _Reference:
    stepper: Stepper
    directory: RunDirectory
    identity: dict[str, Any]
    """Everything that the numbers depend on: they are reused only if it is equal."""
    micro_batch: int
    stop: StopRequest
    start: Callable[[], None]

    @property
    def path(self) -> Path:
        return self.directory.path / REFERENCE

    def attach(self, splits: Sequence[ShardData]) -> bool:
        if on_rank_zero(lambda: self._is_there(splits)):
            with safe_open(self.path, "np") as stored:
                for data in splits:
                    data.refer(stored.get_tensor(data.split))
            return False
        began = time.perf_counter()
        self.start()
        found = {data.split: self._computed(data) for data in splits}
        for data in splits:
            data.refer(found[data.split])
        on_rank_zero(lambda: self._write(found))
        pairs = sum(data.sample_count for data in splits) // PAIR
        log.info(
            "reference: log-probabilities of %s (%s)", counted(pairs, "pair"), as_time(time.perf_counter() - began)
        )
        return True

    def _write(self, tables: dict[str, np.ndarray]) -> None:
        with self.directory.writing():
            write_atomic(self.path, save(tables, {"identity": json.dumps(self.identity)}))

    def _is_there(self, splits: Sequence[ShardData]) -> bool:
        try:
            with safe_open(self.path, "np") as stored:
                same = json.loads((stored.metadata() or {}).get("identity", "null")) == self.identity
                return same and all(stored.get_slice(data.split).get_shape() == [data.sample_count] for data in splits)
        except (OSError, SafetensorError, ValueError):
            return False

    def _computed(self, data: ShardData) -> np.ndarray:
        """Returns the log-probability of every sample of a split, (sample_count,), on every rank."""
        stepper, mesh = self.stepper, self.stepper.mesh
        pairs = stepper.replica.objective.compared
        assert isinstance(pairs, PairLoss), "the job has pairs"
        values = torch.zeros(data.sample_count, dtype=torch.float64, device=stepper.device)
        mine = mesh.owns_loss and mesh.coordinates["cp"] == 0
        world = mesh.axis("world")
        shown = time.perf_counter()
        with mesh.ledger.untracked():
            for done, micro in self._batches(data):
                heartbeat.beat()
                stopping = torch.tensor([self.stop.requested], dtype=torch.float32, device=stepper.device)
                world.all_reduce(stopping).wait()
                if stopping.item():
                    raise StoppedError(f"stopped before the first step, at sequence {done:,} of {len(values):,}")
                pairs.log_probabilities = None
                stepper.replica.loss(stepper.tensors(micro, 0, validates=True))
                real = torch.from_numpy(micro.sample_ids >= 0).to(values.device)
                if mine and pairs.log_probabilities is not None:
                    places = torch.from_numpy(micro.sample_ids).to(values.device)[real]
                    values[places] = pairs.log_probabilities[real]
                if time.perf_counter() - shown > PROGRESS_S:
                    shown = time.perf_counter()
                    log.info("reference: %s: %.0f%%", data.split, 100 * done / len(values))
            world.all_reduce(values).wait()
        pairs.take(values)
        return values.cpu().numpy()

    def _batches(self, data: ShardData) -> Iterator[tuple[int, MicroBatch]]:
        """Yields the number of samples before, and this rank's micro-batch of the next ones; -1 stands for padding."""
        mesh, size = self.stepper.mesh, self.micro_batch
        for first in range(0, data.sample_count, mesh.data_ranks * size):
            numbers = first + mesh.data_rank * size + np.arange(size)
            real = numbers < data.sample_count
            yield first, data.micro_batch(np.where(real, numbers, numbers % PAIR), np.where(real, numbers, -1))
