"""docs/reference/job.md: every field of a job, as Markdown."""

from __future__ import annotations

from collections.abc import Iterator

from phalanx.check.known_names import known_names
from phalanx.config import reference
from phalanx.config.reference import FieldReference

COMMAND = "phalanx schema --markdown --out docs/reference/job.md"
MOST_NAMES = 20
"""Longest catalogue that is listed beside its field; models and machines have pages of their own."""
HEAD = f"""\
# The job file: every field

<!-- `{COMMAND}` writes this page from the dataclasses in src/phalanx/config; edit those. -->

A job is one YAML file of sections. Every field has a default, and the command line may set it by its dotted path, or
by its last name where only one field has that: `phalanx train job.yaml layout.tp=2`, `--tp 2`. `phalanx init` writes
a file to begin with, `phalanx train --help SECTION` shows a section with the values of a job, and `phalanx schema`
prints a JSON schema, with which an editor completes and checks the file. Later values win: default, preset, job files
in order, command line.

The first column has the name that the command line takes. In a file each field stands in its section.
"""


def page() -> str:
    """Returns the page."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    names = known_names()
    yield HEAD
    for section in reference.section_texts():
        yield from (f"## {section}", "", reference.section_texts()[section], "")
        yield from ("| field | type | default | meaning | example |", "|---|---|---|---|---|")
        for field in reference.fields().values():
            if field.section == section:
                yield _row(field, names.get(field.path, []))
        yield ""


def _row(field: FieldReference, names: list[str]) -> str:
    about = field.about
    if names and len(names) <= MOST_NAMES and any(name not in about for name in names):
        about = f"{about} Known: {', '.join(names)}."
    default = f"`{reference.shown(field.default)}`"
    cells = (f"`{field.short}`", field.type_words, default, about, f"`{field.name}: {field.example}`")
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
