"""Conversion of a user's text to a value of a field's type: the same rules for files and the command line."""

from __future__ import annotations

import dataclasses
import json
import math
import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from phalanx.config.typed import words
from phalanx.nearest import did_you_mean

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
                return event.start_mark.line + 1
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
        items = text if isinstance(text, list) else [item.strip() for item in text.strip("[]() ").split(",")]
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
