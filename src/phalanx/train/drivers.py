"""Step drivers take a run's optimizer steps one after the other, in one of three forms.

`SynchronousDriver` finishes each step before the next one begins. `StreamDriver` keeps a pipeline filled from one step
to the next (PipeDream-2BW, train/stream.py). `AsynchronousDriver` lets replicas push gradients to a parameter server
whenever they are ready (train/sync/asp.py). The loop (train/loop.py) is the same for all three.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from phalanx.parallel.pipeline import PipeDream
from phalanx.train.feed import Feed
from phalanx.train.guard.guard import Guard
from phalanx.train.milestones import Milestones
from phalanx.train.requests import NO_REQUESTS, Requests
from phalanx.train.step import Step, Stepper
from phalanx.train.stream import UnflushedSteps
from phalanx.train.sync.arrivals import Arrivals
from phalanx.train.sync.asp import Asynchronous

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
            samples = self.feed.samples(done)
            micro_batches, requests = self.feed.take() if waits else self.feed.take_unless(self._stops), self.requests()
            if micro_batches is None:
                micro_batches, requests = self.feed.blank(), replace(requests, void=True)
            batch = micro_batches, done, self.feed.tokens(done), self.lr(done), requests
            if self.guard is None:
                known = [(done + 1, self.stepper.step(*batch))]
            else:
                settles = self.milestones.needs_weights(done + 1)
                known = self.guard.submit(*batch, samples=samples, settles=settles)
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
            micro_batches, lr, requests = self.feed.take(), self.lr(done), self.requests()
            more = None if self.milestones.needs_weights(done + 1) else self.feed.peek
            for number, newest in unflushed.step(micro_batches, done, self.feed.tokens(done), lr, requests, more):
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
    """Returns the driver for the steps of `stepper`'s job."""
    if stepper.job.layout.sync == "asp":
        return AsynchronousDriver
    return StreamDriver if isinstance(stepper.replica.runner, PipeDream) else SynchronousDriver
