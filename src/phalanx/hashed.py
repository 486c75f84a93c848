"""Frozen dataclasses that are made, copied and hashed millions of times: caches have them as keys, nested. Each is
written as

    @hashed_once
    @dataclass(frozen=True)
    class Layout(Hashed): ...

or, if nothing has it as a key, with `made_quickly`.
"""

from __future__ import annotations

from dataclasses import MISSING, fields
from itertools import zip_longest
from typing import Any, TypeVar

T = TypeVar("T", bound="type[Hashed]")
C = TypeVar("C", bound=type)
One = TypeVar("One")


class Hashed:
    """A base with a slot for the hash, unseen by `vars` and pickles: other processes hash strings differently."""

    __slots__ = ("_hash",)
    _hash: int

    def __getstate__(self) -> dict[str, Any]:
        return dict(self.__dict__)


def hashed_once(cls: T) -> T:
    """Makes each object of a frozen dataclass cache its hash."""
    compute = cls.__hash__

    def cached(self: Any) -> int:
        try:
            return self._hash
        except AttributeError:
            object.__setattr__(self, "_hash", compute(self))
            return self._hash

    cls.__hash__ = cached
    return made_quickly(cls)


def made_quickly(cls: C) -> C:
    """Makes the constructor of a frozen dataclass write its fields into the object's dictionary, in a third of the time
    of a call for each. The class has no `__post_init__`, and its constructor takes every field by position."""
    standard, lines = cls.__init__, list[str]()
    every, defaults = fields(cls), standard.__defaults__ or ()
    known: dict[str, Any] = {}
    for each, default in zip_longest(reversed(every), reversed(defaults)):
        value = each.name
        if each.default_factory is not MISSING:  # the standard default then stands for what it makes
            known |= {f"make_{each.name}": each.default_factory, "absent": default}
            value = f"make_{each.name}() if {each.name} is absent else {each.name}"
        lines.append(f" into[{each.name!r}] = {value}")
    begin = f"def __init__(self, {', '.join(each.name for each in every)}):\n into = self.__dict__"
    exec("\n".join([begin, *reversed(lines)]), known)
    quick = known["__init__"]
    for name in ("__defaults__", "__annotations__", "__qualname__", "__module__"):
        setattr(quick, name, getattr(standard, name))
    cls.__init__ = quick
    return cls


def replace(one: One, **changes: Any) -> One:
    """Returns a copy of a dataclass with other fields, as dataclasses.replace does, in a third of the time. Its
    constructor takes every field by position."""
    cls, values = type(one), vars(one)
    names: tuple[str, ...] = cls.__match_args__  # pyright: ignore[reportAttributeAccessIssue] -- every dataclass has it
    return cls(**{name: values[name] for name in names} | changes)
