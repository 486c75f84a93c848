"""Whole runs on the ranks of a test, and what they left behind."""

import dataclasses
import json
import signal
from pathlib import Path

import torch

from phalanx.job.job import Job
from phalanx.train import checkpoint, loop
from phalanx.train.stop import StopRequest
from phalanx.train.terminal import Terminal


def change(job: Job, section: str, **values) -> Job:
    return dataclasses.replace(job, **{section: dataclasses.replace(getattr(job, section), **values)})


def train(ranks, job: Job, stop_at: int = 0):
    """Train as one of the ranks of a test's process group. `stop_at` acts as if a signal came in that step."""
    stop = StopRequest()
    device = torch.device("cpu")
    trainer = loop.Trainer(job, ranks, device, stop, Terminal(job.train.steps, visible=False))
    real = trainer._steps

    def steps(feed):
        if stop_at == trainer.state.step + 1:
            stop.signal = signal.SIGTERM
        return real(feed)

    trainer._steps = steps
    return trainer.run()


def weights(job: Job) -> dict[str, torch.Tensor]:
    manifest = checkpoint.newest_valid(Path(job.run.dir) / job.run.name / "checkpoints")
    assert manifest is not None
    found = {}
    for group in ("model", "optimizer"):
        with checkpoint.Reader(manifest, group) as tensors:
            found.update({name: tensors[name] for name in tensors.names()})
    return found


def losses(job: Job) -> list[float]:
    return [row["loss"] for row in rows(job, "step")]


def rows(job: Job, event: str) -> list[dict]:
    text = (Path(job.run.dir) / job.run.name / "metrics.jsonl").read_text()
    return [row for row in map(json.loads, text.splitlines()) if row["event"] == event]
