"""Asynchronous SGD (ASP) through a parameter server (Li et al. 2014; Dean et al. 2012, section 4.1, Downpour SGD).

Each replica computes the gradient of its part of a batch, sends it to the server (sync/server.py), and gets the newest
parameters and the next part. It waits for no other replica: the parameters have changed meanwhile, and the gradient is
*stale* by the number of updates that others made. The server's optimizer takes one step per gradient, so a step of the
global batch is as many updates as replicas. Replicas synchronize only for a validation or a checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from phalanx.data.loader import MicroBatch
from phalanx.parallel.parameter_shards import ParameterShard, counted
from phalanx.train.optimizer import square_sum
from phalanx.train.requests import NO_REQUESTS, Requests
from phalanx.train.step import Stepper
from phalanx.train.sync.flat import join, spread
from phalanx.train.sync.server import Push, Reply, Server, Update
from phalanx.train.sync.synchronization import synchronize


class Asynchronous:
    """One rank's part in asynchronous training: it computes, and on the first replica it also serves."""

    def __init__(self, stepper: Stepper):
        job, mesh = stepper.job, stepper.mesh
        self.stepper, self.mesh = stepper, mesh
        self.shards: Sequence[ParameterShard] = stepper.replica.shards
        self.values = [shard.value for shard in self.shards]
        self.size = sum(value.numel() for value in self.values)
        self.gradient_dtype = torch.float32 if job.train.gradients == "fp32" else self.values[0].dtype
        self.messages = mesh.messages("dp_replicate", job.run.timeout_s)
        self.replicas, self.replica = self.messages.size, self.messages.rank
        self.leads = all(place == 0 for axis, place in mesh.coordinates.items() if axis != "dp_replicate")
        """True if this position's server sets the order of updates."""
        self.server: Server | None = None
        if self.replica == 0:
            self.server = Server(stepper.optimizer, self.messages, self.gradient_dtype, job.run.timeout_s)

    def round(
        self,
        first: int,
        until: int,
        *,
        read: Callable[[int], Sequence[MicroBatch]],
        chunk_tokens: Callable[[int], int],
        lr: Callable[[int], float],
        requests: Callable[[], Requests] = lambda: NO_REQUESTS,
        note: Callable[[Update], None] | None = None,
    ) -> tuple[int, Requests]:
        """Trains from step `first` to step `until`, or to the one in which some rank had `requests`.

        `read` returns this rank's micro-batches of a chunk, and `chunk_tokens` the chunk's valid tokens over the
        replica's ranks; `lr` the rate of a step; `note` receives every update on rank 0. Returns the steps done and the
        requests. Afterwards all replicas have the server's parameters.

        Raises NotFiniteError on every rank after a loss or gradient that is not finite, which the server has not
        applied; RunError if a replica or the server is lost.
        """
        problem, asked = "", NO_REQUESTS
        reply = Reply(first * self.replicas, first * self.replicas + self.replica)
        if self.server:
            self.server.open(reply.version, until * self.replicas, lr, note if self.leads else None)
        while reply.chunk >= 0:
            batch, tokens = read(reply.chunk), chunk_tokens(reply.chunk)
            push, gradient, problem, own = self._compute(batch, reply, tokens, requests())
            asked |= own
            reply, values = self._exchange(push, gradient)
            if reply.chunk >= 0:  # otherwise newer ones come from the synchronization
                spread(values, self.values)
                self.stepper.replica.publish()
        if self.server:
            self.server.close()
        with self.mesh.ledger.untracked():  # only validations, checkpoints and the end need it
            asked = synchronize(self.mesh.axis("dp_replicate"), self.stepper.device, asked, problem)
            version = self._take_over()
        self.stepper.replica.publish()
        return version // self.replicas, asked

    def _compute(
        self, micro_batches: Sequence[MicroBatch], reply: Reply, tokens: int, requests: Requests
    ) -> tuple[Push, Tensor | None, str, Requests]:
        """Computes a part of a batch. Returns the push, the flat gradient (n,), a problem if there is one, and the
        requests of the replica's ranks."""
        stepper, step = self.stepper, reply.chunk // self.replicas
        loss = stepper.gradients(micro_batches, step, tokens)
        gradients = [f.value.new_zeros(f.value.shape) if f.gradient is None else f.gradient for f in self.shards]
        of = {shard.name: gradient for shard, gradient in zip(self.shards, gradients, strict=True)}
        square = square_sum([of[f.name] for f in counted(self.shards)])
        status = torch.stack((loss * self.mesh.owns_loss, square.to(loss.device), loss.new_tensor(requests.encode())))
        self.mesh.reduce_replica(status).wait()
        total, square_norm, encoded = status.tolist()
        requests = Requests.decode(encoded)
        mean, norm = total / (tokens or 1), math.sqrt(square_norm) if square_norm >= 0 else math.nan
        broken = not (math.isfinite(norm) and math.isfinite(mean))
        push = Push(reply.chunk, reply.version, mean, norm, requests.pauses, broken)
        if broken:
            bad = (n for n, gradient in enumerate(gradients) if not gradient.isfinite().all())
            problem = f"step {step + 1}: loss {mean:g}, gradient norm {norm:g}{stepper.name_first(next(bad, None))}"
            stepper.replica.clear()
            return push, None, problem, requests
        flat = join(gradients)
        stepper.replica.clear()
        return push, flat.to("cpu", self.gradient_dtype), "", requests

    def _exchange(self, push: Push, gradient: Tensor | None) -> tuple[Reply, Tensor]:
        """Pushes and pulls. If a replica has several ranks, the first learns the gradient's ticket for the others."""
        ticket = torch.zeros((), dtype=torch.float64, device=self.stepper.device)
        reply, values = None, None
        if self.leads:
            reply, values = self._send(push, gradient)
            ticket.fill_(reply.version - 1)
        self.mesh.reduce_replica(ticket).wait()
        if reply is None or values is None:
            reply, values = self._send(replace(push, ticket=int(ticket.item())), gradient)
        return reply, values

    def _send(self, push: Push, gradient: Tensor | None) -> tuple[Reply, Tensor]:
        if self.server:
            return self.server.exchange(push, gradient)
        self.messages.send(push.tensor(), 0)
        if gradient is not None:
            self.messages.send(gradient, 0)
        reply = Reply.receive(self.messages)
        values = torch.empty(self.size, dtype=self.values[0].dtype)
        self.messages.receive(values, 0)
        return reply, values

    def _take_over(self) -> int:
        """Gives every replica the server's parameters. Returns their version."""
        replicas, device = self.mesh.axis("dp_replicate"), self.stepper.device
        version = torch.tensor([self.server.version if self.server else 0], device=device)
        replicas.broadcast(version).wait()
        flat = join(self.server.values if self.server else self.values)
        if flat.numel():
            replicas.broadcast(flat).wait()
        spread(flat, self.values)
        return int(version.item())
