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

    def begins(self, step: int) -> bool:
        """Returns whether a step, from 0, has another size than the one before."""
        return 0 < step == self.at(step).first

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
    phases, samples = list[RampPhase](), 0
    for first, end, size, length in _phases(global_batch, batches, lengths, seq_len):
        phases.append(RampPhase(first, samples, solve(size, layout), max(1, seq_len // length)))
        samples += ((end or first) - first) * phases[-1].batch.global_batch
    return Ramp(tuple(phases))


def _phases(global_batch: int, batches: str, lengths: str, seq_len: int) -> Iterator[tuple[int, int | None, int, int]]:
    """Yields the steps before each phase and at its end, its global batch, and the length of its sequences; the last
    phase has no end."""
    of_batch, of_length = runs(batches), runs(lengths)
    ends = sorted({end for end, _ in (*of_batch, *of_length)})
    for first, end in zip([0, *ends], [*ends, None], strict=True):
        size = next((size for at, size in of_batch if first < at), global_batch)
        yield first, end, size, next((length for at, length in of_length if first < at), seq_len)


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
    train = replace(job.train, batch_ramp="", seq_ramp="")
    whole = job.train.global_batch or solve(0, job.layout).global_batch
    for first, end, size, length in _phases(whole, job.train.batch_ramp, job.train.seq_ramp, job.model.seq_len):
        if end is not None:
            words = f"steps {first + 1} to {end}, global batch {size}, sequences of {length} tokens"
            yield words, replace(job, model=replace(job.model, seq_len=length), train=replace(train, global_batch=size))


def assumption(job: Job) -> str:
    """Returns what predictions of a step assume of a job with ramps, in a line; nothing without."""
    if not (job.train.batch_ramp or job.train.seq_ramp):
        return ""
    phases = [words for words, _ in phase_jobs(job)]
    return f"this is a step after the ramps; those before it are smaller: {'; '.join(phases)}"
