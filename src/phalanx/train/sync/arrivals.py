"""Measurements of asynchronous training: whole steps combined from single updates, and the staleness of gradients."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from statistics import fmean
from typing import Any

from phalanx.train.sync.server import Update


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
