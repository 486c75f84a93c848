"""Conversion of a user's text to a value of a field's type: the same rules for files and the command line."""

from __future__ import annotations

import collections.abc
import dataclasses
import functools
import json
import keyword
import math
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, TypeVar, cast

import yaml

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


MOST_NESTING = 20
"""Most levels of sections and lists. A job has five, and libyaml composes nodes by recursion in C, without a bound."""
LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def yaml_data(module: str, name: str) -> Any:
    """Returns the content of a YAML file of this project, which lies beside a module (its `__file__`)."""
    return yaml.load(Path(module).with_name(name).read_text(encoding="utf-8"), Loader=LOADER)


def row_of(kind: Any) -> type | None:
    """Returns the dataclass of the rows of a type `tuple[Row, ...]`; None for any other type."""
    inner = typing.get_args(kind)[:1] if typing.get_origin(kind) is tuple else ()
    return typing.cast(type, inner[0]) if inner and dataclasses.is_dataclass(inner[0]) else None


def written(rows: Sequence[Any]) -> str:
    """Returns rows as text that is read back, without the values that are defaults."""
    fields = dataclasses.fields(rows[0]) if rows else ()
    return json.dumps(
        [{each.name: vars(row)[each.name] for each in fields if vars(row)[each.name] != each.default} for row in rows]
    )


def too_deep(text: str) -> int:
    """Returns the line on which YAML text exceeds MOST_NESTING, or 0. Events come one by one, so a deeper text is never
    held as nodes. Raises yaml.YAMLError."""
    depth = 0
    for event in yaml.parse(text, Loader=LOADER):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            if depth > MOST_NESTING:
                return event.start_mark.line + 1  # pyrefly: ignore[missing-attribute]
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
    return 0


def read_rows(text: str, names: str) -> list[dict[str, str]]:
    """Returns the rows of a list of mappings as text by key, a list within one as "[a,b]"; `names` says in messages
    what a row has. Raises ValueError with what was expected and what was found."""
    try:
        root = None if too_deep(text) else yaml.compose(text, Loader=LOADER)
    except yaml.YAMLError:
        root = None
    if not isinstance(root, yaml.SequenceNode):
        raise ValueError(
            f"expected a list of mappings of {names}, found {text.strip().removesuffix('...').strip()[:100]!r}"
        )
    return [_row(node, names, f"item {number}") for number, node in enumerate(root.value, start=1)]


def _row(node: yaml.Node, names: str, where: str) -> dict[str, str]:
    if not isinstance(node, yaml.MappingNode):
        raise ValueError(f"{where}: expected a mapping of {names}, found {str(node.value)[:100]!r}")
    found: dict[str, str] = {}
    for key, value in node.value:
        items = value.value if isinstance(value, yaml.SequenceNode) else [value]
        if not isinstance(key, yaml.ScalarNode) or not all(isinstance(item, yaml.ScalarNode) for item in items):
            raise ValueError(
                f"{where}: expected {names}, each with one value or a list of them, found a mapping or more"
            )
        if key.value in found:
            raise ValueError(f"{where}: {key.value} is given twice")
        found[key.value] = value.value if items == [value] else f"[{','.join(item.value for item in items)}]"
    return found


TRUE = {"true", "yes", "on", "1"}
FALSE = {"false", "no", "off", "0"}
LONGEST_NUMBER = 100
"""Most characters of a number. Python converts no integer of more than 4,300 digits, nor prints products of several."""


def leading_zero(text: str) -> str:
    """Returns what a whole number with a leading 0 may stand for, which differs between programs; "" for others."""
    found = re.fullmatch(r"[-+]?0[0-9_]*[0-9]", text.strip()) if len(text) < LONGEST_NUMBER else None
    digits = found[0].replace("_", "") if found else ""
    if not digits.strip("+-0"):
        return ""
    octal = "" if re.search("[89]", digits) or len(digits.lstrip("+-0")) < 2 else f", or {int(digits, 8)} as octal"
    return f"write {int(digits)} without the leading 0{octal}"


def convert(text: str | list[str], kind: Any) -> Any:
    """Converts text to `kind`: int, float, bool, str, a Literal, a tuple of those (of any length if its type says
    so), or a union, whose first fitting kind is taken. `text` is a scalar's text, or a list of them for a tuple; of a
    tuple of dataclasses it is YAML (config/values.py).
    Integers may be written 1e6 or 1_000_000. Raises ValueError with what was expected and what was found."""
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return _first(text, kind)
    if row := row_of(kind):
        return _rows(text, row)
    if typing.get_origin(kind) is tuple:
        kinds = typing.get_args(kind)
        items = text if isinstance(text, list) else [item.strip() for item in _unbracketed(text).split(",")]
        if kinds[1:] == (...,):
            items = [] if items == [""] and kinds[0] is not int else items
            kinds = kinds[:1] * len(items)
        if len(items) != len(kinds):
            raise ValueError(f"expected {len(kinds)} values, found {len(items)}")
        return tuple(convert(item, kind) for item, kind in zip(items, kinds, strict=True))
    if isinstance(text, list):
        raise ValueError(f"expected {words(kind)}, not a list")
    if typing.get_origin(kind) is typing.Literal:
        choices = typing.get_args(kind)
        by_text = {str(choice): choice for choice in choices}
        if text in by_text:
            return by_text[text]
        raise ValueError(f"expected one of {', '.join(by_text)}, found {text!r}{did_you_mean(text.lower(), by_text)}")
    if kind is str:
        return _text(text)
    if kind is bool:
        if text.lower() in TRUE:
            return True
        if text.lower() in FALSE:
            return False
        raise ValueError(f"expected true or false, found {text!r}")
    if leading_zero(text):
        raise ValueError(f"expected {words(kind)}, found {text!r}: {leading_zero(text)}")
    if len(text) > LONGEST_NUMBER:
        raise ValueError(f"expected {words(kind)}, found {len(text):,} characters")
    try:
        return int(text) if kind is int else _finite(float(text))
    except ValueError:
        pass
    try:
        value = _finite(float(text))
    except ValueError:
        raise ValueError(f"expected {words(kind)}, found {text!r}") from None
    if not value.is_integer():
        raise ValueError(f"expected a whole number, found {text!r}")
    return int(value)


def _unbracketed(text: str) -> str:
    """Returns the text of a list without its brackets. Raises ValueError for half a pair, which has lost a part."""
    text = text.strip()
    if (text[:1] + text[-1:]) in ("[]", "()"):
        return text[1:-1]
    if text.startswith(("[", "(")) or text.endswith(("]", ")")):
        raise ValueError(f"expected a list such as [a,b], found {text[:LONGEST_NUMBER]!r}")
    return text


def _first(text: str | list[str], kind: Any) -> Any:
    for each in typing.get_args(kind):
        try:
            return convert(text, each)
        except ValueError:
            continue
    found = text if isinstance(text, str) else ", ".join(text)
    raise ValueError(f"expected {words(kind)}, found {found[:LONGEST_NUMBER]!r}")


def _names(row: type) -> str:
    *others, last = (field.name for field in dataclasses.fields(row))
    return f"{', '.join(others)} and {last}"


def _rows(text: str | list[str], row: type) -> tuple[Any, ...]:
    """Returns the rows of YAML text as objects of the dataclass `row`."""
    read = read_rows(text if isinstance(text, str) else str(text), _names(row))
    wrong = list[str]()
    found = [row_from(fields, row, f"item {number}", wrong) for number, fields in enumerate(read, start=1)]
    if wrong:
        raise ValueError("; ".join(wrong))
    return tuple(found)


def row_from(given: dict[str, str], row: type, where: str, wrong: list[str]) -> Any:
    """Returns a row from its texts; or None after adding every problem of them to `wrong`."""
    kinds, found, before = typing.get_type_hints(row), {}, len(wrong)
    for name, text in given.items():
        try:
            if name not in kinds:
                wrong.append(f"{where}: unknown key {name!r}{did_you_mean(name, kinds)} (keys: {', '.join(kinds)})")
            else:
                found[name] = convert(text, kinds[name])
        except ValueError as error:
            wrong.append(f"{where}: {name}: {error}")
    needed = [field.name for field in dataclasses.fields(row) if field.default is dataclasses.MISSING]
    wrong.extend(f"{where}: {name} is missing" for name in needed if name not in given)
    return row(**found) if len(wrong) == before else None


class FieldRow:
    """A row of a field that is a list of mappings: prints as a job file has it, without what is empty."""

    def __repr__(self) -> str:
        rest = {name: value for name, value in vars(self).items() if value not in (0, "", ())}
        rest |= {name: f"[{', '.join(value)}]" for name, value in rest.items() if isinstance(value, tuple)}
        rest |= {name: f"{value:g}" for name, value in rest.items() if isinstance(value, float)}
        return f"{{{', '.join(f'{name}: {value}' for name, value in rest.items())}}}"


def not_unicode(text: str) -> bool:
    """Returns whether a text has halves of surrogate pairs, as bytes of the command line that are not UTF-8 become."""
    return any("\ud800" <= character <= "\udfff" for character in text)


def _text(text: str) -> str:
    if not_unicode(text):
        raise ValueError(f"expected text in UTF-8, found {text!a}")
    return text


def _finite(value: float) -> float:
    if not math.isfinite(value):
        raise ValueError
    return value
