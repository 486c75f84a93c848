"""A parameter server: it applies each replica's gradient when it arrives, and answers with the newest parameters.

A server is not a process of its own but threads on the first replica's rank: one thread per other replica, which
receives, updates under a lock, and answers. If replicas are sharded or tensor-parallel, every position has its server;
a gradient's *ticket*, its place in the order of arrival at the first of them, keeps all in one order, so that all parts
of a model have the same version.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import astuple, dataclass

import torch
from torch import Tensor

from phalanx.comm.axis import Axis
from phalanx.errors import RunError
from phalanx.train.optimizer import ShardedOptimizer
from phalanx.train.sync.flat import join, parts


@dataclass(frozen=True)
class Push:
    """The values that a replica sends with a gradient: one float64 per field, exact for whole numbers below 2^53."""

    chunk: int
    """The part of a batch that it was computed from: chunk c is the (c mod replicas)-th of step c // replicas."""
    based_on: int
    """Version of the parameters that it was computed from."""
    loss: float
    """Mean over the chunk's tokens."""
    norm: float
    """The 2-norm of the whole gradient."""
    pauses: bool
    """True if the replica was asked to stop or to save."""
    broken: bool
    """True if loss or gradient is not finite; no gradient follows."""
    ticket: int = -1
    """Position in the order of arrival; -1 at the position that sets the order."""

    def tensor(self) -> Tensor:
        return torch.tensor([float(value) for value in astuple(self)], dtype=torch.float64)

    @classmethod
    def receive(cls, messages: Axis, replica: int) -> Push:
        fields = torch.empty(7, dtype=torch.float64)
        messages.receive(fields, replica)
        chunk, based_on, loss, norm, pauses, broken, ticket = fields.tolist()
        return cls(int(chunk), int(based_on), loss, norm, bool(pauses), bool(broken), int(ticket))


@dataclass(frozen=True)
class Reply:
    """The server's answer, without the parameters."""

    version: int
    """The parameters' version: the number of gradients applied to them."""
    chunk: int
    """The chunk to compute next; -1 for none before the replicas synchronize."""

    def tensor(self) -> Tensor:
        return torch.tensor([self.version, self.chunk])

    @classmethod
    def receive(cls, messages: Axis) -> Reply:
        fields = torch.empty(2, dtype=torch.int64)
        messages.receive(fields, 0)
        version, chunk = fields.tolist()
        return cls(version, chunk)


@dataclass(frozen=True)
class Update:
    """A gradient that was applied."""

    version: int
    """The version of the parameters after it."""
    push: Push
    lr: float

    @property
    def staleness(self) -> int:
        """The number of updates by others between the parameters it was computed from and those it changed."""
        return self.version - 1 - self.push.based_on


class Server:
    """One position's parameters and their optimizer."""

    def __init__(self, optimizer: ShardedOptimizer, messages: Axis, gradient_dtype: torch.dtype, timeout_s: float):
        self.optimizer, self.messages, self.replicas = optimizer, messages, messages.size
        self.values = [shard.value for shard in optimizer.shards]
        self.gradient_dtype, self.timeout_s = gradient_dtype, timeout_s
        self.arrival = threading.Condition()
        self.threads: list[threading.Thread] = []
        self.failure: RunError | None = None

    def open(self, version: int, limit: int, lr: Callable[[int], float], note: Callable[[Update], None] | None) -> None:
        """Serves until chunk `limit`, from chunk `version` on; replica r has begun with the r-th. `lr` is the rate of a
        step. `note` receives every update, in order, in some thread."""
        self.version, self.assigned, self.limit = version, version + self.replicas, limit
        self.lr, self.note = lr, note
        arguments = [(replica, torch.get_num_threads()) for replica in range(1, self.replicas)]
        # Daemons: a failing rank ends at once, even if a thread still waits for its replica.
        self.threads = [threading.Thread(target=self._serve, args=pair, daemon=True) for pair in arguments]
        for thread in self.threads:
            thread.start()

    def exchange(self, push: Push, gradient: Tensor | None) -> tuple[Reply, Tensor]:
        """Applies a replica's gradient, flat and in `gradient_dtype`. Returns the answer and the newest parameters,
        flat and on the CPU. Raises RunError if a replica was lost."""
        with self.arrival:
            if push.ticket >= 0:
                self.arrival.wait_for(lambda: self.failure or self.version == push.ticket, self.timeout_s)
                if not self.failure and self.version != push.ticket:
                    raise RunError(f"gradient {self.version} did not arrive within {self.timeout_s:g} s")
            if self.failure:
                raise self.failure
            lr = self.lr(push.chunk // self.replicas)
            if gradient is not None:
                self._apply(gradient, push.norm, lr)
            self.version += 1
            if gradient is not None and self.note:
                self.note(Update(self.version, push, lr))
            reply = Reply(self.version, self._next_chunk(push))
            values = join(self.values).cpu()
            self.arrival.notify_all()
        return reply, values

    def close(self) -> None:
        """Waits until every replica has its last answer. Raises RunError if one was lost."""
        for thread in self.threads:
            thread.join()
        self.threads = []
        if self.failure:
            raise self.failure

    def _serve(self, replica: int, threads: int) -> None:
        """Serves one replica's pushes in a thread, until no chunk is left."""
        torch.set_num_threads(threads)
        gradient = torch.empty(sum(value.numel() for value in self.values), dtype=self.gradient_dtype)
        chunk = 0
        try:
            while chunk >= 0:
                push = Push.receive(self.messages, replica)
                if not push.broken:
                    self.messages.receive(gradient, replica)
                reply, values = self.exchange(push, None if push.broken else gradient)
                self.messages.send(reply.tensor(), replica)
                self.messages.send(values, replica)
                chunk = reply.chunk
        except Exception as error:  # raised again where this rank trains
            with self.arrival:
                self.failure = self.failure or _lost(replica, error)
                self.arrival.notify_all()

    def _apply(self, gradient: Tensor, norm: float, lr: float) -> None:
        shards = self.optimizer.shards
        for shard, part in zip(shards, parts(gradient, self.values), strict=True):
            shard.gradient = part.to(shard.value.device)
        self.optimizer.take()
        device = shards[0].value.device
        self.optimizer.step(lr, torch.tensor(norm, dtype=torch.float64, device=device))
        for shard in shards:
            shard.gradient = None

    def _next_chunk(self, push: Push) -> int:
        """Assigns the next chunk to the replica that asks: a slow one computes fewer. The same at every position."""
        if push.broken:
            self.limit = self.assigned
        elif push.pauses:  # the step that has begun is finished
            self.limit = min(self.limit, -(-self.assigned // self.replicas) * self.replicas)
        if self.assigned >= self.limit:
            return -1
        self.assigned += 1
        return self.assigned - 1


def _lost(replica: int, error: Exception) -> RunError:
    failure = RunError(f"the parameter server lost replica {replica}: {type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure
