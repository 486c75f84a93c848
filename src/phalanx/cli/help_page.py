"""The help pages of verbs that take a job: short by default, one section or one field, or everything."""

from __future__ import annotations

import os
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from phalanx.check.load import LoadedJob
from phalanx.cli.columns import filled, in_columns, page_width
from phalanx.cli.examples import EXAMPLES
from phalanx.cli.option import Option
from phalanx.config import reference
from phalanx.config.fields import get, resolve, sections
from phalanx.config.reference import MEASURED, FieldReference
from phalanx.echo import echo
from phalanx.errors import JobError
from phalanx.nearest import did_you_mean

FLAGS = ("-h", "--help")
EVERYTHING = "all"
"""The word after --help that asks for every field."""


def topics(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Returns the words right after --help, which name sections or fields to explain, and the rest of the command line
    without the flag. Raises JobError about a word there that names none."""
    start = next(place for place, word in enumerate(argv) if word in FLAGS)
    end = start + 1
    while end < len(argv) and not argv[end].startswith("-") and "=" not in argv[end] and not _is_file(argv[end]):
        end += 1
    named = list(argv[start + 1 : end])
    if wrong := [word for word in named if word != EVERYTHING and word not in _sections() and resolve(word) is None]:
        known = [*_sections(), *(field.short for field in reference.fields().values())]
        raise JobError(
            [
                f"--help {word}: no section or field of this name{did_you_mean(word, known)}; sections: "
                f"{', '.join(name for name in _sections() if '.' not in name)}"
                for word in wrong
            ]
        )
    return named, [*argv[:start], *argv[end:]]


def _is_file(word: str) -> bool:
    return word.endswith((".yaml", ".yml")) or os.path.isfile(word)


def _sections() -> list[str]:
    return [*dict.fromkeys([*(each.partition(".")[0] for each in sections()), *sections()])]


def print_page(
    verb: str,
    about: str,
    switches: Mapping[str, str],
    options: Mapping[str, Option],
    asked: Sequence[str],
    loaded: LoadedJob,
) -> None:
    """Prints the page of a verb: the `asked` sections or fields with the values that the job has, or the short page."""
    width = page_width()
    if not asked:
        echo("\n".join(_short(verb, about, switches, options, width)))
        return
    lines: list[str] = []
    if EVERYTHING in asked:
        lines += [*_short(verb, about, switches, options, width), ""]
        asked = [name for name in _sections() if "." not in name]
    for name in dict.fromkeys(asked):
        lines += [*_explained(name, loaded, width), ""]
    echo("\n".join(lines[:-1]))


def _short(
    verb: str, about: str, switches: Mapping[str, str], options: Mapping[str, Option], width: int
) -> Iterator[str]:
    yield f"usage: phalanx {verb} [JOB.yaml ...] [key=value ...] [options]"
    yield ""
    yield from filled(about, width)
    if verb in EXAMPLES:
        yield from ("", "examples:")
        yield from in_columns([(f"phalanx {words}", what) for words, what in EXAMPLES[verb]], width)
    yield from ("", "options:")
    rows = [(f"{_flag(name)} {_value_name(option)}".rstrip(), _option_text(option)) for name, option in options.items()]
    rows += [(_flag(name), what) for name, what in switches.items()]
    rows.append(("-h, --help [NAME]", f"This page; a section, a field, or {EVERYTHING}: --help layout, --help lr."))
    yield from in_columns(rows, width)
    yield from ("", "sections of a job, whose fields are set as key=value or --key value:")
    yield from in_columns([(name, reference.section_texts()[name]) for name in _sections() if "." not in name], width)
    yield from ("", *filled("Every field: docs/job.md, `phalanx schema`. Models: `phalanx models`.", width))


def _explained(name: str, loaded: LoadedJob, width: int) -> Iterator[str]:
    """Yields the lines about a section with those inside of it, or about one field."""
    if name not in _sections():
        yield from _field(reference.fields()[resolve(name) or name], loaded, width)
        return
    for section, text in reference.section_texts().items():
        if f"{section}.".startswith(f"{name}.") and not section.startswith(MEASURED):
            if section != name:
                yield ""
            yield from (section, *filled(text, width), "")
            for field in reference.fields().values():
                if field.section == section:
                    yield from _field(field, loaded, width)


def _field(field: FieldReference, loaded: LoadedJob, width: int) -> Iterator[str]:
    flag = _flag(field.path)
    if field.kind is bool:
        section, _, last = field.path.rpartition(".")
        flag = f"{flag}, {_flag(f'{section}.no_{last}')}"
    else:
        flag = f"{flag} {_metavar(field.kind)}"
    value, origin = get(loaded.job, field.path), loaded.origins.get(field.path, "default")
    now = f"default {reference.shown(field.default)}"
    if origin != "default":
        now = f"{reference.shown(value)} ({origin}); {now}"
    limits = "; ".join(words for each in field.ranges if (words := each.words))
    facts = "; ".join(part for part in (limits, now) if part)
    yield f"  {flag}"
    yield from filled(f"{field.about} [{facts}]", width, indent=6)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _metavar(kind: Any) -> str:
    """Returns the name of a value: the choices, or N, X, TEXT."""
    if typing.get_origin(kind) is typing.Literal:
        return "|".join(map(str, typing.get_args(kind)))
    if typing.get_origin(kind) is tuple:
        inner = _metavar(typing.get_args(kind)[0])
        return f"{inner},{inner}" if ... not in typing.get_args(kind) else f"{inner},..."
    if typing.get_args(kind):
        return "|".join(map(_metavar, typing.get_args(kind)))
    return {int: "N", float: "X", bool: "true|false", str: "TEXT"}[kind]


def _value_name(option: Option) -> str:
    is_file = option.kind is str and " file" in option.about.lower()
    return f"{'FILE' if is_file else _metavar(option.kind)}{' ...' if option.many else ''}"


def _option_text(option: Option) -> str:
    text = f"{option.about[:1].upper()}{option.about[1:].rstrip('.')}."
    shown = option.default not in (None, "", (), 0) and "default" not in option.about.lower()
    return f"{text} Default: {option.default}." if shown else text
