"""The steps of a run after which a line is shown, the model is validated or a checkpoint is written."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.config.job import Job


@dataclass(frozen=True)
class Milestones:
    """The steps of one job after which something is due. Steps count from 1; an interval of 0 steps means never."""

    last: int
    """The last step, always followed by a validation and a checkpoint."""
    log_every: int
    eval_every: int
    save_every: int

    @classmethod
    def of(cls, job: Job) -> Milestones:
        """Returns the milestones of `job`."""
        return cls(job.train.steps, job.train.log_every, job.train.eval_every, job.checkpoint.every)

    def shows(self, step: int) -> bool:
        """Returns whether a log line reports step `step`."""
        return step == 1 or _due(step, self.log_every)

    def validates(self, step: int) -> bool:
        """Returns whether a validation follows step `step`."""
        return step == self.last or _due(step, self.eval_every)

    def saves(self, step: int) -> bool:
        """Returns whether a checkpoint follows step `step`."""
        return step == self.last or _due(step, self.save_every)

    def needs_weights(self, step: int) -> bool:
        """Returns whether the weights after step `step` are needed on all ranks, for a validation or a checkpoint."""
        return self.validates(step) or self.saves(step)

    def next_needing_weights(self, done: int) -> int:
        """Returns the first step after step `done` for which `needs_weights` holds."""
        intervals = [every for every in (self.eval_every, self.save_every) if every]
        return min([self.last, *(done + every - done % every for every in intervals)])


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
