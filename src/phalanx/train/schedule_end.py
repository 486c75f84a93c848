"""Where the learning rate's schedule ends in a run that resumes with another length. Imports no torch.

`optimizer.decay_steps=0` means `train.steps`. If the end moved along when a run resumes with other steps, a schedule
that has already decayed would be stretched, and the rate would jump. So the schedule keeps the end that it has until
the job sets `optimizer.decay_steps`, unless the new end leaves the rate as it is: in the warm-up, or while wsd holds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from phalanx.config.job import Job
from phalanx.partition.derived import solve
from phalanx.train.learning_rate import at_step


@dataclass(frozen=True)
class ScheduleEnd:
    """The end of the schedule of a run that resumes."""

    step: int
    """Step at which the learning rate reaches its minimum."""
    message: str = ""
    """A line for the user where the rate jumps, or where the end is not that of a new run; otherwise empty."""


def end_of(job: Job) -> int:
    """Returns the step at which a new run of the job reaches the smallest rate."""
    return job.optimizer.decay_steps or job.train.steps


def resumed_end(job: Job, then: Job, step: int, saved: int | None) -> ScheduleEnd:
    """Returns the end of the schedule of a run that resumes.

    Args:
        job: the job that resumes.
        then: the job that wrote the checkpoint.
        step: steps done.
        saved: the end that the checkpoint records; None if it was written before checkpoints recorded it.
    """
    before, asked = saved or end_of(then), end_of(job)
    rate_before = _rate(then, step, before)
    keeps = not job.optimizer.decay_steps and not _equal(_rate(job, step, asked), _rate(job, step, before))
    end = before if keeps else asked
    rate = _rate(job, step, end)
    lines = []
    if not _equal(rate, rate_before):
        lines.append(f"jumps at step {step + 1} from {rate_before:.2e} to {rate:.2e}")
    if keeps:
        lines.append(
            f"{rate:.2e} at step {step + 1}: its schedule still ends at step {before}, not at train.steps={asked}; "
            f"optimizer.decay_steps={asked} moves the end, and the rate jumps to {_rate(job, step, asked):.2e}"
        )
    return ScheduleEnd(end, f"learning rate: {'; '.join(lines)}" if lines else "")


def _rate(job: Job, step: int, end: int) -> float:
    return at_step(step, job.optimizer, end, solve(job.train.global_batch, job.layout).global_batch)


def _equal(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=1e-9)
