"""Describes and parses the words of verbs that take no job: `phalanx schedule show NAME --option value`."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any

from phalanx.cli.help_page import FLAGS, print_page, topics
from phalanx.cli.option import Option, repeated_option
from phalanx.cli.page import Example, PageOption, VerbPage, flag_of
from phalanx.errors import MOST_PROBLEMS, JobError
from phalanx.nearest import nearest

JSON = {"json": "print one JSON document on standard output and nothing else"}
"""The switch of every command."""
WHOLE = ""
"""The name of the only command of a verb without commands."""


@dataclass(frozen=True)
class Command:
    """The arguments of a command."""

    subjects: tuple[str, ...] = ()
    """The names of the arguments besides options; those in brackets may be left out."""
    options: Mapping[str, Option] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Alternative names of options."""
    switches: Mapping[str, str] = field(default_factory=lambda: JSON)
    """Options without a value, with their help."""
    more: bool = False
    """The last argument may be given several times."""
    about: str = ""
    """Its purpose, for help pages; empty where a verb has only this command."""

    def takes(self, count: int) -> bool:
        """Returns whether it can have so many arguments."""
        least = sum(not subject.startswith("[") for subject in self.subjects)
        return least <= count <= (inf if self.more else len(self.subjects))

    def has(self, option: str) -> bool:
        """Returns whether it has an option or a switch."""
        return option in self.options or option in self.switches

    @property
    def names(self) -> list[str]:
        """The names of the arguments as the help page shows them: ["RUN ..."]."""
        if not self.more:
            return [*self.subjects]
        *first, last = self.subjects
        return [*first, f"{last.rstrip(']')} ...{']' * last.endswith(']')}"]


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


@dataclass(frozen=True)
class CommandVerb:
    """A verb that takes no job."""

    name: str
    about: str
    commands: Mapping[str, Command]
    """Its commands by name, or one of the name WHOLE."""
    examples: tuple[Example, ...]
    notes: tuple[str, ...] = ()
    """Paragraphs of the help page about what the words mean."""
    exits: Mapping[int, str] = field(default_factory=dict)
    """Exit codes that mean something of its own."""
    default: str | None = None
    """The command that runs where no word is given; without one the verb then prints its help page."""
    hint: Callable[[str], str] = lambda word: ""
    """Returns what to say about a word that is no command, instead of the nearest command; or nothing."""

    def parse(self, argv: Sequence[str]) -> CommandWords | None:
        """Returns the parsed words, or None after printing the help page that they ask for. Raises JobError with every
        problem of the words."""
        if self.answers_help(argv):
            return None
        words, problems = self.read(argv)
        if problems:
            raise JobError(problems)
        return words

    def answers_help(self, argv: Sequence[str]) -> bool:
        """Prints the help page and returns true if the words ask for it. Raises JobError about a name after --help that
        there is not."""
        if not ({*FLAGS} & {*argv} or argv[:1] == ["help"] or (not argv and self.default is None)):
            return False
        asked, rest = topics(argv)
        page = self.page
        if named := [word for word in (*asked, *rest[:1]) if word and word in self.commands]:
            page = page.of_command(named[0])
        # An argument may stand after --help, too: a run's directory is no name of an option.
        print_page(page, [word for word in asked if word not in self.commands and not os.path.exists(word)])
        return True

    def read(self, argv: Sequence[str]) -> tuple[CommandWords, list[str]]:
        """Returns the words after the verb and every problem of them. Raises JobError if they name no command."""
        name, words = WHOLE, list(argv)
        if WHOLE not in self.commands:
            name, *words = argv or [self.default or ""]
        if name not in self.commands:
            meant = nearest(name, self.commands)
            there_are = f"there are: {', '.join(self.commands)}"
            nearby = f"did you mean `phalanx {self.name} {meant}`?" if meant else there_are
            raise JobError(f"phalanx {self.name} has no command {name!r}; {self.hint(name) or nearby}")
        read, problems = _read(self.commands[name], name, words)
        if not self.commands[name].takes(len(read.subjects)):
            full_name = " ".join(filter(None, (self.name, name)))
            wanted = " and ".join(self.commands[name].names) or "options only"
            found = " ".join(read.subjects) or "nothing"
            problems.append(f"phalanx {full_name} takes {wanted}, found {found}")
        return read, problems

    @property
    def page(self) -> VerbPage:
        """What its pages show."""
        several = {name: command for name, command in self.commands.items() if name}
        named = "COMMAND" if self.default is None else "[COMMAND]"
        return VerbPage(
            self.name,
            " ".join([self.name, *([named] if several else self.commands[WHOLE].names), "[options]"]),
            self.about,
            tuple(self._options(several)),
            self.examples,
            self.notes,
            self.exits,
            commands=tuple((" ".join([name, *command.names]), command.about) for name, command in several.items()),
        )

    def _options(self, several: Mapping[str, Command]) -> Iterator[PageOption]:
        """Yields every option once, --json last, with the commands that take it if others do not."""
        options: dict[str, PageOption] = {}
        for command in self.commands.values():
            for option in _page_options(command):
                options.setdefault(option.name, option)
        for option in sorted(options.values(), key=lambda option: option.name in JSON):
            taking = tuple(name for name, command in several.items() if command.has(option.name))
            yield replace(option, commands=taking if len(taking) < len(several) else ())


def _page_options(command: Command) -> Iterator[PageOption]:
    yield from (PageOption(name, option.about, option) for name, option in command.options.items())
    yield from (PageOption(name, about) for name, about in command.switches.items())


def _read(command: Command, name: str, argv: Sequence[str]) -> tuple[CommandWords, list[str]]:
    left = deque(argv)
    subjects: list[str] = []
    options: dict[str, Any] = {}
    problems: list[str] = []
    switches: set[str] = set()
    while left:
        word = left.popleft()
        flag, equals, value = word.partition("=")
        if equals and flag in command.aliases:  # as a job has it
            word = flag = f"--{flag}"
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
            taken = command.options[option]
            try:
                converted = taken.convert([value] if equals else [])
            except ValueError as error:
                problems.append(f"{flag}: {error}")
            else:
                if option in options and not taken.many:
                    problems += repeated_option(flag, options[option], converted[0])
                options[option] = (*options.get(option, ()), *converted) if taken.many else converted[0]
    return CommandWords(name, tuple(subjects), options, frozenset(switches)), problems
