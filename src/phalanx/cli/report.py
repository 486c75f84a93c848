"""Views of runs: `phalanx report RUN…`, `phalanx watch RUN`, `phalanx profile RUN`."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from phalanx.cli.files import OutputFiles, write
from phalanx.cli.verb import Option, Verb, Words, alone
from phalanx.echo import echo
from phalanx.errors import JobError
from phalanx.nearest import nearest

VERB = Verb(
    "report",
    "Shows a run as a page with pictures, or several runs in one page.",
    alone(
        ("RUN",),
        {
            "out": Option(
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
    ),
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


@VERB.runs
def run(words: Words) -> None:
    # Imported here: the cost model and the pictures take as long as all of the rest.
    from phalanx.report.figures import document, expected
    from phalanx.report.run import read_run
    from phalanx.report.write import REPORT, differences, pages, write_record

    compare = "compare" in words.switches
    if compare and len(words.subjects) < 2:
        raise JobError("--compare needs several runs, such as `phalanx report runs/a runs/b --compare`")
    out = OutputFiles.of(words, "out").paths.get("out", "")
    if out and words.as_json:
        raise JobError("--out: no effect with --json, which writes no page")
    paths = [Path(subject) for subject in words.subjects]
    records = [read_run(path) for path in paths]
    for record in records:
        for note in record.notes:
            echo(f"{record.path}: {note}", file=sys.stderr)
    if len(paths) == 1 and not out and not words.as_json:
        echo(f"written: {write_record(records[0])}")
        return
    predictions = [expected(record) for record in records]
    if words.as_json:
        runs = [document(record, prediction) for record, prediction in zip(records, predictions, strict=True)]
        differing = differences(records) if len(records) > 1 else {}
        echo(json.dumps({"runs": runs, "differences": differing}, indent=1))
        return
    write(out or REPORT, pages(records, predictions, compare=compare))
    echo(f"written: {out or REPORT}")


WATCH = Verb(
    "watch",
    "Shows the live view of a run, from any terminal.",
    alone(("RUN",), switches={"once": "print the view once", "json": "print it once, as one JSON document"}),
    (("watch runs/main", "until the run ends"), ("watch runs/main --once", "once, for scripts")),
    (
        "RUN is a run's directory; the run may be on other machines that write there. Only files are read, and nothing "
        "is asked of the run. The view ends with the run, or with Ctrl-C, which does not touch the run.",
    ),
)
EVERY_S = 0.5


@WATCH.runs
def watch(words: Words) -> None:
    from phalanx.report.live import RunFollower, Screen

    follower = RunFollower(Path(words.subject))
    if words.as_json:
        echo(json.dumps(follower.view().document(), indent=1))
        return
    screen = Screen()
    if "once" in words.switches or not screen.is_possible:
        screen.print(follower.view())
        return
    with screen.live(follower.view) as view:
        while view().state == "running":
            time.sleep(EVERY_S)


PROFILE = Verb(
    "profile",
    "Shows where the time of a run's profiled steps went, and what was predicted.",
    alone(("RUN",)),
    (
        ("train examples/main.yaml train.profile.steps=10,12", "profile steps 10 to 12"),
        ("profile runs/main", "then show them"),
    ),
    (
        "RUN is a run's directory, or a profile.json. `phalanx train JOB train.profile.steps=10,12` writes to the "
        "run's folder traces: a trace per rank and one of all for ui.perfetto.dev, a picture, and profile.json.",
    ),
)


@PROFILE.runs
def profile(words: Words) -> None:
    from phalanx.train.profile import report

    path = Path(words.subject)
    if not path.exists():
        known = [str(each.parent) for each in sorted(path.parent.glob("*/traces"))]
        meant = nearest(str(path), known)
        raise JobError(f"there is no {path}" + (f"; did you mean {meant}?" if meant else ""))
    document = report.read(path)
    words.show(document, "\n".join(report.lines(document)), wrap=False)
