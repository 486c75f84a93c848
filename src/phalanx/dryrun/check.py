"""Whether a job or a planned layout fits, by rehearsing the ranks that may be fullest."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from phalanx.check.job import problems_of
from phalanx.config.job import Job
from phalanx.cost.job_spec import rank_spec
from phalanx.cost.rank_memory import RankMemory, step_memory
from phalanx.data.files import Progress, silent
from phalanx.dryrun.rehearse import RankRehearsal, device_type_of, distinct_ranks, rehearse
from phalanx.errors import DoesNotFitError, JobError
from phalanx.partition import derived as batch
from phalanx.plan.plan import Candidate, Plan
from phalanx.techniques.memory import compiles
from phalanx.units import gib

CHEAP = 600
"""Layers × micro-batches up to which every pipeline stage is rehearsed: about a minute."""
CHECKED = 3
"""Layouts of a plan that are rehearsed, beside those that do not fit."""


@dataclass(frozen=True)
class JobRehearsal:
    """Ranks of a job, rehearsed, beside the prediction."""

    job: Job
    """The job as rehearsed: with fewer micro-batches where more change nothing in memory."""
    device: str
    """torch's type of the device."""
    ranks: Sequence[RankRehearsal]
    predicted: Sequence[RankMemory]
    """Memory of the eager step, which is the rehearsed one, by pipeline rank."""
    saved: Sequence[int]
    """Bytes that the job's step keeps less than the rehearsed one, by pipeline rank: torch.compile's, as predicted."""
    seconds: float

    def stage(self, rank: RankRehearsal) -> int:
        return rank.coordinates.get("pp", 0)

    def needed(self, rank: RankRehearsal) -> int:
        """Returns the bytes that a rank's device must have: the rehearsed peak and the context, which is no tensor."""
        stage = self.stage(rank)
        return rank.peak + self.predicted[stage].context - self.saved[stage]

    @property
    def fullest(self) -> RankRehearsal:
        return max(self.ranks, key=self.needed)

    @property
    def limit(self) -> int:
        """Bytes of a device; 0 if they are not known."""
        return round(self.job.cluster.accelerator.memory_gib * 2**30)

    @property
    def fits(self) -> bool:
        return not self.limit or self.needed(self.fullest) <= self.limit

    @property
    def verdict(self) -> str:
        """The fullest rank's memory in one line."""
        found, needed = self.fullest, self.needed(self.fullest)
        stage = self.stage(found)
        more = [("context", self.predicted[stage].context), ("less when compiled", self.saved[stage])]
        beside = "".join(f", {name} {gib(size)}" for name, size in more if size)
        if not self.limit:
            limit = ": the memory of the devices is not known (cluster.accelerator.memory_gib)"
        else:
            limit = (
                f" of {gib(self.limit)}: fits" if self.fits else f" exceeds {gib(self.limit)} per device: does not fit"
            )
        largest = max(found.peak_bytes.items(), key=lambda part: part[1])
        return (
            f"rank {found.rank} needs {gib(needed)} (rehearsed peak {gib(found.peak)} in {found.at}, of which "
            f"{largest[0]} {gib(largest[1])}{beside}){limit}"
        )

    def as_dict(self) -> dict[str, Any]:
        """Returns the document of `phalanx dryrun --json`."""
        found = self.fullest.as_dict()
        return {
            "layout": self.job.layout.line(),
            "world": self.job.layout.processes,
            "device": self.device,
            "peak_bytes": found["peak_bytes"],
            "needed_bytes": self.needed(self.fullest),
            "predicted_peak_bytes": {each.rank: self.predicted[self.stage(each)].allocated for each in self.ranks},
            "traffic_bytes": found["traffic_bytes"],
            "flops": found["flops"],
            "fits": self.fits,
            "ranks": [each.as_dict() for each in self.ranks],
            "seconds": round(self.seconds, 3),
        }


def rehearse_ranks(
    job: Job, vocab_size: int, ranks: Sequence[int], steps: int | None = None, progress: Progress = silent
) -> JobRehearsal:
    """Rehearses ranks of a job. Raises JobError for a job that cannot be rehearsed, or if there is no such rank."""
    if wrong := [rank for rank in ranks if not 0 <= rank < job.layout.processes]:
        raise JobError(f"rank {wrong[0]}: the layout has ranks 0 to {job.layout.processes - 1}")
    began, device = time.perf_counter(), device_type_of(job)
    predicted = _memory(job, vocab_size, device)
    saved = [0] * len(predicted)
    if compiles(job, device):
        eager = _memory(_eager(job), vocab_size, device)
        saved = [max(0, one.allocated - other.allocated) for one, other in zip(eager, predicted, strict=True)]
        predicted = eager
    found: list[RankRehearsal] = []
    for rank in ranks:
        progress("rehearsing ranks", len(found), len(ranks))
        found.append(rehearse(job, rank, vocab_size, device, steps))
    progress("rehearsing ranks", len(found), len(ranks))
    return JobRehearsal(job, device, found, predicted, saved, time.perf_counter() - began)


def check(job: Job, vocab_size: int, progress: Progress = silent) -> JobRehearsal:
    """Rehearses the ranks of a job that may be fullest: the first of every pipeline stage where that is cheap, else
    that of the stage predicted fullest. Raises as `rehearse_ranks`."""
    device = device_type_of(job)
    job = shortened(job, vocab_size, device)
    ranks = distinct_ranks(job)
    if job.model.n_layers * batch.solve(job.train.global_batch, job.layout).accumulation > CHEAP:
        needed = [each.needed for each in _memory(_eager(job), vocab_size, device)]
        ranks = [ranks[needed.index(max(needed))]]
    return rehearse_ranks(job, vocab_size, ranks, progress=progress)


def check_plan(plan: Plan, job: Job, progress: Progress = silent) -> Plan:
    """Returns the plan of a job with rehearsed candidates first: the best CHECKED that fit, without those before them
    that do not, which are `struck`. Raises DoesNotFitError if none fits when rehearsed."""
    good: list[Candidate] = []
    struck, left = dict[str, str](), list(plan.best)
    while left and len(good) < CHECKED:
        each = left.pop(0)
        progress("rehearsing layouts", len(good), CHECKED)
        layout, batch = replace(each.layout, auto=False), each.spec.batch.global_batch
        rehearsed = replace(job, layout=layout, train=replace(job.train, global_batch=batch))
        try:
            tried = check(rehearsed, each.spec.model.vocab_size)
        except JobError as error:
            struck[each.layout.line()] = str(error)
            continue
        if tried.fits:
            good.append(replace(each, rehearsed=tried.needed(tried.fullest)))
        else:
            struck[each.layout.line()] = tried.verdict
    progress("rehearsing layouts", CHECKED, CHECKED)
    found = replace(plan, best=(*good, *left), struck=struck)
    if plan.best and not good:
        raise DoesNotFitError("\n".join(["rehearsed, and none can be recommended:", *found.struck_lines()]))
    if good and good[0].layout != plan.best[0].layout:  # they are about another choice
        return replace(found, notes=(), alternatives=())
    return found


def shortened(job: Job, vocab_size: int, device: str) -> Job:
    """Returns the job with the fewest micro-batches per step for which the same memory is predicted on every rank: more
    add only their tokens."""
    layout = job.layout
    solved = batch.solve(job.train.global_batch, layout)
    memory = _memory(job, vocab_size, device)
    fewer = 2 if layout.pp == 1 else 2 * layout.pp
    while fewer < solved.accumulation:
        short = replace(layout, micro_batch=solved.micro_batch, accumulation=fewer)
        train = replace(job.train, global_batch=fewer * solved.micro_batch * layout.data_ranks)
        found = replace(job, layout=short, train=train)
        if not problems_of(found) and _memory(found, vocab_size, device) == memory:
            return found
        fewer *= 2
    return job


def _eager(job: Job) -> Job:
    return replace(job, train=replace(job.train, compile=False))


def _memory(job: Job, vocab_size: int, device: str) -> tuple[RankMemory, ...]:
    return step_memory(rank_spec(job, vocab_size, device))
