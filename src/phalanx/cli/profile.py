"""`phalanx profile RUN`: the profile of a run's steps once more, as text or JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from phalanx.cli.commands import WHOLE, Command, CommandVerb
from phalanx.echo import echo
from phalanx.errors import JobError
from phalanx.nearest import nearest
from phalanx.train.profile import report

VERB = CommandVerb(
    "profile",
    "Shows where the time of a run's profiled steps went, and what was predicted.",
    {WHOLE: Command(("RUN",))},
    (
        ("train examples/main.yaml train.profile.steps=10,12", "profile steps 10 to 12"),
        ("profile runs/main", "then show them"),
    ),
    (
        "RUN is a run's directory, or a profile.json. `phalanx train JOB train.profile.steps=10,12` writes to the "
        "run's folder traces: a trace per rank and one of all for ui.perfetto.dev, a picture, and profile.json.",
    ),
)


def run(argv: Sequence[str]) -> int:
    words = VERB.parse(argv)
    if words is None:
        return 0
    path = Path(words.subject)
    if not path.exists():
        known = [str(each.parent) for each in sorted(path.parent.glob("*/traces"))]
        meant = nearest(str(path), known)
        raise JobError(f"there is no {path}" + (f"; did you mean {meant}?" if meant else ""))
    document = report.read(path)
    echo(json.dumps(document, indent=1) if words.as_json else "\n".join(report.lines(document)))
    return 0
