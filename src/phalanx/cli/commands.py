"""The words of a verb that has commands of its own and takes no job: `phalanx schedule show NAME --option value`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from phalanx.cli.job_words import Option
from phalanx.errors import JobError
from phalanx.nearest import nearest


@dataclass(frozen=True)
class Command:
    """What a command takes."""

    subject: str = ""
    """The one word that it takes besides options, in words for messages; empty where it takes none."""
    options: Mapping[str, Option] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Other names of options."""


@dataclass(frozen=True)
class CommandWords:
    """The command line, understood."""

    command: str
    subject: str
    """Empty for a command that takes none."""
    options: dict[str, Any]
    """Those that were given."""
    as_json: bool

    def given(self, names: Mapping[str, Option]) -> dict[str, Any]:
        """Returns the given options among `names`."""
        return {name: self.options[name] for name in names if name in self.options}


def parse(verb: str, commands: Mapping[str, Command], argv: Sequence[str], hint: str = "") -> CommandWords:
    """Returns what the words after `phalanx VERB` say; every command takes --json.

    `hint` is said of an unknown command instead of the nearest one. Raises JobError with every problem of the words.
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
    """Returns the lines of a help page about options, with --json after them."""
    lines = []
    for name, option in options.items():
        flag = f"--{name.replace('_', '-')} {'FILE' if option.kind is str else 'N'}"
        default = f" (default {option.default})" if option.default else ""
        lines.append(f"  {flag:<18}  {option.about}{default}")
    return "\n".join([*lines, f"  {'--json':<18}  print one JSON document on standard output and nothing else"])
