"""Step drivers take a run's optimizer steps one after the other, in one of three forms.

`SynchronousDriver` finishes each step before the next one begins. `StreamDriver` keeps a pipeline filled from one step
to the next (PipeDream-2BW). `AsynchronousDriver` lets replicas push gradients to a parameter server
whenever they are ready (train/asp.py). The loop (train/loop.py) is the same for all three.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import Tensor

from phalanx.comm.axis import Pending
from phalanx.data.loader import MicroBatch
from phalanx.errors import NotFiniteError
from phalanx.launch.watchdog import heartbeat
from phalanx.launch.watchdog.heartbeat import Phase
from phalanx.parallel.objective import MicroTensors
from phalanx.parallel.pipeline import PipeDream
from phalanx.train.asp import Arrivals, Asynchronous
from phalanx.train.feed import Feed
from phalanx.train.guard import Guard
from phalanx.train.requests import NO_REQUESTS, Milestones, Requests
from phalanx.train.step import Step, StepInputs, Stepper


@dataclass(frozen=True)
class _UnknownStep:
    """A step whose gradients this rank has, but whose norm over all ranks it does not know yet."""

    inputs: StepInputs
    batch: int
    status: Tensor
    everywhere: Pending


class UnflushedSteps:
    """Takes the steps of a Stepper whose pipeline continues from one step to the next (parallel/pipeline.py).

    A step's update is not needed before the step after the next one begins. Until then its norm is reduced over the
    ranks, while they compute: a step's result is known one step later."""

    def __init__(self, stepper: Stepper, pipeline: PipeDream):
        self.stepper, self.pipeline = stepper, pipeline
        self.unknown: _UnknownStep | None = None
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
        for own, shard in zip(stepper.optimizer.shards, stepper.replica.shards, strict=True):
            own.gradient = None if shard.gradient is None else shard.gradient.clone()
        stepper.replica.clear()
        _, status, everywhere = stepper.status(loss, inputs.requests)
        self.unknown = _UnknownStep(inputs, batch, status, everywhere)
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
        if self.unknown is not None and self.unknown.batch <= batch - 2:
            self._settle()

    def _settle(self) -> None:
        """Takes the step whose result is pending; its norm has arrived by now."""
        if self.unknown is None:
            return
        unknown, stepper, self.unknown = self.unknown, self.stepper, None
        inputs, number = unknown.inputs, unknown.inputs.step + 1
        unknown.everywhere.wait()
        total, square, encoded = unknown.status.tolist()
        loss, norm = total / (inputs.tokens or 1), math.sqrt(square) if square >= 0 else math.nan
        if math.isfinite(norm) and math.isfinite(loss):
            stepper.optimizer.step(inputs.lr, unknown.status[1].sqrt())
            self.pipeline.write(unknown.batch + 2, [f.value for f in stepper.optimizer.shards])
        else:
            # Not raised here: some ranks are still computing results that others wait for.
            self.problem = f"step {number}: loss {loss:g}, gradient norm {norm:g}"
        self.requests |= Requests.decode(encoded)
        self.known.append((number, Step(loss, norm)))

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
        pairs = asdict(step.pairs) if step.pairs else {}
        self.record(number, {"loss": step.loss, "grad_norm": step.grad_norm, "lr": self.lr(number - 1), **pairs})


class SynchronousDriver(StepDriver):
    """Finishes each step before the next one begins; where the guard defers, its result is known one step later."""

    def steps(self) -> Iterator[tuple[int, Step]]:
        for done in range(self.first, self.milestones.last):
            # Independent replicas cannot drop a step alone: they wait until the data come.
            waits = self.stepper.independent_replicas > 1
            micro_batches, requests = self.feed.take() if waits else self.feed.take_unless(self._stops), self.requests()
            if micro_batches is None:
                micro_batches, requests = self.feed.blank(), replace(requests, void=True)
            tokens, samples = self.feed.tokens(done), self.feed.samples(done)
            inputs = StepInputs(micro_batches, done, tokens, self.lr(done), requests, samples)
            if self.guard is None:
                known = [(done + 1, self.stepper.step(inputs))]
            else:
                known = self.guard.submit(inputs, settles=self.milestones.needs_weights(done + 1))
            for number, step in known:
                if step.requests.void:
                    yield number - 1, step
                    return
                self.record_step(number, step)
                yield number, step

    def _stops(self) -> bool:
        return self.requests().stop


class StreamDriver(StepDriver):
    """Keeps a pipeline filled from step to step and drains it only where the weights are needed: a step's result is
    known one step later, and the last one's before a drain at once."""

    def steps(self) -> Iterator[tuple[int, Step]]:
        runner = self.stepper.replica.runner
        assert isinstance(runner, PipeDream), "the layout's schedule has no flush"
        unflushed, newest = UnflushedSteps(self.stepper, runner), UNKNOWN
        for done in range(self.first, self.milestones.last):
            inputs = StepInputs(self.feed.take(), done, self.feed.tokens(done), self.lr(done), self.requests())
            more = None if self.milestones.needs_weights(done + 1) else self.feed.peek
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
    return StreamDriver if isinstance(stepper.replica.runner, PipeDream) else SynchronousDriver
