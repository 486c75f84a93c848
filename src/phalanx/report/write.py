"""Writes report.html and loss.svg into a run's directory.

    python -P -m phalanx.report.write RUN

does so in a process of its own, while the run trains.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from phalanx.config.fields import get, leaves
from phalanx.cost.breakdown import duration
from phalanx.data.files import write_atomic
from phalanx.pictures.page import html_page, section, table
from phalanx.report import page
from phalanx.report.figures import Expected, expected, figures
from phalanx.report.run import RunRecord, read_run
from phalanx.units import gib
from phalanx.units import seconds as as_time

_OF_THE_PLACE = ("run.name", "run.dir", "data.dir")
"""Fields in which runs always differ."""
_ROWS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "step": ("steps done", lambda v: f"{v:,}"),
    "loss": ("loss", lambda v: f"{v:.4f}"),
    "val_loss": ("validation loss", lambda v: f"{v:.4f}"),
    "best_val_loss": ("best validation loss", lambda v: f"{v:.4f}"),
    "tokens": ("tokens", lambda v: f"{v:,.0f}"),
    "step_time_s": ("step time, median", duration),
    "tps": ("tps (per device)", lambda v: f"{v:,.0f}"),
    "tps_total": ("tps_total (all devices)", lambda v: f"{v:,.0f}"),
    "mfu": ("MFU", lambda v: f"{v:.1%}"),
    "padding": ("padding", lambda v: f"{v:.1%}"),
    "memory_bytes": ("peak memory, rank 0", gib),
    "seconds": ("time in steps", as_time),
}


def pages(records: Sequence[RunRecord], predictions: Sequence[Expected], *, compare: bool) -> str:
    """Returns the page of one run, or one page of several: compared, or each with its own chapter."""
    if len(records) == 1:
        return page.html(records[0], predictions[0])
    name_apart(records)
    names = ", ".join(record.name for record in records)
    if compare:
        parts = [
            page.STYLE_ELEMENT,
            *section("curves", "Curves", page.chart_grid(page.charts(records))),
            *section("figures", "Figures", _figures(records)),
            *section("differences", "What differs in the jobs", _differences(records)),
            page.foot(),
        ]
        return html_page(f"Runs {names}", f"{len(records)} runs compared", names, parts)
    entries = (
        f"<li><a href='#run-{at}'>{escape(record.name)}</a> {escape(page.subtitle(record))}</li>"
        for at, record in enumerate(records)
    )
    chapters = [page.STYLE_ELEMENT, "<ul>", *entries, "</ul>"]
    for at, (record, prediction) in enumerate(zip(records, predictions, strict=True)):
        chapters.append(f"<h1 id='run-{at}'>{escape(record.name)}</h1>")
        chapters.append(f"<p class='soft'>{escape(page.subtitle(record))}</p>")
        chapters += page.body(record, prediction, f"run-{at}-")
    return html_page(f"Runs {names}", f"{len(records)} runs", names, [*chapters, page.foot()])


def _figures(records: Sequence[RunRecord]) -> Iterator[str]:
    found = [figures(record) for record in records]
    rows = [[("state", None), *((record.state, None) for record in records)]]
    for name, (label, shown) in _ROWS.items():
        values = [each[name] for each in found]
        if any(value is not None for value in values):
            rows.append([(label, None), *(("–" if value is None else shown(value), value) for value in values)])
    yield from table(("", *(record.name for record in records)), rows, words=(0,))


def _differences(records: Sequence[RunRecord]) -> Iterator[str]:
    unread = [record.name for record in records if record.loaded is None]
    if unread:
        yield f"<p class='soft'>The jobs of {escape(', '.join(unread))} cannot be read.</p>"
    different = differences(records)
    if not different:
        yield "<p>Nothing: the jobs are equal but for their names.</p>"
        return
    rows = [[(path, None), *((value, None) for value in values)] for path, values in different.items()]
    columns = range(len(records) + 1)
    yield from table(("", *(record.name for record in records)), rows, words=columns)


def name_apart(records: Sequence[RunRecord]) -> None:
    """Adds to the names of runs that have the same one what differs in their jobs, as few fields as suffice, or their
    folder if nothing does."""
    for name in {record.name for record in records}:
        alike = [record for record in records if record.name == name]
        if len(alike) == 1:
            continue
        fields, told = differences(alike), [""] * len(alike)
        for path in sorted(fields, key=lambda path: -len(set(fields[path]))):
            if len(set(told)) < len(alike):
                more = [f"{path.rpartition('.')[2]}={value}" for value in fields[path]]
                told = [", ".join(filter(None, pair)) for pair in zip(told, more, strict=True)]
        if len(set(told)) < len(alike):
            told = [str(record.path.parent) for record in alike]
        for record, words in zip(alike, told, strict=True):
            record.apart = words


def differences(records: Sequence[RunRecord]) -> Mapping[str, list[str]]:
    """Returns the fields in which the runs' jobs differ, with the value of each run, "–" where it is not known."""
    found: dict[str, list[str]] = {}
    for path in leaves():
        if path in _OF_THE_PLACE:
            continue
        values = [str(get(record.loaded.job, path)) if record.loaded else "–" for record in records]
        if len({value for value in values if value != "–"}) > 1:
            found[path] = [value if value != "" else "(empty)" for value in values]
    return found


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
    for picture in page.loss([record], alone=True):
        write_atomic(run / LOSS, picture.encode(errors="backslashreplace"))
    return run / REPORT


def main(argv: Sequence[str]) -> None:
    """Writes the report of the run that the command line names, when nothing else wants the processor."""
    os.nice(_LEAST_IMPORTANT)
    write_report(Path(argv[0]))


if __name__ == "__main__":
    main(sys.argv[1:])
