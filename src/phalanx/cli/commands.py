"""Parses the words of verbs with commands of their own and no job: `phalanx schedule show NAME --option value`."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from phalanx.cli.option import Option
from phalanx.errors import MOST_PROBLEMS, JobError
from phalanx.nearest import nearest

JSON = {"json": "print one JSON document on standard output and nothing else"}
"""The switch of every command."""


@dataclass(frozen=True)
class Command:
    """The arguments of a command."""

    subjects: tuple[str, ...] = ()
    """The descriptions of the arguments besides options."""
    options: Mapping[str, Option] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Alternative names of options."""
    switches: Mapping[str, str] = field(default_factory=lambda: JSON)
    """Options without a value, with their help."""
    more: bool = False
    """The last argument may be given several times."""

    def takes(self, count: int) -> bool:
        """Returns whether it can have so many arguments."""
        return count >= len(self.subjects) if self.more else count == len(self.subjects)


@dataclass(frozen=True)
class CommandWords:
    """A parsed command line."""

    command: str
    subjects: tuple[str, ...]
    """The arguments besides options."""
    options: dict[str, Any]
    """The given options."""
    switches: frozenset[str]

    @property
    def subject(self) -> str:
        """The only argument."""
        (subject,) = self.subjects
        return subject

    @property
    def as_json(self) -> bool:
        return "json" in self.switches

    def given(self, names: Mapping[str, Option]) -> dict[str, Any]:
        """Returns the given options among `names`."""
        return {name: self.options[name] for name in names if name in self.options}


def parse(verb: str, commands: Mapping[str, Command], argv: Sequence[str], hint: str = "") -> CommandWords:
    """Parses the words after `phalanx VERB`. `hint` replaces the nearest name in the
    message about an unknown command. Raises JobError with every problem of the words.
    """
    name, *words = argv
    if name not in commands:
        meant = nearest(name, commands)
        nearby = f"did you mean `phalanx {verb} {meant}`?" if meant else f"there are: {', '.join(commands)}"
        raise JobError(f"phalanx {verb} has no command {name!r}; {hint or nearby}")
    command = commands[name]
    left = deque(words)
    subjects: list[str] = []
    options: dict[str, Any] = {}
    problems: list[str] = []
    switches: set[str] = set()
    while left:
        word = left.popleft()
        flag, equals, value = word.partition("=")
        option = flag[2:].replace("-", "_")
        option = command.aliases.get(option, option)
        if word.startswith("--") and option in command.switches and not equals:
            switches.add(option)
        elif not word.startswith("-") or word == "-":
            subjects.append(word)
        elif option not in command.options:
            names = [*command.options, *command.aliases, *command.switches]
            meant = nearest(option, names) if len(problems) < MOST_PROBLEMS else None
            problems.append(f"unknown option {flag}" + (f"; did you mean {flag_of(meant)}?" if meant else ""))
            if not equals and left and not left[0].startswith("-"):
                left.popleft()  # its value: one mistake is one message
        else:
            if not equals and left and not left[0].startswith("--"):
                equals, value = "=", left.popleft()
            try:
                options[option] = command.options[option].convert([value] if equals and value else [])[0]
            except ValueError as error:
                problems.append(f"{flag}: {error}")
    if not command.takes(len(subjects)):
        found = " ".join(subjects) or "nothing"
        problems.append(
            f"phalanx {verb} {name} takes {' and '.join(command.subjects) or 'options only'}, found {found}"
        )
    if problems:
        raise JobError(problems)
    return CommandWords(name, tuple(subjects), options, frozenset(switches))


def flag_of(name: str) -> str:
    """Returns an option as it is written on the command line: "--nproc-per-node"."""
    return f"--{name.replace('_', '-')}"


def wants_help(argv: Sequence[str]) -> bool:
    """Whether the words after the verb ask for its help page."""
    return not argv or bool({"-h", "--help", "help"} & set(argv))


def option_lines(options: Mapping[str, Option], switches: Mapping[str, str] = MappingProxyType({})) -> str:
    """Returns the lines of a help page about options and switches, followed by --json."""
    lines = []
    for name, option in options.items():
        flag = f"{flag_of(name)} {'FILE' if option.kind is str else 'N'}"
        default = f" (default {option.default})" if option.default else ""
        lines.append(f"  {flag:<18}  {option.about}{default}")
    lines += [f"  {flag_of(name):<18}  {about}" for name, about in {**switches, **JSON}.items()]
    return "\n".join(lines)
