"""`phalanx completion SHELL`: a script with every verb, option, field and name, so that a Tab starts no program."""

from __future__ import annotations

import dataclasses
import importlib
import typing
from collections.abc import Iterator, Sequence
from typing import Any

from phalanx.check.known_names import known_names
from phalanx.cli import completion_scripts
from phalanx.cli.commands import Command, flag_of, wants_help
from phalanx.cli.completion_scripts import Words
from phalanx.cli.job_words import COMMON_SWITCHES, JobVerb
from phalanx.config import reference
from phalanx.config.fields import SECTION_SHORTHAND, short_names
from phalanx.config.layout_line import AUTO, SECTION
from phalanx.echo import echo
from phalanx.errors import JobError
from phalanx.nearest import did_you_mean

SHELLS = {"bash": completion_scripts.bash, "zsh": completion_scripts.zsh, "fish": completion_scripts.fish}
PAGE = """\
phalanx completion: completion of verbs, options, fields (layout.tp=) and their names for a shell

usage: phalanx completion bash|zsh|fish

It prints a script. Write it once, and again after an update or a new package:
  bash  phalanx completion bash > ~/.phalanx.bash       and in ~/.bashrc: source ~/.phalanx.bash
  zsh   phalanx completion zsh > ~/.phalanx.zsh         and in ~/.zshrc, after compinit: source ~/.phalanx.zsh
  fish  phalanx completion fish > ~/.config/fish/completions/phalanx.fish\
"""


def run(argv: Sequence[str]) -> int:
    if wants_help(argv):
        echo(PAGE)
        return 0
    shell, *others = argv
    if shell not in SHELLS or others:
        raise JobError(
            f"phalanx completion takes bash, zsh or fish, found {' '.join(argv)!r}{did_you_mean(shell, SHELLS)}"
        )
    echo(SHELLS[shell](words()))
    return 0


def words() -> Words:
    """Returns everything that is completed."""
    from phalanx.cli.main import VERBS  # here, because it imports this module by name

    return Words(
        verbs=dict(VERBS),
        arguments={verb: [*_arguments(verb)] for verb in VERBS},
        takes_job=[verb for verb in VERBS if verb == "data" or _job_verb(verb)],
        keys=[*_keys()],
        values=_values(),
    )


def _module(verb: str) -> Any:
    return importlib.import_module(f"phalanx.cli.{'import_' if verb == 'import' else verb.replace('-', '_')}")


def _job_verb(verb: str) -> JobVerb | None:
    return next((each for each in vars(_module(verb)).values() if isinstance(each, JobVerb)), None)


def _arguments(verb: str) -> Iterator[str]:
    """Yields the commands of a verb and its options."""
    module = _module(verb)
    commands: dict[str, Command] = getattr(module, "COMMANDS", {})
    flags: list[str] = []
    for name, command in commands.items():
        if name.isalpha() and len(commands) > 1:
            yield name
        flags += [*command.options, *command.switches]
    if job_verb := _job_verb(verb):
        yield from job_verb.name.split()[1:]
        flags += [*job_verb.options, *job_verb.switches, *COMMON_SWITCHES]
    options = getattr(module, verb.title().replace("-", ""), None)
    if dataclasses.is_dataclass(options):
        flags += [field.name for field in dataclasses.fields(options) if not _is_positional(options, field.name)]
    yield from SHELLS if verb == "completion" else ()
    yield from map(flag_of, dict.fromkeys([*flags, "help"]))


def _is_positional(options: Any, name: str) -> bool:
    """Returns whether tyro takes a field of a verb's options without a flag."""
    hint = typing.get_type_hints(options, include_extras=True)[name]
    return any("ositional" in repr(mark) for mark in getattr(hint, "__metadata__", ()))


def _keys() -> Iterator[str]:
    """Yields the names by which the command line sets fields: sections as one word, short names, and dotted paths."""
    yield from (SECTION, *SECTION_SHORTHAND)
    fields = [field for field in reference.fields().values() if not field.path.startswith(reference.MEASURED)]
    yield from dict.fromkeys(name for field in fields for name in (field.short, field.path))


def _values() -> dict[str, list[str]]:
    """Returns the values of every key that has a list of them."""
    known, found = known_names(), {SECTION: [AUTO]}
    for field in reference.fields().values():
        choices = known.get(field.path) or [*map(str, field.choices)]
        choices = choices or (["true", "false"] if field.kind is bool else [])
        if choices and not field.path.startswith(reference.MEASURED):
            found.update(dict.fromkeys((field.path, field.short), choices))
            if field.name not in short_names():  # the value decides: schedule=zb_v, schedule=cosine
                found[field.name] = [*found.get(field.name, []), *choices]
    return {**found, **{section: found[path] for section, path in SECTION_SHORTHAND.items() if path in found}}
