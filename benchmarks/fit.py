"""Fits the values of src/phalanx/cost/calibration.yaml to the rows that it names.

    python -m benchmarks.fit [TRUTH] [--write]

TRUTH is a folder of CSV files, as for benchmarks.accuracy. A value is the one with which the median of predicted over
measured step times of its rows is 1. `--write` puts fitted values into the file; without it a value that differs from
the file's by more than 1 % ends with exit code 1. Lines are fitted in the file's order, twice, because rows that wait
for their host also depend on their device.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import median

from scipy.optimize import brentq

from benchmarks.accuracy import rows_of
from benchmarks.truth.grades import BLIND
from phalanx.cost.frameworks import CALIBRATION, FRAMEWORKS, FittedValue, fits, sustained
from phalanx.cost.prediction import predict
from phalanx.cost.spec import Framework
from phalanx.validation.row import Reading, read

PRECISION = 1e-5
"""Relative precision of a value, which is sought from a third of the one in the file up to three times it."""


class Fit:
    """The fitted values so far, with which rows are predicted."""

    def __init__(self, readings: Mapping[str, Reading], lines: Sequence[FittedValue]):
        self._readings, self._lines = readings, lines
        self.values = {line: line.value for line in lines}

    def once(self, line: FittedValue) -> None:
        """Fits one value, with all others as they are."""

        @cache
        def miss(factor: float) -> float:
            self.values[line] = line.value * math.exp(factor)
            return math.log(self.ratio(line))

        low, high = -math.log(3), math.log(3)
        if miss(low) * miss(high) < 0:
            found = brentq(miss, low, high, xtol=PRECISION)
        else:  # no value between them does: the nearer end
            found = min(low, high, key=lambda end: abs(miss(end)))
        self.values[line] = line.value * math.exp(found)

    def ratio(self, line: FittedValue) -> float:
        """Returns the median of predicted over measured step times of a line's rows."""
        return median(self._ratio(row, line) for row in line.rows)

    def _ratio(self, row: str, line: FittedValue) -> float:
        reading = self._readings[row]
        cluster = reading.spec.cluster
        device = cluster.accelerator
        rate = self.values[line] if line.field == "sustained" else sustained(device, values=self.values)
        cluster = replace(cluster, accelerator=replace(device, sustained=rate))
        prediction = predict(replace(reading.spec, cluster=cluster, framework=self._framework(reading, line)))
        measured = reading.measured_s
        assert measured, f"{row} has no step time"
        return prediction.step_time_s / measured

    def _framework(self, reading: Reading, fitted: FittedValue) -> Framework:
        program, device = reading.spec.framework.name, reading.spec.cluster.accelerator.name
        values = {line.field: self.values[line] for line in self._lines if line.is_of(program, device)}
        if fitted.programs:
            values[fitted.field] = self.values[fitted]  # also where other rows give a better value
        if "slowdown" in values:
            values["slowdown"] *= FRAMEWORKS[program].slowdown
        return replace(reading.spec.framework, **values)


def fitted(truth: Path) -> dict[FittedValue, float]:
    """Returns the fitted value of every line of calibration.yaml."""
    rows = {row["row_id"]: row for row in rows_of(truth)}
    lines = fits()
    if blind := {line.source for line in lines} & set(BLIND):
        raise ValueError(f"blind sources are never fitted to: {', '.join(sorted(blind))}")
    fit = Fit({name: read(rows[name]) for line in lines for name in line.rows}, lines)
    for line in (*lines, *lines):
        fit.once(line)
    return fit.values


def rounded(value: float) -> float:
    """Returns a value with three digits."""
    return float(f"{value:.3g}")


def written(text: str, values: Mapping[FittedValue, float]) -> str:
    """Returns the text of calibration.yaml with other values."""
    for line, value in values.items():
        device, rows = line.device or "''", ", ".join(map(str, line.numbers))
        programs = line.programs if re.fullmatch(r"\S+", line.programs) else f"'{line.programs}'"
        head, tail = f"  - [{programs}, {device}, ", f", {line.source}, [{rows}]]"
        text = re.sub(re.escape(head) + r"[^,]*" + re.escape(tail), f"{head}{rounded(value):g}{tail}", text)
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("truth", nargs="?", default=os.environ.get("PHALANX_TRUTH", ""), type=str)
    parser.add_argument("--write", action="store_true", help="put the fitted values into calibration.yaml")
    options = parser.parse_args()
    if not options.truth or not Path(options.truth).is_dir():
        print("no tables: name their folder, or set PHALANX_TRUTH to it", file=sys.stderr)
        return 2
    values = fitted(Path(options.truth))
    for line, value in values.items():
        name = f"{line.field} of {line.programs} on {line.device or 'other devices'}"
        print(f"{name:<96} {line.value:6g} in the file, fitted {rounded(value):6g} to {len(line.rows)} rows")
    if options.write:
        CALIBRATION.write_text(written(CALIBRATION.read_text(encoding="utf-8"), values), encoding="utf-8")
        return 0
    return int(any(abs(value / line.value - 1) > 0.01 for line, value in values.items()))


if __name__ == "__main__":
    sys.exit(main())
