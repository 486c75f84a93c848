"""Writes report.html and loss.svg into a run's directory.

    python -P -m phalanx.report.write RUN

does so in a process of its own, while the run trains.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from phalanx.data.files import write_atomic
from phalanx.report import charts, page
from phalanx.report.expected import expected
from phalanx.report.run import RunRecord, read_run

REPORT, LOSS = "report.html", "loss.svg"
_LEAST_IMPORTANT = 19  # of the kernel's priorities


def write_report(run: Path) -> Path:
    """Writes the report of a run into its directory and returns its path. Raises DataError if it is no run, OSError if
    it cannot be written."""
    return write_record(read_run(run))


def write_record(record: RunRecord) -> Path:
    """Writes the report of a run that was read into its directory and returns its path. Raises OSError."""
    run = record.path
    write_atomic(run / REPORT, page.html(record, expected(record)).encode(errors="backslashreplace"))
    for picture in charts.loss([record], alone=True):
        write_atomic(run / LOSS, picture.encode(errors="backslashreplace"))
    return run / REPORT


def main(argv: Sequence[str]) -> None:
    """Writes the report of the run that the command line names, when nothing else wants the processor."""
    os.nice(_LEAST_IMPORTANT)
    write_report(Path(argv[0]))


if __name__ == "__main__":
    main(sys.argv[1:])
