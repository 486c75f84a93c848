"""The problems of the `guard` section: policies that a form of training cannot follow."""

from __future__ import annotations

from collections.abc import Iterator

from phalanx.check.layout import Problem
from phalanx.config.job import Job
from phalanx.errors import JobError
from phalanx.partition.derived import flushes


def guard_problems(job: Job) -> Iterator[Problem]:
    """Yields the dotted path of each wrong field, and the message with the nearest legal choice."""
    if not (reason := unguarded(job)):
        return
    for name, legal in (("on_spike", "off"), ("on_nan", "stop")):
        if (policy := getattr(job.guard, name)) not in (legal, "stop"):
            yield (
                f"guard.{name}",
                f"{policy} needs the loss and norm of all ranks before the optimizer writes, and {reason}; nearest "
                f"legal: {name}={legal}",
            )
    if job.guard.on_spike == "stop":
        yield "guard.on_spike", f"no step is compared with earlier ones: {reason}; nearest legal: on_spike=off"
    if job.guard.repeat_every:
        yield "guard.repeat_every", f"no step is computed again: {reason}; nearest legal: repeat_every=0"


def unguarded(job: Job) -> str:
    """Returns why no step of a job can be judged before the optimizer writes; nothing if it can be."""
    if job.layout.sync != "bsp":
        return f"replicas train independently (sync={job.layout.sync})"
    try:
        overlaps = not flushes(job.layout)
    except (JobError, KeyError):
        return ""  # the schedule has a message of its own
    return f"steps overlap (schedule={job.layout.schedule})" if overlaps else ""
