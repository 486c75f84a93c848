"""The micro-batches of a run's steps: step by step, and for asynchronous training replica by replica.

With `data.readers` only some ranks read from storage, each for as many data ranks, and send every other rank its
micro-batches at the beginning of a step. What a rank gets is the same at any number of readers.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from phalanx.comm.axis import Axis, Pending
from phalanx.config.corpora import has_pairs
from phalanx.config.job import Job
from phalanx.config.layout import Layout
from phalanx.data.loader import Batches, MicroBatch, ShardData
from phalanx.launch.process_group import new_group
from phalanx.launch.watchdog import heartbeat
from phalanx.launch.watchdog.heartbeat import Phase
from phalanx.parallel.mesh import Mesh, data_rank, place
from phalanx.partition.ramp import Ramp
from phalanx.train.metrics import Meter
from phalanx.units import counted

_POLL_S = 0.2
_PATIENCE_S = 3.0  # for data that come after a request to stop: dropping a step is for storage that hangs


_SENT = {"tokens": "<i4", "targets": "<i4", "documents": "<i4", "conversations": "<i4"}
_SENT |= {"sample_ids": "<i8", "reference": "<f8", "valid_share": "<f8"}
"""The fields of a micro-batch that are sent, with their types: an id is below 2^24."""
_MOST_UNSENT = 8  # steps that followers have not asked for yet: stages of a pipeline without a flush are so far apart


def packed(micro_batches: Sequence[MicroBatch]) -> torch.Tensor:
    """Returns the micro-batches of a step as one message (bytes,) uint8, whose first byte is 1."""
    values = ((getattr(micro, name), dtype) for micro in micro_batches for name, dtype in _SENT.items())
    content = b"".join(np.asarray(value, dtype).tobytes() for value, dtype in values if value is not None)
    return torch.frombuffer(bytearray(b"\1" + content), dtype=torch.uint8)


def unpacked(message: torch.Tensor, like: Sequence[MicroBatch]) -> list[MicroBatch]:
    """Returns the micro-batches of a message, of the form of others; none if its first byte is 0."""
    content, found = message.numpy(), list[MicroBatch]()
    first = 1
    for micro in like if content[0] else ():
        fields: dict[str, Any] = {}
        for name, dtype in _SENT.items():
            if (form := getattr(micro, name)) is None:
                continue
            values = np.frombuffer(content, dtype, np.size(form), first)
            first += values.nbytes
            own = values.reshape(np.shape(form)).astype(np.asarray(form).dtype)
            fields[name] = own if own.ndim else own.item()
        found.append(replace(micro, **fields))
    return found


class DataReaders:
    """The ranks that one rank reads for, the first of them. A process group of their own, created with this."""

    def __init__(self, readers: int, layout: Layout, mesh: Mesh):
        self.axis, self.followers = Axis("data"), list[int]()
        """On a reader, the data rank of each of its followers, the other ranks of `axis`."""
        self._unsent = deque[tuple[torch.Tensor, Pending]]()
        if not readers or layout.world == 1:
            return
        readers = min(readers, layout.data_ranks)
        rank, part = mesh.axis("world").rank, mesh.data_rank * readers // layout.data_ranks
        data_ranks = {each: data_rank(*place(layout, each)) for each in range(layout.world)}
        mine = [each for each, own in data_ranks.items() if own * readers // layout.data_ranks == part]
        # With a ledger of its own: what is sent is no step's traffic.
        self.axis = Axis("data", len(mine), mine.index(rank), new_group(mine, "gloo"))
        self.followers = [data_ranks[each] for each in mine[1:]] if self.is_reader else []

    @property
    def is_reader(self) -> bool:
        return self.axis.rank == 0

    def send(self, messages: Mapping[int, torch.Tensor]) -> None:
        """Sends the followers the message of their data rank, without waiting for them."""
        for rank, data in enumerate(self.followers, start=1):
            self._unsent.append((messages[data], self.axis.start_send(messages[data], rank)))
        self.settle(_MOST_UNSENT * len(self.followers))

    def settle(self, most: int = 0) -> None:
        """Waits until at most so many messages are under way."""
        while len(self._unsent) > most:
            self._unsent.popleft()[1].wait()

    def receive(self, like: Sequence[MicroBatch]) -> list[MicroBatch]:
        """Returns this rank's micro-batches, of the form of others; none if its reader has given up."""
        message = torch.empty_like(packed(like))
        self.axis.receive(message, 0)
        return unpacked(message, like)


_TRIED_STEPS = 2
_LEAST_GAIN = 2.0  # messages delay a step; what each rank reads ahead for itself does not


def readers_of(
    job: Job, data: ShardData, ramp: Ramp, mesh: Mesh, device: torch.device, *, first_step: int, first_sample: int
) -> tuple[DataReaders, str]:
    """Returns the job's readers, and for `data.readers=auto` what was measured, in words: all ranks read later steps of
    the run at the same time, and the slowest counts, so that all choose the same. A collective."""
    layout = job.layout
    if job.data.readers != "auto":
        return DataReaders(job.data.readers, layout, mesh), ""
    if layout.world == layout.data_ranks:
        return DataReaders(0, layout, mesh), "every rank reads its own samples: no two need the same"
    fewest = min(job.cluster.nodes, layout.data_ranks)
    choices = {n: DataReaders(n, layout, mesh) for n in dict.fromkeys((0, layout.data_ranks, fewest, 1))}
    took, unhurried = dict[int, float](), replace(job, data=replace(job.data, prefetch=0))
    for number, readers in choices.items():
        step = first_step + (1 + len(took)) * (1 + _TRIED_STEPS)
        sample = first_sample + ramp.samples(step) - ramp.samples(first_step)
        meter, slowest = Meter(0, 0.0, 0.0, 1), torch.zeros(1, device=device)
        with Feed(unhurried, data, ramp, mesh, meter, first_step=step, first_sample=sample, readers=readers) as feed:
            feed.take()  # opens files and connections
            mesh.axis("world").all_reduce(slowest).wait()
            meter.waited = 0.0
            for _ in range(_TRIED_STEPS):
                feed.take()
        mesh.axis("world").all_reduce(slowest.fill_(meter.waited), torch.distributed.ReduceOp.MAX).wait()
        took[number] = slowest.item() / _TRIED_STEPS
    best = min(took, key=lambda number: took[number] * (1 if number else 1 / _LEAST_GAIN))
    names = {number: counted(number, "reader") if number else "every rank" for number in took}
    shown = ", ".join(f"{names[number]} {1e3 * each:.2f}" for number, each in took.items())
    return choices[best], f"{names[best]}; reading and sending took, in ms per step: {shown}"


class Feed:
    """This rank's micro-batches of a run that continues after `first_step` steps, from sample `first_sample` on.

    A context manager: leaving it ends the reading ahead. Time spent waiting for data is added to `meter`, which learns
    the tokens of each step from it.
    """

    def __init__(
        self,
        job: Job,
        data: ShardData,
        ramp: Ramp,
        mesh: Mesh,
        meter: Meter,
        *,
        first_step: int,
        first_sample: int,
        readers: DataReaders,
    ):
        self.job, self.data, self.ramp, self.mesh, self.meter = job, data, ramp, mesh, meter
        self.first_step, self.first_sample = first_step, first_sample
        self.steps_read, self.readers = first_step, readers
        self.streams: dict[int, Batches] = {}
        """By data rank: the steps that this rank reads, its own and those of its followers."""
        self.next: list[MicroBatch] | None = None
        self.members = 0, 1
        """The place of this replica among those that come and go, and their number."""
        meter.tokens_of = self._tokens_of if data.most_conversations else None

    def __enter__(self) -> Feed:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for stream in self.streams.values():
            stream.close()
        if kind is None:
            self.readers.settle()

    def divide(self, members: tuple[int, int], done: int) -> None:
        """Reads from the step after `done` steps on what is this replica's part with other `members`."""
        if self.members != members or self.steps_read != done:
            self.__exit__(None)  # ends the reading ahead
            first = self.samples(done).start
            self.first_sample, self.first_step, self.steps_read = first, done, done
            self.members, self.streams, self.next = members, {}, None

    def samples(self, done: int) -> range:
        """Returns the samples of the global batch of the step after `done` steps."""
        first = self.first_sample + self.ramp.samples(done) - self.ramp.samples(self.first_step)
        return range(first, first + self.ramp.at(done).batch.global_batch)

    def tokens(self, done: int) -> int:
        """Returns the valid tokens of the global batch of the step after `done` steps. For an independent replica they
        are its own part's, times the replicas: it takes its part for an equal one."""
        replicas = self.job.layout.independent_replicas
        if replicas == 1:
            samples = self.samples(done)
            if self.job.layout.sync != "bsp":  # replicas that come and go
                size = self.ramp.at(done).batch.micro_batch * self.mesh.data_ranks
                rounds, (member, most) = len(samples) // size, self.members
                samples = samples[rounds * member // most * size : rounds * (member + 1) // most * size]
            return self._valid(samples.start, len(samples))
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
            while not all(stream.wait(_POLL_S) for stream in self._opened().values()):
                patience -= _POLL_S * give_up()
                if patience <= 0:
                    self.readers.send(dict.fromkeys(self.streams, torch.zeros_like(packed(self.blank()))))
                    return None
        self.meter.waited += time.perf_counter() - began
        return self.take() or None  # the reader may have given up

    def blank(self) -> list[MicroBatch]:
        """Returns micro-batches of the right shapes without data, for a next step that will be dropped."""
        phase = self.ramp.at(self.steps_read)
        shape = phase.batch.micro_batch, self.job.model.seq_len
        zeros = np.zeros(shape, dtype=np.int64)
        documents = zeros if self.job.data.document_mask else None
        reference = np.full(shape[0], np.nan) if has_pairs(self.job.data) else None
        micro = MicroBatch(zeros, zeros, np.full(shape[0], -1), documents, reference)
        if most := self.data.most_conversations:
            micro = replace(micro, conversations=zeros, most_conversations=most)
        return [micro.cut(phase.parts)] * phase.batch.accumulation

    def peek(self) -> list[MicroBatch]:
        """Reads the same as `take`, which then returns these micro-batches once more."""
        if self.next is not None:
            return self.next
        with heartbeat.within(Phase.DATA):
            began = time.perf_counter()
            self.next = self._read()
            self.steps_read += 1
            self.meter.waited += time.perf_counter() - began
        return self.next

    def _read(self) -> list[MicroBatch]:
        """Reads this rank's micro-batches of the next step, and sends its followers theirs."""
        if not self.readers.is_reader:
            return self.readers.receive(self.blank())
        steps = {data: next(stream) for data, stream in self._opened().items()}
        if self.readers.followers:
            self.readers.send({data: packed(micro_batches) for data, micro_batches in steps.items()})
        return steps[self.mesh.data_rank]

    def share(self, chunk: int) -> list[MicroBatch]:
        """Reads this rank's micro-batches of one replica's part of a step.

        With R replicas, chunk c is the (c mod R)-th of the R equal parts of step c // R, counted from 0. Nothing is
        read ahead, since a chunk goes to whichever replica asks first."""
        (step, replica), ranks = divmod(chunk, self.job.layout.independent_replicas), self.mesh.axis("shard")
        with heartbeat.within(Phase.DATA), self._open(step, replica * ranks.size + ranks.rank, prefetch=0) as batches:
            return next(batches)

    def _share(self, chunk: int) -> tuple[int, int]:
        """Returns the first sample of a chunk, and the number of its samples."""
        step, replica = divmod(chunk, replicas := self.job.layout.independent_replicas)
        whole = self.samples(step)
        samples = len(whole) // replicas
        return whole.start + replica * samples, samples

    def _tokens_of(self, step: int) -> int:
        """Returns the positions of the global batch of `step`, counted from 1, that are no padding."""
        samples = self.samples(step - 1)
        return self.data.used_positions(samples.start, len(samples), self.job.train.seed)

    def _valid(self, first: int, samples: int) -> int:
        return self.data.valid_tokens(first, samples, self.job.train.seed)

    def _opened(self) -> dict[int, Batches]:
        """Returns the streams of steps that this rank reads, opened at the first call; none on a follower."""
        if not self.streams and self.readers.is_reader:
            self.streams = {
                data: self._open(self.first_step, data, prefetch=self.job.data.prefetch)
                for data in sorted({self.mesh.data_rank, *self.readers.followers})
            }
        return self.streams

    def _open(self, step: int, data_rank: int, *, prefetch: int) -> Batches:
        """Opens the steps of a data rank, from `step` on."""
        whole = self.ramp.phases[-1].batch
        return Batches(
            self.data,
            global_batch=whole.global_batch,
            micro_batch=whole.micro_batch,
            rank=data_rank,
            ranks=self.mesh.data_ranks,
            seed=self.job.train.seed,
            first_sample=self.samples(step).start,
            prefetch=prefetch,
            replicas=self.job.layout.independent_replicas,
            members=self.members,
            ramp=self.ramp,
            first_step=step,
        )
