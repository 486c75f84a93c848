"""Reads a value that came out of JSON or YAML as what a type says: a dataclass in, every problem at once out. And the
tables of known things in the JSON files beside this one, each entry read when it is first asked for."""

from __future__ import annotations

import collections.abc
import dataclasses
import functools
import json
import keyword
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, TypeVar, cast

from phalanx.config.constraints import Example
from phalanx.nearest import did_you_mean

T = TypeVar("T")
_PLAIN = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "null"}
_SHOWN = 80  # characters of a wrong value in a message


class TypedError(ValueError):
    """A value is not what its type says; `problems` has every problem, each with its place."""

    def __init__(self, problems: list[str]):
        self.problems = problems
        super().__init__("; ".join(problems))


def read_as(kind: type[T], value: Any, where: str = "", *, more: bool = False) -> T:
    """Returns a parsed value as a `kind`: a dataclass of an object's keys (`from` is the field `from_`), a tuple or a
    list of a list, a Mapping with texts as keys, one of a Literal or of a union, or a plain value, which must have the
    type already; a whole number is a number, and stays what it is. Ranges that a type states (constraints.py) are
    checked. Raises TypedError with every problem; `where` begins the place of each.

    With `more`, objects may have keys that their dataclasses do not know."""
    problems: list[str] = []
    found = _read(kind, value, where, problems, more)
    if problems:
        raise TypedError(problems)
    return found


def _read(kind: Any, value: Any, where: str, problems: list[str], more: bool) -> Any:
    """Returns the value as its type, or anything with a problem added."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return value
    if origin is Annotated:
        before = len(problems)
        found = _read(arguments[0], value, where, problems, more)
        if len(problems) == before:
            limits = [each for each in arguments[1:] if not isinstance(each, Example)]
            problems += [_at(where, str(wrong)) for each in limits if (wrong := each.problem(found))]
        return found
    if origin in (typing.Union, types.UnionType):
        for each in arguments:
            wrong: list[str] = []
            found = _read(each, value, where, wrong, more)
            if not wrong:
                return found
    elif dataclasses.is_dataclass(kind):
        if isinstance(value, Mapping):
            return _object(cast(type, kind), value, where, problems, more)
    elif origin is Literal:
        if any(value == each and type(value) is type(each) for each in arguments):
            return value
    elif origin is tuple or origin in (list, collections.abc.Sequence):
        if isinstance(value, list | tuple):
            kinds = arguments if origin is tuple and arguments[-1:] != (...,) else arguments[:1] * len(value)
            if len(kinds) == len(value):
                pairs = enumerate(zip(kinds, value, strict=True), start=1)
                items = [_read(each, item, _inside(where, f"item {n}"), problems, more) for n, (each, item) in pairs]
                return items if origin is list else tuple(items)
    elif origin in (dict, collections.abc.Mapping):
        if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
            return {key: _read(arguments[1], each, _inside(where, key), problems, more) for key, each in value.items()}
    elif isinstance(value, bool):
        if kind is bool:
            return value
    elif isinstance(value, int | float if kind is float else kind):
        return value
    hint = did_you_mean(value, [*map(str, arguments)]) if origin is Literal and isinstance(value, str) else ""
    problems.append(_at(where, f"expected {words(kind)}, found {_shown(value)}{hint}"))
    return None


def _object(kind: type, value: Mapping[str, Any], where: str, problems: list[str], more: bool) -> Any:
    """Returns a dataclass of an object's keys."""
    fields, found = _fields(kind), dict[str, Any]()
    for key, each in value.items():
        if key in fields:
            attribute, of, _ = fields[key]
            found[attribute] = _read(of, each, _inside(where, key), problems, more)
        elif not more:
            hint = did_you_mean(str(key), fields)
            problems.append(_at(where, f"unknown key {key!r}{hint} (keys: {', '.join(fields)})"))
    absent = [name for name, (attribute, _, needed) in fields.items() if needed and attribute not in found]
    problems += [_at(where, f"{name} is missing") for name in absent]
    return None if problems else kind(**found)


@functools.lru_cache(256)
def _fields(kind: type) -> dict[str, tuple[str, Any, bool]]:
    """Returns the attribute of each field of a dataclass by the name that users write, its type, and whether it must be
    given."""
    hints, nothing, found = typing.get_type_hints(kind, include_extras=True), dataclasses.MISSING, {}
    for each in dataclasses.fields(kind):
        plain = each.name.removesuffix("_")
        needed = each.default is nothing and each.default_factory is nothing
        found[plain if keyword.iskeyword(plain) else each.name] = each.name, hints[each.name], needed
    return found


def words(kind: Any) -> str:
    """Returns a type in a user's words."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        return words(arguments[0])
    if origin in (typing.Union, types.UnionType):
        return " or ".join(map(words, arguments)).replace("one of ", "")
    if origin is Literal:
        return "one of " + ", ".join(map(str, arguments))
    if origin is tuple and arguments[-1:] != (...,):
        return f"{len(arguments)} values"
    if origin is tuple and dataclasses.is_dataclass(arguments[0]):
        *others, last = (field.name for field in dataclasses.fields(arguments[0]))
        return f"a list of mappings of {', '.join(others)} and {last}"
    if origin in (tuple, list, collections.abc.Sequence):
        return "a list of whole numbers" if arguments[0] is int else "a list"
    return _PLAIN.get(kind, "an object")


def _shown(value: Any) -> str:
    if isinstance(value, Mapping | list | tuple):
        return "an object" if isinstance(value, Mapping) else f"a list of {len(value):,}"
    text = json.dumps(value) if value is None or isinstance(value, bool) else repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def _inside(where: str, name: object) -> str:
    return f"{where}.{name}" if where else str(name)


def _at(where: str, problem: str) -> str:
    return f"{where}: {problem}" if where else problem


@functools.cache
def data_file(name: str) -> dict[str, Any]:
    """Returns the content of a JSON file of this folder."""
    return json.loads(Path(__file__).with_name(name).read_text(encoding="utf-8"))


class Known(Mapping[str, T], Generic[T]):
    """The `entries` of a data file, by name. An entry has what its `base`, one of the file's `bases`, has and it does
    not; objects in it are merged. A `comment` is for readers."""

    def __init__(self, file: str, make: Callable[[str, dict[str, Any]], T]):
        """`make(name, fields)` makes the thing of an entry."""
        self._file, self._make, self._made = file, make, dict[str, T]()

    def __getitem__(self, name: str) -> T:
        if name not in self._made:
            self._made[name] = self._make(name, self._with_base(data_file(self._file)["entries"][name]))
        return self._made[name]

    def __contains__(self, name: object) -> bool:
        return name in data_file(self._file)["entries"]

    def __iter__(self) -> Iterator[str]:
        return iter(data_file(self._file)["entries"])

    def __len__(self) -> int:
        return len(data_file(self._file)["entries"])

    def _with_base(self, entry: Mapping[str, Any]) -> dict[str, Any]:
        base = self._with_base(data_file(self._file)["bases"][entry["base"]]) if "base" in entry else {}
        return {name: each for name, each in _merged(base, entry).items() if name not in ("base", "comment")}


def _merged(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    both = {name: _merged(under[name], each) for name, each in over.items() if isinstance(each, dict) and name in under}
    return {**under, **over, **both}
