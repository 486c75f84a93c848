"""The intervals of predictions: the narrowest between which eight of ten published steps lie, by what is known.

    python -m benchmarks.intervals [TRUTH] [--write]

TRUTH is as in benchmarks.accuracy. A step is of a class: dense or with experts, of a program that was fitted on its
device or not, its layout and batch given or filled in. Steps of `unfitted` programs are all rows, each predicted
without what was fitted to its own source, nor a program that was described because of it; those of `fitted` ones are
the rows that were not used in the fit. A class with too few sources has the interval of the next more general one. What
is filled in is judged by rows of which the layout or the micro-batch is taken away, too. --write replaces
src/phalanx/cost/intervals.yaml; else it is printed.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil, exp, floor, log
from pathlib import Path

import numpy as np

from benchmarks.accuracy import left_out, rows_of
from phalanx.blocks.parameters import count
from phalanx.cost.frameworks import calibrated, calibration_rows
from phalanx.cost.intervals import INTERVALS
from phalanx.cost.prediction import Prediction, predict
from phalanx.cost.spec import StepSpec
from phalanx.errors import JobError
from phalanx.validation.row import Reading, read
from phalanx.validation.table import memory_bytes

INSIDE, LEAST_INSIDE = 0.8, 0.75
"""Share of all rows, and of the sources' mean, that lie inside; least share of every source (of less than eight rows:
all but one)."""
FEWEST_SOURCES, FEWEST_ROWS = 3, 3
"""Sources that an interval needs, and rows that a source needs."""
GRID = 0.01
BLANKS = (("dp", "tp", "pp", "vpp", "cp", "ep", "zero_stage", "sequence_parallel", "schedule"), ("micro_batch",))
"""Columns that are taken away to see what filling them in costs: few published rows lack them."""
LEAST_FILLED = 0.5
"""LEAST_INSIDE of steps whose layout or batch was filled in."""

DESCRIBED = ("internlm",)
"""Programs that are described by their code because their own rows had erred."""


@dataclass(frozen=True)
class Residual:
    """A measured step beside its prediction."""

    source: str
    experts: bool
    fitted: bool
    given: bool
    time: float | None
    """Logarithm of measured over predicted seconds."""
    memory: float | None
    parameters: int
    devices: int

    @classmethod
    def of(cls, reading: Reading, found: Prediction, fitted: bool) -> Residual:
        seconds, size = reading.measured_s, memory_bytes(reading, found)
        spec = reading.spec
        return cls(
            reading.source,
            spec.model.moe.n_experts > 0,
            fitted,
            spec.given,
            log(seconds / found.step_time_s) if seconds else None,
            log(reading.measured_memory / size) if size and reading.measured_memory else None,
            count(spec.model),
            spec.layout.world,
        )


def residuals(truth: Path) -> Iterator[Residual]:
    """Yields each row without its own source's fit, and with it if the row was not used for it; and both ways where
    its layout, or its micro-batch, is taken away."""
    used = calibration_rows()
    for row in rows_of(truth):
        try:
            reading = read(row)
        except JobError:
            continue
        for blanks in ((), *BLANKS):
            less = reading if not blanks else _without(row, reading, blanks)
            if not less:
                continue
            yield Residual.of(less, left_out(_undescribed(less.spec), less.source), False)
            if less.spec.fitted and row.get("row_id") not in used:
                yield Residual.of(less, predict(less.spec), True)


def _undescribed(spec: StepSpec) -> StepSpec:
    """Returns a step of a program that was described with its own rows in view as one of an unknown program."""
    if spec.framework.name not in DESCRIBED:
        return spec
    return replace(spec, framework=calibrated("megatron", spec.cluster.accelerator))


def _without(row: dict[str, str], whole: Reading, blanks: Sequence[str]) -> Reading | None:
    """Returns the row as it reads without some of its columns; None if nothing is filled in for them."""
    try:
        less = read({**row, **dict.fromkeys(blanks, "")})
    except JobError:
        return None
    same_batch = less.spec.batch.global_batch == whole.spec.batch.global_batch
    return less if same_batch and less.assumptions != whole.assumptions and not less.spec.given else None


def narrowest(by_source: dict[str, list[float]], least: float = LEAST_INSIDE) -> tuple[float, float] | None:
    """Returns the narrowest interval of logarithms, around 0, that holds enough of all and of every source; None for
    too few sources."""
    sources = [np.array(values) for values in by_source.values() if len(values) >= FEWEST_ROWS]
    if len(sources) < FEWEST_SOURCES:
        return None
    every = np.concatenate(sources)
    lows = np.arange(np.floor(min(every.min(), 0) / GRID), 1) * GRID
    highs = np.arange(0, np.ceil(max(every.max(), 0) / GRID) + 1) * GRID
    best: tuple[float, float] | None = None
    for low in lows:
        for high in highs:
            if best and high - low >= best[1] - best[0] - GRID / 2:
                break
            inside = [(low <= values) & (values <= high) for values in sources]
            most = [max(1, int((1 - least) * len(one))) for one in inside]
            enough = all(int((~one).sum()) <= outside for one, outside in zip(inside, most, strict=True))
            shares = [float(one.mean()) for one in inside]
            whole = float(np.concatenate(inside).mean())
            if enough and whole >= INSIDE and sum(shares) / len(shares) >= INSIDE:
                best = float(low), float(high)
                break
    return best


def outwards(interval: tuple[float, float]) -> tuple[float, float]:
    """Returns the factors of an interval of logarithms with three digits, which hold all that it holds."""
    low, high = map(exp, interval)
    return floor(1000 * low) / 1000, ceil(1000 * high) / 1000


def fitted_intervals(found: Sequence[Residual]) -> Iterator[tuple[str, str, str, float, float, int, int]]:
    """Yields kind, fit, layout, factors and numbers of rows and sources of every class that has enough of them."""
    for experts in (False, True):
        for fitted in (False, True):
            least = most = 1.0
            for given in (True, False):
                rows = defaultdict[str, list[float]](list)
                for one in found:
                    same = one.experts == experts and one.fitted == fitted and one.given == given
                    if one.time is not None and same:
                        rows[one.source].append(one.time)
                if (interval := narrowest(rows, LEAST_INSIDE if given else LEAST_FILLED)) is None:
                    continue
                low, high = outwards(interval)
                names = "experts" if experts else "dense", "fitted" if fitted else "unfitted"
                number = sum(map(len, rows.values()))
                if given:
                    least, most = low, high
                    yield *names, "any", low, high, number, len(rows)
                elif low < least or high > most:  # what is filled in makes nothing surer
                    yield *names, "filled in", min(low, least), max(high, most), number, len(rows)


def written(found: Sequence[Residual]) -> str:
    """Returns the text of intervals.yaml."""
    memory = defaultdict[str, list[float]](list)
    for one in found:
        if one.memory is not None and not one.fitted and one.given:
            memory[one.source].append(one.memory)
    low, high = outwards(narrowest(memory) or (0.0, 0.0))
    parameters, devices = max(one.parameters for one in found), max(one.devices for one in found)
    lines = [
        "# Written by benchmarks/intervals.py: measured over predicted, between which eight of ten published steps",
        "# lie. Kind of model, program on its device, layout and batch; factors; rows and sources.",
        "intervals:",
        *(f"  - [{', '.join(map(str, one))}]" for one in fitted_intervals(found)),
        f"memory_interval: [{low}, {high}, {sum(map(len, memory.values()))}, {len(memory)}]",
        f"largest: {{parameters: {parameters}, devices: {devices}}}",
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("truth", nargs="?", default=os.environ.get("PHALANX_TRUTH", ""), type=str)
    parser.add_argument("--write", action="store_true", help="replace intervals.yaml")
    options = parser.parse_args()
    if not options.truth or not Path(options.truth).exists():
        print("no table: name it, or set PHALANX_TRUTH to the folder of published measurements", file=sys.stderr)
        return 2
    text = written(list(residuals(Path(options.truth))))
    print(text, end="")
    if options.write:
        INTERVALS.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
