"""The accuracy of predictions: errors against published rows, by source and by family of hardware and framework.

An error is predicted / measured - 1. The baseline is one constant efficiency per source and device, fitted in hindsight
to the very rows it is judged on.
"""

from __future__ import annotations

import re
import statistics
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from phalanx.cost.prediction import Prediction
from phalanx.errors import JobError
from phalanx.validation.row import Reading, read
from phalanx.validation.table import Predict, memory_bytes

SPLITS = ("model", "device", "number format", "program on its device", "layout and batch", "year", "kind of source")
"""Properties by which errors are shown apart."""

BLIND = ("internlm_a100", "maxtext_trillium", "nemo_automodel")
"""Sources that nothing was ever fitted to, nor chosen with: they tell what to expect of a program that nobody has seen.
benchmarks/fit.py refuses their rows; a source that leaves this list does not come back."""

_YEAR = re.compile(
    r"\b(20[12][0-9])(?=[-_ )/,;]|[0-9]{2}\b)|\b(2[0-9])\.[01][0-9](?= nemo)|\b(2[0-6])[01][0-9]\.[0-9]{5}\b"
)
"""A date, a container's release (25.11 NeMo), or an article's number (2104.04473)."""


def year_of(row: Mapping[str, str]) -> str:
    """Returns the year in which a row was published, as far as its source and notes say it."""
    found = _YEAR.search(" ".join(row.get(name) or "" for name in ("source", "notes")).lower())
    return next((f"20{group[-2:]}" for group in found.groups() if group), "") if found else "not said"


@dataclass(frozen=True)
class GradedRow:
    """One row: its measurement and its prediction."""

    row_id: str
    source: str
    family: str
    """Device and framework."""
    calibration: bool
    """Whether the model's constants were fitted to it, among others."""
    measured_s: float | None
    predicted_s: float
    interval_s: tuple[float, float]
    """Seconds between which eight of ten measurements are to lie."""
    measured_bytes: float | None
    predicted_bytes: float | None
    oom: bool
    """Whether it ran out of memory."""
    fits: bool
    """Whether it is predicted to fit; true if its memory is not predicted, because weights are frozen."""
    group: Hashable
    """Properties shared by rows whose layouts compete: model, machine, batch, number format, framework."""
    layout: str
    ideal_s: float
    """Seconds of its FLOPs, recomputation included, at the device's peak."""
    kinds: tuple[str, ...] = ()
    """Its group in each of SPLITS, in their order."""

    @property
    def time_error(self) -> float | None:
        return None if self.measured_s is None else self.predicted_s / self.measured_s - 1

    @property
    def inside(self) -> bool | None:
        """Whether the measurement lies in the predicted interval."""
        low, high = self.interval_s
        return None if self.measured_s is None else low <= self.measured_s <= high

    @property
    def memory_error(self) -> float | None:
        if self.measured_bytes is None or self.predicted_bytes is None:
            return None
        return self.predicted_bytes / self.measured_bytes - 1


@dataclass(frozen=True)
class Errors:
    """The errors of some rows."""

    n: int
    median: float
    """Median of the absolute errors."""
    p90: float
    bias: float
    """Median of the signed errors."""


@dataclass(frozen=True)
class Ranking:
    """Agreement of the predicted with the measured order of layouts."""

    groups: int
    rows: int
    tau: float
    """Kendall's tau-b, the mean over groups weighted by their pairs."""
    regret: float
    """Mean over groups of the measured time of the layout predicted fastest, over the best measured, minus 1."""
    worst_regret: float


@dataclass(frozen=True)
class Verdicts:
    """Predictions of whether a row fits, against the outcome."""

    oom_said: int
    """Number of rows that ran out of memory, as predicted."""
    oom_missed: tuple[str, ...]
    """Rows that ran out of memory although they were predicted to fit."""
    ran_said: int
    ran_refused: tuple[str, ...]
    """Rows that ran although they were predicted not to fit."""


def outcomes(
    rows: Iterable[Mapping[str, str]], predict: Predict, calibration: Collection[str] = ()
) -> tuple[list[GradedRow], list[tuple[str, str]]]:
    """Returns every row that can be expressed; for the others the id and the reason."""
    found: list[GradedRow] = []
    refused: list[tuple[str, str]] = []
    for number, row in enumerate(rows, 2):
        row_id = row.get("row_id") or f"line {number}"
        try:
            reading = read(row)
            graded = _outcome(row_id, reading, predict(reading.spec), row_id in calibration)
            kind = "blind" if reading.source in BLIND else "others"
            found.append(replace(graded, kinds=(*graded.kinds, year_of(row), kind)))
        except JobError as error:
            refused.append((row_id, "; ".join(error.problems)))
    return found, refused


def _outcome(row_id: str, reading: Reading, prediction: Prediction, calibration: bool) -> GradedRow:
    spec, seconds = reading.spec, prediction.step_time_s
    low, high = prediction.spread
    return GradedRow(
        row_id=row_id,
        source=reading.source,
        family=f"{spec.cluster.accelerator.name} {reading.framework}",
        calibration=calibration,
        measured_s=reading.measured_s,
        predicted_s=seconds,
        interval_s=(low * seconds, high * seconds),
        measured_bytes=reading.measured_memory,
        predicted_bytes=memory_bytes(reading, prediction),
        oom=reading.oom,
        fits=prediction.fits or bool(spec.model.lora.rank),
        group=(spec.model, spec.cluster, spec.batch.global_batch, spec.products, reading.framework),
        layout=spec.layout.line(),
        ideal_s=prediction.hardware_flops / prediction.devices / prediction.peak_flops,
        kinds=(
            "experts" if spec.model.moe.n_experts else "dense",
            spec.cluster.accelerator.name.partition("-")[0],
            spec.products,
            "fitted" if spec.fitted else "not fitted",
            "given" if spec.given else "filled in",
        ),
    )


def errors(values: Iterable[float | None]) -> Errors | None:
    """Returns median, 90th percentile and bias; None for no rows."""
    signed = [value for value in values if value is not None]
    if not signed:
        return None
    absolute = sorted(abs(value) for value in signed)
    # Nearest-rank percentile: the smallest value that 90 % do not exceed.
    ninetieth = absolute[-(-9 * len(absolute) // 10) - 1]
    return Errors(len(signed), statistics.median(absolute), ninetieth, statistics.median(signed))


def by(found: Iterable[GradedRow], key: Callable[[GradedRow], str]) -> dict[str, list[GradedRow]]:
    """Groups outcomes by `key`, sorted by name."""
    groups: dict[str, list[GradedRow]] = defaultdict(list)
    for outcome in found:
        groups[key(outcome)].append(outcome)
    return dict(sorted(groups.items()))


def baseline(found: Sequence[GradedRow]) -> list[float]:
    """Returns the errors of one constant efficiency: the time at the peak times the factor with the least sum of
    absolute relative errors, which is a weighted median."""
    ratios = [outcome.ideal_s / outcome.measured_s for outcome in found if outcome.measured_s]
    if not ratios:
        return []
    ordered = sorted(ratios, reverse=True)
    half, total = sum(ordered) / 2, 0.0
    for ratio in ordered:
        total += ratio
        if total >= half:
            return [other / ratio - 1 for other in ratios]
    raise AssertionError("the whole is at least its half")


def ranking(found: Iterable[GradedRow]) -> Ranking | None:
    """Returns the ranking over all groups of at least three layouts; None if there are none."""
    taus, regrets, rows = list[tuple[float, int]](), list[float](), 0
    for layouts in _competing(found):
        measured, predicted = [m for m, _ in layouts], [p for _, p in layouts]
        tau = kendall(measured, predicted)
        pairs = len(layouts) * (len(layouts) - 1) // 2
        if tau is not None:
            taus.append((tau, pairs))
        regrets.append(min(layouts, key=lambda layout: layout[1])[0] / min(measured) - 1)
        rows += len(layouts)
    if not regrets or not taus:
        return None
    mean = sum(tau * pairs for tau, pairs in taus) / sum(pairs for _, pairs in taus)
    return Ranking(len(regrets), rows, mean, statistics.mean(regrets), max(regrets))


def _competing(found: Iterable[GradedRow]) -> Iterator[list[tuple[float, float]]]:
    """Yields the measured and predicted seconds of each layout of a group; of several runs of one layout the mean."""
    groups: dict[Hashable, dict[str, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
    for outcome in found:
        if outcome.measured_s is not None:
            groups[outcome.source, outcome.group][outcome.layout].append((outcome.measured_s, outcome.predicted_s))
    for layouts in groups.values():
        if len(layouts) >= 3:
            yield [(statistics.mean(m for m, _ in runs), runs[0][1]) for runs in layouts.values()]


def kendall(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Returns Kendall's tau-b of two orders of the same items; None if one of them is constant."""
    agree = one = other = 0
    for (a, b), (c, d) in combinations(zip(first, second, strict=True), 2):
        x, y = (a > c) - (a < c), (b > d) - (b < d)
        agree += x * y
        one += x != 0
        other += y != 0
    return agree / (one * other) ** 0.5 if one and other else None


def verdicts(found: Iterable[GradedRow]) -> Verdicts:
    """Returns the verdicts on rows that ran out of memory, and on those whose time or memory was measured."""
    oom_predicted, missed, ran_predicted, refused = 0, list[str](), 0, list[str]()
    for outcome in found:
        if outcome.oom:
            oom_predicted += not outcome.fits
            missed += [outcome.row_id] * outcome.fits
        elif outcome.measured_s is not None or outcome.measured_bytes is not None:
            ran_predicted += outcome.fits
            refused += [outcome.row_id] * (not outcome.fits)
    return Verdicts(oom_predicted, tuple(missed), ran_predicted, tuple(refused))
