"""The micro-batches of a run's steps: step by step, and for asynchronous training replica by replica."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from phalanx.config.corpora import has_pairs
from phalanx.config.job import Job
from phalanx.data.loader import Batches, MicroBatch, ShardData
from phalanx.launch.watchdog import heartbeat
from phalanx.launch.watchdog.heartbeat import Phase
from phalanx.parallel.mesh import Mesh
from phalanx.partition.derived import Batch
from phalanx.train.metrics import Meter

_POLL_S = 0.2
_PATIENCE_S = 3.0  # for data that come after a request to stop: dropping a step is for storage that hangs


class Feed:
    """This rank's micro-batches of a run that continues after `first_step` steps, from sample `first_sample` on.

    A context manager: leaving it ends the reading ahead. Time spent waiting for data is added to `meter`, which learns
    the tokens of each step from it.
    """

    def __init__(
        self, job: Job, data: ShardData, batch: Batch, mesh: Mesh, meter: Meter, *, first_step: int, first_sample: int
    ):
        self.job, self.data, self.batch, self.mesh, self.meter = job, data, batch, mesh, meter
        self.first_step, self.first_sample = first_step, first_sample
        self.batches: Batches | None = None
        self.next: list[MicroBatch] | None = None
        meter.tokens_of = self._tokens_of if data.most_conversations else None

    def __enter__(self) -> Feed:
        return self

    def __exit__(self, *_: object) -> None:
        if self.batches is not None:
            self.batches.close()

    def samples(self, done: int) -> range:
        """Returns the samples of the global batch of the step after `done` steps."""
        first = self.first_sample + (done - self.first_step) * self.batch.global_batch
        return range(first, first + self.batch.global_batch)

    def tokens(self, done: int) -> int:
        """Returns the valid tokens of the global batch of the step after `done` steps. For an independent replica they
        are its own part's, times the replicas: it takes its part for an equal one."""
        replicas = self.job.layout.independent_replicas
        if replicas == 1:
            return self._valid(self.samples(done).start, self.batch.global_batch)
        return replicas * self.share_tokens(done * replicas + self.mesh.coordinates[self.job.layout.replica_axis])

    def share_tokens(self, chunk: int) -> int:
        """Returns the valid tokens of what `share` reads, over the ranks of a replica."""
        return self._valid(*self._share(chunk))

    def take(self) -> list[MicroBatch]:
        """Reads this rank's micro-batches of the next step."""
        micro_batches = self.peek()
        self.next = None
        return micro_batches

    def take_unless(self, give_up: Callable[[], bool]) -> list[MicroBatch] | None:
        """Reads the same as `take`; returns None if the data are still not there some seconds after `give_up` began to
        hold: slow storage must not keep a run from stopping."""
        began, patience = time.perf_counter(), _PATIENCE_S
        with heartbeat.within(Phase.DATA):
            while not self._opened().wait(_POLL_S):
                patience -= _POLL_S * give_up()
                if patience <= 0:
                    return None
        self.meter.waited += time.perf_counter() - began
        return self.take()

    def blank(self) -> list[MicroBatch]:
        """Returns micro-batches of the right shapes without data, for a step that will be dropped."""
        shape = self.batch.micro_batch, self.job.model.seq_len
        zeros = np.zeros(shape, dtype=np.int64)
        documents = zeros if self.job.data.document_mask else None
        reference = np.full(shape[0], np.nan) if has_pairs(self.job.data) else None
        micro = MicroBatch(zeros, zeros, np.full(shape[0], -1), documents, reference)
        if most := self.data.most_conversations:
            micro = replace(micro, conversations=zeros, most_conversations=most)
        return [micro] * (self.batch.global_batch // (self.mesh.data_ranks * shape[0]))

    def peek(self) -> list[MicroBatch]:
        """Reads the same as `take`, which then returns these micro-batches once more."""
        if self.next is not None:
            return self.next
        with heartbeat.within(Phase.DATA):
            began = time.perf_counter()
            self.next = next(self._opened())
            self.meter.waited += time.perf_counter() - began
        return self.next

    def share(self, chunk: int) -> list[MicroBatch]:
        """Reads this rank's micro-batches of one replica's part of a step.

        With R replicas, chunk c is the (c mod R)-th of the R equal parts of step c // R, counted from 0. Nothing is
        read ahead, since a chunk goes to whichever replica asks first."""
        ranks = self.mesh.axis("shard")
        first, samples = self._share(chunk)
        with (
            heartbeat.within(Phase.DATA),
            self._open(first, samples, ranks.rank, ranks.size, prefetch=0) as batches,
        ):
            return next(batches)

    def _share(self, chunk: int) -> tuple[int, int]:
        """Returns the first sample of a chunk, and the number of its samples."""
        replicas = self.job.layout.independent_replicas
        samples = self.batch.global_batch // replicas
        return self.first_sample + (chunk - self.first_step * replicas) * samples, samples

    def _tokens_of(self, step: int) -> int:
        """Returns the positions of the global batch of `step`, counted from 1, that are no padding."""
        samples = self.samples(step - 1)
        return self.data.used_positions(samples.start, len(samples), self.job.train.seed)

    def _valid(self, first: int, samples: int) -> int:
        return self.data.valid_tokens(first, samples, self.job.train.seed)

    def _opened(self) -> Batches:
        """Returns the stream of this rank's steps, opened at the first call."""
        if self.batches is None:
            self.batches = self._open(
                self.first_sample,
                self.batch.global_batch,
                self.mesh.data_rank,
                self.mesh.data_ranks,
                prefetch=self.job.data.prefetch,
                replicas=self.job.layout.independent_replicas,
            )
        return self.batches

    def _open(self, first: int, samples: int, rank: int, ranks: int, *, prefetch: int, replicas: int = 1) -> Batches:
        """Opens the `rank`-th of `ranks` equal parts of `samples` samples per step, from sample `first` on, of which
        independent `replicas` take a part each."""
        return Batches(
            self.data,
            global_batch=samples,
            micro_batch=self.batch.micro_batch,
            rank=rank,
            ranks=ranks,
            seed=self.job.train.seed,
            first_sample=first,
            prefetch=prefetch,
            replicas=replicas,
        )
