"""The help pages of all verbs: short by default; one section, field, option or command; or everything."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING

from phalanx.cli.columns import filled, in_columns, page_width
from phalanx.cli.page import VerbPage, flag_of
from phalanx.echo import echo
from phalanx.errors import JobError
from phalanx.nearest import did_you_mean

if TYPE_CHECKING:
    from phalanx.check.load import LoadedJob

FLAGS = ("-h", "--help")
EVERYTHING = "all"
"""The word after --help that asks for every option and field in full."""
MOST_LINES = 42
"""Lines from which on the short page cuts the text of each option to one line."""


def topics(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Returns the words right after --help, which name what to explain, and the rest of the command line without the
    flag."""
    start = next((place for place, word in enumerate(argv) if word in FLAGS), None)
    if start is None:
        return [], list(argv)
    end = start + 1
    while end < len(argv) and not argv[end].startswith("-") and "=" not in argv[end] and not _is_file(argv[end]):
        end += 1
    return list(argv[start + 1 : end]), [*argv[:start], *argv[end:]]


def _is_file(word: str) -> bool:
    return word.endswith((".yaml", ".yml")) or os.path.isfile(word)


def print_page(page: VerbPage, asked: Sequence[str], loaded: LoadedJob | None = None) -> None:
    """Prints the page of a verb: the short one, or what is `asked` about.

    Args:
        page: what there is to say.
        asked: names of options, and of sections and fields of a job if the verb takes one; or "all".
        loaded: the job whose values are shown, if the verb takes one.

    Raises JobError about a name of none of these.
    """
    width = page_width()
    options = {option.name: option for option in page.options}
    names = [word for word in asked if word != EVERYTHING]
    _refuse([word for word in names if _plain(word) not in options], [*options], takes_job=loaded is not None)
    if not asked:
        echo("\n".join(_short(page, width)))
        return
    lines: list[str] = []
    if EVERYTHING in asked:
        lines += [*_page(page, width), ""]
        names = []
    for name in dict.fromkeys(map(_plain, names)):
        if name in options:
            lines += [*in_columns([(options[name].flag, options[name].text)], width), ""]
    if loaded is not None:
        from phalanx.cli import help_fields  # here and below: it reads every field of a job

        fields = help_fields.outer_sections() if EVERYTHING in asked else [*dict.fromkeys(names)]
        for name in fields:
            if _plain(name) not in options:
                lines += [*help_fields.explained(name, loaded, width), ""]
    echo("\n".join(lines[:-1]))


def _refuse(words: Sequence[str], options: Sequence[str], *, takes_job: bool) -> None:
    """Raises JobError if there is a word, none of which is an option, unless it names a section or field of a job."""
    if takes_job and words:
        from phalanx.cli import help_fields

        problems = [*help_fields.problems_of(words, options)]
    else:
        problems = [f"--help {word}: no option of this name{did_you_mean(word, options)}" for word in words]
    if problems:
        raise JobError(problems)


def _plain(word: str) -> str:
    return word.replace("-", "_")


def _short(page: VerbPage, width: int) -> list[str]:
    """Returns the lines of the whole page, or of a page with one line per option if it is long."""
    hidden = [option.name for option in page.options if option.is_rare]
    lines = [*_page(page, width, hidden=hidden)]
    return lines if len(lines) <= MOST_LINES else [*_page(page, width, hidden=hidden, clips=True)]


def _page(page: VerbPage, width: int, *, hidden: Collection[str] = (), clips: bool = False) -> Iterator[str]:
    yield from _hanging(f"usage: phalanx {page.usage}", width)
    yield from ("", *filled(page.about, width))
    if page.commands:
        yield from ("", "commands:", *in_columns(page.commands, width, clips=clips))
    for note in page.notes:
        yield from ("", *filled(note, width))
    yield from ("", "examples:")
    yield from in_columns([(f"phalanx {words}", what) for words, what in page.examples], width)
    yield from ("", "options:")
    rows = [(option.flag, option.text) for option in page.options if option.name not in hidden]
    rows.append(
        ("-h, --help [NAME]", f"This page; {'a section, a field, ' if page.takes_job else ''}an option, or all.")
    )
    yield from in_columns(rows, width, clips=clips)
    if hidden or clips:
        names = f"{', '.join(flag_of(name) for name in hidden)}: " if hidden else "In full: "
        one = f"`phalanx {page.verb} COMMAND --help`, or " if page.commands else ""
        yield from ("", *filled(f"{names}{one}`phalanx {page.verb} --help {EVERYTHING}`.", width))
    if page.exits:
        codes = "; ".join(f"{code} {meaning}" for code, meaning in page.exits.items())
        yield from ("", *filled(f"Exit codes: {codes}.", width))
    if page.takes_job:
        from phalanx.cli.help_fields import outer_sections

        text = (
            f"Fields of a job are set as key=value or --key value. Sections: {', '.join(outer_sections())}. "
            "`--help layout` explains a section, `phalanx docs job` every field."
        )
        yield from ("", *filled(text, width))


def _hanging(text: str, width: int) -> list[str]:
    """Returns the lines of a text, the later ones indented."""
    first, *rest = filled(text, width)
    return [first, *filled(" ".join(rest), width, indent=len("usage: "))] if rest else [first]
