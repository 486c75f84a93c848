"""`phalanx profile RUN`: the profile of a run's steps once more, as text or JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from phalanx.cli.commands import JSON, wants_help
from phalanx.echo import echo
from phalanx.errors import JobError
from phalanx.nearest import nearest
from phalanx.train.profile import report

PAGE = f"""\
phalanx profile: where the time of a run's profiled steps went, and what was predicted

usage: phalanx profile RUN [--json]

RUN is a run's directory, or a profile.json. `phalanx train JOB train.profile.steps=10,12` profiles steps 10 to 12. It
writes to the run's folder traces: a trace per rank and one of all for ui.perfetto.dev, a picture, and profile.json.

options:
  --json  {JSON["json"]}

examples:
  phalanx train examples/main.yaml train.profile.steps=10,12 train.profile.memory=true
  phalanx profile runs/main\
"""


def run(argv: Sequence[str]) -> int:
    if wants_help(argv):
        echo(PAGE)
        return 0
    words = [word for word in argv if word != "--json"]
    problems = [
        f"unknown option {word}; `phalanx profile` takes a run and --json" for word in words if word[0:1] == "-"
    ]
    if len(words) != 1 and not problems:
        problems = [f"phalanx profile takes one run, found {' '.join(words) or 'nothing'}"]
    if problems:
        raise JobError(problems)
    path = Path(words[0])
    if not path.exists():
        known = [str(each.parent) for each in sorted(path.parent.glob("*/traces"))]
        meant = nearest(str(path), known)
        raise JobError(f"there is no {path}" + (f"; did you mean {meant}?" if meant else ""))
    document = report.read(path)
    echo(json.dumps(document, indent=1) if len(words) < len(argv) else "\n".join(report.lines(document)))
    return 0
