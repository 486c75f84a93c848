"""What `train.compile` stands for on a device, and the jobs that torch.compile does not take."""

from __future__ import annotations

from collections.abc import Iterator

from phalanx.check.layout import Problem
from phalanx.config.job import Job
from phalanx.partition.pipeline import flushes, slices_of


def compiles(job: Job, device: str = "") -> bool:
    """Returns whether blocks are compiled on a device, "cpu" or "cuda"; by default, that of the job's cluster."""
    if job.train.compile != "auto":
        return job.train.compile
    device = device or ("cpu" if job.cluster.device == "cpu" else "cuda")
    return device == "cuda" and not refusal(job)


def compile_problems(job: Job) -> Iterator[Problem]:
    """Yields why a job that asks for it is not compiled. Raises JobError if a schedule's file is none."""
    if job.train.compile is True and (reason := refusal(job)):
        yield "train.compile", f"{reason}; nearest legal: train.compile=auto, which leaves it off"


def refusal(job: Job) -> str:
    """Returns why torch.compile does not take a job; empty if it does. Raises JobError if a schedule's file is none."""
    if slices_of(job.layout) > 1 or not flushes(job.layout):
        return f"compiled blocks handle whole sequences and one step at a time, {job.layout.schedule} does not"
    return ""
