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
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, PrefixStore  # torch.distributed.*, to the type stubs

from phalanx.comm.axis import Axis, Pending
from phalanx.config.job import Job
from phalanx.errors import NotFiniteError
from phalanx.launch.meeting import connected, served
from phalanx.launch.ranks import REPLICA, Ranks
from phalanx.launch.replicas import ReplicaLink, ReplicaNotice
from phalanx.launch.verdict import LostPeerError
from phalanx.launch.watchdog import heartbeat
from phalanx.launch.watchdog.heartbeat import Phase
from phalanx.parallel.compression import join
from phalanx.parallel.mesh import Mesh
from phalanx.partition.ramp import ramp_of
from phalanx.train.agreement import program_facts
from phalanx.train.optimizer import ShardedOptimizer
from phalanx.train.requests import NO_REQUESTS, Requests
from phalanx.train.run_directory import job_facts
from phalanx.train.sync import DiLoCo

_SLICE_S = 0.2
"""Seconds between two signs of life while other replicas are waited for."""
_POLL_S, _JOIN_S = 0.002, 20.0


class MembershipChangedError(Exception):
    """A step does not count, because a replica was lost in it: it is computed again by those that are there."""


def own_job(job: Job) -> Job:
    """Returns the job of one replica's ranks: its layout without the others, which must do the whole batch alone if
    nobody else is there."""
    batch = ramp_of(job).phases[-1].batch
    layout = replace(job.layout, dp_replicate=1, micro_batch=batch.micro_batch, accumulation=0)
    return replace(job, layout=layout, train=replace(job.train, global_batch=batch.global_batch))


class ElasticAxis(Axis):
    """The ranks with this one's place in the replicas that are there, which change between steps. A sum that fails
    leaves its tensor as it is, and so do all that follow: `failure` says so at the end of the step."""

    def __init__(self, size: int, timeout_s: float, lost: Callable[[], bool]):
        super().__init__("dp_replicate", size)
        self.timeout_s, self.lost = timeout_s, lost
        self.failure: RuntimeError | None = None
        self._peers: Any = None
        self._failed: list[Any] = []  # groups with calls that may still wait: their destructors would, too

    def meet(self, rank: int, size: int, peers: Any) -> None:
        """Begins anew with a process group; None if it could not be made."""
        self.rank, self.size, self._peers, self.failure = rank, size, peers, None

    # Calls have memory of their own: one that was given up may still write there.

    def all_reduce(self, x: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Pending:
        if self.size == 1:
            return super().all_reduce(x, op)
        self.count("all_reduce", x)
        there, options = _on_host(x), dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(op)
        return _ElasticCall(self, x, there, lambda peers: peers.allreduce([there], options), options)

    def all_gather(self, whole: Tensor, part: Tensor) -> Pending:
        if self.size == 1:
            return super().all_gather(whole, part)
        self.count("all_gather", whole)
        there, own, options = _on_host(whole), _on_host(part), AllgatherOptions()
        return _ElasticCall(self, whole, there, lambda peers: peers._allgather_base(there, own, options), options)

    def all_to_all(
        self,
        received: Tensor,
        x: Tensor,
        received_sizes: Sequence[int] | None = None,
        sizes: Sequence[int] | None = None,
    ) -> Pending:
        assert received_sizes is sizes is None, "equal parts"
        if self.size == 1:
            return super().all_to_all(received, x)
        self.ledger.note(self.name, "all_to_all", x.nbytes - x.nbytes // self.size)
        there, own, options = _on_host(received), _on_host(x), dist.AllToAllOptions()
        return _ElasticCall(
            self, received, there, lambda peers: peers.alltoall_base(there, own, [], [], options), options
        )

    def broadcast(self, x: Tensor, source: int = 0) -> Pending:
        there, options = _on_host(x), dist.BroadcastOptions()
        options.rootRank = source
        return _ElasticCall(self, x, there, lambda peers: peers.broadcast([there], options), options)

    def begin(self, call: Callable[[Any], Any]) -> Any:
        """Returns the work of a call; None if it or one before it has failed."""
        try:
            if self.failure is None and self._peers is None:
                raise RuntimeError("a replica was lost before it met the others")
            return call(self._peers) if self.failure is None else None
        except RuntimeError as error:
            return self._fail(error)

    def has(self, work: Any) -> bool:
        """Waits for the work with signs of life; returns whether it was done, by peers that live and come in time."""
        while work is not None and self.failure is None:
            try:
                work.wait(timedelta(seconds=_SLICE_S))
                return True
            except RuntimeError as error:
                if work.is_completed() or self.lost():
                    self._fail(error)
            heartbeat.beat()
        return False

    def _fail(self, error: RuntimeError) -> None:
        self._failed.append(self._peers)
        self.failure = error


def _on_host(x: Tensor) -> Tensor:
    return x.detach().contiguous().to("cpu", copy=True)


class _ElasticCall:
    """A collective of an ElasticAxis in flight: `x` gets what arrives `there`."""

    def __init__(self, axis: ElasticAxis, x: Tensor, there: Tensor, call: Callable[[Any], Any], options: Any):
        options.timeout = timedelta(seconds=axis.timeout_s)
        self.axis, self.x, self.there, self.work = axis, x, there, axis.begin(call)

    def wait(self) -> None:
        if self.axis.has(self.work):
            self.x.copy_(self.there.view_as(self.x))


class ElasticReplicas:
    """One rank's part: its place among the replicas, and the sums over them."""

    def __init__(self, job: Job, ranks: Ranks, device: torch.device):
        """Raises RunError if the launcher refuses this replica."""
        facts = json.dumps({**program_facts(device), **job_facts(job)}, sort_keys=True)
        digest = hashlib.sha256(facts.encode()).hexdigest()
        self.link = ReplicaLink(json.loads(os.environ[REPLICA]), ranks.rank, digest)
        self.rank, self.job = ranks.rank, own_job(job)
        self.axis = ElasticAxis(job.layout.dp_replicate, job.run.timeout_s, lambda: self.link.lost(self.notice))
        """The ranks whose gradients this one's are summed with; of all replicas before the first step."""
        self.notice, self.next = ReplicaNotice(), self.link.met
        self.rows = list[dict[str, Any]]()
        """Rows for metrics.jsonl about changes of the members that nobody has written yet."""
        self.began = time.monotonic()
        self.port, self.store = 0, None
        if ranks.rank == 0:
            family = socket.getaddrinfo(self.link.address, 0)[0][0]
            with socket.create_server((self.link.address, 0), family=family) as listener:
                self.port = listener.getsockname()[1]
                self.store = served(listener, 1, job.run.timeout_s, self.link.address)

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
        self.state = state
        self.link.ready(-1 if self.link.copies else state.step, self.port)
        self._await_place()
        try:
            if not self.next.over:
                self.settle()
        except LostPeerError:
            if not self.link.over:
                raise
        return not self.link.over

    def _await_place(self) -> None:
        # Others may take long over a step, or wait for further replicas, which their own watchdogs look after.
        while self.link.replica not in self.next.members and not self.next.over:
            self.next = self.link.newer(self.next, heartbeat.beat)

    def settle(self) -> None:
        """Meets the members of the step that begins, if they have changed; those that are new get the state."""
        before, self.notice = self.notice, self.next
        if before.epoch == self.notice.epoch or before.step != self.notice.step:
            self.began = time.monotonic()
        if before.epoch == self.notice.epoch:
            return
        members, (here, size) = self.notice.members, self.place
        with heartbeat.within(Phase.EXCHANGE):
            self.axis.meet(here, size, self._join("sum", range(size)))
            new = [place for place, replica in enumerate(members) if replica in self.notice.new]
            if new and here in (places := [0, *new]):
                copies = ElasticAxis(len(places), self.axis.timeout_s, self.axis.lost)
                copies.meet(places.index(here), len(places), self._join("copy", places))
                self._copy(copies)
        joined = self.notice.new if before.epoch else members
        lost = [each for each in before.members if each not in members or each in joined]
        row = {"members": members, "lost": lost, "joined": joined, "seconds": time.monotonic() - self.began}
        self.rows.append({"step": self.state.step, **row})

    def sum(self, status: Tensor) -> None:
        """Sums a step's status over the replicas, in place, but for the norm, which is that of their sum. As
        `exchange`."""
        norm = status[1].clone()
        self.exchange(status)
        status[1] = norm

    def arrive(self) -> None:
        """Waits until an exchange opens that this replica takes part in. Raises MembershipChangedError if it was too
        late for one, and copied the state that the others have after it, or if the run is over."""
        self.link.arrive(self.notice)
        self.next = self.link.newer(self.notice, heartbeat.beat)
        in_time = self.link.replica in self.next.members
        if not in_time:
            self._await_place()
        if not self.next.over:
            self.settle()
        if not in_time:
            raise MembershipChangedError

    def exchange(self, x: Tensor) -> None:
        """Sums `x` over the replicas, in place, once all sums before it are there. Raises MembershipChangedError on all
        ranks if one of them has not got one of these."""
        heartbeat.enter(Phase.EXCHANGE)
        if self.next.epoch != self.notice.epoch:  # since the exchange before it in this step
            raise MembershipChangedError
        self.notice = self.next
        with self.axis.ledger.untracked():
            self.axis.all_reduce(x).wait()
        failure = self.axis.failure
        self.link.vote(self.notice, self.state.step, summed=failure is None)
        self.next = self.link.newer(self.notice, heartbeat.beat)
        if self.next.step == self.notice.step:
            if failure is not None and self.next.members == self.notice.members and not self.next.new:
                raise failure  # no member was lost, not even one that is back
            raise MembershipChangedError

    def finish(self) -> None:
        """Ends the run for all; the others wait until the first one has saved it. Raises LostPeerError without that."""
        if self.leads:
            self.link.finish()
        while not self.link.over:
            if self.link.lost(self.next):
                raise LostPeerError("a replica was lost that had to save the end of the run")
            heartbeat.beat()
            time.sleep(_POLL_S)

    def _join(self, name: str, places: Sequence[int]) -> Any:
        """Returns the group of the ranks that have this one's place in the worlds of some members; None if it cannot
        be made. All of them call it."""
        if len(places) == 1:
            return None
        with suppress(RuntimeError, OSError):
            store = (
                self.store if self.leads and self.store else connected(self.notice.host, self.notice.port, 1, _JOIN_S)
            )
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

    def _copy(self, axis: ElasticAxis) -> None:
        """Copies the state of the first member to the new ones. Raises LostPeerError on these if that fails."""
        sends = self.leads

        def copied(tensor: Tensor) -> Tensor:
            axis.broadcast(tensor).wait()
            if axis.failure is not None and not sends:  # or a new member is lost: this step's sum will say so
                raise LostPeerError(f"a replica was lost whose state this one copied: {axis.failure}")
            return tensor

        content = bytearray(json.dumps({"step": self.state.step, **self.state.meta()}).encode() if sends else b"")
        content += bytes(int(copied(torch.tensor([len(content)])).item()) - len(content))
        meta = json.loads(copied(torch.frombuffer(content, dtype=torch.uint8)).numpy().tobytes())
        for tensor in self.state.tensors() if sends else self.state.adopt(meta, meta["step"]):
            if tensor.numel():
                copied(tensor)
        if not sends:
            self.state.stepper.reload()


class ElasticDiLoCo(DiLoCo):
    """DiLoCo whose outer steps take the replicas that arrive in time."""

    def __init__(
        self, job: Job, mesh: Mesh, optimizer: ShardedOptimizer, device: torch.device, elastic: ElasticReplicas
    ):
        super().__init__(job, mesh, optimizer, device)
        self.elastic, self.replicas = elastic, elastic.axis  # pyrefly: ignore[bad-override-mutable-attribute]

    def after_update(self, step: int, requests: Requests, problem: str) -> Requests:
        """As LocalSGD's. Raises MembershipChangedError where this replica was too late."""
        self.problem = self.problem or problem
        if not self.is_due(step):
            return NO_REQUESTS
        heartbeat.enter(Phase.EXCHANGE)
        while True:
            self.elastic.arrive()
            gradient = self.anchor - join(self.values)
            self.replicas.all_reduce(gradient).wait()
            asked = torch.tensor([requests.encode(), float(bool(self.problem))], dtype=torch.float64)
            with suppress(MembershipChangedError):
                self.elastic.exchange(asked)
                break
        if asked[1]:
            raise NotFiniteError(self.problem or "another replica has met a loss or gradient that is not finite")
        self.move(gradient)
        self.optimizer.write()
        return Requests.decode(asked[0].item())
