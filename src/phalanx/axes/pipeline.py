"""The problems of a job's pipeline: the schedule, the stages, and options that exclude it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from phalanx.axes.axis import AxisEntry
from phalanx.axes.context import context_problems, kinds_without_cores
from phalanx.config.job import Job
from phalanx.errors import JobError
from phalanx.nearest import Misfit, divisors, multiples
from phalanx.partition import derived as batch
from phalanx.partition.derived import is_file, written_stages
from phalanx.schedule import catalogue, file
from phalanx.schedule.generators import pipedream
from phalanx.techniques.technique import Problem


def pipeline_problems(job: Job) -> Iterator[Problem]:
    """Yields the dotted path of each wrong field, and the message with the nearest legal choice. Without a pipeline (pp
    1) only an unknown schedule is a problem."""
    layout = job.layout
    if not is_file(layout.schedule) and layout.schedule not in catalogue.SCHEDULES:
        for problem in catalogue.problems(layout.schedule, layout.pp, 1):
            yield (
                "layout.schedule",
                f"{problem}; the learning rate's: optimizer.schedule; a schedule of your own: the path of its file",
            )
    if layout.pp == 1:
        return
    if is_file(layout.schedule):
        yield from _file(job)
    elif layout.schedule in catalogue.SCHEDULES:
        yield from _named(job)


def _named(job: Job) -> Iterator[Problem]:
    """Yields the problems of a schedule from the catalogue."""
    layout, name = job.layout, job.layout.schedule
    equation, entry = _equation(job), catalogue.SCHEDULES[name]
    if equation is not None:  # else the batch equation has its own message
        note = f" (accumulation in {equation.equation()})"
        choice = layout.pp, equation.accumulation, layout.pp_chunks, layout.pp_slices
        # With more stages than layers, the nearest legal number of ranks follows from the layers.
        sized = catalogue.stages(name, layout.pp, layout.pp_chunks) <= job.model.most_stages
        for problem in catalogue.problems(name, *choice, sized=sized):
            yield "layout.schedule", problem + (note if "micro-batch" in problem else "")
    least, most = entry.chunks
    if least <= catalogue.chunks_of(name, layout.pp_chunks) <= most:
        stages = catalogue.stages(name, layout.pp, layout.pp_chunks)
        chunks = stages // layout.pp
        equals = f"pp {layout.pp} × chunks {chunks} = {stages}" if chunks > 1 else f"pp {layout.pp}"
        yield from _stages(job, stages, equals, _fewer(job) if stages > job.model.most_stages else "")
    if entry.sliced:
        yield from _slices(job, layout.pp_slices or entry.slices)
    if entry.steps > 1:
        yield from _without_flush(job)
    if entry.stashes:
        yield from _stashing(job)


def _file(job: Job) -> Iterator[Problem]:
    """Yields the problems of a schedule from a file."""
    layout = job.layout
    path = layout.schedule
    try:
        schedule = file.read(path)
    except JobError as error:
        yield from (("layout.schedule", problem) for problem in error.problems)
        return
    if schedule.ranks != layout.pp:
        yield (
            "layout.pp",
            f"{path} is for pp {schedule.ranks}, pp is {layout.pp}; nearest legal: pp {schedule.ranks}, or another "
            "schedule",
        )
    equation, micro_batches = _equation(job), schedule.micro_batches // schedule.steps
    if equation is not None and equation.accumulation != micro_batches:
        yield (
            "layout.schedule",
            f"{path} is for {micro_batches} micro-batches per step, but {equation.equation()}; nearest legal: "
            f"accumulation {micro_batches} with a global batch that is a multiple of "
            f"{micro_batches * equation.data_ranks}",
        )
    for name, own in (("pp_chunks", len(schedule.stages_on(0))), ("pp_slices", schedule.slices)):
        value = getattr(layout, name)
        if value and value != own:
            yield f"layout.{name}", f"{path} has {own}, {name} is {value}; nearest legal: {name}=0"
    yield from _stages(job, schedule.stages, f"{path}: {schedule.stages}", f"n_layers {schedule.stages}")
    yield from _slices(job, schedule.slices)
    if schedule.steps > 1:
        own = pipedream(schedule.ranks, micro_batches, schedule.steps)
        if (schedule.programs, schedule.placements) != (own.programs, own.placements):
            yield (
                "layout.schedule",
                f"{path} spans {schedule.steps} optimizer steps without a flush in an order of its own; only "
                "pipedream's is trained. Nearest legal: schedule=pipedream, or a file with one step",
            )
        yield from _without_flush(job)


def _stages(job: Job, stages: int, equals: str, legal: str) -> Iterator[Problem]:
    """Yields the problems of the number of stages, and of the user's cut, with the model's layers."""
    layers, most, text, together = job.model.n_layers, job.model.most_stages, job.layout.pp_cut, job.model.together
    if stages > most:
        why = "modules for further tokens" if job.model.mtp else "which share keys"
        has = f", the last with the last {together} layers, {why}" if most < layers else ""
        yield (
            "layout.pp",
            f"{equals} stages need at least as many layers{has}, the model has {layers}; nearest legal: {legal}",
        )
    if text:
        try:
            written_stages(text, stages, layers, together)
        except JobError as error:
            yield from (("layout.pp_cut", problem) for problem in error.problems)


def _slices(job: Job, slices: int) -> Iterator[Problem]:
    """Yields the options that exclude slices of sequences."""
    if slices == 1:
        return
    layout, tokens = job.layout, job.model.seq_len
    if without_cores := kinds_without_cores(job.model, by_heads=True):
        yield (
            "layout.pp_slices",
            f"attention {', '.join(without_cores)} states no cores, so its layers need whole sequences, and slices "
            f"{slices} cut them; nearest legal: a schedule without slices, such as 1f1b",
        )
        return
    ranks = layout.tp if layout.sp else 1
    if tokens % (slices * ranks):
        tp = f" × tp {ranks} (sp)" if ranks > 1 else ""
        equation = f"seq_len {tokens} / (slices {slices}{tp}) is not an integer"
        legal = {
            "layout.pp_slices": divisors(tokens // ranks),
            "model.seq_len": multiples(slices * ranks, tokens),
        }
        yield (
            "layout.pp_slices",
            f"{equation}; nearest legal: sp=false" if tokens % ranks else Misfit(equation, slices, legal),
        )
    if tokens % slices == 0 and not any(context_problems(job)):  # else the whole sequence has its own message
        yield from context_problems(job, slices)
    moe = job.model.moe
    if moe.n_experts:
        for name, value in (("aux_loss", moe.aux_loss), ("capacity", moe.capacity)):
            if value > 0:
                yield (
                    f"model.moe.{name}",
                    f"{name} {value} counts the tokens of whole sequences, slices {slices} cut them; nearest legal: "
                    f"{name}=0, or a schedule without slices, such as 1f1b",
                )


def _without_flush(job: Job) -> Iterator[Problem]:
    """Yields the options that exclude a pipeline without a flush (PipeDream): micro-batches in flight keep the weights
    that they began with, whole, in several versions."""
    layout, name = job.layout, job.layout.schedule
    if layout.accumulate == "sharded":
        yield (
            "layout.accumulate",
            f"{name} keeps gradients whole until their step; nearest legal: accumulate=local, or schedule=1f1b",
        )
    if layout.shard_ranks > 1:
        axis = "cp" if layout.dp_shard == 1 else "dp_shard"
        degree = getattr(layout, axis)
        yield (
            f"layout.{axis}",
            f"{name} keeps two versions of the weights whole on each rank, {axis} {degree} shards state; nearest "
            f"legal: {axis}=1 with dp_replicate={degree * layout.dp_replicate}, or schedule=1f1b",
        )


def _stashing(job: Job) -> Iterator[Problem]:
    """Yields the options that exclude an update of each stage after each micro-batch, at weights of its own."""
    layout, name = job.layout, job.layout.schedule
    each = f"{name} updates a stage as soon as a micro-batch has returned there"
    if job.optimizer.clip:
        yield (
            "optimizer.clip",
            f"{each}, before the norm of all stages' gradients is known; nearest legal: clip=0, or schedule=pipedream",
        )
    for field in ("dp_replicate", "dp_shard", "cp", "ep"):
        if (degree := getattr(layout, field)) > 1:
            yield (
                f"layout.{field}",
                f"{each}, and {field} {degree} would exchange its gradients each time, which is not built; "
                f"nearest legal: {field}=1, or schedule=pipedream",
            )
    for field, value, legal in (
        ("model.tied", job.model.tied, "false"),
        ("model.mtp", job.model.mtp, 0),
        ("model.moe.n_experts", job.model.moe.n_experts, 0),
        ("layout.offload", layout.offload != "none", "none"),
    ):
        if value:
            why = (
                "both ends share a matrix" if field in ("model.tied", "model.mtp") else f"{field} counts on whole steps"
            )
            yield field, f"{each}, and {why}; nearest legal: {field.rpartition('.')[2]}={legal}, or 1f1b"
    if job.train.precision == "fp16":
        yield "train.precision", f"{each}, with one loss scale per step; nearest legal: precision=bf16, or 1f1b"


def _fewer(job: Job) -> str:
    """Returns the nearest legal changes for fewer layers than stages: fewer ranks, or fewer stages per rank."""
    layout, layers = job.layout, job.model.most_stages
    chunks = catalogue.chunks_of(layout.schedule, layout.pp_chunks)
    by_pp = next(pp for pp in range(min(layout.pp - 1, layers), 0, -1) if _fits(job, pp=pp))
    by_chunks = next((n for n in range(min(chunks - 1, layers), 0, -1) if _fits(job, pp_chunks=n)), 0)
    return f"pp {by_pp}" + (f", or pp_chunks {by_chunks}" if by_chunks else "")


def _fits(job: Job, **changed: int) -> bool:
    """Returns whether a pipeline with a changed layout is legal for the model's layers and the batch."""
    layout = dataclasses.replace(job.layout, **changed)
    if layout.pp == 1:
        return True
    equation = _equation(dataclasses.replace(job, layout=layout))
    return (
        equation is not None
        and catalogue.stages(layout.schedule, layout.pp, layout.pp_chunks) <= job.model.most_stages
        and not catalogue.problems(
            layout.schedule, layout.pp, equation.accumulation, layout.pp_chunks, layout.pp_slices
        )
    )


def _equation(job: Job) -> batch.Batch | None:
    """Returns the solved batch equation; None if it has no solution."""
    try:
        return batch.solve(job.train.global_batch, job.layout)
    except ValueError:
        return None


PIPELINE = AxisEntry(
    "pipeline ranks, each with stages of consecutive layers",
    "Huang et al. 2019; Narayanan et al. 2021",
    "layers",
    problems=pipeline_problems,
    layouts=(
        "pp=2,accumulation=4",
        "pp=4,schedule=gpipe,accumulation=4",
        "pp=2,schedule=interleaved_1f1b,accumulation=4,recompute=selective",
        "pp=4,schedule=zb_h1,accumulation=8",
        "pp=2,schedule=zb_v,accumulation=4,recompute=full,loss_chunk=24",
        "pp=2,schedule=dualpipe,accumulation=4",
        "pp=2,schedule=terapipe,pp_slices=4,accumulation=2",
        "pp=3,schedule=pipedream,accumulation=4",
    ),
    combined=(
        *("pp=2", "pp=2,schedule=interleaved_1f1b", "pp=2,schedule=zb_h1", "pp=2,schedule=zb_v"),
        *("pp=2,schedule=dualpipe", "pp=2,schedule=terapipe,pp_slices=2"),
    ),
)
