"""Frozen dataclasses whose hash is computed once: those that caches have as keys, nested and asked for millions of
times."""

from __future__ import annotations

from typing import Any, TypeVar

T = TypeVar("T")
_KEPT = "_hash"


def hashed_once(cls: type[T]) -> type[T]:
    """Has each object of a frozen dataclass keep its hash. It does not travel with pickles: another process hashes
    strings differently."""
    compute = cls.__hash__

    def kept(self: Any) -> int:
        known = self.__dict__.get(_KEPT)
        if known is None:
            known = self.__dict__[_KEPT] = compute(self)
        return known

    def state(self: Any) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != _KEPT}

    cls.__hash__ = kept
    cls.__getstate__ = state  # type: ignore[method-assign]
    return cls
