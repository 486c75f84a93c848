"""Replicas that come and go (`run.min_replicas`): each is a world of ranks of its own, and sums its gradients with the
others' over process groups that are made anew whenever their number changes.

The global batch stays what it is: its micro-batches are dealt out among the replicas that are there, so the loss of
every step is that of the job's batch, whoever computed it. A replica that is lost in the middle of a step costs the
others that step, which they compute again without it. One that comes back copies weights, optimizer state and progress
from the first replica, over the network. Who takes part, and which steps count, the launcher says (launch/replicas.py).
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore  # torch.distributed.*, to the type stubs

from phalanx.config.job import Job
from phalanx.launch.meeting import connected, listening_socket, served
from phalanx.launch.ranks import REPLICA, Ranks
from phalanx.launch.replicas import ReplicaLink, ReplicaNotice
from phalanx.launch.verdict import LostPeerError
from phalanx.launch.watchdog import heartbeat
from phalanx.launch.watchdog.heartbeat import Phase
from phalanx.parallel.parameter_shards import ParameterShard
from phalanx.partition.ramp import ramp_of
from phalanx.train.agreement import program_facts
from phalanx.train.requests import Requests
from phalanx.train.run_directory import job_facts

_SLICE_S = 0.2
"""Seconds between two signs of life while other replicas are waited for."""
_POLL_S, _JOIN_S = 0.002, 20.0
_HOST = "127.0.0.1"


class MembershipChangedError(Exception):
    """A step does not count, because a replica was lost in it: it is computed again by those that are there."""


def own_job(job: Job) -> Job:
    """Returns the job of one replica's ranks: its layout without the others, which must do the whole batch alone if
    nobody else is there."""
    batch = ramp_of(job).phases[-1].batch
    layout = replace(job.layout, dp_replicate=1, micro_batch=batch.micro_batch, accumulation=0)
    return replace(job, layout=layout, train=replace(job.train, global_batch=batch.global_batch))


class ElasticReplicas:
    """One rank's part: its place among the replicas, and the sums over them."""

    def __init__(self, job: Job, ranks: Ranks, device: torch.device):
        """Raises RunError if the launcher refuses this replica."""
        facts = json.dumps({**program_facts(device), **job_facts(job)}, sort_keys=True)
        digest = hashlib.sha256(facts.encode()).hexdigest()
        self.link = ReplicaLink(json.loads(os.environ[REPLICA]), ranks.rank, digest)
        self.rank, self.timeout_s = ranks.rank, job.run.timeout_s
        self.job, self.bucket = own_job(job), int(job.layout.bucket_mb * 2**20)
        self.notice, self.next = ReplicaNotice(), self.link.met
        self.rows = list[dict[str, Any]]()
        """Rows for metrics.jsonl about changes of the members that nobody has written yet."""
        self.began = time.monotonic()
        self.port, self.store = 0, None
        if ranks.rank == 0:
            with listening_socket(0, one_node=True) as listener:
                self.port = listener.getsockname()[1]
                self.store = served(listener, 1, self.timeout_s)
        self._group: Any = None
        self._stuck: list[Any] = []  # groups with calls that still wait: their destructors would, too

    @property
    def place(self) -> tuple[int, int]:
        """The place of this replica among those that are there, and their number."""
        return self.notice.members.index(self.link.replica), len(self.notice.members)

    @property
    def leads(self) -> bool:
        """Whether this replica writes checkpoints and metrics: the one that has been there for longest does."""
        return self.notice.members[:1] == (self.link.replica,)

    def enter(self, state: Any) -> bool:
        """Waits until this replica takes part, and copies the others' TrainState; returns False if the run is over."""
        self.state, self.ledger = state, state.stepper.mesh.ledger
        self.link.ready(-1 if self.link.copies else state.step, self.port)
        # Others may take long over a step, or wait for further replicas, which their own watchdogs look after.
        while self.link.replica not in self.next.members and not self.next.over:
            self.next = self.link.newer(self.next, heartbeat.beat)
        try:
            if not self.next.over:
                self.settle()
        except LostPeerError:
            if not self.link.over:
                raise
        return not self.link.over

    def settle(self) -> None:
        """Meets the members of the step that begins, if they have changed; those that are new get the state."""
        before, self.notice = self.notice, self.next
        if before.epoch == self.notice.epoch or before.step != self.notice.step:
            self.began = time.monotonic()
        if before.epoch == self.notice.epoch:
            return
        members, (here, size) = self.notice.members, self.place
        with heartbeat.within(Phase.EXCHANGE):
            self._group = self._join("sum", range(size))
            new = [place for place, replica in enumerate(members) if replica in self.notice.new]
            if new and here in (0, *new):
                self._copy(self._join("copy", [0, *new]))
        joined = self.notice.new if before.epoch else members
        lost = [each for each in before.members if each not in members or each in joined]
        row = {"members": members, "lost": lost, "joined": joined, "seconds": time.monotonic() - self.began}
        self.rows.append({"step": self.notice.step, **row})

    def sum(self, shards: Sequence[ParameterShard], loss: Tensor, requests: Requests) -> Requests:
        """Sums the gradients of `shards`, the loss and the requests over the replicas, in place; returns the latter.

        Raises MembershipChangedError on all ranks if one of them has not got the sum."""
        heartbeat.enter(Phase.EXCHANGE)
        status = torch.tensor([loss.item(), requests.encode()], dtype=torch.float64)
        failure = None
        try:
            for bucket in self._buckets(shards):
                flat = torch.cat([gradient.flatten() for gradient in bucket])
                self._all_reduce(flat)
                for gradient, part in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
                    gradient.copy_(part.view_as(gradient))
            with self.ledger.untracked():
                self._all_reduce(status)
        except RuntimeError as error:
            failure = error
        self.link.vote(self.notice, summed=failure is None)
        self.next = self.link.newer(self.notice, heartbeat.beat)
        if self.next.step == self.notice.step:
            if failure is not None and self.next.members == self.notice.members:
                raise failure  # nobody was lost
            raise MembershipChangedError
        loss.fill_(status[0])
        return Requests.decode(status[1].item())

    def finish(self) -> None:
        """Ends the run for all; the others wait until the first one has saved it. Raises LostPeerError without that."""
        if self.leads:
            self.link.finish()
        while not self.link.over:
            if self.link.lost(self.next):
                raise LostPeerError("a replica was lost that had to save the end of the run")
            heartbeat.beat()
            time.sleep(_POLL_S)

    def _buckets(self, shards: Sequence[ParameterShard]) -> Iterator[list[Tensor]]:
        bucket, size = list[Tensor](), 0
        for shard in reversed(shards):
            if (gradient := shard.gradient) is not None and gradient.numel():
                if bucket and (size + gradient.nbytes > self.bucket or gradient.dtype != bucket[0].dtype):
                    yield bucket
                    bucket, size = [], 0
                bucket.append(gradient)
                size += gradient.nbytes
        if bucket:
            yield bucket

    def _all_reduce(self, flat: Tensor) -> None:
        if (size := self.place[1]) == 1:
            return
        self.ledger.add("dp_replicate", "all_reduce", flat.nbytes, size)
        there, options = flat.cpu(), dist.AllreduceOptions()  # gloo's
        self._wait(self._group, lambda group: group.allreduce([there], options), options)
        if there is not flat:
            flat.copy_(there)

    def _wait(self, group: Any, call: Callable[[Any], Any], options: Any) -> None:
        """Makes a call of a group, and waits for it with signs of life. Raises RuntimeError if a peer is lost, or does
        not come in time."""
        if group is None:
            raise RuntimeError("a replica was lost before it met the others")
        options.timeout = timedelta(seconds=self.timeout_s)
        work = call(group)
        while True:
            try:
                work.wait(timedelta(seconds=_SLICE_S))
                return
            except RuntimeError:
                if work.is_completed() or self.link.lost(self.notice):
                    if not work.is_completed():
                        self._stuck.append(group)
                    raise
            heartbeat.beat()

    def _join(self, name: str, places: Sequence[int]) -> Any:
        """Returns the group of the ranks that have this one's place in the worlds of some members; None if it cannot
        be made. All of them call it."""
        if len(places) == 1:
            return None
        with suppress(RuntimeError, OSError):
            store = self.store if self.leads and self.store else connected(_HOST, self.notice.port, 1, _JOIN_S)
            if store is None:
                return None
            prefixed = PrefixStore(f"{self.notice.epoch}/{name}/{self.rank}", store)
            prefixed.set(f"here/{self.place[0]}", "")
            keys = [f"here/{place}" for place in places]
            # A member may still save a checkpoint, or be lost before it comes.
            while not prefixed.check(keys):
                if self.link.lost(self.notice):
                    return None
                heartbeat.beat()
                time.sleep(_POLL_S)
            return dist.ProcessGroupGloo(prefixed, places.index(self.place[0]), len(places), timedelta(seconds=_JOIN_S))
        return None

    def _copy(self, group: Any) -> None:
        """Copies the state of the first member to the new ones. Raises LostPeerError on these if that fails."""
        sends, options = self.leads, dist.BroadcastOptions()
        options.rootRank = 0

        def copied(tensor: Tensor) -> Tensor:
            there = tensor.detach().contiguous().view(-1).cpu()
            self._wait(group, lambda group: group.broadcast([there], options), options)
            return there

        try:
            content = bytearray(json.dumps(self.state.meta()).encode() if sends else b"")
            content += bytes(int(copied(torch.tensor([len(content)])).item()) - len(content))
            content = copied(torch.frombuffer(content, dtype=torch.uint8)).numpy().tobytes()
            own = self.state.tensors() if sends else self.state.adopt(json.loads(content), self.notice.step)
            for tensor in own:
                if tensor.numel():
                    there = copied(tensor)
                    if not sends:
                        tensor.copy_(there.view_as(tensor))
        except RuntimeError as error:
            if sends:  # a new member is lost: the sum of this step will say so
                return
            raise LostPeerError(f"a replica was lost whose state this one copied: {error}") from error
        if not sends:
            self.state.stepper.reload()
