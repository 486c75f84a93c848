"""Frozen dataclasses whose hash is computed once: those that caches have as keys, nested and asked for millions of
times. Each is written as

    @hashed_once
    @dataclass(frozen=True)
    class Layout(Hashed): ...
"""

from __future__ import annotations

from typing import Any, TypeVar

T = TypeVar("T", bound="type[Hashed]")


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
    return cls
