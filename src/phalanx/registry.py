"""Tables of named things that installed packages may add to: schedules, optimizers, kinds of blocks, clusters, etc.

A package adds its own through an entry point of the group `phalanx.extensions`: a function without arguments that calls
`phalanx.extend`. Entry points are loaded when a table is first asked for a name that it lacks, or listed: commands that
use the project's own names alone never look for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.metadata import EntryPoint, entry_points
from threading import RLock
from typing import TypeVar

from phalanx.errors import ExtensionError

GROUP = "phalanx.extensions"
"""The group of entry points."""
T = TypeVar("T")
Check = Callable[[str, T], Iterable[str]]
"""Yields the problems of an entry with this name: every fact that is missing or wrong."""


class Registry(Mapping[str, T]):
    """A table of entries of one kind, by name, in the order in which they were added."""

    def __init__(self, kind: str, entries: Mapping[str, T], check: Check[T] | None = None):
        """`kind` is the entries' kind in messages, such as "schedule"; `check` judges those that are added later."""
        self.kind, self._entries, self._check = kind, dict(entries), check

    def add(self, name: str, entry: T) -> None:
        """Adds an entry. Raises ExtensionError with every problem: a name that is taken, and what `check` finds."""
        problems = [] if name not in self._entries else [f"{self.kind} {name!r}: the name is taken"]
        problems += self._check(name, entry) if self._check else ()
        if problems:
            raise ExtensionError(problems)
        self._entries[name] = entry

    def remove(self, name: str) -> None:
        """Removes an entry that was added."""
        del self._entries[name]

    def __getitem__(self, name: str) -> T:
        if name not in self._entries:
            load_installed()
        return self._entries[name]

    def __contains__(self, name: object) -> bool:
        if name not in self._entries:
            load_installed()
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        load_installed()
        return iter(tuple(self._entries))

    def __len__(self) -> int:
        load_installed()
        return len(self._entries)


_lock, _loaded = RLock(), False


def load_installed() -> None:
    """Loads the entry points of all installed packages, once. Raises ExtensionError, naming the package, if one of them
    fails."""
    global _loaded  # noqa: PLW0603
    with _lock:
        if _loaded:
            return
        _loaded = True  # extensions themselves look names up
        try:
            for point in sorted(entry_points(group=GROUP), key=lambda point: (point.name, point.value)):
                _load(point)
        except BaseException:
            _loaded = False
            raise


def _load(point: EntryPoint) -> None:
    package = point.dist.name if point.dist else "?"
    try:
        point.load()()
    except ExtensionError as error:
        raise ExtensionError([f"package {package}: {problem}" for problem in error.problems]) from error
    except Exception as error:
        raise ExtensionError(
            f"package {package}: its entry point {point.name} = {point.value} failed: {type(error).__name__}: {error}"
        ) from error
