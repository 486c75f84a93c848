"""Records a run's results: rows of metrics.jsonl, and log lines."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from phalanx.comm.axis import Ledger
from phalanx.echo import shortened
from phalanx.launch.watchdog import heartbeat
from phalanx.train import device as devices
from phalanx.train.evaluate import Validation
from phalanx.train.metrics import Meter, MetricsFile, line
from phalanx.train.milestones import Milestones
from phalanx.units import gib
from phalanx.units import seconds as as_time

log = logging.getLogger(__name__)


class Recorder:
    """Records one rank's results. A context manager; without a path (every rank but the first) the rows of
    metrics.jsonl are discarded."""

    def __init__(
        self,
        path: Path | None,
        meter: Meter,
        milestones: Milestones,
        device: torch.device,
        source_tokens: Callable[[int], dict[str, int]] = lambda step: {},
    ):
        self.source_tokens = source_tokens
        self.rows, self.meter, self.milestones = MetricsFile(path), meter, milestones
        self.device = device
        self.newest = 0
        """The newest step."""

    def __enter__(self) -> Recorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.end(self.newest, "failed", str(error) or type(error).__name__)
        self.rows.__exit__(kind, error, trace)

    def step(self, number: int, values: dict[str, float]) -> None:
        """Records step `number`, which ends now: `values` has its loss, gradient norm and learning rate."""
        row = {"step": number, **values, **self.meter.step(number), "memory": devices.peak_memory(self.device)}
        self.newest = number
        heartbeat.memory(row["memory"])
        sources = self.source_tokens(number)
        self.rows.write("step", **row, **({"source_tokens": sources} if sources else {}))
        if self.milestones.shows(number):
            log.info("%s", line({**row, **self.meter.since_shown()}, devices.peak_memory(self.device)))

    def validation(self, step: int, found: Validation, seconds: float) -> None:
        """Records a validation after step `step`. Its time is not training."""
        self.meter.pause(seconds)
        pairs = found.pairs
        facts: dict[str, Any] = {f"val_{name}": value for name, value in asdict(pairs).items()} if pairs else {}
        facts |= {"source_losses": found.sources} if found.sources else {}
        self.rows.write("validation", step=step, val_loss=found.loss, **facts, seconds=seconds)
        shown = f"margin: {pairs.reward_margin:.3f}  accuracy: {pairs.reward_accuracy:.1%}  " if pairs else ""
        shown += "".join(f"{path}: {loss:.4f}  " for path, loss in found.sources.items())
        log.info("step: %d  val_loss: %.4f  %s(%s)", step, found.loss, shown, as_time(seconds))

    def guard(self, step: int, text: str, values: dict[str, Any]) -> None:
        """Records what the guard found in step `step`, and what it did."""
        self.rows.write("guard", step=step, text=text, **values)
        log.warning("step: %d  guard: %s", step, text)

    def restart(self, resumed: int, attempt: int, reason: str, seconds: float) -> None:
        """Records that attempt `attempt` continued from step `resumed` after a failure, and took its first step so many
        seconds after that."""
        self.rows.write("restart", step=resumed, attempt=attempt, reason=reason, down_s=seconds)
        log.info("restart: attempt %d resumed from step %d, %s down: %s", attempt, resumed, as_time(seconds), reason)

    def checkpoint(self, step: int, path: Path, seconds: float, waited: float) -> None:
        """Records that the checkpoint of step `step` is whole, its seconds, and those that training waited for it."""
        size = sum(file.stat().st_size for file in path.iterdir())
        self.rows.write("checkpoint", step=step, name=path.name, seconds=seconds, waited_s=waited, bytes=size)

    def end(self, step: int, status: str, reason: str = "") -> None:
        """Records how this attempt ends: finished, stopped or failed."""
        self.rows.write("end", step=step, status=status, reason=shortened(reason.partition("\n")[0], 500))

    def traffic(self, step: int, ledger: Ledger, steps: int) -> None:
        """Records the bytes that this rank sent per step, over the last `steps` steps, by axis and collective."""
        self.rows.write("traffic", step=step, steps=steps, traffic_bytes=ledger.traffic(steps))
        for text in ledger.lines(steps):
            log.info("sent per step by rank 0 over %s", text)

    def offload(self, step: int, copied: dict[str, int], steps: int) -> None:
        """Records the bytes that this rank copied per step between the tiers of memory, over the last `steps` steps;
        nothing if nothing is offloaded."""
        if not copied:
            return
        each = {name: count // steps for name, count in copied.items()}
        self.rows.write("offload", step=step, steps=steps, bytes=each)
        log.info("copied per step by rank 0: %s", ", ".join(f"{name} {gib(size)}" for name, size in each.items()))

    def staleness(self, step: int, summary: dict[str, Any]) -> None:
        """Records the staleness of gradients since this attempt began."""
        self.rows.write("staleness", step=step, **summary)
        log.info("staleness of %d gradients: mean %.3g, max %d", summary["updates"], summary["mean"], summary["max"])
