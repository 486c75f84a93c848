"""Whole runs on the ranks of a test, and what they left behind."""

import dataclasses
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint.contents import contents, require_same_bits
from phalanx.checkpoint.inventory import newest_valid
from phalanx.config.job import Job, Optimizer
from phalanx.config.layout import Layout
from phalanx.errors import StoppedError
from phalanx.train import loop
from phalanx.train.requests import Requests, StopRequest


def optimizer_of(words: str, **options: Any) -> Optimizer:
    """Returns an optimizer by its name, and its other fields as `state=8bit`, after spaces."""
    name, *fields = words.split()
    return Optimizer(name=name, **dict(field.split("=") for field in fields), **options)


def change(job: Job, section: str, **values) -> Job:
    return dataclasses.replace(job, **{section: dataclasses.replace(getattr(job, section), **values)})


def train(ranks, job: Job, stop_at: int = 0):
    """Train as one of the ranks of a test's process group. `stop_at` acts as if a signal came in that step."""
    trainer = loop.Trainer(job, ranks, torch.device("cpu"), StopRequest())
    trainer.requests = lambda: Requests(stop=0 < stop_at <= trainer.state.step + 1)
    return trainer.run()


def stopped(ranks, job: Job, at: int) -> str:
    """Trains until a signal comes in step `at`. Returns the message, so that the rank's process lives on."""
    with pytest.raises(StoppedError) as caught:
        train(ranks, job, at)
    return str(caught.value)


def stop(ranks, job: Job, at: int, match: str = "stopped by a signal") -> None:
    """Trains until a signal comes in step `at`, with a message of every rank that has `match`."""
    for message in ranks(stopped, job.layout.processes, job, at):
        assert re.search(match, message)


def resumes_bit_by_bit(ranks, job: Job, *steps: int) -> None:
    """A run that stops in these steps and goes on each time has the losses and the weights of an unbroken one."""
    ranks(train, job.layout.processes, job)
    broken = change(job, "run", name="broken")
    for step in steps:
        stop(ranks, broken, step, f"stopped by a signal at step {step} of {job.train.steps}, with a checkpoint")
    ranks(train, job.layout.processes, broken)
    require_same_weights(broken, job)


def require_same_weights(found: Job, expected: Job) -> None:
    """Fails unless two runs have the same losses, and newest checkpoints with the same bits."""
    require_same_bits(weights(found), weights(expected))
    assert losses(found) == losses(expected)


def moves_between(ranks, job: Job, layouts: Sequence[Layout]) -> None:
    """A run that stops and goes on under one layout after the other makes the curve and the weights of one process."""
    ranks(train, 1, job)
    moved = change(job, "run", name="moved")
    for number, layout in enumerate(layouts):
        moved = dataclasses.replace(moved, layout=layout)
        if number < len(layouts) - 1:
            stop(ranks, moved, 2 * number + 2)
        else:
            ranks(train, layout.processes, moved)
    assert losses(moved) == pytest.approx(losses(job), rel=1e-9)
    straight, found = weights(job), weights(moved)
    assert straight.keys() == found.keys()
    for name, tensor in straight.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-7, atol=1e-10)


def weights(job: Job) -> dict[str, torch.Tensor]:
    """Every tensor of a run's newest checkpoint, by name."""
    manifest = newest_valid(Path(job.run.dir) / job.run.name / "checkpoints")
    assert manifest is not None
    return contents(manifest.path)


def losses(job: Job) -> list[float]:
    return [row["loss"] for row in rows(job, "step")]


def rows(job: Job, event: str) -> list[dict]:
    text = (Path(job.run.dir) / job.run.name / "metrics.jsonl").read_text()
    return [row for row in map(json.loads, text.splitlines()) if row["event"] == event]
