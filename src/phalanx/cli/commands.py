"""Parses the words of verbs with commands of their own and no job: `phalanx schedule show NAME --option value`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from phalanx.cli.job_words import Option
from phalanx.errors import JobError
from phalanx.nearest import nearest


@dataclass(frozen=True)
class Command:
    """The arguments of a command."""

    subject: str = ""
    """The description of the one argument besides options; empty if there is none."""
    options: Mapping[str, Option] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Alternative names of options."""


@dataclass(frozen=True)
class CommandWords:
    """A parsed command line."""

    command: str
    subject: str
    """The argument; empty for a command without one."""
    options: dict[str, Any]
    """The given options."""
    as_json: bool

    def given(self, names: Mapping[str, Option]) -> dict[str, Any]:
        """Returns the given options among `names`."""
        return {name: self.options[name] for name in names if name in self.options}


def parse(verb: str, commands: Mapping[str, Command], argv: Sequence[str], hint: str = "") -> CommandWords:
    """Parses the words after `phalanx VERB`; every command takes --json. `hint` replaces the nearest name in the
    message about an unknown command. Raises JobError with every problem of the words.
    """
    name, *left = argv
    if name not in commands:
        meant = nearest(name, commands)
        nearby = f"did you mean `phalanx {verb} {meant}`?" if meant else f"there are: {', '.join(commands)}"
        raise JobError(f"phalanx {verb} has no command {name!r}; {hint or nearby}")
    command = commands[name]
    subjects: list[str] = []
    options: dict[str, Any] = {}
    problems: list[str] = []
    as_json = False
    while left:
        word = left.pop(0)
        flag, equals, value = word.partition("=")
        option = flag[2:].replace("-", "_")
        option = command.aliases.get(option, option)
        if word == "--json":
            as_json = True
        elif not word.startswith("-") or word == "-":
            subjects.append(word)
        elif option not in command.options:
            meant = nearest(option, [*command.options, *command.aliases, "json"])
            problems.append(
                f"unknown option {flag}" + (f"; did you mean --{meant.replace('_', '-')}?" if meant else "")
            )
            if not equals and left and not left[0].startswith("-"):
                left.pop(0)  # its value: one mistake is one message
        else:
            if not equals and left and not left[0].startswith("--"):
                equals, value = "=", left.pop(0)
            try:
                options[option] = command.options[option].convert([value] if equals and value else [])[0]
            except ValueError as error:
                problems.append(f"{flag}: {error}")
    if len(subjects) != bool(command.subject):
        found = " ".join(subjects) or "nothing"
        problems.append(f"phalanx {verb} {name} takes {command.subject or 'no name'}, found {found}")
    if problems:
        raise JobError(problems)
    return CommandWords(name, subjects[0] if subjects else "", options, as_json)


def option_lines(options: Mapping[str, Option]) -> str:
    """Returns the lines of a help page about options, followed by --json."""
    lines = []
    for name, option in options.items():
        flag = f"--{name.replace('_', '-')} {'FILE' if option.kind is str else 'N'}"
        default = f" (default {option.default})" if option.default else ""
        lines.append(f"  {flag:<18}  {option.about}{default}")
    return "\n".join([*lines, f"  {'--json':<18}  print one JSON document on standard output and nothing else"])
