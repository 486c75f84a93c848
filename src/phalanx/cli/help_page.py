"""The help pages of all verbs: short by default; one section, field, option or command; or everything."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Collection, Iterator, Sequence
from os.path import isfile
from typing import TYPE_CHECKING

from phalanx.cli.option import VerbPage, flag_of, value_name
from phalanx.echo import echo
from phalanx.errors import JobError
from phalanx.nearest import did_you_mean

if TYPE_CHECKING:
    from phalanx.check.load import LoadedJob
    from phalanx.config.reference import FieldReference

FLAGS = ("-h", "--help")
EVERYTHING = "all"
"""The word after --help that asks for every option and field in full."""
MOST_LINES = 42
"""Lines from which on the short page cuts the text of each option to one line."""
MOST_COLUMNS = 120
"""Widest page: longer lines are hard to read."""
GAP, LONGEST_FIRST, LEAST_SECOND = 2, 30, 20
"""Columns between the two columns of a page, the longest text in the first that shares its line with the second, and
the fewest columns of the second."""


def topics(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Returns the words right after --help, which name what to explain, and the rest of the command line without the
    flag."""
    start = next((place for place, word in enumerate(argv) if word in FLAGS), None)
    if start is None:
        return [], list(argv)
    end = start + 1
    while end < len(argv) and not (
        argv[end].startswith("-") or "=" in argv[end] or argv[end].endswith((".yaml", ".yml")) or isfile(argv[end])
    ):
        end += 1
    return list(argv[start + 1 : end]), [*argv[:start], *argv[end:]]


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
        fields = outer_sections() if EVERYTHING in asked else [*dict.fromkeys(names)]
        for name in fields:
            if _plain(name) not in options:
                lines += [*explained(name, loaded, width), ""]
    echo("\n".join(lines[:-1]))


def _refuse(words: Sequence[str], options: Sequence[str], *, takes_job: bool) -> None:
    """Raises JobError if there is a word, none of which is an option, unless it names a section or field of a job."""
    if takes_job and words:
        problems = [*problems_of(words, options)]
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
        text = (
            f"Fields of a job are set as key=value or --key value. Sections: {', '.join(outer_sections())}. "
            "`--help layout` explains a section, `phalanx docs job` every field."
        )
        yield from ("", *filled(text, width))


def _hanging(text: str, width: int) -> list[str]:
    """Returns the lines of a text, the later ones indented."""
    first, *rest = filled(text, width)
    return [first, *filled(" ".join(rest), width, indent=len("usage: "))] if rest else [first]


def section_names() -> list[str]:
    """Returns the names of all sections, outer ones before those inside of them."""
    from phalanx.config.added import ADDED
    from phalanx.config.fields import sections  # here and below: they read every field of a job

    known = sections()
    around = [added for added in ADDED if any(each.startswith(f"{added}.") for each in known)]
    return [*dict.fromkeys([*(each.partition(".")[0] for each in known), *around, *known])]


def outer_sections() -> list[str]:
    """Returns the names of the sections that lie in no other."""
    return [name for name in section_names() if "." not in name]


def problems_of(words: Sequence[str], options: Sequence[str]) -> Iterator[str]:
    """Yields a message about every word after --help that is no section and no field. `options` are other names that
    could be meant."""
    from phalanx.config import reference
    from phalanx.config.added import load_for
    from phalanx.config.fields import resolve

    for word in words:
        load_for(word)
    known = [*section_names(), *options, *(field.short for field in reference.fields().values())]
    for word in words:
        if word not in section_names() and resolve(word) is None:
            yield (
                f"--help {word}: no section or field of this name{did_you_mean(word, known)}; sections: "
                f"{', '.join(outer_sections())}"
            )


def explained(name: str, loaded: LoadedJob, width: int) -> Iterator[str]:
    """Yields the lines about a section with those inside of it, or about one field."""
    from phalanx.config import reference
    from phalanx.config.fields import resolve

    if name not in section_names():
        yield from _field(reference.fields()[resolve(name) or name], loaded, width)
        return
    for section, text in reference.section_texts().items():
        if f"{section}.".startswith(f"{name}.") and not section.startswith(reference.MEASURED):
            if section != name:
                yield ""
            yield from (section, *filled(text, width), "")
            for field in reference.fields().values():
                if field.section == section:
                    yield from _field(field, loaded, width)


def _field(field: FieldReference, loaded: LoadedJob, width: int) -> Iterator[str]:
    from phalanx.config.fields import get
    from phalanx.config.reference import shown

    flag = flag_of(field.path)
    if field.kind is bool:
        section, _, last = field.path.rpartition(".")
        flag = f"{flag}, {flag_of(f'{section}.no_{last}')}"
    else:
        flag = f"{flag} {value_name(field.kind)}"
    value, origin = get(loaded.job, field.path), loaded.origins.get(field.path, "default")
    now = f"default {shown(field.default)}"
    if origin != "default":
        now = f"{shown(value)} ({origin}); {now}"
    limits = "; ".join(words for each in field.ranges if (words := each.words))
    facts = "; ".join(part for part in (limits, now) if part)
    yield from filled(flag, width, indent=2)
    yield from filled(f"{field.about} [{facts}]", width, indent=6)


def page_width() -> int:
    """Returns the width of a page in columns: the terminal's ($COLUMNS, or 80 where there is none)."""
    return min(shutil.get_terminal_size().columns, MOST_COLUMNS)


def in_columns(rows: Sequence[tuple[str, str]], width: int, *, clips: bool = False) -> Iterator[str]:
    """Yields the lines of rows in two columns. A long first cell has its own line, or several that a shell reads as
    one. The second cell is wrapped, or with `clips` cut to one line."""
    longest = min(LONGEST_FIRST, width * 2 // 5)
    left = max((len(first) for first, _ in rows if len(first) <= longest), default=0)
    indent = " " * (left + 2 * GAP)
    room = max(width - len(indent), LEAST_SECOND)
    for first, second in rows:
        lines = [clipped(second, room)] if clips else filled(second, room)
        if len(first) > left:
            yield from command_lines(first, width, GAP)
        else:
            yield f"{' ' * GAP}{first:<{left}}{' ' * GAP}{lines.pop(0) if lines else ''}".rstrip()
        yield from (f"{indent}{line}" for line in lines)


def command_lines(words: str, width: int, indent: int = 0) -> list[str]:
    """Returns a command in lines that a shell reads as one."""
    first, later = " " * indent, " " * (indent + 2 * GAP)
    lines = textwrap.wrap(
        words, width - len(" \\"), initial_indent=first, subsequent_indent=later, break_on_hyphens=False
    )
    return [f"{line} \\" for line in lines[:-1]] + lines[-1:]


def filled(text: str, width: int, indent: int = 0) -> list[str]:
    """Returns the lines of a paragraph."""
    start = " " * indent
    return textwrap.wrap(text, width, initial_indent=start, subsequent_indent=start, break_on_hyphens=False)


def clipped(text: str, room: int) -> str:
    """Returns a text that fits into `room` columns: if it is longer its first sentence or clause, unless that says
    little, or its first words."""
    for mark in (". ", "; ", ": "):
        clause = text.partition(mark)[0]
        if len(text) > room and len(clause) >= room // 2:
            text = clause
    return text if len(text) <= room else f"{text[: room - 2].rsplit(' ', 1)[0]} …"
