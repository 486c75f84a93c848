"""Step drivers take a run's optimizer steps one after the other, in one of three forms.

`SynchronousDriver` finishes each step before the next one begins. `StreamDriver` keeps a pipeline filled from one step
to the next (PipeDream-2BW). `AsynchronousDriver` is asynchronous SGD (ASP) through a parameter server (Li et al. 2014;
Dean et al. 2012, section 4.1, Downpour SGD). The loop (train/loop.py) is the same for all three.

With ASP each replica computes the gradient of its part of a batch, sends it to the server, and gets the newest
parameters and the next part. It waits for no other replica: the parameters have changed meanwhile, and the gradient is
*stale* by the number of updates that others made. The server's optimizer takes one step per gradient, so a step of the
global batch is as many updates as replicas. Replicas synchronize only for a validation or a checkpoint.
"""

from __future__ import annotations

import math
import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from phalanx.comm.axis import Axis
from phalanx.data.loader import MicroBatch
from phalanx.errors import NotFiniteError, RunError
from phalanx.launch.watchdog import heartbeat
from phalanx.launch.watchdog.heartbeat import Phase
from phalanx.parallel.objective import MicroTensors
from phalanx.parallel.parameter_shards import ParameterShard, counted
from phalanx.parallel.pipeline import PipeDream
from phalanx.train.elastic import MembershipChangedError
from phalanx.train.feed import Feed
from phalanx.train.guard import Guard
from phalanx.train.optimizer import ShardedOptimizer, square_sum
from phalanx.train.requests import NO_REQUESTS, Milestones, Requests
from phalanx.train.step import Computed, Step, StepInputs, Stepper, not_finite
from phalanx.train.sync import join, parts, spread, synchronize


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


class Arrivals:
    """Receives every update, in order; calls `show(step, values)` for every whole step, as many updates as there are
    replicas."""

    def __init__(self, replicas: int, show: Callable[[int, dict[str, float]], None]):
        self.replicas, self.show = replicas, show
        self.pending: list[Update] = []
        self.histogram: Counter[int] = Counter()
        """Number of updates by staleness."""
        self.loss = float("nan")
        """Mean over the last whole step."""

    def __call__(self, update: Update) -> None:
        self.histogram[update.staleness] += 1
        self.pending.append(update)
        if len(self.pending) < self.replicas:
            return
        done, self.pending = self.pending, []
        self.loss = fmean(one.push.loss for one in done)
        values = {
            "loss": self.loss,
            "grad_norm": fmean(one.push.norm for one in done),
            "lr": update.lr,
            "staleness": fmean(one.staleness for one in done),
        }
        self.show(update.version // self.replicas, values)

    def summary(self) -> dict[str, Any]:
        """Returns the staleness of all updates so far: {"mean": ..., "max": ..., "updates": ..., "histogram": ...}."""
        updates = self.histogram.total()
        return {
            "mean": sum(stale * count for stale, count in self.histogram.items()) / updates if updates else 0.0,
            "max": max(self.histogram, default=0),
            "updates": updates,
            "histogram": {str(stale): self.histogram[stale] for stale in sorted(self.histogram)},
        }


class Asynchronous:
    """One rank's part in asynchronous training: it computes, and on the first replica it also serves."""

    def __init__(self, stepper: Stepper):
        job, mesh = stepper.job, stepper.mesh
        self.stepper, self.mesh = stepper, mesh
        self.shards: Sequence[ParameterShard] = stepper.trained
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
        stepper.replica.objective.take_further(loss)  # the server knows the main loss alone
        gradients = [f.value.new_zeros(f.value.shape) if f.gradient is None else f.gradient for f in self.shards]
        of = {shard.name: gradient for shard, gradient in zip(self.shards, gradients, strict=True)}
        square = square_sum([of[f.name] for f in counted(self.shards)])
        status = torch.stack((loss * self.mesh.owns_loss, square.to(loss.device), loss.new_full((), requests.encode())))
        self.mesh.reduce_replica(status).wait()
        total, square_norm, encoded = status.tolist()
        requests = Requests.decode(encoded)
        mean, norm = total / (tokens or 1), math.sqrt(square_norm) if square_norm >= 0 else math.nan
        broken = not (math.isfinite(norm) and math.isfinite(mean))
        push = Push(reply.chunk, reply.version, mean, norm, requests.pauses, broken)
        if broken:
            bad = (n for n, gradient in enumerate(gradients) if not gradient.isfinite().all())
            problem = not_finite(step + 1, mean, norm) + stepper.name_first(next(bad, None))
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


class UnflushedSteps:
    """Takes the steps of a Stepper whose pipeline continues from one step to the next (parallel/pipeline.py).

    A step's update is not needed before the step after the next one begins. Until then its norm is reduced over the
    ranks, while they compute: a step's result is known one step later."""

    def __init__(self, stepper: Stepper, pipeline: PipeDream):
        self.stepper, self.pipeline = stepper, pipeline
        self.unknown: tuple[int, Computed] | None = None
        """A batch and its step, whose gradients this rank has, but whose norm over all ranks it does not know yet."""
        self.known: list[tuple[int, Step]] = []
        self.problem = ""
        self.requests = NO_REQUESTS

    def step(self, inputs: StepInputs, more: Callable[[], Sequence[MicroBatch]] | None) -> list[tuple[int, Step]]:
        """Finishes a step's micro-batches, and starts those of the next one that `more` returns, if any.

        Returns the steps whose results became known, with their numbers: the previous one, and without `more` also this
        one. After a request, seen one step later, `more` is not asked. Raises as Stepper.step."""
        stepper, batch = self.stepper, self.pipeline.batch
        if self.requests.pauses:
            more = None

        def tensors(micros: Sequence[MicroBatch], number: int) -> list[MicroTensors]:
            return [stepper.tensors(micro, number) for micro in micros]

        heartbeat.enter(Phase.FORWARD_BACKWARD)
        loss = self.pipeline.run_batch(
            tensors(inputs.micro_batches, inputs.step),
            stepper.factor(inputs.tokens, inputs.micro_batches),
            (lambda: tensors(more(), inputs.step + 1)) if more else None,
            self._due,
        )
        self._settle()
        self._raise()
        for own, shard in zip(stepper.optimizer.shards, stepper.trained, strict=True):
            own.gradient = None if shard.gradient is None else shard.gradient.clone()
        stepper.replica.clear()
        self.unknown = batch, Computed(inputs, loss, inputs.tokens, *stepper.status(loss, inputs.requests))
        if more is None:
            self._settle()
            self._raise()
            self.pipeline.restart([f.value for f in stepper.optimizer.shards])
        heartbeat.enter(Phase.RECORD)
        steps, self.known = self.known, []
        if more is None and steps:
            number, final = steps[-1]
            steps[-1] = number, replace(final, requests=self.requests)
            self.requests = NO_REQUESTS
        return steps

    def _due(self, batch: int) -> None:
        """Takes the step before the last one, since a batch's first forward pass is next."""
        if self.unknown is not None and self.unknown[0] <= batch - 2:
            self._settle()

    def _settle(self) -> None:
        """Takes the step whose result is pending; its norm has arrived by now."""
        if self.unknown is None:
            return
        (batch, computed), optimizer, self.unknown = self.unknown, self.stepper.optimizer, None
        computed.settle()
        number, loss, norm = computed.inputs.step + 1, computed.loss, computed.grad_norm
        if math.isfinite(norm) and math.isfinite(loss):
            optimizer.step(computed.inputs.lr, computed.square.sqrt())
            self.pipeline.write(batch + 2, [f.value for f in optimizer.shards])
        else:
            # Not raised here: some ranks are still computing results that others wait for.
            self.problem = not_finite(number, loss, norm)
        self.requests |= computed.requests
        self.known.append((number, Step(loss, norm, facts=computed.facts)))

    def _raise(self) -> None:
        if self.problem:
            raise NotFiniteError(self.problem + self.stepper.name_first(self.stepper.optimizer.first_bad_gradient()))


UNKNOWN = Step(math.nan, math.nan)
"""The newest known step of a run without a step so far."""


@dataclass
class StepDriver(ABC):
    """Takes the steps of a run that has done `first` steps, until its last one."""

    stepper: Stepper
    feed: Feed
    milestones: Milestones
    requests: Callable[[], Requests]
    """This rank's requests at the moment."""
    lr: Callable[[int], float]
    """The learning rate of a step, which counts from 0."""
    record: Callable[[int, dict[str, float]], None]
    """Called once for every step as soon as its loss is known, with its number, from 1, and its measurements."""
    first: int
    guard: Guard | None = None
    """Judges every step, if all ranks take it together."""

    @abstractmethod
    def steps(self) -> Iterator[tuple[int, Step]]:
        """Trains. Yields the number of steps done, and the newest step whose loss is known.

        At every yield all ranks have done the same number of steps. After a step for which `milestones.needs_weights`
        holds, or which carries a request, all ranks have the weights after it. A void step, for which a rank had no
        data when it was asked to stop, is yielded but not counted, and is the last. Raises NotFiniteError on every rank
        before a loss or gradient that is not finite changes a weight."""

    def report(self) -> dict[str, Any]:
        """Returns additional measurements of this form of training, by event name; none by default."""
        return {}

    def record_step(self, number: int, step: Step) -> None:
        """Records a step that was taken at its own learning rate."""
        values = {"loss": step.loss, "grad_norm": step.grad_norm, "lr": self.lr(number - 1)}
        self.record(number, {**values, **step.facts})


class SynchronousDriver(StepDriver):
    """Finishes each step before the next one begins; where the guard defers, its result is known one step later."""

    def steps(self) -> Iterator[tuple[int, Step]]:
        done = self.first
        while done < self.milestones.last:
            for number, step in self.take(done):
                if step.requests.void:
                    yield number - 1, step
                    return
                self.record_step(number, step)
                yield number, step
            done = self.after(done)

    def after(self, done: int) -> int:
        """Returns the steps that are done after the one that followed `done`."""
        return done + 1

    def take(self, done: int) -> Iterable[tuple[int, Step]]:
        """Takes the step after `done` steps; returns those that are known by now."""
        # Independent replicas cannot drop a step alone: they wait until the data come.
        waits = self.stepper.independent_replicas > 1 or self.stepper.sync is not None
        micro_batches, requests = self.feed.take() if waits else self.feed.take_unless(self._stops), self.requests()
        if micro_batches is None:
            micro_batches, requests = self.feed.blank(), replace(requests, void=True)
        tokens, samples = self.feed.tokens(done), self.feed.samples(done)
        inputs = StepInputs(micro_batches, done, tokens, self.lr(done), requests, samples)
        if self.guard is None:
            return [(done + 1, self.stepper.step(inputs))]
        return self.guard.submit(inputs, settles=self.milestones.needs_weights(done + 1))

    def _stops(self) -> bool:
        return self.requests().stop


@dataclass
class ElasticDriver(SynchronousDriver):
    """Takes each step with the replicas that are there, and again if one of them is lost in it."""

    def __post_init__(self) -> None:
        assert self.stepper.elastic is not None, "the job has run.min_replicas"
        self.replicas = self.stepper.elastic

    def take(self, done: int) -> Iterable[tuple[int, Step]]:
        routing = self.stepper.routing
        routed = routing.take()
        while not self.replicas.link.over:
            self.replicas.settle()
            done = self.after(done)
            self.feed.divide(self.replicas.place, done)
            try:
                taken = [*super().take(done)]
            except MembershipChangedError:
                self.stepper.discard()
                routing.clear()
            else:
                routing.add(routed)
                return taken
        return ()

    def after(self, done: int) -> int:
        """As SynchronousDriver's: more where this replica was left behind, and copied the others' state."""
        return self.milestones.last if self.replicas.link.over else self.replicas.state.step


class StreamDriver(StepDriver):
    """Keeps a pipeline filled from step to step and drains it only where the weights are needed, or at the end of a
    ramp's phase: a step's result is known one step later, and the last one's before a drain at once."""

    def steps(self) -> Iterator[tuple[int, Step]]:
        runner = self.stepper.replica.runner
        assert isinstance(runner, PipeDream), "the layout's schedule has no flush"
        unflushed, newest = UnflushedSteps(self.stepper, runner), UNKNOWN
        for done in range(self.first, self.milestones.last):
            inputs = StepInputs(self.feed.take(), done, self.feed.tokens(done), self.lr(done), self.requests())
            drains = self.milestones.needs_weights(done + 1) or self.feed.ramp.begins(done + 1)
            more = None if drains else self.feed.peek
            for number, newest in unflushed.step(inputs, more):
                self.record_step(number, newest)
            yield done + 1, newest
            newest = replace(newest, requests=NO_REQUESTS)  # it stays the newest for another step, but they were met


@dataclass
class AsynchronousDriver(StepDriver):
    """Replicas push gradients to a parameter server and synchronize only where the weights are needed. One step
    consists of one update per replica. Rank 0 learns of each step while the others continue."""

    def __post_init__(self) -> None:
        self.replicas = self.stepper.job.layout.dp_replicate
        self.arrivals = Arrivals(self.replicas, self.record)

    def steps(self) -> Iterator[tuple[int, Step]]:
        replica, done = Asynchronous(self.stepper), self.first
        while done < self.milestones.last:
            done, requests = replica.round(
                done,
                self.milestones.next_needing_weights(done),
                read=self.feed.share,
                chunk_tokens=self.feed.share_tokens,
                lr=self.lr,
                requests=self.requests,
                note=self.arrivals,
            )
            yield done, Step(self.arrivals.loss, math.nan, requests)

    def report(self) -> dict[str, Any]:
        return {"staleness": self.arrivals.summary()}


def driver_of(stepper: Stepper) -> type[StepDriver]:
    if stepper.job.layout.sync == "asp":
        return AsynchronousDriver
    if stepper.elastic:
        return ElasticDriver
    return StreamDriver if isinstance(stepper.replica.runner, PipeDream) else SynchronousDriver
