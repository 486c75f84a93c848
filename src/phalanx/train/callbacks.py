"""Callbacks around the steps of a run: the loop (train/loop.py) has a list of them, and calls each in order.

Metrics, the balance of experts, validation, checkpoints and the profile are callbacks. All ranks have the same list, so
that a callback may call collectives.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.errors import NotFiniteError
from phalanx.partition.ramp import Ramp
from phalanx.train.state import TrainState
from phalanx.train.step import Step

Steps = Iterator[tuple[int, Step]]
"""The number of steps done, and the newest step whose loss is known."""


@dataclass
class Done:
    """A step that is done, and what follows from it."""

    number: int
    """Counted from 1."""
    step: Step
    last: bool
    """Whether it is the job's last."""
    stops: bool
    """Whether the run ends after it on request; a callback may set it."""

    @property
    def ends(self) -> bool:
        """Whether no step follows."""
        return self.stops or self.last


class Callback:
    """Does nothing; the base of all callbacks."""

    def begin(self, step: int) -> None:
        """Called when the run begins or goes back to an earlier state, after `step` steps."""

    def around(self, steps: Steps, done: int) -> Steps:
        """Returns the same steps, the first of which follows `done` steps."""
        return steps

    def after_step(self, done: Done) -> None:
        """Called after every step."""

    def conclude(self, step: int, measured: dict[str, Any]) -> None:
        """Called after the last step of this attempt, if it took any; `measured` is the report of its step driver."""


class NotFiniteAdvice(Callback):
    """Adds advice to the error about a loss or a gradient that is not finite."""

    def __init__(self, state: TrainState, ramp: Ramp, checkpoints: Path):
        self.state, self.ramp, self.checkpoints = state, ramp, checkpoints

    def around(self, steps: Steps, done: int) -> Steps:
        try:
            yield from steps
        except NotFiniteError as error:
            first, samples = self.state.samples, ""
            if self.state.stepper.job.layout.is_synchronous:
                last = first + self.ramp.at(self.state.step).batch.global_batch - 1
                samples = f" (samples {first} to {last})"
            raise NotFiniteError(
                f"{error}{samples}. The optimizer did not apply it, and checkpoints in {self.checkpoints} are older; a "
                "lower optimizer.lr, a longer optimizer.warmup_steps or train.precision=fp32 usually helps"
            ) from None
