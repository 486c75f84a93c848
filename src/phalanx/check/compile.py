"""What `train.compile` stands for on a device, and the jobs that torch.compile does not take."""

from __future__ import annotations

from collections.abc import Iterator

from phalanx.check.layout import Problem
from phalanx.config.job import Job


def compiles(job: Job, device: str = "") -> bool:
    """Returns whether blocks are compiled on a device, "cpu" or "cuda"; by default, that of the job's cluster."""
    if job.train.compile != "auto":
        return job.train.compile
    device = device or ("cpu" if job.cluster.device == "cpu" else "cuda")
    return device == "cuda" and not refusal(job)


def compile_problems(job: Job) -> Iterator[Problem]:
    """Yields why a job that asks for it is not compiled."""
    if job.train.compile is True and (reason := refusal(job)):
        yield "train.compile", f"{reason}; nearest legal: train.compile=auto, which leaves it off"


def refusal(job: Job) -> str:
    """Returns why torch.compile does not take a job; empty if it does."""
    if job.layout.data_parallel == "threads" and job.layout.dp_replicate > 1:
        return "torch compiles in one thread at a time, and each of data_parallel=threads would make graphs of its own"
    return ""
