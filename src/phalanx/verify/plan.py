"""What `phalanx verify` compares with one process: the small job, the layouts, and those that it leaves out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from phalanx.errors import JobError
from phalanx.job import batch, layout_line
from phalanx.job.check import problems_of, untrainable, untrainable_shape
from phalanx.job.job import Job
from phalanx.job.layout import Layout
from phalanx.job.pipeline import flushes, is_file, schedule_of
from phalanx.job.stages import parse_cut
from phalanx.schedule.schedule import Schedule
from phalanx.units import counted
from phalanx.verify import matrix
from phalanx.verify.small import Proof, proof_of

GLOBAL_BATCHES = (8, 24)
"""Sequences a step: the first that divides by a layout's data ranks × accumulation, else that product."""
PIPELINE_BATCHES = (8,)
"""The same where there is a pipeline, whose micro-batches may be a sequence each: 5 of them take 5."""


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
        """The job of one case: the same model and optimizer, with the layout and a global batch that it divides. The
        model has a layer for each stage at least."""
        return _with(deep_enough(self.proof.job, layout), layout)

    def alone(self, layout: Layout) -> Job:
        """The job of one process that the layout's case is compared with."""
        return replace(self.case(layout), layout=self.proof.job.layout)

    def stale(self, layout: Layout) -> bool:
        """Whether a layout's gradients are one update late by design (a pipeline without a flush). It is compared with
        one process that takes its own so."""
        return not flushes(layout)


def make(
    job: Job,
    *,
    lines: Sequence[str] = (),
    full: bool = False,
    schedules: bool = False,
    max_ranks: int = 8,
    as_is: bool = False,
) -> Plan:
    """Choose what to compare: the layouts of `lines`, or the job's own with the matrix, with all there is (`full`), or
    with every pipeline schedule alone (`schedules`).

    A layout of the matrix that is not legal for the model, or larger than `max_ranks`, is skipped. A model with fewer
    layers than stages gets some, unless `as_is`. Raises JobError with every problem of the model and of the layouts
    that were named.
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
        for layout in _candidates(full, schedules, max_ranks):
            deep = job if as_is else deep_enough(job, layout)
            if reasons := _reasons(deep, plan, layout, max_ranks):
                plan.skipped.append(Skipped(layout.line(), "; ".join(reasons)))
            else:
                _add(plan, layout)
    if any(map(plan.stale, plan.layouts)):
        plan.notes.append(
            "pipelines without a flush are compared with one process whose gradients are one update late, as theirs are"
        )
    deepened = sum(plan.case(layout).model.n_layers > job.model.n_layers for layout in plan.layouts)
    if deepened:
        plan.notes.append(
            f"model.n_layers: {job.model.n_layers} in the job, a layer a stage in {counted(deepened, 'layout')} with "
            "more stages than that"
        )
    return plan


def deep_enough(job: Job, layout: Layout) -> Job:
    """The job with a model for a layout's stages: as many layers as `pp_cut` has, else at least one for each stage.

    Where the layout is not legal it is the job itself."""
    if layout.pp == 1:
        return job
    try:
        layers = sum(parse_cut(layout.pp_cut)) if layout.pp_cut else max(job.model.n_layers, _schedule(layout).stages)
    except JobError:
        return job
    return replace(job, model=replace(job.model, n_layers=layers))


def _schedule(layout: Layout) -> Schedule:
    """A pipeline's schedule, whose stages do not depend on how many micro-batches it is for. Raises JobError where it
    is none."""
    return schedule_of(layout, max(layout.pp, layout.accumulation))


def _candidates(full: bool, schedules: bool, max_ranks: int) -> Iterator[Layout]:
    """The layouts that are compared besides the job's own, where nobody names any."""
    if full or not schedules:
        yield from map(layout_line.parse, matrix.MATRIX)
    if full:
        yield from matrix.full(max_ranks)
    if full or schedules:
        yield from matrix.schedules(max_ranks)


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
        accumulation=_accumulation(layout, accumulation),
        pp_cut=layout.pp_cut if plan.proof.job.model.n_layers == job.model.n_layers else "",
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


def _accumulation(layout: Layout, accumulation: int) -> int:
    """As few micro-batches a step as show everything: 2, or 2 a rank that a pipeline has. Those of a file are its own;
    0 stands for one."""
    if layout.pp > 1 and is_file(layout.schedule):
        return accumulation
    fewer = min(accumulation, 2 * layout.pp)
    return fewer if fewer > 1 else 0


def _add(plan: Plan, layout: Layout) -> None:
    """Take a layout in, once."""
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
        sizes = GLOBAL_BATCHES if layout.pp == 1 else PIPELINE_BATCHES
        global_batch = next((size for size in sizes if size % known == 0), known)
    return replace(job, layout=layout, train=replace(job.train, global_batch=global_batch))
