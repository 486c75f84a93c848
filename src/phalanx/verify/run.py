"""Compares layouts with one process, each on warm ranks of this machine: cases and their report."""

from __future__ import annotations

import itertools
import math
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from phalanx.blocks.parameters import count as parameters
from phalanx.config.layout import Layout
from phalanx.config.model import ModelConfig
from phalanx.errors import JobError
from phalanx.launch.pool import Pool
from phalanx.pictures.divergence import divergence_map
from phalanx.units import counted, seconds
from phalanx.verify.locate import Divergence, explained, locate
from phalanx.verify.measure import MIN_STEPS, TOLERANCE, Differences, compare, nothing, record
from phalanx.verify.rounding import RoundingCase, RoundingReport, finite, message_of, run_rounded, too_large
from phalanx.verify.select import Selection, skipped_lines
from phalanx.verify.trace import trace_step

PRELOAD = ("torch.distributed.tensor", "torch.distributed.fsdp", "torch._dynamo", "phalanx.verify.trace")
START_S = 300.0
"""Maximum seconds for processes to start."""


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


@dataclass(frozen=True)
class LayoutCase:
    """One layout's comparison with one process. The differences are None if it failed to run."""

    layout: str
    """The layout's line."""
    world: int
    """Number of ranks."""
    n_layers: int
    n_experts: int
    global_batch: int
    loss_max_rel: float | None
    """Largest relative difference of the loss."""
    grad_max_rel: float | None
    """Largest relative difference of a gradient."""
    norm_max_rel: float | None
    """Largest relative difference of the norm of a step's gradients."""
    param_max_rel: float | None
    """Largest relative difference of a parameter."""
    validation_rel: float | None
    """Relative difference of the validation loss after the last step."""
    ok: bool
    """Whether all differences are within the tolerance."""
    first_difference: FirstDifference | None
    """Where they first exceed it; None if they never do."""
    error: str | None
    """The message of what failed on the ranks; None if they ran."""
    divergence: Divergence | None
    """The first module that differs, found by a second pass; None if the layout is equal, or if that found nothing."""
    not_located: str | None
    """Why the second pass names no module; None if it does, or if there was none."""
    seconds: float
    """Seconds of the case."""


@dataclass
class VerifyReport:
    """All cases, in order."""

    selection: Selection
    steps: int
    cases: list[LayoutCase] = field(default_factory=list)
    """One case per layout, in order."""
    seconds: float = 0.0
    """Seconds of all cases."""

    @property
    def ok(self) -> bool:
        """Whether every layout computes the same as one process."""
        return all(case.ok for case in self.cases)

    def as_dict(self) -> dict[str, Any]:
        """Returns the document of `phalanx verify --json`. A difference that is not a number (NaN) is null."""
        compared = self.selection.compared
        return {
            "cases": [finite(asdict(case)) for case in self.cases],
            "ok": self.ok,
            "tolerance": TOLERANCE,
            "precision": compared.job.train.precision,
            "steps": self.steps,
            "device": compared.job.cluster.device,
            "model": {
                **asdict(compared.job.model),
                "vocab_size": compared.vocab_size,
                "parameters": parameters(compared.job.model, compared.vocab_size),
            },
            "shrunk": {path: list(pair) for path, pair in compared.changes.items()},
            "skipped": [asdict(skipped) for skipped in self.selection.skipped],
            "refused": self.selection.refused,
            "notes": self.selection.notes,
            "seconds": round(self.seconds, 3),
        }


def refuse_missing_device(selection: Selection) -> None:
    """Raises JobError if the job asks for GPUs and this machine has none."""
    if selection.compared.job.cluster.device == "cuda" and not torch.cuda.device_count():
        raise JobError("cluster.device is cuda, but this machine has 0 CUDA devices; use cluster.device=cpu")


def run(
    selection: Selection, steps: int, on_case: Callable[[LayoutCase], None], on_start: Callable[[Layout], None]
) -> VerifyReport:
    """Compares every selected layout, over `steps` steps.

    Raises the errors of the one-process run (NotFiniteError for a job that diverges at once). An error on a layout's
    ranks makes its case fail with the message, and the others continue.
    """
    began = time.perf_counter()
    report = VerifyReport(selection, steps)
    with tempfile.TemporaryDirectory(prefix="phalanx_verify_") as folder, _started(selection) as pool:
        records: dict[tuple[ModelConfig, int, bool], Path] = {}
        for layout in selection.layouts:
            on_start(layout)
            job = selection.case(layout)
            stale = selection.stale(layout)
            count = max(steps, MIN_STEPS) if stale else steps
            of = job.model, job.train.global_batch, stale
            if of not in records:
                path = Path(folder) / f"record_{len(records)}.safetensors"
                alone, vocab = selection.alone(layout), selection.compared.vocab_size
                pool.run(record, 1, alone, vocab, count, path, stale, timeout=job.run.timeout_s)
                records[of] = path
            report.cases.append(_case(pool, selection, layout, count, records[of]))
            on_case(report.cases[-1])
    report.seconds = time.perf_counter() - began
    return report


def run_in_precision(
    selection: Selection, steps: int, on_case: Callable[[RoundingCase], None], on_start: Callable[[Layout], None]
) -> RoundingReport:
    """Compares every selected layout in the precision of its job, by one process's own rounding (rounding.py)."""
    with _started(selection) as pool:
        return run_rounded(selection, steps, pool, on_case, on_start)


@contextmanager
def _started(selection: Selection) -> Iterator[Pool]:
    """Starts as many processes as the largest layout needs."""
    processes = max((layout.processes for layout in selection.layouts), default=1)
    with Pool(processes, PRELOAD, selection.compared.job.cluster.device) as pool:
        pool.run(nothing, processes, timeout=START_S)
        yield pool


def _case(pool: Pool, selection: Selection, layout: Layout, steps: int, path: Path) -> LayoutCase:
    job, began = selection.case(layout), time.perf_counter()
    found, error = None, None
    try:
        vocab = selection.compared.vocab_size
        found = pool.run(compare, job.layout.processes, job, vocab, steps, path, timeout=job.run.timeout_s)[0]
    except Exception as raised:  # an error on a rank is this case's result and does not end the others
        error = message_of(raised)
    first = first_difference(found, TOLERANCE) if found else None
    divergence, not_located = None, None
    if first is not None:
        try:
            divergence = locate(pool.run, selection, layout, first.step, trace_step, job.run.timeout_s)
            if divergence is None:
                not_located = "the second pass found no module that differs"
        except Exception as raised:
            not_located = f"the second pass failed: {message_of(raised)}"
    return LayoutCase(
        layout=job.layout.line(),
        world=job.layout.world,
        n_layers=job.model.n_layers,
        n_experts=job.model.moe.n_experts,
        global_batch=job.train.global_batch,
        loss_max_rel=worst(found.losses) if found else None,
        grad_max_rel=worst([rel for step in found.gradients for rel in step.values()]) if found else None,
        norm_max_rel=worst(found.norms) if found else None,
        param_max_rel=worst(list(found.parameters.values())) if found else None,
        validation_rel=found.validation if found else None,
        ok=found is not None and first is None,
        first_difference=first,
        error=error,
        divergence=divergence,
        not_located=not_located,
        seconds=round(time.perf_counter() - began, 3),
    )


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


def worst(differences: list[float]) -> float:
    """Returns the largest difference; NaN counts as larger than any."""
    return max((math.inf if math.isnan(rel) else rel for rel in differences), default=0.0)


def table(report: VerifyReport) -> str:
    """Returns the report as plain text in columns: a line per layout, failures, skipped layouts, and the verdict."""
    rows: list[tuple[str, ...]] = [("layout", "ranks", "loss", "gradients", "parameters", "", "time")]
    for case in report.cases:
        measured = (case.loss_max_rel, case.grad_max_rel, case.param_max_rel)
        numbers = ("-" if number is None else f"{number:.1e}" for number in measured)
        rows.append((case.layout, str(case.world), *numbers, "ok" if case.ok else "FAIL", seconds(case.seconds)))
    first, *widths = (max(map(len, column)) for column in zip(*rows, strict=True))
    lines = [
        "  ".join([row[0].ljust(first), *map(str.rjust, row[1:], widths)]).rstrip()  # names to the left
        for row in rows
    ]
    failed = [case for case in report.cases if not case.ok]
    if failed:
        lines += ["", "Differences:"]
        for case in failed:
            lines.append(f"  {case.layout}: {complaint(case)}")
            lines += [f"    {line}" for line in location(case)]
    lines += skipped_lines(report.selection)
    how_many = f"{f'{len(failed)} of ' if failed else ''}{counted(len(report.cases), 'layout')}"
    measure = f"tolerance {TOLERANCE:g}, {counted(report.steps, 'step')}, {seconds(report.seconds)}"
    verdict = f"{'Not equal' if failed else 'Equal'} to one process: {how_many} ({measure})"
    return "\n".join([*lines, "", verdict])


def complaint(case: LayoutCase) -> str:
    """Returns the cause of a failed case: the error, or the first difference."""
    if case.error is not None:
        return case.error
    match case.first_difference:
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


def location(case: LayoutCase) -> list[str]:
    """Returns lines on the first module that differs."""
    if case.divergence is None:
        return [case.not_located] if case.not_located else []
    return [*explained(case.divergence), *(f"not compared: {why}" for why in case.divergence.unknown)]


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


def progress(case: LayoutCase | RoundingCase) -> str:
    """Returns one line about a finished case."""
    failed = "" if case.ok else f": {too_large(case) if isinstance(case, RoundingCase) else complaint(case)}"
    return f"{'ok  ' if case.ok else 'FAIL'}  {case.layout} ({seconds(case.seconds)}){failed}"
