"""Optimizer steps of a pipeline that is not flushed between them (parallel/pipeline.py).

A step's update is not needed before the step after the next one begins. Until then its norm is reduced over the ranks,
while they compute: a step's result is known one step later.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from phalanx.comm.axis import Pending
from phalanx.data.loader import MicroBatch
from phalanx.errors import NotFiniteError
from phalanx.launch.watchdog import heartbeat
from phalanx.launch.watchdog.layout import Phase
from phalanx.parallel.objective import MicroTensors
from phalanx.parallel.pipeline import PipeDream
from phalanx.train.requests import NO_REQUESTS, Requests
from phalanx.train.step import Step, Stepper


@dataclass(frozen=True)
class _UnknownStep:
    """A step whose gradients this rank has, but whose norm over all ranks it does not know yet."""

    step: int
    batch: int
    status: Tensor
    everywhere: Pending
    tokens: int
    lr: float


class UnflushedSteps:
    """Takes the steps of a Stepper whose pipeline continues from one step to the next."""

    def __init__(self, stepper: Stepper, pipeline: PipeDream):
        self.stepper, self.pipeline = stepper, pipeline
        self.unknown: _UnknownStep | None = None
        self.known: list[tuple[int, Step]] = []
        self.problem = ""
        self.requests = NO_REQUESTS

    def step(
        self,
        micro_batches: Sequence[MicroBatch],
        step: int,
        global_tokens: int,
        lr: float,
        requests: Requests,
        more: Callable[[], Sequence[MicroBatch]] | None,
    ) -> list[tuple[int, Step]]:
        """Finishes step `step`'s micro-batches, and starts those of the next one that `more` returns, if any.

        Returns the steps whose results became known, with their numbers: the previous one, and without `more` also this
        one. After a request, seen one step later, `more` is not asked. Raises as Stepper.step."""
        stepper, batch = self.stepper, self.pipeline.batch
        if self.requests.pauses:
            more = None

        def tensors(micros: Sequence[MicroBatch], number: int) -> list[MicroTensors]:
            return [stepper.tensors(micro, number) for micro in micros]

        heartbeat.enter(Phase.FORWARD_BACKWARD)
        loss = self.pipeline.run_batch(
            tensors(micro_batches, step),
            stepper.factor(global_tokens, micro_batches),
            (lambda: tensors(more(), step + 1)) if more else None,
            self._due,
        )
        self._settle()
        self._raise()
        for own, shard in zip(stepper.optimizer.shards, stepper.replica.shards, strict=True):
            own.gradient = None if shard.gradient is None else shard.gradient.clone()
        stepper.replica.clear()
        _, status, everywhere = stepper.status(loss, requests)
        self.unknown = _UnknownStep(step, batch, status, everywhere, global_tokens, lr)
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
        unknown.everywhere.wait()
        total, square, encoded = unknown.status.tolist()
        loss, norm = total / (unknown.tokens or 1), math.sqrt(square) if square >= 0 else math.nan
        if math.isfinite(norm) and math.isfinite(loss):
            stepper.optimizer.step(unknown.lr, unknown.status[1].sqrt())
            self.pipeline.write(unknown.batch + 2, [f.value for f in stepper.optimizer.shards])
        else:
            # Not raised here: some ranks are still computing results that others wait for.
            self.problem = f"step {unknown.step + 1}: loss {loss:g}, gradient norm {norm:g}"
        self.requests |= Requests.decode(encoded)
        self.known.append((unknown.step + 1, Step(loss, norm)))

    def _raise(self) -> None:
        if self.problem:
            raise NotFiniteError(self.problem + self.stepper.name_first(self.stepper.optimizer.first_bad_gradient()))
