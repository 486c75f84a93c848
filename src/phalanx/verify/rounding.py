"""Is a difference in bf16, fp16 or fp8 normal? Layouts compared with float64, measured by one process's own rounding.

The tolerance is derived, not chosen. One process runs the same steps in the same precision several times, with its sums
in other orders: more micro-batches, and products added in parts, as ranks that hold parts add them. Each run's error is
its difference from a float64 run; the largest of them is the rounding of a tensor, or of the loss. A layout is a
further order of the same sums, so its error is normal up to MULTIPLE times as much.
"""

from __future__ import annotations

import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

from phalanx.config.job import Job
from phalanx.config.layout import Layout
from phalanx.config.model import ModelConfig
from phalanx.config.precision import MeasuredPrecision, Precision
from phalanx.errors import PhalanxError
from phalanx.launch.pool import Pool
from phalanx.units import counted, seconds
from phalanx.verify.measure import MIN_STEPS, Differences, compare, record
from phalanx.verify.select import Selection, skipped_lines

MULTIPLE = 4.0
"""A layout's error is normal up to this many times the largest error of one process's reordered sums: twice because
the largest error of a further order may exceed that of a few, and twice because sums over ranks round in places where
one process does not."""
ORDERS = ((1, 1), (2, 1), (1, 2), (4, 2), (1, 4), (8, 4))
"""Orders of one process's sums: micro-batches, and parts in which products are added."""
PRECISIONS = tuple(name for name in (*get_args(MeasuredPrecision), "fp8") if name != "fp32")
EXACT: Precision = "fp64"


@dataclass(frozen=True)
class LossError:
    """The loss of one step in three runs."""

    step: int
    """From 1."""
    loss: float
    """The layout's."""
    one_process: float
    """That of one process in the same precision."""
    float64: float
    difference: float
    """|layout - one process| / float64."""
    error: float
    """|layout - float64| / float64."""
    normal: float
    """The largest error that is normal."""


@dataclass(frozen=True)
class TensorError:
    """The tensor, or all parameters together, whose error is the largest multiple of its rounding."""

    what: str
    """gradient, or parameters: all together."""
    name: str | None
    step: int
    error: float
    """Its relative difference from float64."""
    rounding: float
    """The largest one of one process's reordered sums."""

    @property
    def multiple(self) -> float:
        return self.error / self.rounding if self.rounding else math.inf if self.error else 0.0


@dataclass(frozen=True)
class RoundingCase:
    """One layout's errors. Those are None if it failed to run."""

    layout: str
    world: int
    n_experts: int
    losses: list[LossError] | None
    worst: TensorError | None
    ok: bool
    """Whether all errors are normal."""
    error: str | None
    """The message of what failed on the ranks; None if they ran."""
    seconds: float


@dataclass
class RoundingReport:
    """All cases, in order."""

    selection: Selection
    steps: int
    cases: list[RoundingCase] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether every layout's errors are normal."""
        return all(case.ok for case in self.cases)

    @property
    def precision(self) -> str:
        return self.selection.compared.job.train.precision

    def as_dict(self) -> dict[str, Any]:
        """Returns the document of `phalanx verify --precision P --json`. What is no number is null."""
        cases = []
        for case in self.cases:
            worst = None if case.worst is None else asdict(case.worst) | {"multiple": case.worst.multiple}
            cases.append(finite(asdict(case) | {"worst": worst}))
        return {
            "cases": cases,
            "ok": self.ok,
            "precision": self.precision,
            "multiple": MULTIPLE,
            "orders": [{"micro_batches": batches, "parts": parts} for batches, parts in ORDERS],
            "steps": self.steps,
            "shrunk": {path: list(pair) for path, pair in self.selection.compared.changes.items()},
            "skipped": [asdict(skipped) for skipped in self.selection.skipped],
            "refused": self.selection.refused,
            "notes": self.selection.notes,
            "seconds": round(self.seconds, 3),
        }


def finite(value: Any) -> Any:
    """Replaces NaN and infinity, which JSON lacks, by None."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@dataclass(frozen=True)
class Rounding:
    """What one process's reordered sums differ from float64."""

    loss: float
    gradients: dict[str, float]
    parameters: float
    """Of all parameters together: where a gradient is smaller than its rounding, Adam's step goes either way."""
    losses: list[float]
    """Those of the first order, by step."""

    @classmethod
    def of(cls, orders: list[Differences]) -> Rounding:
        """Returns the largest errors of several runs. A tensor of few numbers may by chance be nearly exact in all:
        none counts as more exact than half of the tensors of its kind."""
        gradients: dict[str, float] = {}
        for found in orders:
            for step in found.gradients:
                gradients |= {name: max(gradients.get(name, 0.0), rel) for name, rel in step.items()}
        middle = statistics.median(gradients.values())
        gradients = {name: max(rel, middle) for name, rel in gradients.items()}
        loss = max(rel for found in orders for rel in found.losses)
        return cls(loss, gradients, max(found.all_parameters for found in orders), orders[0].values)


def run_rounded(
    selection: Selection,
    steps: int,
    pool: Pool,
    on_case: Callable[[RoundingCase], None],
    on_start: Callable[[Layout], None],
) -> RoundingReport:
    """Compares every selected layout, over `steps` steps, in the precision of the compared job. Raises the errors of
    the one-process runs."""
    began = time.perf_counter()
    report, known = RoundingReport(selection, steps), dict[tuple[ModelConfig, int, bool], tuple[Path, Rounding]]()
    with tempfile.TemporaryDirectory(prefix="phalanx_verify_") as folder:
        for layout in selection.layouts:
            on_start(layout)
            job, stale = selection.case(layout), selection.stale(layout)
            count, of = max(steps, MIN_STEPS) if stale else steps, (job.model, job.train.global_batch, stale)
            if of not in known:
                path = Path(folder) / f"record_{len(known)}.safetensors"
                known[of] = path, _rounding(pool, selection, layout, count, path)
            report.cases.append(_case(pool, job, selection.compared.vocab_size, count, *known[of]))
            on_case(report.cases[-1])
    report.seconds = time.perf_counter() - began
    return report


def _rounding(pool: Pool, selection: Selection, layout: Layout, steps: int, path: Path) -> Rounding:
    """Runs one process in float64 and with its sums in several orders."""
    alone, vocab, stale = selection.alone(layout), selection.compared.vocab_size, selection.stale(layout)
    exact = replace(alone, train=replace(alone.train, precision=EXACT))
    pool.run(record, 1, exact, vocab, steps, path, stale, timeout=alone.run.timeout_s)
    orders = list[Differences]()
    for micro_batches, parts in ORDERS:
        if alone.train.global_batch % (2 * micro_batches):  # a pair of preferences stays together
            continue
        job = replace(alone, layout=replace(alone.layout, accumulation=micro_batches))
        options: dict[str, Any] = {"own_precision": True, "chunks": parts, "stale": stale}
        found = pool.run(compare, 1, job, vocab, steps, path, timeout=job.run.timeout_s, **options)[0]
        orders.append(found)
    return Rounding.of(orders)


def _case(pool: Pool, job: Job, vocab: int, steps: int, path: Path, rounding: Rounding) -> RoundingCase:
    layout, began = job.layout, time.perf_counter()
    found, error = None, None
    try:
        options: dict[str, Any] = {"own_precision": True, "timeout": job.run.timeout_s}
        found = pool.run(compare, layout.processes, job, vocab, steps, path, **options)[0]
    except Exception as raised:  # an error on a rank is this case's result and does not end the others
        error = message_of(raised)
    losses = None if found is None else list(_losses(found, rounding))
    worst = None if found is None else max(_tensors(found, rounding), key=_multiple)
    ok = losses is not None and all(each.error <= each.normal for each in losses)
    return RoundingCase(
        layout=layout.line(),
        world=layout.world,
        n_experts=job.model.moe.n_experts,
        losses=losses,
        worst=worst,
        ok=ok and worst is not None and worst.multiple <= MULTIPLE,
        error=error,
        seconds=round(time.perf_counter() - began, 3),
    )


def message_of(raised: Exception) -> str:
    """Returns the first line of an error of a rank, with its kind unless it is of this package."""
    kind = "" if isinstance(raised, PhalanxError) else f"{type(raised).__name__}: "
    return kind + (str(raised).strip().splitlines() or [""])[0]


def _losses(found: Differences, rounding: Rounding) -> Iterable[LossError]:
    for step, (loss, exact, error) in enumerate(zip(found.values, found.expected, found.losses, strict=True)):
        alone = rounding.losses[step]
        difference = abs(loss - alone) / (abs(exact) or 1.0)
        yield LossError(step + 1, loss, alone, exact, difference, error, MULTIPLE * rounding.loss)


def _tensors(found: Differences, rounding: Rounding) -> Iterable[TensorError]:
    for step, gradients in enumerate(found.gradients):
        for name, error in gradients.items():
            yield TensorError("gradient", name, step + 1, error, rounding.gradients[name])
    yield TensorError("parameters", None, len(found.losses), found.all_parameters, rounding.parameters)


def _multiple(error: TensorError) -> float:
    return math.inf if math.isnan(error.multiple) else error.multiple


def rounding_table(report: RoundingReport) -> str:
    """Returns the report as plain text: a line per layout with the loss in three runs, then what is not normal."""
    head = (
        "layout",
        "ranks",
        "loss",
        "one process",
        "differs",
        "float64",
        "error",
        "normal to",
        "gradients",
        "",
        "time",
    )
    rows: list[tuple[str, ...]] = [head]
    for case in report.cases:
        cells = ("-",) * 7
        if case.losses and case.worst:
            last = max(case.losses, key=lambda each: each.error)
            alone = f"{last.one_process:.6f}", f"{last.difference:.1e}"
            cells = (
                f"{last.loss:.6f}",
                *alone,
                f"{last.float64:.6f}",
                f"{last.error:.1e}",
                f"{last.normal:.1e}",
                f"{case.worst.multiple:.1f} x",
            )
        verdict = "ok" if case.ok else "FAIL"
        rows.append((case.layout, str(case.world), *cells, verdict, seconds(case.seconds)))
    first, *widths = (max(map(len, column)) for column in zip(*rows, strict=True))
    lines = ["  ".join([row[0].ljust(first), *map(str.rjust, row[1:], widths)]).rstrip() for row in rows]
    failed = [case for case in report.cases if not case.ok]
    if failed:
        lines += ["", "Not normal:", *(f"  {case.layout}: {too_large(case)}" for case in failed)]
        lines.append("  without --precision, in float64, verify names the module")
        if any(case.n_experts for case in failed):
            lines.append(
                "  a token whose best experts score alike may go to another one by rounding, which changes more than "
                "sums in another order do"
            )
    how_many = f"{f'{len(failed)} of ' if failed else ''}{counted(len(report.cases), 'layout')}"
    lines += skipped_lines(report.selection)
    verdict = "Not normal" if failed else "Normal"
    lines += [
        "",
        f"{verdict} for {report.precision}: {how_many} (up to {MULTIPLE:g} x the largest error of one process's "
        f"reordered sums, {counted(report.steps, 'step')}, {seconds(report.seconds)})",
    ]
    return "\n".join(lines)


def too_large(case: RoundingCase) -> str:
    """Returns the cause of a failed case."""
    if case.error is not None:
        return case.error
    causes = [
        f"the loss of step {each.step} is {each.error:.1e} from float64, normal are {each.normal:.1e}"
        for each in case.losses or ()
        if not each.error <= each.normal
    ]
    if (worst := case.worst) is not None and not worst.multiple <= MULTIPLE:
        what = f"the gradient of {worst.name} is" if worst.name else "the parameters are"
        causes.append(
            f"{what} {worst.error:.1e} from float64 in step {worst.step}, {worst.multiple:.1f} x "
            f"one process's rounding of {worst.rounding:.1e}"
        )
    return "; ".join(causes)
