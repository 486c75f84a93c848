"""Ramps: runs that begin with smaller batches, or with shorter sequences.

A phase of smaller batches is the job with another global batch: the batch equation gives it a micro-batch and an
accumulation, and the next step begins at the next sample. In a phase of shorter sequences each sample of model.seq_len
tokens is cut into equal parts, sequences of their own: the step has the same tokens, and the order of samples does not
change (Li et al. 2022, "The stability-efficiency dilemma", without its loss of tokens)."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from phalanx.config.job import Job
from phalanx.config.layout import Layout
from phalanx.partition.derived import Batch, solve


@dataclass(frozen=True)
class RampPhase:
    """Steps of one size."""

    first: int
    """Steps of the run before them."""
    samples: int
    """Samples of the run before them."""
    batch: Batch
    parts: int
    """Sequences that each sample is cut into."""


@dataclass(frozen=True)
class Ramp:
    """The phases of a run, in their order; the last one, of whole steps, has no end."""

    phases: tuple[RampPhase, ...]

    def at(self, step: int) -> RampPhase:
        """Returns the phase of a step, from 0."""
        return self.phases[bisect_right(self.phases, step, key=lambda phase: phase.first) - 1]

    def samples(self, steps: int) -> int:
        """Returns the samples of model.seq_len tokens that so many steps of a run read."""
        phase = self.at(steps)
        return phase.samples + (steps - phase.first) * phase.batch.global_batch


def ramp_of(job: Job) -> Ramp:
    """Returns the phases of a job's run: one without ramps. Raises ValueError as `solve`."""
    train = job.train
    return _ramp(train.global_batch, job.layout, train.batch_ramp, train.seq_ramp, job.model.seq_len)


@lru_cache(64)
def _ramp(global_batch: int, layout: Layout, batches: str, lengths: str, seq_len: int) -> Ramp:
    whole = solve(global_batch, layout)
    of_batch, of_length = runs(batches), runs(lengths)
    starts = sorted({0, *(end for end, _ in of_batch), *(end for end, _ in of_length)})
    phases, samples = list[RampPhase](), 0
    for number, first in enumerate(starts):
        size = next((size for end, size in of_batch if first < end), 0)
        length = next((length for end, length in of_length if first < end), seq_len)
        phase = RampPhase(first, samples, solve(size, layout) if size else whole, max(1, seq_len // length))
        phases.append(phase)
        if number + 1 < len(starts):
            samples += (starts[number + 1] - first) * phase.batch.global_batch
    return Ramp(tuple(phases))


def runs(ramp: str) -> list[tuple[int, int]]:
    """Returns the step at which each run of a ramp such as "100*16+50*32" ends, and its value."""
    found, end = list[tuple[int, int]](), 0
    for part in ramp.split("+") if ramp else ():
        steps, _, value = part.partition("*")
        end += int(steps)
        found.append((end, int(value)))
    return found


def phase_jobs(job: Job) -> Iterator[tuple[str, Job]]:
    """Yields, for each phase before the whole steps, its steps in words and the job whose every step is of its size."""
    ramp = replace(job.train, batch_ramp="", seq_ramp="")
    whole = job.train.global_batch or solve(0, job.layout).global_batch
    ends = sorted({end for text in (job.train.batch_ramp, job.train.seq_ramp) for end, _ in runs(text)})
    for first, end in zip([0, *ends], ends, strict=False):
        size = next((size for at, size in runs(job.train.batch_ramp) if first < at), whole)
        length = next((length for at, length in runs(job.train.seq_ramp) if first < at), job.model.seq_len)
        words = f"steps {first + 1} to {end}, global batch {size}, sequences of {length} tokens"
        model = replace(job.model, seq_len=length)
        yield words, replace(job, model=model, train=replace(ramp, global_batch=size))


def assumption(job: Job) -> str:
    """Returns what predictions of a step assume of a job with ramps, in a line; nothing without."""
    if not (job.train.batch_ramp or job.train.seq_ramp):
        return ""
    phases = [words for words, _ in phase_jobs(job)]
    return f"this is a step after the ramps; those before it are smaller: {'; '.join(phases)}"
