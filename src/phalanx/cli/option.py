"""An option of a verb, and the description of a verb from which help pages, docs/reference/cli.md and completion are
made."""

from __future__ import annotations

import dataclasses
import re
import typing
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from phalanx.config import values
from phalanx.config.values import row_of

Example = tuple[str, str]
"""Words after `phalanx`, and what they do."""


def flag_of(name: str) -> str:
    """Returns an option as it is written on the command line: "--nproc-per-node"."""
    return f"--{name.replace('_', '-')}"


@dataclass(frozen=True)
class Option:
    """An option with a value, beside the fields of a job: `--steps 2`, `--steps=2`."""

    kind: Any
    default: Any
    about: str
    at_least: int | None = None
    many: bool = False
    """May have several values, which are then a tuple. In a verb that takes a job, they are all words up to the next
    that begins with `--` or names a YAML file; elsewhere the option is repeated."""
    like: str = ""
    """With `many`: a regular expression for the beginning of later words; any word if it is empty."""
    empty: str = ""
    """What to say where the value is the empty text."""
    value: str = ""
    """The name of the value on help pages, such as FILE; that of its kind if it is empty."""
    rare: bool = False
    """The short help page only names it."""
    read: Callable[[str], Any] | None = None
    """Reads its text, if its kind does not say how; raises ValueError for a wrong one."""

    def convert(self, texts: Sequence[str]) -> tuple[Any, ...]:
        """Converts the given texts. Raises ValueError that says what was expected."""
        if not any(texts):
            raise ValueError(f"is empty: {self.empty}" if texts and self.empty else "needs a value")
        read = self.read or (Path if self.kind is Path else lambda text: values.convert(text, self.kind))
        converted: tuple[Any, ...] = tuple(map(read, texts))
        if self.at_least is not None and min(converted) < self.at_least:
            raise ValueError(f"must be at least {self.at_least}, is {min(converted)}")
        return converted

    def taken(self, left: deque[str], *, of_job: bool) -> list[str]:
        """Removes its values from the words that follow it, and returns them."""
        found: list[str] = []
        while left and not left[0].startswith("--") and (not found or (of_job and self.many)):
            if of_job and self.many and left[0].endswith((".yaml", ".yml")):
                break
            if found and not re.match(self.like, left[0]):
                break
            found.append(left.popleft())
        return found


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
    """A verb, or one of its commands, as its pages show it."""

    verb: str
    usage: str
    """The form of its command line: the words after `phalanx`."""
    about: str
    options: tuple[PageOption, ...]
    examples: tuple[Example, ...]
    notes: tuple[str, ...]
    exits: Mapping[int, str]
    takes_job: bool
    commands: tuple[Example, ...]
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
    return {int: "N", float: "X", bool: "true|false", str: "TEXT", Path: "TEXT"}[kind]
