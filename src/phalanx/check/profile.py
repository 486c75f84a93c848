"""The rules for the profile of a run's steps."""

from __future__ import annotations

from collections.abc import Iterator

from phalanx.check.layout import Problem
from phalanx.config.job import Job
from phalanx.config.profile import MOST_STEPS


def profile_problems(job: Job) -> Iterator[Problem]:
    """Yields what is wrong with train.profile. Ranks are compared with the layout once it is chosen."""
    profile, layout = job.train.profile, job.layout
    if not profile.is_on:
        if profile.memory or profile.python or profile.ranks != "all":
            yield "train.profile.steps", "no step is profiled; name the first and the last, such as steps=[10, 12]"
        return
    (first, last), steps = profile.steps, job.train.steps
    if first > last:
        yield "train.profile.steps", f"the first is {first}, the last {last}; nearest legal: [{last or 1}, {first}]"
    elif first < 1 or last > steps:
        legal = f"[{min(max(1, first), steps)}, {min(last, steps)}]"
        yield "train.profile.steps", f"[{first}, {last}] lies outside of steps 1 to {steps}; nearest legal: {legal}"
    elif last - first >= MOST_STEPS:
        yield (
            "train.profile.steps",
            f"{last - first + 1} steps, but a trace of one step takes megabytes per rank: at most {MOST_STEPS}; "
            f"nearest legal: [{first}, {first + MOST_STEPS - 1}]",
        )
    if layout.sync == "asp":
        yield "train.profile.steps", "sync=asp has no steps that all ranks take together; nearest legal: sync=bsp"
    if layout.data_parallel == "threads":
        yield (
            "train.profile.steps",
            "the replicas of data_parallel=threads share one interpreter; nearest legal: data_parallel=ddp",
        )
    if profile.ranks == "all":
        return
    world = layout.processes
    if len(set(profile.ranks)) < len(profile.ranks):
        yield "train.profile.ranks", f"each once: {sorted(set(profile.ranks))}"
    elif min(profile.ranks) < 0 or (not layout.auto and max(profile.ranks) >= world):
        legal = sorted({min(max(0, rank), world - 1) for rank in profile.ranks})
        yield (
            "train.profile.ranks",
            f"are {list(profile.ranks)}, but there are ranks 0 to {world - 1}; nearest legal: {legal}",
        )
