"""The report as text: one line per layout, then failures, skipped layouts, and the verdict."""

from __future__ import annotations

from phalanx.units import seconds
from phalanx.verify.measure import TOLERANCE
from phalanx.verify.run import FirstDifference, LayoutCase, VerifyReport
from phalanx.verify.select import Selection


def table(report: VerifyReport) -> str:
    """Returns the report as plain text in columns."""
    head = ("layout", "ranks", "loss", "gradients", "parameters", "", "time")
    rows = [head, *(_row(case) for case in report.cases)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    lines = [
        "  ".join(_cell(text, width, i == 0) for i, (text, width) in enumerate(zip(row, widths, strict=True)))
        for row in rows
    ]
    lines = [line.rstrip() for line in lines]
    failed = [case for case in report.cases if not case.ok]
    if failed:
        lines += ["", "Differences:", *(f"  {case.layout}: {complaint(case)}" for case in failed)]
    if report.selection.skipped:
        lines += ["", "Not compared:", *_skipped(report.selection)]
    if report.selection.refused:
        lines += ["", "Refused:", *(f"  {problem}" for problem in report.selection.refused)]
    return "\n".join([*lines, "", _verdict(report)])


def complaint(case: LayoutCase) -> str:
    """Returns the cause of a failed case: the error, or the first difference."""
    if case.error is not None:
        return case.error
    first = case.first_difference
    return _where(first) if first else ""


def introduction(selection: Selection, steps: int) -> list[str]:
    """Returns lines about the layouts to compare and the changes of the job."""
    job = selection.compared.job
    what = f"{_number(len(selection.layouts), 'layout')} with one process"
    products = " with products in fp8" if job.train.precision == "fp8" else ""
    lines = [f"comparing {what}: {_number(steps, 'step')} in fp64{products}"]
    lines += [
        f"{path}: {wanted} in the job, {used} here" for path, (wanted, used) in selection.compared.changes.items()
    ]
    if not job.model.vocab_size:
        lines.append(f"model.vocab_size: the tokenizer's in the job, {selection.compared.vocab_size} here")
    return [*lines, *selection.notes]


def progress(case: LayoutCase) -> str:
    """Returns one line about a finished case."""
    return f"{'ok  ' if case.ok else 'FAIL'}  {case.layout} ({seconds(case.seconds)})" + (
        "" if case.ok else f": {complaint(case)}"
    )


def _row(case: LayoutCase) -> tuple[str, ...]:
    measured = (case.loss_max_rel, case.grad_max_rel, case.param_max_rel)
    numbers = ("-" if number is None else f"{number:.1e}" for number in measured)
    return case.layout, str(case.world), *numbers, "ok" if case.ok else "FAIL", seconds(case.seconds)


def _skipped(selection: Selection) -> list[str]:
    by_reason: dict[str, list[str]] = {}
    for skipped in selection.skipped:
        by_reason.setdefault(skipped.reason, []).append(skipped.layout)
    return [
        f"  {layouts[0]}{f' and {len(layouts) - 1} more' if len(layouts) > 1 else ''}: {reason}"
        for reason, layouts in by_reason.items()
    ]


def _cell(text: str, width: int, left: bool) -> str:
    return text.ljust(width) if left else text.rjust(width)


def _where(first: FirstDifference) -> str:
    if first.what == "parameter":
        return f"{first.name}: after step {first.step} the parameter differs by {first.rel:.1e}, its gradients agree"
    if first.what == "loss":
        return f"the loss of step {first.step} differs by {first.rel:.1e}, gradients and parameters agree"
    return f"{first.name}: the gradient of step {first.step} differs by {first.rel:.1e}"


def _verdict(report: VerifyReport) -> str:
    bad = sum(not case.ok for case in report.cases)
    how_many = f"{f'{bad} of ' if bad else ''}{_number(len(report.cases), 'layout')}"
    measure = f"tolerance {TOLERANCE:g}, {_number(report.steps, 'step')}, {seconds(report.seconds)}"
    return f"{'Not equal' if bad else 'Equal'} to one process: {how_many} ({measure})"


def _number(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"
