"""Steps of a pipeline that is not flushed, and the same stale gradients on one process.

PipeDream-2BW does not compute what synchronous training does: from the third step on, gradients are those at the
weights before the last update (parallel/pipeline.py). So it is compared with one process that does the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from phalanx.data.loader import MicroBatch
from phalanx.parallel.pipeline import PipeDream
from phalanx.train.requests import NO_REQUESTS
from phalanx.train.step import Stepper
from phalanx.train.stream import UnflushedSteps

MIN_STEPS = 4
"""The minimum number of steps: the first two use the same weights, the third one's are stale, the last one drains the
pipeline."""

Read = Callable[[int], tuple[list[MicroBatch], int]]
"""Returns a step's micro-batches on this rank, and the valid tokens of the whole batch."""


def streamed(stepper: Stepper, pipeline: PipeDream, read: Read, steps: int, lr: float) -> list[float]:
    """Takes steps through the pipeline, which is empty before and after. Returns the losses."""
    stream, losses = UnflushedSteps(stepper, pipeline), []
    for step in range(steps):
        batches, valid = read(step)
        more = (lambda following=step + 1: read(following)[0]) if step < steps - 1 else None
        losses += [known.loss for _, known in stream.step(batches, step, valid, lr, NO_REQUESTS, more)]
    return losses


def delayed(stepper: Stepper, read: Read, steps: int, lr: float) -> list[float]:
    """Takes steps with equally stale gradients on one process. Returns the losses."""
    weights = [shard.value for shard in stepper.replica.shards]
    older = newest = _copies(weights)
    losses = []
    for step in range(steps):
        batches, valid = read(step)
        _put(weights, older)
        loss = stepper.gradients(batches, step, valid)
        _put(weights, newest)
        square, status, everywhere = stepper.status(loss)
        everywhere.wait()
        stepper.optimizer.step(lr, square.sqrt())
        stepper.replica.clear()
        older, newest = newest, _copies(weights)
        losses.append((status[0] / valid).item())
    return losses


def _copies(weights: Sequence[Tensor]) -> list[Tensor]:
    return [weight.detach().clone() for weight in weights]


@torch.no_grad()
def _put(weights: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    for weight, value in zip(weights, values, strict=True):
        weight.copy_(value)
