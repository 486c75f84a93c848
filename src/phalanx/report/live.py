"""The live view of a run at one moment, read from the files of its directory: `phalanx train` shows it on a
terminal, `phalanx watch` anywhere."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from phalanx.config.job import Job
from phalanx.report.metrics import Metrics, middle, number
from phalanx.report.ranks import NodeStates, RankState, read_nodes
from phalanx.report.run import RunRecord, is_alive, read_job, require_run

RECENT = 20
"""Newest steps whose median is shown."""
CURVE = 400
"""Newest losses of the curve."""
_WARNINGS = 3


@dataclass(frozen=True)
class LiveView:
    """One moment of a run. Figures are None where there are none."""

    name: str
    layout: str
    state: str
    step: int
    steps: int | None
    left_s: float | None
    """Seconds to the last step, at the pace of the newest ones with their validations and checkpoints."""
    loss: float | None = None
    losses: tuple[float, ...] = ()
    val_loss: float | None = None
    val_step: int = 0
    grad_norm: float | None = None
    lr: float | None = None
    tps: float | None = None
    tps_total: float | None = None
    tflops: float | None = None
    mfu: float | None = None
    step_time_s: float | None = None
    silent_s: float | None = None
    """Seconds since the newest step was done."""
    ranks: tuple[RankState, ...] = ()
    checkpoint: int | None = None
    """The step of the newest checkpoint."""
    checkpoint_age_s: float | None = None
    checkpoint_s: float | None = None
    """Seconds that it took."""
    warnings: tuple[str, ...] = field(default=())

    def document(self) -> dict[str, Any]:
        """Returns the view as plain values, for JSON."""
        return asdict(self)


class RunFollower:
    """Reads on in the files of a run. Raises DataError if a folder is no run's directory."""

    def __init__(self, path: Path, job: Job | None = None):
        require_run(path)
        self.record = RunRecord(path, Metrics())
        self._job = job
        if job is None:
            read_job(self.record)
            self._job = self.record.loaded.job if self.record.loaded else None
        self.nodes = NodeStates()

    def view(self) -> LiveView:
        """Returns the run as its files show it now."""
        record, path = self.record, self.record.path
        with suppress(OSError):
            record.metrics.read(path / "metrics.jsonl")
        record.alive = is_alive(path)
        self.nodes = read_nodes(path / "logs")
        metrics, now = record.metrics, time.time()
        job = self._job
        validation, saved = metrics.last("validation") or {}, metrics.last("checkpoint") or {}
        start = metrics.last("start") or {}
        total = job.train.steps if job else None
        state = record.state
        running = state == "running"
        recent = {name: middle(metrics.values(name, RECENT)) for name in ("tps", "tps_total", "tflops", "mfu")}
        newest = {name: next(iter(metrics.values(name, 1)), None) for name in ("loss", "grad_norm", "lr")}
        return LiveView(
            name=record.name,
            layout=str(start.get("layout", "")) or (job.layout.line() if job else ""),
            state=state,
            step=metrics.last_step,
            steps=total,
            left_s=self._left(total) if running else None,
            losses=tuple(metrics.values("loss", CURVE)),
            val_loss=number(validation.get("val_loss")),
            val_step=validation.get("step", 0),
            step_time_s=middle(metrics.values("step_time_s", RECENT)),
            silent_s=max(0.0, now - metrics.times[-1]) if metrics.times and running else None,
            ranks=self._ranks(running),
            checkpoint=saved.get("step") if saved else _latest(path),
            checkpoint_age_s=max(0.0, now - saved["time"]) if saved else None,
            checkpoint_s=number(saved.get("seconds")),
            warnings=tuple(self._warnings())[-_WARNINGS:],
            **recent,
            **newest,
        )

    def _left(self, total: int | None) -> float | None:
        metrics = self.record.metrics
        start = metrics.last("start") or {}
        first = bisect_right(metrics.steps, start.get("step", 0))
        times = metrics.times[max(first, len(metrics.times) - 200) :]
        if total is None or len(times) < 2:
            return None
        pace = (times[-1] - times[0]) / (len(times) - 1)
        return max(0.0, (total - metrics.last_step) * pace - (time.time() - times[-1]))

    def _ranks(self, running: bool) -> tuple[RankState, ...]:
        """Returns the ranks of the nodes' files; of a run of one process, which has none, what metrics.jsonl says."""
        metrics = self.record.metrics
        if self.nodes.ranks or not metrics.steps:
            return self.nodes.ranks
        memory = next(iter(metrics.values("memory", 1)), 0.0)
        silent = max(0.0, time.time() - metrics.times[-1]) if running else 0.0
        return (RankState(0, "training" if running else "ended", metrics.last_step, silent, int(memory)),)

    def _warnings(self) -> Iterator[str]:
        found = list(self.nodes.messages)
        for row in self.record.metrics.events:
            if row["event"] == "guard":
                found.append((row["time"], f"step {row['step']}: guard: {row.get('text')}"))
            elif row["event"] == "restart":
                found.append((row["time"], f"restarted at step {row['step']}: {row.get('reason')}"))
            elif row["event"] == "end" and row.get("status") == "failed":
                found.append((row["time"], f"step {row['step']}: failed: {row.get('reason')}"))
        yield from (text for _, text in sorted(found))
        for rank in self.nodes.ranks:
            if self.record.alive and rank.is_silent:
                yield f"rank {rank.rank} ({rank.host}) has been silent for {rank.silent_s:.0f} s in {rank.phase}"


def _latest(path: Path) -> int | None:
    with suppress(OSError, ValueError):
        return int((path / "latest").read_text(encoding="ascii")[:64].strip().rpartition("step-")[2])
    return None
