"""The accuracy of `phalanx predict` on published measurements.

    python -m benchmarks.accuracy [TRUTH] [--json]

TRUTH is a folder of CSV files, or one file, with the columns that `phalanx predict --table` reads; by default the
environment variable PHALANX_TRUTH names it. Figures and pictures go to benchmarks/results, the rows stay where they
are. Rows of the calibration (docs/explanation/accuracy.md) do not count in any error. `constant` is the result of one
constant efficiency for each source and device, fitted in hindsight to the rows it is judged on.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path

from benchmarks.report import RESULTS, machine, save
from benchmarks.truth import picture as accuracy_picture
from benchmarks.truth.grades import SPLITS, GradedRow, outcomes, verdicts
from benchmarks.truth.report import as_dict, confusion, markdown, table
from benchmarks.truth.report import calibrated as calibration_table
from phalanx.cost.frameworks import calibration_rows, recalibrated, sustained
from phalanx.cost.prediction import Prediction, predict
from phalanx.cost.spec import StepSpec
from phalanx.validation.row import source_of
from phalanx.validation.row_layout import COLUMNS, Cells

OTHERS = """Published errors of others, to compare: vTrain 8.4 % on one node and 14.7 % on several, of its own rows
(mean; MICRO 2024); SimuMax 5.6 % of its B200 rows (mean) and 0.5 % of their memory; Proteus 3.0 %, Charon 3.7 %, Maya
about 5 % where the operators were measured on the same machine. Floor: repeated runs of one MLPerf submission differ by
0.3 % (median), the same machine at another site by up to 21 %."""


def rows_of(truth: Path) -> Iterator[dict[str, str]]:
    """Yields the rows of all tables; files without any column of measurements are skipped."""
    for path in sorted(truth.glob("*.csv")) if truth.is_dir() else [truth]:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file)
            if {"gpu", "n_gpus", "model_name"} <= set(reader.fieldnames or ()) <= set(COLUMNS):
                yield from reader


def left_out(spec: StepSpec, source: str) -> Prediction:
    """Returns the prediction without what was fitted to rows of this source."""
    device = spec.cluster.accelerator
    framework = recalibrated(spec.framework, device, without=source)
    rate = device.sustained * sustained(device, without=source) / sustained(device)
    cluster = replace(spec.cluster, accelerator=replace(device, sustained=rate))
    return predict(replace(spec, cluster=cluster, framework=framework))


def leave_one_source_out(rows: Sequence[dict[str, str]]) -> list[GradedRow]:
    """Returns every row, predicted as if its source were not known."""
    sources = defaultdict[str, list[dict[str, str]]](list)
    for row in rows:
        sources[source_of(Cells(row))].append(row)
    graded = (outcomes(own, partial(left_out, source=source))[0] for source, own in sources.items())
    return [*chain.from_iterable(graded)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("truth", nargs="?", default=os.environ.get("PHALANX_TRUTH", ""), type=str)
    parser.add_argument("--json", action="store_true", help="print the figures as JSON and write nothing")
    options = parser.parse_args()
    if not options.truth or not Path(options.truth).exists():
        print("no table: name it, or set PHALANX_TRUTH to the folder of published measurements", file=sys.stderr)
        return 2
    began = time.monotonic()
    rows = list(rows_of(Path(options.truth)))
    found, refused = outcomes(rows, predict, calibration_rows())
    seconds = time.monotonic() - began
    blind = leave_one_source_out(rows)
    result = {
        "machine": machine(),
        "seconds": seconds,
        **as_dict(found, refused),
        "leave_one_source_out": as_dict(blind, ())["sources"],
    }
    if options.json:
        print(json.dumps(result, indent=1))
        return 0
    said = verdicts(found)
    seen = [
        "By device and program:",
        markdown(table(found, lambda one: one.family)),
        "Each source predicted without what was fitted to its own rows:",
        markdown(table(blind, lambda one: one.source)),
        *(
            text
            for place, name in enumerate(SPLITS)
            for text in (
                f"By {name}, without what was fitted to the row's source:",
                markdown(table(blind, lambda one, place=place: one.kinds[place])[:-1]),
            )
        ),
        "Verdicts on memory:",
        markdown(confusion(found)),
        f"Ran and predicted not to fit: {', '.join(said.ran_refused) or 'none'}. Out of memory and predicted to fit: "
        f"{', '.join(said.oom_missed) or 'none'}.",
        "Rows of the calibration, which count above only in the order of layouts:",
        markdown(calibration_table(found)),
        f"Refused: {'; '.join(f'{row} ({why})' for row, why in refused) or 'none'}.",
        f"{len(found)} rows in {seconds:.1f} s, reading and prediction.",
        OTHERS,
        "![predicted against measured](accuracy.svg)",
    ]
    (RESULTS / "accuracy.svg").write_text(accuracy_picture.svg(found), encoding="utf-8")
    save("accuracy", result, table(found, lambda one: one.source), "Predicted against published", "\n\n".join(seen))
    return 0


if __name__ == "__main__":
    sys.exit(main())
