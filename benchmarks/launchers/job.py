"""The job that every launcher starts, and what its run directory says."""

from __future__ import annotations

import json
import statistics
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.chaos import weights

STEPS = 30
NODES = 2
_LONG_S = 120.0
_JOB = """
model: {n_layers: 2, d_model: 64, n_heads: 4, seq_len: 64}
cluster: {device: cpu, peak_tflops: 1.0}
data: {corpus: random, random_tokens: 20000, random_vocab: 64}
train: {precision: fp64, steps: STEPS, global_batch: 32, eval_samples: 8, log_every: 1}
checkpoint: {every: EVERY}
run: {sample_tokens: 0, timeout_s: 240, threads: 1}
"""


def text(per_node: int, steps: int = STEPS) -> str:
    """Returns the job for two nodes, or as many ranks on one: in float64, with a fixed layout and one thread per rank,
    so that every launcher must reach the same bits. Checkpoints are a third of the steps apart, at most 50."""
    layout = f"layout: {{dp_replicate: {NODES}, tp: {per_node}}}\n"
    return _JOB.replace("STEPS", str(steps)).replace("EVERY", str(min(50, steps // 3))) + layout


def long_steps(control: Run) -> int:
    """Returns the steps that take two minutes here, by the step time of a run."""
    seconds = statistics.median(row["step_time_s"] for row in control.rows("step"))
    return round(_LONG_S / seconds)


MISTAKE = "optimizer.lrr=3"
MISTAKE_SAID = "unknown key"


@dataclass(frozen=True)
class Run:
    """A run directory."""

    directory: Path

    def rows(self, event: str) -> list[dict[str, Any]]:
        """Returns the rows of metrics.jsonl for one event; none if there is no file yet."""
        found = []
        with suppress(OSError):
            for line in (self.directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
                with suppress(ValueError):  # a line that is being written
                    row = json.loads(line)
                    if row["event"] == event:
                        found.append(row)
        return found

    @property
    def step(self) -> int:
        """The newest step; 0 before the first."""
        return max((row["step"] for row in self.rows("step")), default=0)

    @property
    def losses(self) -> list[float]:
        """The loss of each step; of steps that were trained again, the last."""
        by_step = {row["step"]: row["loss"] for row in self.rows("step")}
        return [by_step[step] for step in sorted(by_step)]

    @property
    def first_step_at(self) -> float | None:
        """When the first step had ended, in seconds since the epoch."""
        rows = self.rows("step")
        return rows[0]["time"] if rows else None

    def weights(self, steps: int) -> weights.State | None:
        """Returns the weights and moments of the last checkpoint; None if that is not of step `steps`."""
        return weights.load(self.directory / "checkpoints", steps)


def compare(run: Run, control: Run, steps: int) -> dict[str, Any]:
    """Returns the final loss, and how far losses and weights are from the control's: 0.0 if all bits are equal."""
    losses, wanted = run.losses, control.losses
    found: dict[str, Any] = {"steps": len(losses), "loss": losses[-1] if losses else None}
    if len(losses) == len(wanted) == steps:
        found["loss_max_rel"] = max(abs(a - b) / abs(b) for a, b in zip(losses, wanted, strict=True))
        state = control.weights(steps)
        assert state is not None, "the control has its last checkpoint"
        found["weights_max_rel"] = weights.difference(run.weights(steps), state)
    return found
