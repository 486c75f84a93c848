"""Writes docs/reference/cli.md: every verb with its commands, options, exit codes and examples, from the descriptions
that the verbs parse with.

    python docs/cli_reference.py
"""

from __future__ import annotations

import typing
from collections.abc import Iterator, Sequence
from pathlib import Path

from markdown_table import table

from phalanx.cli.main import EXIT_CODES, VERBS, description_of
from phalanx.cli.verb import JOB_SWITCHES, Option, Verb, flag_of
from phalanx.config.reference import type_words

PAGE = Path(__file__).with_name("reference") / "cli.md"
COMMAND = "make reference"
HEAD = f"""\
# The command line: every verb

<!-- `{COMMAND}` writes this page from the descriptions in src/phalanx/cli; edit those. -->

    phalanx VERB [JOB.yaml ...] [key=value ...] [options]

`phalanx VERB --help` is a short page, `--help all` has every option in full, and `--help NAME` explains one option,
or a section or field of a job. Options read the same with `-` and `_`, with a space or `=` before the value. Verbs that
take a job share the [fields of a job](job.md), which job files, `key=value` and `--key value` set; the command line
wins. Results go to standard output, progress and logs to standard error.
"""
JOB_OPTIONS = (
    "Fields of a job, `--json` and `--print-config`, as [every verb that takes a job](#verbs-that-take-a-job)."
)


def page() -> str:
    """Returns the page."""
    return "\n".join(_lines()).rstrip() + "\n"


def _lines() -> Iterator[str]:
    yield HEAD
    yield from ("## Verbs", "", *table(("verb", "what it does"), [_listed(verb) for verb in VERBS]), "")
    yield from (
        "## Exit codes",
        "",
        *table(("code", "meaning"), [(f"`{code}`", what) for code, what in EXIT_CODES.items()]),
    )
    yield from ("", "## Verbs that take a job", "", *_of_jobs())
    for verb in VERBS:
        yield from _verb(verb, description_of(verb))


def _of_jobs() -> Iterator[str]:
    named = ", ".join(f"[`{verb}`](#phalanx-{verb})" for verb in VERBS if description_of(verb).takes_job)
    yield f"{named}. Beside their own options they have:"
    yield ""
    options = [Option(about, False, name=name) for name, about in JOB_SWITCHES.items()]
    yield from _options(
        [*options, Option("a short page; with a word about a section, field or option", False, name="help")]
    )
    yield ""


def _listed(verb: str) -> tuple[str, str]:
    return f"[`{verb}`](#phalanx-{verb})", VERBS[verb]


def _verb(verb: str, page: Verb) -> Iterator[str]:
    yield from (f"## phalanx {verb}", "", page.about, "", f"    phalanx {page.usage}", "")
    if page.listed:
        yield from (*table(("command", "what it does"), [(f"`{words}`", what) for words, what in page.listed]), "")
    for note in page.notes:
        yield from (note, "")
    options = [option for option in page.options if not (page.takes_job and option.name in JOB_SWITCHES)]
    if options:
        yield from (*_options(options), "")
    if page.takes_job:
        yield from (JOB_OPTIONS, "")
    if page.exits:
        yield from (f"Exit codes: {'; '.join(f'`{code}` {what}' for code, what in page.exits.items())}.", "")
    yield from ("Examples:", "")
    yield from (f"    phalanx {words:<{_widest(page)}}  # {what}" for words, what in page.examples)
    yield ""


def _widest(page: Verb) -> int:
    return max(len(words) for words, _ in page.examples)


def _options(options: Sequence[Option]) -> Iterator[str]:
    rows = [(f"`{_flag(option)}`", _type(option), _default(option), option.meaning) for option in options]
    return table(("option", "type", "default", "meaning"), rows)


def _flag(option: Option) -> str:
    """Returns an option with its value, unless its type lists the choices."""
    choices = typing.get_origin(option.kind) is typing.Literal
    return flag_of(option.name) if choices else option.flag


def _type(option: Option) -> str:
    if option.kind is bool:
        return "switch"
    least = "" if option.at_least is None else f", ≥ {option.at_least}"
    kind = str if option.kind is Path else option.kind
    return f"{type_words(kind)}{least}{', several' if option.many else ''}"


def _default(option: Option) -> str:
    return f"`{option.shown_default}`" if option.shown_default else ""


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
