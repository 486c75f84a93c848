"""`phalanx schema`: every field of a job, as JSON schema for editors or as a page."""

from __future__ import annotations

import json
from collections.abc import Sequence

from phalanx.check.schema import schema
from phalanx.cli.commands import WHOLE, Command, CommandVerb
from phalanx.cli.files import check_folders, write
from phalanx.cli.option import Option
from phalanx.echo import echo

VERB = CommandVerb(
    "schema",
    "Prints every field of a job, with type, default, range and meaning: as JSON schema, with which an editor "
    "completes and checks job files, or as a page.",
    {
        WHOLE: Command(
            (),
            {"out": Option(str, "", "file to write instead of standard output", value="FILE")},
            switches={"markdown": "as a page (docs/reference/job.md)", "json": "as JSON schema, the default"},
        )
    },
    (
        ("schema --out phalanx.schema.json", "for an editor"),
        ("schema --markdown --out job.md", "for a reader"),
    ),
    (
        "An editor with the YAML language server reads the schema that a job file names in its first line, as those of "
        "`phalanx init` do: # yaml-language-server: $schema=phalanx.schema.json",
    ),
    default=WHOLE,
)


def run(argv: Sequence[str]) -> int:
    words = VERB.parse(argv)
    if words is None:
        return 0
    out = words.options.get("out", "")
    check_folders({"out": out}, "out")
    if "markdown" in words.switches:
        from phalanx.check.schema import page

        text = page()
    else:
        text = schema_text()
    if out:
        write(out, text)
        echo(f"written: {out}")
    else:
        echo(text.rstrip())
    return 0


def schema_text() -> str:
    """Returns the schema as a JSON document."""
    return json.dumps(schema(), indent=1, ensure_ascii=False) + "\n"
