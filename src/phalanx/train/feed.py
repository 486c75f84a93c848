"""The micro-batches of a run's steps: step by step, and for asynchronous training replica by replica."""

from __future__ import annotations

import time

from phalanx.config.job import Job
from phalanx.data.loader import Batches, MicroBatch, TokenData
from phalanx.launch.watchdog import heartbeat
from phalanx.launch.watchdog.layout import Phase
from phalanx.parallel.mesh import Mesh
from phalanx.partition.batch import Batch
from phalanx.train.metrics import Meter


class Feed:
    """This rank's micro-batches of a run that continues after `first_step` steps, from sample `first_sample` on.

    A context manager: leaving it ends the reading ahead. Time spent waiting for data is added to `meter`.
    """

    def __init__(
        self, job: Job, data: TokenData, batch: Batch, mesh: Mesh, meter: Meter, *, first_step: int, first_sample: int
    ):
        self.job, self.data, self.batch, self.mesh, self.meter = job, data, batch, mesh, meter
        self.first_step, self.first_sample = first_step, first_sample
        self.batches: Batches | None = None
        self.next: list[MicroBatch] | None = None

    def __enter__(self) -> Feed:
        return self

    def __exit__(self, *_: object) -> None:
        if self.batches is not None:
            self.batches.close()

    def samples(self, done: int) -> range:
        """Returns the samples of the global batch of the step after `done` steps."""
        first = self.first_sample + (done - self.first_step) * self.batch.global_batch
        return range(first, first + self.batch.global_batch)

    def take(self) -> list[MicroBatch]:
        """Reads this rank's micro-batches of the next step."""
        micro_batches = self.peek()
        self.next = None
        return micro_batches

    def peek(self) -> list[MicroBatch]:
        """Reads the same as `take`, which then returns these micro-batches once more."""
        if self.next is not None:
            return self.next
        with heartbeat.within(Phase.DATA):
            began = time.perf_counter()
            if self.batches is None:
                place = self.mesh.data_rank, self.mesh.data_ranks
                self.batches = self._open(
                    self.first_sample, self.batch.global_batch, *place, prefetch=self.job.data.prefetch
                )
            self.next = next(self.batches)
            self.meter.waited += time.perf_counter() - began
        return self.next

    def share(self, chunk: int) -> list[MicroBatch]:
        """Reads this rank's micro-batches of one replica's part of a step.

        With R replicas, chunk c is the (c mod R)-th of the R equal parts of step c // R, counted from 0. Nothing is
        read ahead, since a chunk goes to whichever replica asks first."""
        replicas, ranks = self.job.layout.dp_replicate, self.mesh.axis("shard")
        samples = self.batch.global_batch // replicas
        first = self.first_sample + (chunk - self.first_step * replicas) * samples
        with (
            heartbeat.within(Phase.DATA),
            self._open(first, samples, ranks.rank, ranks.size, prefetch=0) as batches,
        ):
            return next(batches)

    def _open(self, first: int, samples: int, rank: int, ranks: int, *, prefetch: int) -> Batches:
        """Opens the `rank`-th of `ranks` equal parts of `samples` samples per step, from sample `first` on."""
        return Batches(
            self.data,
            global_batch=samples,
            micro_batch=self.batch.micro_batch,
            rank=rank,
            ranks=ranks,
            seed=self.job.train.seed,
            first_sample=first,
            prefetch=prefetch,
        )
