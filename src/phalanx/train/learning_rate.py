"""The learning rate at each step: warm-up, then cosine, linear, warmup-stable-decay, or constant."""

from __future__ import annotations

import math

from phalanx.config.job import Optimizer


def peak(optimizer: Optimizer, global_batch: int) -> float:
    """Returns the job's peak rate, scaled to its batch: linear (Goyal et al. 2017) or square root (Krizhevsky 2014)."""
    if optimizer.batch_scaling == "none":
        return optimizer.lr
    ratio = global_batch / optimizer.base_batch
    return optimizer.lr * (ratio if optimizer.batch_scaling == "linear" else math.sqrt(ratio))


def at_step(step: int, optimizer: Optimizer, end: int, global_batch: int) -> float:
    """Returns the learning rate of step `step` (the first is 0) under a schedule that ends at step `end`
    (train/schedule_end.py)."""
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
