"""`phalanx docs [PAGE]`: prints a page of the documentation, or lists them."""

from __future__ import annotations

import json
from collections.abc import Sequence

from phalanx.cli import shipped
from phalanx.cli.commands import WHOLE, Command, CommandVerb
from phalanx.echo import echo

VERB = CommandVerb(
    "docs",
    "Prints a page of the documentation as Markdown, or lists the pages. Messages and help name pages by these names.",
    {WHOLE: Command(("[PAGE]",))},
    (("docs job", "every field of a job"), ("docs tutorials/first-run", "a tutorial")),
    default=WHOLE,
)


def run(argv: Sequence[str]) -> int:
    words = VERB.parse(argv)
    if words is None:
        return 0
    known = shipped.files("docs", ".md")
    if not words.subjects:
        titles = {name: path.read_text().partition("\n")[0].lstrip("# ") for name, path in known.items()}
        shipped.listed(titles, words.as_json)
        return 0
    path = shipped.pick(words.subject, known, "docs")
    text = path.read_text()
    echo(json.dumps({"page": words.subject, "text": text}) if words.as_json else text.rstrip("\n"))
    return 0
