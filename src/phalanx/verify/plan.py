"""What `phalanx verify` compares with one process: the small job, the layouts, and those that it leaves out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from phalanx.errors import JobError
from phalanx.job import batch, layout_line
from phalanx.job.check import problems_of, untrainable, untrainable_shape
from phalanx.job.job import Job
from phalanx.job.layout import Layout
from phalanx.verify import matrix
from phalanx.verify.small import Proof, proof_of

GLOBAL_BATCHES = (8, 24)
"""Sequences a step: the first that divides by a layout's data ranks × accumulation, else that product."""


@dataclass(frozen=True)
class Skipped:
    """A layout that is not compared."""

    layout: str
    reason: str


@dataclass
class Plan:
    """What is compared."""

    proof: Proof
    layouts: list[Layout] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What a layout that is compared has to do with the job's own."""

    def case(self, layout: Layout) -> Job:
        """The job of one case: the same model and optimizer, with the layout and a global batch that it divides."""
        return _with(self.proof.job, layout)

    def alone(self, global_batch: int) -> Job:
        """The job of one process that cases with that global batch are compared with."""
        job = self.proof.job
        return replace(job, train=replace(job.train, global_batch=global_batch))


def make(
    job: Job,
    *,
    lines: Sequence[str] = (),
    full: bool = False,
    max_ranks: int = 8,
    as_is: bool = False,
) -> Plan:
    """Choose what to compare: the layouts of `lines`, or the job's own and the matrix, `full` or not.

    A layout of the matrix that is not legal for the model, or larger than `max_ranks`, is skipped. Raises JobError with
    every problem of the model and of the layouts that were named.
    """
    problems = [f"{path}: {message}" for path, message in untrainable_shape(job.model)]
    plan = Plan(proof_of(job, as_is, max_ranks)) if not problems else None
    named: list[Layout] = []
    for line in lines:
        try:
            layout = layout_line.parse(line)
        except JobError as error:
            problems += error.problems
            continue
        named.append(layout)
        problems += [f"layout {line!r}: {reason}" for reason in _reasons(job, plan, layout, max_ranks)]
    if problems or plan is None:
        raise JobError(problems)
    for layout in named:
        _add(plan, layout)
    if not lines:
        _own(plan, job, max_ranks)
        candidates = [layout_line.parse(line) for line in matrix.MATRIX]
        for layout in [*candidates, *(matrix.full(max_ranks) if full else ())]:
            if reasons := _reasons(job, plan, layout, max_ranks):
                plan.skipped.append(Skipped(layout.line(), "; ".join(reasons)))
            else:
                _add(plan, layout)
    return plan


def _own(plan: Plan, job: Job, max_ranks: int) -> None:
    """The job's own layout comes first: without what this version does not train, and on fewer ranks if need be."""
    own = job.layout
    if own.world == 1 and own == replace(Layout(), bucket_mb=own.bucket_mb):
        return
    missing = untrainable(job)
    if missing:
        plan.skipped.append(Skipped(own.line(), "the job's own layout: " + "; ".join(text for _, text in missing)))
    accumulation = batch.solve(job.train.global_batch, own).accumulation
    layout = matrix.reduced(matrix.without(own, {path for path, _ in missing}), max_ranks)
    layout = replace(
        layout,
        micro_batch=0,
        accumulation=min(accumulation, 2) if accumulation > 1 else 0,
        loss_chunk=min(layout.loss_chunk, max(1, plan.proof.job.model.seq_len // 2)),
        bucket_mb=Layout.bucket_mb,
    )
    if reasons := _reasons(job, plan, layout, max_ranks):
        plan.skipped.append(Skipped(layout.line(), "the job's own layout, reduced: " + "; ".join(reasons)))
        return
    _add(plan, layout)
    if layout.line() == own.line():
        plan.notes.append(f"the first layout is the job's own: {own.line()}")
    else:
        plan.notes.append(f"the job's own layout, {own.line()} ({own.world} ranks), is compared as {layout.line()}")


def _add(plan: Plan, layout: Layout) -> None:
    if layout.bucket_mb == Layout.bucket_mb:
        layout = replace(layout, bucket_mb=plan.proof.job.layout.bucket_mb)
    if layout not in plan.layouts:
        plan.layouts.append(layout)


def _reasons(job: Job, plan: Plan | None, layout: Layout, max_ranks: int) -> list[str]:
    """Why a layout cannot be compared: it is illegal for the job's model, not trained, or too large."""
    checked = replace(job, cluster=replace(job.cluster, nodes=1, devices_per_node=0))
    problems = problems_of(_with(checked, layout))
    if not problems:
        problems = [problem for problem in untrainable(_with(checked, layout)) if problem[0].startswith("layout.")]
    if not problems and plan is not None:  # where the small model divides by less than the job's own
        problems = problems_of(plan.case(layout))
    reasons = [f"{path}: {message}" for path, message in problems]
    if not reasons and layout.processes > max_ranks:
        reasons.append(f"needs {layout.processes} processes, more than --max-ranks {max_ranks}")
    return reasons


def _with(job: Job, layout: Layout) -> Job:
    """The job with a layout and the smallest global batch that goes with it."""
    known = max(1, layout.data_ranks * max(1, layout.micro_batch) * max(1, layout.accumulation))
    if layout.micro_batch and layout.accumulation:
        global_batch = known
    else:
        global_batch = next((size for size in GLOBAL_BATCHES if size % known == 0), known)
    return replace(job, layout=layout, train=replace(job.train, global_batch=global_batch))
