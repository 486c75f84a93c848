"""Contenders that take turns in the same processes: every one makes a step in every round, and ratios are taken round
by round, so that changes in the machine's speed affect all alike."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from phalanx.config.job import Job
from phalanx.parallel import mesh as meshes
from phalanx.train.device import keep_freed_memory
from phalanx.train.step import Stepper

MIN_ROUNDS = 3
"""Minimum number of measured rounds, however long they take."""
Steps = Mapping[str, Callable[[], Any]]
Turns = dict[str, list[tuple[float, float]]]
"""The begin and end of each contender's turns on one rank, on the clock that all processes of a machine share."""


def prepare() -> None:
    """Applies the settings of every measuring process."""
    keep_freed_memory()
    torch.set_num_threads(1)


def alone(job: Job) -> Stepper:
    """Returns a job's stepper for one process, in a process beside which there are others."""
    mesh = meshes.alone()
    return Stepper(job, mesh, torch.device("cpu"), job.model.vocab_size)


def agree(found: Mapping[str, tuple[float, float] | None], close: float) -> None:
    """Raises AssertionError if losses and gradient norms differ from the first one's. Some may be on other ranks."""
    known = {name: values for name, values in found.items() if values is not None}
    first, expected = next(iter(known.items()))
    for name, values in known.items():
        same = all(math.isclose(a, b, rel_tol=close) for a, b in zip(values, expected, strict=True))
        assert same, f"{name}: loss and gradient norm {values}, not {expected} as {first}"


def take_turns(steps: Steps, rounds: int, seconds: float) -> Turns:
    """Takes all contenders' turns on this rank, in as many of `rounds` rounds as begin within `seconds`. Each has made
    a step before, to be compared, so that all are warm."""
    turns: Turns = {name: [] for name in steps}
    start = time.perf_counter()
    for number in range(rounds):
        late = torch.tensor([time.perf_counter() - start > seconds])
        dist.broadcast(late, 0)
        if late and number >= MIN_ROUNDS:
            break
        for name in list(steps) if number % 2 else list(steps)[::-1]:
            dist.barrier()
            began = time.perf_counter()
            steps[name]()
            turns[name].append((began, time.perf_counter()))
    return turns


def lasted(answers: Sequence[Turns]) -> dict[str, list[float]]:
    """Returns the seconds of every turn, from the first rank's beginning to the last one's end."""
    seconds: dict[str, list[float]] = {}
    for name in answers[0]:
        together = zip(*(turns[name] for turns in answers), strict=True)
        seconds[name] = [max(end for _, end in turn) - min(begin for begin, _ in turn) for turn in together]
    return seconds


def ratio(seconds: Mapping[str, Sequence[float]], name: str, other: str) -> float:
    """Returns the time of `name` relative to `other`: the median of the rounds' ratios."""
    return statistics.median(a / b for a, b in zip(seconds[name], seconds[other], strict=True))
