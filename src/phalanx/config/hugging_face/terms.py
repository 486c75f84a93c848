"""The parts of a config.json: each says which fields of transformers it reads and writes, and which of ours they set.

A term works in both directions, so that what is read and what is written cannot drift apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any, Protocol

from phalanx.config.model import ModelConfig
from phalanx.nearest import nearest

REQUIRED: Any = object()
"""The default of a field without which a configuration says nothing."""
LARGEST = 2**31 - 1
"""Largest size that is read."""
HARMLESS_PREFIX = "unsloth_"
"""Begins fields that Unsloth writes and transformers does not read."""
_KINDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a text",
    list: "a list",
    dict: "an object",
}
_STAND_INS: dict[type, Any] = {int: 1, float: 1.0, bool: False, str: "", list: [], dict: {}}

Fields = dict[str, Any]
"""Values of ModelConfig by dotted path, such as "moe.n_experts"."""


class ConfigReader:
    """The fields of a config.json, which notes those that were read and everything that is wrong."""

    def __init__(self, values: Mapping[str, Any], prefix: str = ""):
        self._values = values
        self.prefix = prefix
        self.seen: set[str] = set()
        self.problems: list[str] = []
        self.notes: list[str] = []

    def take(self, name: str, kind: type, default: Any = REQUIRED, most: int = LARGEST, least: int = 0) -> Any:
        """Returns the value of a field, or its default where it is absent or null. A wrong value becomes a problem, and
        a stand-in is returned."""
        self.seen.add(name)
        value = self._values.get(name)
        stand_in = _STAND_INS[kind] if default is REQUIRED else default
        if value is None:
            if default is REQUIRED:
                self.problem(name, "is missing")
            return stand_in
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            self.problem(name, f"is {shown(value)}, expected {_KINDS[kind]}")
            return stand_in
        if kind is float and not isfinite(value):
            self.problem(name, f"is {value}, expected a finite number")
            return stand_in
        if kind is int and not least <= value <= most:
            self.problem(name, f"is {value:,}, expected at most {most:,} and at least {least}")
            return stand_in
        return value

    def problem(self, name: str, message: str) -> None:
        """Notes what is wrong with a field."""
        self.problems.append(f"{self.prefix}{name} {message}")

    def inside(self, name: str) -> ConfigReader:
        """Returns the reader of an object within this one, which shares problems and notes. Absent, it is empty."""
        inner = ConfigReader(self.take(name, dict, {}), f"{self.prefix}{name}.")
        inner.problems, inner.notes = self.problems, self.notes
        return inner

    def holds(self, name: str) -> bool:
        """Returns whether a field is present and not null."""
        return self._values.get(name) is not None

    def names(self, name: str) -> bool:
        """Returns whether a field is present, be it null."""
        return name in self._values

    def states(self, name: str, value: Any) -> bool:
        """Returns whether a field has this value."""
        return self._values.get(name) == value

    def raw(self, name: str) -> Any:
        """Returns the value of a field of any type, and notes that it was read."""
        self.seen.add(name)
        return self._values.get(name)

    def left(self) -> list[str]:
        """Returns the fields that are set and that nothing has read."""
        return [name for name, value in self._values.items() if name not in self.seen and value is not None]


class Term(Protocol):
    """A part of a configuration."""

    def read(self, source: ConfigReader, fields: Fields) -> None:
        """Sets the fields of ours that this part determines."""

    def write(self, model: ModelConfig) -> Fields:
        """Returns the fields of theirs."""
        ...


@dataclass(frozen=True)
class Field:
    """One field of theirs that is one field of ours."""

    theirs: str
    ours: str
    kind: type
    default: Any = REQUIRED
    write_as: Callable[[ModelConfig], Any] | None = None
    """The value to write where ours may stand for a default, such as 0 key/value heads."""
    most: int = LARGEST
    least: int = 0
    also: tuple[str, ...] = ()
    """Other names of theirs, which are read only."""
    absent: Any = None
    """The value of a field that is absent where it is another than that of null, which is the default."""

    def read(self, source: ConfigReader, fields: Fields) -> None:
        """Takes the value over."""
        names = (self.theirs, *self.also)
        chosen = next((name for name in names if source.holds(name)), self.theirs)
        default = self.default if self.absent is None or source.names(chosen) else self.absent
        fields[self.ours] = value = source.take(chosen, self.kind, default, self.most, self.least)
        for name in names:
            if source.holds(name) and source.raw(name) != value and name != chosen:
                source.problem(name, f"is {shown(source.raw(name))}, {chosen} is {shown(value)}: they are the same")

    def write(self, model: ModelConfig) -> Fields:
        """Returns the value of ours under their name."""
        return {self.theirs: self.write_as(model) if self.write_as else value_of(model, self.ours)}


@dataclass(frozen=True)
class Fixed:
    """A field that must have one of a few values, since ours computes nothing else. The first is written."""

    theirs: str
    values: tuple[Any, ...]
    default: Any
    """The value that transformers takes if the field is absent."""
    reason: str = ""

    def read(self, source: ConfigReader, fields: Fields) -> None:
        """Notes a problem for every other value."""
        value = source.raw(self.theirs)
        value = self.default if value is None else value
        if not any(value == known and isinstance(value, bool) == isinstance(known, bool) for known in self.values):
            known = " or ".join(shown(each) for each in self.values)
            source.problem(self.theirs, f"is {shown(value)}, supported: {known}{self.reason and f' ({self.reason})'}")

    def write(self, model: ModelConfig) -> Fields:
        """Returns the first value."""
        return {self.theirs: self.values[0]}


@dataclass(frozen=True)
class Written:
    """A field that is read without effect, and written with one value."""

    theirs: str
    value: Any

    def read(self, source: ConfigReader, fields: Fields) -> None:
        """Notes that the field is known."""
        source.seen.add(self.theirs)

    def write(self, model: ModelConfig) -> Fields:
        """Returns the value."""
        return {self.theirs: self.value}


@dataclass(frozen=True)
class Choice:
    """A field whose values are those of one field of ours by another name. The first name of a value is written."""

    theirs: str
    ours: str
    names: tuple[tuple[Any, Any], ...]
    """(theirs, ours)"""
    default: Any = None
    """The value that transformers takes if the field is absent; None: ours keeps the family's own value."""

    def read(self, source: ConfigReader, fields: Fields) -> None:
        """Translates the value."""
        value = source.raw(self.theirs)
        value = self.default if value is None else value
        for theirs, ours in self.names:
            if value == theirs and isinstance(value, bool) == isinstance(theirs, bool):
                fields[self.ours] = ours
                return
        if value is not None:
            known = ", ".join(shown(theirs) for theirs, _ in self.names)
            source.problem(self.theirs, f"is {shown(value)}, supported: {known}")

    def write(self, model: ModelConfig) -> Fields:
        """Returns the name of our value, or nothing if it has none: the shape read back then differs."""
        ours = value_of(model, self.ours)
        known = [theirs for theirs, value in self.names if value == ours]
        return {self.theirs: known[0]} if known else {}


def value_of(model: ModelConfig, path: str) -> Any:
    """Returns the value at a dotted path."""
    part: Any = model
    for name in path.split("."):
        part = getattr(part, name)
    return part


def shown(value: Any) -> str:
    """Returns a value as JSON shows it, at most 60 characters of it."""
    words = {None: "null", True: "true", False: "false"}
    text = words[value] if value is None or isinstance(value, bool) else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"


def written(terms: Iterable[Term], model: ModelConfig) -> Fields:
    """Returns the fields of all terms in their order."""
    return {name: value for term in terms for name, value in term.write(model).items()}


def refuse_unknown(source: ConfigReader, harmless: frozenset[str] = frozenset(), where: str = "") -> None:
    """Notes every field that nothing has read and that is not known to change nothing; `where` says of what. The first
    message says how to read the file without them. Programs write these files, so that few names are slips of the
    pen."""
    unknown = [name for name in source.left() if name not in harmless and not name.startswith(HARMLESS_PREFIX)]
    listed = ",".join(f"{source.prefix}{name}" for name in unknown)
    for name in unknown:
        meant = nearest(name, [*source.seen, *harmless], strictly=True)
        hint = f"; did you mean {meant}?" if meant else ""
        way = f" (what changes no number may be left out: model.ignore_config=[{listed}])" if name == unknown[0] else ""
        source.problem(name, f"is not understood{where}{hint}{way}")
