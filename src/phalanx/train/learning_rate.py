"""The learning rate at each step: warm-up, then cosine, linear, warmup-stable-decay, or constant."""

from __future__ import annotations

import math
from dataclasses import dataclass

from phalanx.config.job import Job, Optimizer
from phalanx.partition.ramp import ramp_of


def peak(optimizer: Optimizer, global_batch: int) -> float:
    """Returns the job's peak rate, scaled to its batch: linear (Goyal et al. 2017) or square root (Krizhevsky 2014)."""
    if optimizer.batch_scaling == "none":
        return optimizer.lr
    ratio = global_batch / optimizer.base_batch
    return optimizer.lr * (ratio if optimizer.batch_scaling == "linear" else math.sqrt(ratio))


def at_step(step: int, optimizer: Optimizer, end: int, global_batch: int) -> float:
    """Returns the learning rate of step `step` (the first is 0) under a schedule that ends at step `end`
    (train/learning_rate.py)."""
    top = peak(optimizer, global_batch)
    if step < optimizer.warmup_steps:
        return top * (step + 1) / optimizer.warmup_steps
    floor = top * optimizer.min_lr_ratio
    return floor + (top - floor) * _share(step, optimizer, end)


def _share(step: int, optimizer: Optimizer, end: int) -> float:
    """Returns the fraction of the way from the smallest rate to the peak: 1 at the peak, 0 from step `end` on."""
    start = optimizer.warmup_steps
    if optimizer.schedule == "constant":
        return 1.0
    if optimizer.schedule == "wsd":
        start = max(start, end - round(optimizer.decay_fraction * end))
    if step < start:
        return 1.0
    if step >= end:
        return 0.0
    done = (step - start) / (end - start)
    return (1 + math.cos(math.pi * done)) / 2 if optimizer.schedule == "cosine" else 1 - done


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
    return at_step(step, job.optimizer, end, ramp_of(job).at(step).batch.global_batch)


def _equal(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=1e-9)
