"""`phalanx schema`: every field of a job, as JSON schema for editors or as a page."""

from __future__ import annotations

import json
from collections.abc import Sequence

from phalanx.check.schema import schema
from phalanx.cli.commands import Command, parse
from phalanx.cli.files import check_folders, write
from phalanx.cli.option import Option
from phalanx.echo import echo

PAGE = """\
phalanx schema: every field of a job, with type, default, range and meaning

usage: phalanx schema [--out FILE]                JSON schema, with which an editor completes and checks job files
       phalanx schema --markdown [--out FILE]     the same as a page (docs/job.md)

An editor with the YAML language server reads the schema that a file names in its first line, as those of
`phalanx init` do:
  # yaml-language-server: $schema=phalanx.schema.json

examples:
  phalanx schema --out phalanx.schema.json
  phalanx schema --markdown --out job.md\
"""
COMMANDS = {
    "print": Command(
        (),
        {"out": Option(str, "", "file to write")},
        switches={"markdown": "as a page", "json": "as JSON, the default"},
    )
}


def run(argv: Sequence[str]) -> int:
    if {"-h", "--help"} & set(argv) or argv == ["help"]:
        echo(PAGE)
        return 0
    words = parse("schema", COMMANDS, ["print", *argv])
    out = words.options.get("out", "")
    check_folders({"out": out}, "out")
    if "markdown" in words.switches:
        from phalanx.check.reference_page import page

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
