"""Selects the comparison of `phalanx verify`: the small job, the layouts, and those that are skipped."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, field, replace

from phalanx.check.causes import by_cause
from phalanx.check.effect import effect_problems
from phalanx.check.job import out_of_range, problems_of
from phalanx.check.layout import Problem
from phalanx.check.load import spelled
from phalanx.check.sizes import size_problems
from phalanx.config import layout_line
from phalanx.config.corpora import PAIR, has_answers, has_pairs
from phalanx.config.job import Job
from phalanx.config.layout import Layout
from phalanx.errors import JobError
from phalanx.partition import derived as batch
from phalanx.partition.derived import BLOCK, LARGEST, flushes, is_file
from phalanx.units import counted
from phalanx.verify import covering, matrix
from phalanx.verify.fit import deep_enough, with_experts
from phalanx.verify.small import ComparedJob, compared_job

GLOBAL_BATCHES = (8, 24)
"""Sequences per step: the first one divisible by a layout's data ranks × accumulation, else that product."""
PIPELINE_BATCHES = (8,)
"""Sequences per step for pipelines, whose micro-batches may be one sequence each: 5 of them take 5."""
PAIR_RANKS = 8
"""Maximum ranks of a layout of the covering set: more would make layouts larger, not different."""


_ROUNDED = {"quantise_weights": "gathered parameters", "quantise_gradients": "gradients each time they are sent"}
"""Messages that a layout rounds, by the setting that sends them as codes."""


@dataclass(frozen=True)
class Skipped:
    """A layout that is not compared."""

    layout: str
    reason: str


@dataclass
class Selection:
    """The layouts to compare with one process, and their job."""

    compared: ComparedJob
    layouts: list[Layout] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """Notes on how compared layouts differ from the job's own."""
    refused: list[str] = field(default_factory=list)
    """Problems of layouts that were named and cannot be compared, while others can."""

    def case(self, layout: Layout) -> Job:
        """Returns the job of one case: the same model and optimizer, with the layout and a global batch divisible by
        it. The model has at least one layer per stage, and experts if the layout uses expert parallelism."""
        return _with(deep_enough(with_experts(self.compared.job, layout), layout), layout)

    def alone(self, layout: Layout) -> Job:
        """Returns the job of one process that the layout's case is compared with."""
        return replace(self.case(layout), layout=self.compared.job.layout)

    def stale(self, layout: Layout) -> bool:
        """Returns whether a layout's gradients are one update late by design (a pipeline without a flush). It is
        compared with one process whose gradients are equally late."""
        return not flushes(layout)


def select(
    job: Job,
    *,
    lines: Sequence[str] = (),
    full: bool = False,
    schedules: bool = False,
    max_ranks: int = 8,
    as_is: bool = False,
) -> Selection:
    """Selects the layouts of `lines`, or the job's own with the matrix and the covering set, with every layout
    (`full`), or with every pipeline schedule alone (`schedules`).

    A layout of the matrix that is not legal for the model, or larger than `max_ranks`, is skipped. Unless `as_is`, a
    model with fewer layers than stages gets more, and one without experts gets some for layouts with expert
    parallelism. A named layout that cannot be compared does not stop the others. Raises JobError with every problem if
    none of the named layouts can be compared.
    """
    selection, problems = Selection(compared_job(job, as_is, max_ranks)), list[str]()
    for line in lines:
        try:
            layout = layout_line.parse(line)
            named, _ = layout_line.settings_of(line)
        except JobError as error:
            problems += error.problems
            continue
        layout = replace(layout, schedule=spelled("layout.schedule", layout.schedule))
        if any(spelled(path, text) != text for path, text in named.items()):
            selection.notes.append(f"layout {line!r}: taken as {layout.line()}")
        if layout.auto:
            problems.append(f"layout {line!r}: verify compares layouts, not the planner's choice; name its fields")
            continue
        if rounded := _rounded(layout):
            problems += [f"layout {line!r}: {bound}" for bound in rounded]
            continue
        asked = replace(job, layout=layout)
        if wrong := [*out_of_range(asked), *size_problems(asked)]:
            problems += [f"layout {line!r}: {path}: {message}" for path, message in wrong]
            continue
        fit = job if as_is else with_experts(job, layout)
        if reasons := _reasons(fit, selection, layout, max_ranks, named.keys()):
            problems += [f"layout {line!r}: {reason}" for reason in reasons]
            continue
        _add(selection, layout)
    if problems and not selection.layouts:
        raise JobError(problems)
    selection.refused = problems
    if not lines:
        _own(selection, job, max_ranks)
        _rest(selection, job, full, schedules, max_ranks, as_is)
    selection.notes += _notes(selection, job)
    return selection


_UNEQUAL = {
    "asp": "asynchronous SGD computes each share of a step at whatever parameters its replica has just read, so the "
    "result depends on the order in which replicas come",
    "local_sgd": "replicas of local SGD step alone and then average their parameters, which one process does not",
    "diloco": "replicas of DiLoCo step alone and an outer optimizer joins their changes, which one process does not",
}
"""Why a way to synchronise does not compute what one process computes."""


def _rounded(layout: Layout) -> list[str]:
    """Returns why a layout that sends codes does not equal one process, with the bound of the error."""
    formats = {name: getattr(layout, name) for name in _ROUNDED}
    return [
        f"layout.{name}: {format} rounds {_ROUNDED[name]} by at most 1/{2 * LARGEST[format]} of the largest of "
        f"{BLOCK}, so it does not equal one process to verify's tolerance; nearest legal: {name}=none"
        for name, format in formats.items()
        if format != "none"
    ]


def _rest(selection: Selection, job: Job, full: bool, schedules: bool, max_ranks: int, as_is: bool) -> None:
    """Adds the layouts that are compared by default besides the job's own."""

    def reasons(layout: Layout) -> list[str]:
        fit = job if as_is else deep_enough(with_experts(job, layout), layout)
        return _reasons(fit, selection, layout, max_ranks)

    candidates = list[Layout]()
    if full or not schedules:
        candidates += map(layout_line.parse, matrix.MATRIX)
        candidates += covering.pairs(min(max_ranks, PAIR_RANKS), lambda layout: not reasons(layout))
    if full:
        candidates += matrix.full(max_ranks)
    if full or schedules:
        candidates += matrix.schedules(max_ranks)
    for layout in candidates:
        if why := reasons(layout):
            selection.skipped.append(Skipped(layout.line(), "; ".join(why)))
        else:
            _add(selection, layout)


def _notes(selection: Selection, job: Job) -> Iterator[str]:
    if any(map(selection.stale, selection.layouts)):
        yield (
            "pipelines without a flush are compared with one process whose gradients are one update late, as theirs are"
        )
    models = [selection.case(layout).model for layout in selection.layouts]
    written = [bool(layout.recompute_cut) for layout in selection.layouts]
    if cut := sum(mine and job.model.n_layers != model.n_layers for mine, model in zip(written, models, strict=True)):
        yield f"model.n_layers: {job.model.n_layers} in the job, those of recompute_cut in {counted(cut, 'layout')}"
    stages = (model.n_layers for mine, model in zip(written, models, strict=True) if not mine)
    if deepened := sum(n_layers > job.model.n_layers for n_layers in stages):
        yield (
            f"model.n_layers: {job.model.n_layers} in the job, one layer per stage in {counted(deepened, 'layout')} "
            "with "
            "more stages than that"
        )
    if not job.model.moe.n_experts and (mixed := [model.moe for model in models if model.moe.n_experts]):
        cut = sum(not moe.aux_loss for moe in mixed)
        without = f", without aux_loss in {cut} with slices of sequences" if cut else ""
        yield (
            f"model.moe: no experts in the job, {mixed[0].n_experts} of width {mixed[0].d_ff} in "
            f"{counted(len(mixed), 'layout')} with ep above 1{without}"
        )
    if job.data.document_mask:
        yield "data.document_mask: the random sequences are cut into documents at random places"
    if has_pairs(job.data):
        yield "data.corpus: pairs of random sequences, compared by DPO"
    elif has_answers(job.data):
        yield "data.loss_on: only random parts of the random sequences count in the loss, as answers do"


def _own(selection: Selection, job: Job, max_ranks: int) -> None:
    """Adds the job's own layout first, on fewer ranks if necessary."""
    own = job.layout
    if own.world == 1 and own == replace(Layout(), bucket_mb=own.bucket_mb):
        return
    accumulation = batch.solve(job.train.global_batch, own).accumulation
    layout = matrix.reduced(own, max_ranks)
    rounded = _rounded(layout)
    selection.notes += [f"the job's own layout is compared without quantisation: {bound}" for bound in rounded]
    layout = replace(
        layout,
        quantise_weights="none",
        quantise_gradients="none",
        micro_batch=0,
        accumulation=_accumulation(layout, accumulation),
        pp_cut=layout.pp_cut if selection.compared.job.model.n_layers == job.model.n_layers else "",
        recompute_cut=layout.recompute_cut if selection.compared.job.model.n_layers == job.model.n_layers else "",
        loss_chunk=min(layout.logits_of(1 << 20), max(1, selection.compared.job.model.seq_len // 2)),
        bucket_mb=Layout.bucket_mb,
    )
    if reasons := _reasons(job, selection, layout, max_ranks):
        selection.skipped.append(Skipped(layout.line(), "the job's own layout, reduced: " + "; ".join(reasons)))
        return
    _add(selection, layout)
    if layout.line() == own.line():
        selection.notes.append(f"the first layout is the job's own: {own.line()}")
    else:
        selection.notes.append(
            f"the job's own layout, {own.line()} ({own.world} ranks), is compared as {layout.line()}"
        )


def _accumulation(layout: Layout, accumulation: int) -> int:
    """Returns the smallest sufficient number of micro-batches per step: 2, or 2 per pipeline rank. A schedule file has
    its own; 0 stands for one."""
    if layout.pp > 1 and is_file(layout.schedule):
        return accumulation
    fewer = min(accumulation, 2 * layout.pp)
    return fewer if fewer > 1 else 0


def _add(selection: Selection, layout: Layout) -> None:
    if layout.bucket_mb == Layout.bucket_mb:
        layout = replace(layout, bucket_mb=selection.compared.job.layout.bucket_mb)
    if layout not in selection.layouts:
        selection.layouts.append(layout)


def _reasons(
    job: Job, selection: Selection, layout: Layout, max_ranks: int, named: Set[str] | None = None
) -> list[str]:
    """Returns why a layout cannot be compared: it is illegal for the job's model, or too large. For a layout that the
    user named, with the fields `named`, a cause is said once, with values that can be compared."""

    def check(job: Job) -> list[Problem]:
        return _problems(job, selection, max_ranks) or [*effect_problems(job, named or set())]

    asked = replace(job, layout=layout, cluster=replace(job.cluster, nodes=1, devices_per_node=0))
    found = check(asked)
    found = found if named is None else by_cause(asked, found, named, check)
    return [f"{path}: {message}" if path else message for path, message in found]


def _problems(job: Job, selection: Selection, max_ranks: int) -> list[Problem]:
    """Returns the problems of a job's layout, with the paths of fields, for the comparison."""
    layout = job.layout
    # The small model may have fewer divisors than the job's own.
    found = problems_of(_with(job, layout)) or problems_of(selection.case(layout))
    if not found and layout.processes > max_ranks:
        found.append(("", f"needs {layout.processes} processes, more than --max-ranks {max_ranks}"))
    if layout.sync != "bsp":
        why = _UNEQUAL.get(layout.sync, "its replicas differ between synchronisations")
        found.append(("layout.sync", f"{layout.sync} is not compared: {why}; nearest legal: sync=bsp"))
    if layout.data_parallel == "threads" and selection.compared.job.cluster.device == "cuda":
        found.append(
            (
                "layout.data_parallel",
                "threads is for CPUs; nearest legal: data_parallel=ddp, or cluster.device=cpu",
            )
        )
    return found


def _with(job: Job, layout: Layout) -> Job:
    """Returns the job with a layout and the smallest global batch that suits it."""
    group = PAIR if has_pairs(job.data) else 1
    known = max(1, layout.data_ranks * max(1, layout.micro_batch) * max(1, layout.accumulation))
    if layout.micro_batch and layout.accumulation:
        global_batch = known
    else:
        known *= group if not layout.micro_batch else 1
        sizes = [group * size for size in (GLOBAL_BATCHES if layout.pp == 1 else PIPELINE_BATCHES)]
        global_batch = next((size for size in sizes if size % known == 0), known)
        if group > 1 and layout.pp > 1 and not layout.micro_batch and not layout.accumulation:
            layout = replace(layout, micro_batch=group)
    return replace(job, layout=layout, train=replace(job.train, global_batch=global_batch))
