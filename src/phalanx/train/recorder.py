"""Records a run's results: rows of metrics.jsonl, log lines, and the live bar."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch

from phalanx.comm.ledger import Ledger
from phalanx.train import device as devices
from phalanx.train.metrics import Meter, MetricsFile, line
from phalanx.train.milestones import Milestones
from phalanx.train.terminal import Terminal
from phalanx.units import seconds as as_time

log = logging.getLogger(__name__)


class Recorder:
    """Records one rank's results. A context manager; without a path (every rank but the first) the rows of
    metrics.jsonl are discarded."""

    def __init__(
        self, path: Path | None, meter: Meter, milestones: Milestones, terminal: Terminal, device: torch.device
    ):
        self.rows, self.meter, self.milestones = MetricsFile(path), meter, milestones
        self.terminal, self.device = terminal, device

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *error: object) -> None:
        self.rows.__exit__(*error)

    def step(self, number: int, values: dict[str, float]) -> None:
        """Records step `number`, which ends now: `values` has its loss, gradient norm and learning rate."""
        row = {"step": number, **values, **self.meter.step(), "memory": devices.peak_memory(self.device)}
        self.rows.write("step", **row)
        self.terminal.step(number, row["loss"], row["tps"])
        if self.milestones.shows(number):
            log.info("%s", line({**row, **self.meter.since_shown()}, devices.peak_memory(self.device)))

    def validation(self, step: int, loss: float, seconds: float) -> None:
        """Records a validation after step `step`: its mean loss per token, in nats. Its time is not training."""
        self.meter.pause(seconds)
        self.rows.write("validation", step=step, val_loss=loss, seconds=seconds)
        log.info("step: %d  val_loss: %.4f  (%s)", step, loss, as_time(seconds))

    def guard(self, step: int, text: str, values: dict[str, Any]) -> None:
        """Records what the guard found in step `step`, and what it did."""
        self.rows.write("guard", step=step, text=text, **values)
        log.warning("step: %d  guard: %s", step, text)

    def restart(self, resumed: int, attempt: int, reason: str, seconds: float) -> None:
        """Records that attempt `attempt` continued from step `resumed` after a failure, and took its first step so many
        seconds after that."""
        self.rows.write("restart", step=resumed, attempt=attempt, reason=reason, down_s=seconds)
        log.info("restart: attempt %d resumed from step %d, %s down: %s", attempt, resumed, as_time(seconds), reason)

    def traffic(self, step: int, ledger: Ledger, steps: int) -> None:
        """Records the bytes that this rank sent per step, over the last `steps` steps, by axis and collective."""
        self.rows.write("traffic", step=step, steps=steps, traffic_bytes=ledger.traffic(steps))
        for text in ledger.lines(steps):
            log.info("sent per step by rank 0 over %s", text)

    def staleness(self, step: int, summary: dict[str, Any]) -> None:
        """Records the staleness of gradients since this attempt began."""
        self.rows.write("staleness", step=step, **summary)
        log.info("staleness of %d gradients: mean %.3g, max %d", summary["updates"], summary["mean"], summary["max"])
