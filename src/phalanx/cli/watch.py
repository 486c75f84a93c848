"""`phalanx watch RUN`: the live view of a run from any terminal, read from its directory's files."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path

from phalanx.cli.commands import WHOLE, Command, CommandVerb
from phalanx.echo import echo

VERB = CommandVerb(
    "watch",
    "Shows the live view of a run, from any terminal.",
    {WHOLE: Command(("RUN",), switches={"once": "print the view once", "json": "print it once, as one JSON document"})},
    (
        ("watch runs/main", "until the run ends"),
        ("watch runs/main --once", "once, for scripts"),
    ),
    (
        "RUN is a run's directory; the run may be on other machines that write there. Only files are read, and nothing "
        "is asked of the run. The view ends with the run, or with Ctrl-C, which does not touch the run.",
    ),
)
EVERY_S = 0.5


def run(argv: Sequence[str]) -> int:
    words = VERB.parse(argv)
    if words is None:
        return 0
    from phalanx.report.live import RunFollower, Screen

    follower = RunFollower(Path(words.subject))
    if words.as_json:
        echo(json.dumps(follower.view().document(), indent=1))
        return 0
    screen = Screen()
    if "once" in words.switches or not screen.is_possible:
        screen.print(follower.view())
        return 0
    with screen.live(follower.view) as view:
        while view().state == "running":
            time.sleep(EVERY_S)
    return 0
