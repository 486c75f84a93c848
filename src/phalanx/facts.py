"""Facts that the entries of a table state: which are missing or unknown, and which are of the wrong kind.

An entry is a frozen dataclass whose fields are its facts. `stated` makes its constructor refuse an incomplete one with
every missing fact at once; a registry (registry.py) also refuses facts of the wrong kind.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import functools
import inspect
import math
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, TypeVar

from phalanx.errors import ExtensionError
from phalanx.nearest import did_you_mean

T = TypeVar("T")
_WORDS = {int: "a whole number", float: "a finite number", bool: "True or False", str: "text", type(None): "None"}
_SHOWN = 60  # characters of a wrong value in a message


class CodePlace:
    """The form of `Lazy`: a function, or the text that says where one is."""

    form = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")

    def problem(self, value: Any) -> str:
        """Returns what is wrong with a value, or nothing."""
        if callable(value) or (isinstance(value, str) and self.form.fullmatch(value)):
            return ""
        return f"must be a function, or its place as text, package.module:name, is {_shown(value)}"


Lazy = Annotated[str | Callable[..., Any], CodePlace()]
"""A function or a class, or its place, "package.module:name", which is imported when it is first used: an entry that
names code this way is added without importing it, or torch."""


def stated(cls: type[T]) -> type[T]:
    """Makes the constructor of a dataclass raise ExtensionError with every missing, unknown and repeated fact, and
    those of the wrong kind, where it would raise TypeError for one of them."""
    plain = cls.__init__

    @functools.wraps(plain)
    def init(self: T, *args: Any, **facts: Any) -> None:
        try:
            plain(self, *args, **facts)
        except TypeError:
            if found := list(_misstated(cls, args, facts)):
                raise ExtensionError(found) from None
            raise

    cls.__init__ = init
    return cls


def problems(entry: Any) -> Iterator[str]:
    """Yields what is wrong with every fact of a (nested) dataclass that is of the wrong kind, outside its range, or
    required and empty."""
    for field in dataclasses.fields(entry):
        value, hint = getattr(entry, field.name), _hints(type(entry))[field.name]
        if dataclasses.is_dataclass(hint) and isinstance(value, typing.cast(type, hint)):
            yield from (f"{field.name}.{found}" for found in problems(value))
        elif found := _problem(value, hint, _is_required(field)):
            yield f"{field.name} {found}"


def _misstated(cls: type, args: tuple[Any, ...], facts: Mapping[str, Any]) -> Iterator[str]:
    """Yields the problems of the arguments of a dataclass's constructor."""
    fields = {field.name: field for field in dataclasses.fields(cls) if field.init}
    given = dict(zip(fields, args, strict=False))
    if len(args) > len(fields):
        yield f"{cls.__name__}: {len(args)} facts without a name; it has {len(fields)}"
    missing = [name for name, field in fields.items() if _is_required(field) and name not in {*given, *facts}]
    if missing:
        yield f"{cls.__name__} states too little; missing: {', '.join(missing)}"
    for name in facts:
        if name not in fields:
            yield f"{cls.__name__}: no fact {name!r}{did_you_mean(name, fields)} (known: {', '.join(fields)})"
        elif name in given:
            yield f"{cls.__name__}: {name} is stated twice"
    for name, value in {**facts, **given}.items():
        if name in fields and (found := _problem(value, _hints(cls)[name], _is_required(fields[name]))):
            yield f"{cls.__name__}: {name} {found}"


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls, include_extras=True)


def _problem(value: Any, hint: Any, required: bool = False) -> str:
    """Returns what is wrong with a value of a field of this type, as "must be …, is …", or nothing."""
    if typing.get_origin(hint) is typing.Annotated:
        kind, *ranges = typing.get_args(hint)
        if any(isinstance(each, CodePlace) for each in ranges):
            return CodePlace().problem(value)
        found = _problem(value, kind, required)
        stated_ranges = [each for each in ranges if hasattr(each, "problem")]
        return found or next(filter(None, (each.problem(value) for each in stated_ranges)), "")
    if not _is_of(value, hint):
        return f"must be {_words(hint)}, is {_shown(value)}"
    if required and value == "":
        return "must not be empty"
    if typing.get_origin(hint) is collections.abc.Callable:
        return _call_problem(value, typing.get_args(hint)[0])
    return ""


def _is_of(value: Any, hint: Any) -> bool:
    """Returns whether a value has a type, as far as that can be told without using it."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return not _problem(value, hint)
    if origin in (typing.Union, types.UnionType):
        return any(_is_of(value, each) for each in args)
    if origin is typing.Literal:
        return value in args
    if origin is tuple:
        if not isinstance(value, tuple):
            return False
        kinds = args[:1] * len(value) if args[-1:] == (...,) else args
        return len(value) == len(kinds) and all(map(_is_of, value, kinds))
    if origin is collections.abc.Callable:
        return callable(value)
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    kind = origin or hint
    return not isinstance(kind, type) or isinstance(value, kind)


def _call_problem(function: Callable[..., Any], kinds: Any) -> str:
    """Returns why a function cannot be called with as many arguments as its type says, or nothing."""
    if kinds is ...:
        return ""
    try:
        inspect.signature(function).bind(*kinds)
    except TypeError:
        return f"must take {len(kinds)} argument{'' if len(kinds) == 1 else 's'}"
    except ValueError:  # a function without a signature, such as one written in C
        return ""
    return ""


def _words(hint: Any) -> str:
    """Returns a type in words."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return "a function, or its place" if CodePlace in map(type, args[1:]) else _words(args[0])
    if origin in (typing.Union, types.UnionType):
        return " or ".join(map(_words, args))
    if origin is typing.Literal:
        return f"one of {', '.join(map(repr, args))}"
    if origin is tuple:
        return f"a tuple of {_words(args[0])}" if args[-1:] == (...,) else f"a tuple of {len(args)} values"
    if origin is collections.abc.Callable:
        return "a function"
    return _WORDS.get(hint, getattr(origin or hint, "__name__", str(hint)))


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
