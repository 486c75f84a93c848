"""Is a difference in bf16, fp16 or fp8 normal? Layouts compared with float64, measured by one process's own rounding.

The tolerance is derived, not chosen. One process runs the same steps in the same precision several times, with its sums
in other orders: more micro-batches, and products added in parts, as ranks that hold parts add them. Each run's error is
its difference from a float64 run; the largest of them is the rounding of a tensor, or of the loss. A layout is a
further order of the same sums, so its error is normal up to MULTIPLE times as much.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from phalanx.config.layout import Layout
from phalanx.config.precision import Precision
from phalanx.units import counted, finite, seconds
from phalanx.verify.cases import CaseReport, LayoutRun, VerifyCase, guarded, layout_runs, started
from phalanx.verify.measure import Differences
from phalanx.verify.select import Selection

MULTIPLE = 4.0
"""A layout's error is normal up to this many times the largest error of one process's reordered sums: twice because
the largest error of a further order may exceed that of a few, and twice because sums over ranks round in places where
one process does not."""
ORDERS = ((1, 1), (2, 1), (1, 2), (4, 2), (1, 4), (8, 4))
"""Orders of one process's sums: micro-batches, and parts in which products are added."""
EXACT: Precision = "fp64"


@dataclass(frozen=True)
class LossError:
    """The loss of one step in three runs."""

    step: int
    """From 1."""
    loss: float
    """The layout's."""
    one_process: float
    """The loss of one process in the same precision."""
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
        """The error in units of the rounding; NaN counts as infinity."""
        found = self.error / self.rounding if self.rounding else math.inf if self.error else 0.0
        return math.inf if math.isnan(found) else found


@dataclass(frozen=True, kw_only=True)
class RoundingCase(VerifyCase):
    """One layout's errors. Those are None if it failed to run."""

    layout: str
    world: int
    n_experts: int
    losses: list[LossError] | None = None
    worst: TensorError | None = None

    @property
    def title(self) -> str:
        return self.layout

    def complaint(self) -> str:
        if self.error is not None:
            return self.error
        causes = [
            f"the loss of step {each.step} is {each.error:.1e} from float64, normal are {each.normal:.1e}"
            for each in self.losses or ()
            if not each.error <= each.normal
        ]
        if (worst := self.worst) is not None and not worst.multiple <= MULTIPLE:
            what = f"the gradient of {worst.name} is" if worst.name else "the parameters are"
            causes.append(
                f"{what} {worst.error:.1e} from float64 in step {worst.step}, {worst.multiple:.1f} x "
                f"one process's rounding of {worst.rounding:.1e}"
            )
        return "; ".join(causes)


@dataclass
class RoundingReport(CaseReport[RoundingCase]):
    """All cases, in order."""

    heading = "Not normal:"

    @property
    def precision(self) -> str:
        return self.selection.compared.job.train.precision

    def as_dict(self) -> dict[str, Any]:
        """Returns the document of `phalanx verify --precision P --json`. What is no number is null."""
        document = super().as_dict()
        for case, shown in zip(self.cases, document["cases"], strict=True):
            if case.worst is not None:
                shown["worst"]["multiple"] = finite(case.worst.multiple)
        return document | {
            "precision": self.precision,
            "multiple": MULTIPLE,
            "orders": [{"micro_batches": batches, "parts": parts} for batches, parts in ORDERS],
        }

    def rows(self) -> Iterator[Sequence[str]]:
        names = ("loss", "one process", "differs", "float64", "error", "normal to", "gradients")
        yield "layout", "ranks", *names
        for case in self.cases:
            cells = ("-",) * len(names)
            if case.losses and case.worst:
                last = max(case.losses, key=lambda each: each.error)
                cells = (
                    *(f"{last.loss:.6f}", f"{last.one_process:.6f}", f"{last.difference:.1e}", f"{last.float64:.6f}"),
                    *(f"{last.error:.1e}", f"{last.normal:.1e}", f"{case.worst.multiple:.1f} x"),
                )
            yield case.layout, str(case.world), *cells

    def verdict(self, failed: int, how_many: str) -> str:
        return (
            f"{'Not normal' if failed else 'Normal'} for {self.precision}: {how_many} (up to {MULTIPLE:g} x the "
            f"largest error of one process's reordered sums, {counted(self.steps, 'step')}, {seconds(self.seconds)})"
        )

    def failures(self, failed: Sequence[RoundingCase]) -> Iterator[str]:
        yield from super().failures(failed)
        yield "  without --precision, in float64, verify names the module"
        if any(case.n_experts for case in failed):
            yield (
                "  a token whose best experts score alike may go to another one by rounding, which changes more than "
                "sums in another order do"
            )


@dataclass(frozen=True)
class Rounding:
    """The errors of one process's reordered sums: their differences from float64."""

    loss: float
    gradients: dict[str, float]
    parameters: float
    """All parameters' error together: where a gradient is smaller than its rounding, Adam's step goes either way."""
    losses: list[float]
    """The losses of the first order, by step."""

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


def run_in_precision(
    selection: Selection, steps: int, on_case: Callable[[RoundingCase], None], on_start: Callable[[Layout], None]
) -> RoundingReport:
    """Compares every selected layout, over `steps` steps, in the precision of the compared job. Raises the errors of
    the one-process runs."""
    report, known = RoundingReport(selection, steps), dict[Path, Rounding]()
    with started(report) as place:
        for each in layout_runs(report, *place, on_start):
            if each.path not in known:
                known[each.path] = _rounding(each)
            layout, n_experts = each.job.layout, each.job.model.moe.n_experts
            case = RoundingCase(layout=layout.line(), world=layout.world, n_experts=n_experts)
            on_case(report.add(case, partial(_measured, each, known[each.path])))
    return report


def _rounding(each: LayoutRun) -> Rounding:
    """Runs one process in float64 and with its sums in several orders."""
    alone, orders = each.alone, list[Differences]()
    each.record(replace(alone, train=replace(alone.train, precision=EXACT)))
    for micro_batches, parts in ORDERS:
        if alone.train.global_batch % (2 * micro_batches):  # a pair of preferences stays together
            continue
        job = replace(alone, layout=replace(alone.layout, accumulation=micro_batches))
        orders.append(each.compare(each.ranks, job, own_precision=True, chunks=parts, stale=each.stale))
    return Rounding.of(orders)


def _measured(each: LayoutRun, rounding: Rounding) -> dict[str, Any]:
    """Returns what a case has after its ranks ran."""
    found = each.compare(guarded(each.ranks), each.job, own_precision=True)
    losses = list(_losses(found, rounding))
    worst = max(_tensors(found, rounding), key=lambda each: each.multiple)
    ok = all(each.error <= each.normal for each in losses) and worst.multiple <= MULTIPLE
    return {"losses": losses, "worst": worst, "ok": ok}


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
