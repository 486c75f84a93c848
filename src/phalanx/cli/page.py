"""The one description of a verb, from which help pages, docs/reference/cli.md and shell completion are made."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from phalanx.cli.option import Option
from phalanx.config.values import row_of

Example = tuple[str, str]
"""Words after `phalanx`, and what they do."""


def flag_of(name: str) -> str:
    """Returns an option as it is written on the command line: "--nproc-per-node"."""
    return f"--{name.replace('_', '-')}"


@dataclass(frozen=True)
class PageOption:
    """An option of a verb, or a switch: an option without a value."""

    name: str
    about: str
    option: Option | None = None
    """Its value; none for a switch."""
    commands: tuple[str, ...] = ()
    """The commands that take it, if others do not."""

    @property
    def flag(self) -> str:
        """The option with its value: "--steps N"."""
        if self.option is None:
            return flag_of(self.name)
        value = self.option.value or value_name(self.option.kind)
        return f"{flag_of(self.name)} {value}{' ...' if self.option.many else ''}"

    @property
    def meaning(self) -> str:
        """The meaning as a sentence."""
        text = f"{self.about[:1].upper()}{self.about[1:].rstrip('.')}."
        return f"({', '.join(self.commands)}) {text}" if self.commands else text

    @property
    def default(self) -> str:
        """The default; nothing if there is none, or if the meaning states it."""
        if self.option is None or self.option.default in (None, "", (), 0) or "default" in self.about.lower():
            return ""
        return f"{self.option.default}"

    @property
    def text(self) -> str:
        """The meaning with the default."""
        return f"{self.meaning} Default: {self.default}." if self.default else self.meaning

    @property
    def is_rare(self) -> bool:
        """Whether the short page only names it."""
        return self.option is not None and self.option.rare


@dataclass(frozen=True)
class VerbPage:
    """A verb as its pages show it."""

    verb: str
    usage: str
    """The form of its command line: the words after `phalanx`."""
    about: str
    options: tuple[PageOption, ...]
    examples: tuple[Example, ...]
    notes: tuple[str, ...] = ()
    """Paragraphs about what its words mean."""
    exits: Mapping[int, str] = field(default_factory=dict)
    """Exit codes that mean something of its own."""
    takes_job: bool = False
    commands: tuple[Example, ...] = ()
    """Every command as the words after the verb, and what it does."""

    def of_command(self, command: str) -> VerbPage:
        """Returns the page of one command of the verb."""
        start = f"{self.verb} {command}"
        mine = tuple(each for each in self.examples if f"{each[0]} ".startswith(f"{start} "))
        ((words, about),) = [each for each in self.commands if each[0].split()[0] == command]
        options = (each for each in self.options if not each.commands or command in each.commands)
        return replace(
            self,
            usage=f"{self.verb} {words} [options]",
            commands=(),
            about=f"{about[:1].upper()}{about[1:]}.",
            options=tuple(replace(each, commands=()) for each in options),
            examples=mine or self.examples,
        )


def value_name(kind: Any) -> str:
    """Returns the name of a value: its choices, or N, X, TEXT."""
    if typing.get_origin(kind) is typing.Literal:
        return "|".join(str(choice) for choice in typing.get_args(kind) if choice != "")
    if row := row_of(kind):
        return f"[{{{', '.join(f'{field.name}: …' for field in dataclasses.fields(row))}}}]"
    if typing.get_origin(kind) is tuple:
        inner = value_name(typing.get_args(kind)[0])
        return f"{inner},{inner}" if ... not in typing.get_args(kind) else f"{inner},..."
    if typing.get_args(kind):
        return "|".join(map(value_name, typing.get_args(kind)))
    return {int: "N", float: "X", bool: "true|false", str: "TEXT"}[kind]
