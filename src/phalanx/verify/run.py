"""Compares layouts with one process in float64, and names the first module that differs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from phalanx.blocks.parameters import count as parameters
from phalanx.config.layout import Layout
from phalanx.launch.accelerators import require
from phalanx.pictures.heat_map import divergence_map
from phalanx.units import counted, seconds
from phalanx.verify.cases import CaseReport, FailedRanksError, LayoutRun, VerifyCase, guarded, layout_runs, started
from phalanx.verify.locate import Divergence, explained, locate
from phalanx.verify.measure import TOLERANCE, Differences
from phalanx.verify.select import Selection
from phalanx.verify.trace import trace_step


@dataclass(frozen=True)
class FirstDifference:
    """The first difference of a layout: the earliest step, the first parameter in the model's order."""

    what: str
    """gradient, copy (a gradient, or last a parameter, of which ranks hold different copies), norm (of all gradients of
    a step, before clipping), parameter, loss or validation (its loss)."""
    name: str | None
    """The parameter's name; None for a norm or a loss."""
    step: int
    """The step, counted from 1."""
    rel: float
    """The relative difference; infinity for copies, which are compared bit by bit."""


@dataclass(frozen=True, kw_only=True)
class LayoutCase(VerifyCase):
    """One layout's comparison with one process. The differences are None if it failed to run."""

    layout: str
    """The layout's line."""
    world: int
    """Number of ranks."""
    n_layers: int
    n_experts: int
    global_batch: int
    loss_max_rel: float | None = None
    """Largest relative difference of the loss."""
    grad_max_rel: float | None = None
    """Largest relative difference of a gradient."""
    norm_max_rel: float | None = None
    """Largest relative difference of the norm of a step's gradients."""
    param_max_rel: float | None = None
    """Largest relative difference of a parameter."""
    validation_rel: float | None = None
    """Relative difference of the validation loss after the last step."""
    first_difference: FirstDifference | None = None
    """Where they first exceed it; None if they never do."""
    divergence: Divergence | None = None
    """The first module that differs, found by a second pass; None if the layout is equal, or if that found nothing."""
    not_located: str | None = None
    """Why the second pass names no module; None if it does, or if there was none."""

    @property
    def title(self) -> str:
        return self.layout

    def complaint(self) -> str:
        """Returns the cause of a failed case: the error, or the first difference."""
        if self.error is not None:
            return self.error
        match self.first_difference:
            case FirstDifference("gradient", name, step, rel):
                return f"{name}: the gradient of step {step} differs by {rel:.1e}"
            case FirstDifference("parameter", name, step, rel):
                return f"{name}: after step {step} the parameter differs by {rel:.1e}, its gradients agree"
            case FirstDifference("copy", name, step, _):
                return f"{name}: ranks that hold the same hold different values in step {step}, the first one's agree"
            case FirstDifference("norm", _, step, rel):
                return f"the gradient norm of step {step} differs by {rel:.1e}, its gradients agree"
            case FirstDifference("validation", _, step, rel):
                return f"the validation loss after step {step} differs by {rel:.1e}, all else agrees"
            case FirstDifference(_, _, step, rel):
                return f"the loss of step {step} differs by {rel:.1e}, gradients and parameters agree"
        return ""


@dataclass
class VerifyReport(CaseReport[LayoutCase]):
    """All cases, in order."""

    cases: list[LayoutCase] = field(default_factory=list)
    """One case per layout, in order."""

    def as_dict(self) -> dict[str, Any]:
        """Returns the document of `phalanx verify --json`. A difference that is not a number (NaN) is null."""
        compared = self.selection.compared
        model, vocab = compared.job.model, compared.vocab_size
        return super().as_dict() | {
            "tolerance": TOLERANCE,
            "precision": compared.job.train.precision,
            "device": compared.job.cluster.device,
            "model": {**asdict(model), "vocab_size": vocab, "parameters": parameters(model, vocab)},
        }

    def rows(self) -> Iterator[Sequence[str]]:
        yield "layout", "ranks", "loss", "gradients", "parameters"
        for case in self.cases:
            measured = (case.loss_max_rel, case.grad_max_rel, case.param_max_rel)
            numbers = ("-" if number is None else f"{number:.1e}" for number in measured)
            yield case.layout, str(case.world), *numbers

    def failures(self, failed: Sequence[LayoutCase]) -> Iterator[str]:
        for case in failed:
            yield from super().failures([case])
            lines = [case.not_located] if case.not_located else []
            if case.divergence is not None:
                lines = [*explained(case.divergence), *(f"not compared: {why}" for why in case.divergence.unknown)]
            yield from (f"    {line}" for line in lines)

    def verdict(self, failed: int, how_many: str) -> str:
        measure = f"tolerance {TOLERANCE:g}, {counted(self.steps, 'step')}, {seconds(self.seconds)}"
        return f"{'Not equal' if failed else 'Equal'} to one process: {how_many} ({measure})"


def refuse_missing_device(selection: Selection) -> None:
    """Raises JobError if the job asks for GPUs and this machine has none."""
    require(selection.compared.job.cluster.device)


def run(
    selection: Selection, steps: int, on_case: Callable[[LayoutCase], None], on_start: Callable[[Layout], None]
) -> VerifyReport:
    """Compares every selected layout, over `steps` steps.

    Raises the errors of the one-process run (NotFiniteError for a job that diverges at once). An error on a layout's
    ranks makes its case fail with the message, and the others continue.
    """
    report = VerifyReport(selection, steps)
    with started(report) as place:
        for each in layout_runs(report, *place, on_start):
            if not each.path.exists():
                each.record(each.alone)
            layout, model = each.job.layout, each.job.model
            case = LayoutCase(
                layout=layout.line(),
                world=layout.world,
                n_layers=model.n_layers,
                n_experts=model.moe.n_experts,
                global_batch=each.job.train.global_batch,
            )
            on_case(report.add(case, partial(_measured, selection, each)))
    return report


def _measured(selection: Selection, each: LayoutRun) -> dict[str, Any]:
    """Returns what a case has after its ranks ran."""
    ranks = guarded(each.ranks)
    found = each.compare(ranks, each.job)
    first = first_difference(found, TOLERANCE)
    divergence, not_located = None, None
    if first is not None:
        try:
            divergence = locate(ranks, selection, each.layout, first.step, trace_step, each.job.run.timeout_s)
            not_located = None if divergence else "the second pass found no module that differs"
        except FailedRanksError as failed:
            not_located = f"the second pass failed: {failed}"
    return {
        "loss_max_rel": worst(found.losses),
        "grad_max_rel": worst(rel for step in found.gradients for rel in step.values()),
        "norm_max_rel": worst(found.norms),
        "param_max_rel": worst(found.parameters.values()),
        "validation_rel": found.validation,
        "ok": first is None,
        "first_difference": first,
        "divergence": divergence,
        "not_located": not_located,
    }


def first_difference(found: Differences, tolerance: float) -> FirstDifference | None:
    """Returns the first gradient that differs by more than `tolerance` (or by NaN), or where a step's gradients agree
    the first with different copies, or their norm; else the first parameter, else the first loss, else the validation
    loss, else None."""
    steps = len(found.gradients)
    for step, gradients in enumerate(found.gradients):
        for name, rel in gradients.items():
            if not rel <= tolerance:
                return FirstDifference("gradient", name, step + 1, rel)
        for name in itertools.chain.from_iterable(found.copies[step : step + 1]):
            return FirstDifference("copy", name, step + 1, math.inf)
        for rel in found.norms[step : step + 1]:
            if not rel <= tolerance:
                return FirstDifference("norm", None, step + 1, rel)
    for name, rel in found.parameters.items():
        if not rel <= tolerance:
            return FirstDifference("parameter", name, len(found.losses), rel)
    for name in itertools.chain.from_iterable(found.copies[steps:]):
        return FirstDifference("copy", name, steps, math.inf)
    for step, rel in enumerate(found.losses):
        if not rel <= tolerance:
            return FirstDifference("loss", None, step + 1, rel)
    if not found.validation <= tolerance:
        return FirstDifference("validation", None, len(found.losses), found.validation)
    return None


def worst(differences: Iterable[float]) -> float:
    """Returns the largest difference; NaN counts as larger than any."""
    return max((math.inf if math.isnan(rel) else rel for rel in differences), default=0.0)


def picture(report: VerifyReport) -> str | None:
    """Returns where the first layout that differs parts from one process, as an SVG document; None if no layout does,
    or none was located."""
    for case in report.cases:
        if found := case.divergence:
            title = f"{case.layout} and one process"
            return divergence_map(title, explained(found), found.table, (found.direction, found.module), TOLERANCE)
    return None


def introduction(selection: Selection, steps: int, *, own_precision: bool = False) -> list[str]:
    """Returns lines about the layouts to compare and the changes of the job; `own_precision` where they are compared
    in its precision."""
    job = selection.compared.job
    products = " with products in fp8" if job.train.precision == "fp8" else ""
    form = f"{job.train.precision}, measured from fp64" if own_precision else f"fp64{products}"
    what = f"{counted(len(selection.layouts), 'layout')} with one process"
    lines = [f"comparing {what}: {counted(steps, 'step')} in {form}"]
    lines += [
        f"{path}: {wanted} in the job, {used} here" for path, (wanted, used) in selection.compared.changes.items()
    ]
    if not job.model.vocab_size:
        lines.append(f"model.vocab_size: the tokenizer's in the job, {selection.compared.vocab_size} here")
    return [*lines, *selection.notes]
