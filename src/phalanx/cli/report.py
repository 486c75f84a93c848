"""`phalanx report RUN…`: a run's directory as a page with pictures, or several runs in one page."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from phalanx.cli.commands import WHOLE, Command, CommandVerb
from phalanx.cli.files import check_folders, write
from phalanx.cli.option import Option
from phalanx.echo import echo
from phalanx.errors import JobError

VERB = CommandVerb(
    "report",
    "Shows a run as a page with pictures, or several runs in one page.",
    {
        WHOLE: Command(
            ("RUN",),
            {
                "out": Option(
                    str,
                    "",
                    "the page (default: report.html in the run's directory; for several runs in the current one)",
                    value="FILE",
                )
            },
            switches={
                "compare": "several runs: their curves over each other, their figures side by side, and what differs "
                "in their jobs",
                "json": "print one JSON document on standard output and write no page",
            },
            more=True,
        )
    },
    (
        ("report runs/main", "one run"),
        ("report runs/main runs/pipeline --compare --out compared.html", "two runs in one page"),
    ),
    (
        "RUN is a run's directory. The page is one file that loads nothing: curves, the step beside its prediction, "
        "memory, traffic, checkpoints and restarts, environment. `phalanx train` keeps it up to date in the run's "
        "directory; this makes it again, also from a copy of the directory, and without torch.",
    ),
)


def run(argv: Sequence[str]) -> int:
    words = VERB.parse(argv)
    if words is None:
        return 0
    # Imported here: the cost model and the pictures take as long as all of the rest.
    from phalanx.report.figures import document, expected
    from phalanx.report.run import read_run
    from phalanx.report.write import REPORT, differences, pages, write_record

    compare = "compare" in words.switches
    if compare and len(words.subjects) < 2:
        raise JobError("--compare needs several runs, such as `phalanx report runs/a runs/b --compare`")
    out = words.options.get("out", "")
    check_folders({"out": out}, "out")
    paths = [Path(subject) for subject in words.subjects]
    records = [read_run(path) for path in paths]
    for record in records:
        for note in record.notes:
            echo(f"{record.path}: {note}", file=sys.stderr)
    if len(paths) == 1 and not out and not words.as_json:
        echo(f"written: {write_record(records[0])}")
        return 0
    predictions = [expected(record) for record in records]
    if words.as_json:
        runs = [document(record, prediction) for record, prediction in zip(records, predictions, strict=True)]
        differing = differences(records) if len(records) > 1 else {}
        echo(json.dumps({"runs": runs, "differences": differing}, indent=1))
        return 0
    write(out or REPORT, pages(records, predictions, compare=compare))
    echo(f"written: {out or REPORT}")
    return 0
