"""Tables of named things that installed packages may add to: schedules, optimizers, kinds of blocks, clusters, etc.

A package adds its own through an entry point of the group `phalanx.extensions`: a function without arguments that calls
`phalanx.extend`. Entry points are loaded when a table is first asked for a name that it lacks, or listed: commands that
use the project's own names alone never look for them. Every process loads them in the same order.

If a package fails, everything that was loaded is removed, and the tables raise the same error from then on: a plan or a
run with a part of the tables would not say what it lacks.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, is_dataclass
from functools import lru_cache
from threading import RLock
from typing import TYPE_CHECKING, Any, TypeVar

from phalanx import facts
from phalanx.errors import ExtensionError, JobError, PhalanxError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP = "phalanx.extensions"
"""The group of entry points."""
OWN = "phalanx"
"""The package of the project's own entries."""
NAME = re.compile("[a-z0-9][a-z0-9_.+-]{0,63}")
"""The form of a name: it is written on command lines, in lists with commas, and as a part of folders' names."""
_METADATA = (".dist-info", ".egg-info")

T = TypeVar("T")
U = TypeVar("U")
Check = Callable[[str, T], Iterable[str]]
"""Yields the problems of an entry with this name, whose facts are of the right kind: what contradicts what they say.
Raises ExtensionError with one more where the entry's own code fails."""


@contextmanager
def package_code(
    failed: str, *, passing: tuple[type[BaseException], ...] = (), raising: type[Exception] = ExtensionError
) -> Iterator[None]:
    """Turns any error of code that a package supplied into `raising`, with the message "FAILED: TYPE: TEXT"; errors
    `passing` stay as they are.

    All errors, since the project cannot know which ones such code raises: a typing error in a package would otherwise
    end a command with a traceback that looks like an error of the project, and does not name the entry."""
    try:
        yield
    except passing:
        raise
    except (Exception, SystemExit) as error:
        what = str(error) if isinstance(error, PhalanxError) else f"{type(error).__name__}: {error}"
        raise raising(f"{failed}: {what}") from error


def function_of(place: str, option: str) -> Callable[..., Any]:
    """Returns the function that a user names in `option` as "package.module:function", of the current folder or an
    installed package: its code runs, as any code that one imports. Raises JobError."""
    if (here := os.getcwd()) not in sys.path:
        sys.path.insert(0, here)
    with package_code(f"{option} {place}", passing=(JobError,), raising=JobError):
        found = _imported(place)
        if not callable(found):
            raise JobError(f"{option} {place} is no function")
    return found


@dataclass(frozen=True)
class Package:
    """An installed package with entry points of the group."""

    name: str
    version: str

    def __str__(self) -> str:
        return f"{self.name} {self.version}".rstrip()


class Registry(Mapping[str, T]):
    """A table of entries of one kind, by name, in the order in which they were added. An entry is a dataclass, whose
    fields are its facts (facts.py)."""

    def __init__(self, kind: str, entries: Mapping[str, T], check: Check[T] | None = None):
        """`kind` is the entries' kind in messages, such as "schedule"; `check` judges those that are added later, and
        the tests the project's own."""
        self.kind, self._check = kind, check
        self._entries = dict(entries) if isinstance(entries, dict) else ChainMap({}, entries)  # pyrefly: ignore[bad-argument-type] -- read when asked for
        self._packages: dict[str, Package | None] = {}

    def add(self, name: str, entry: T) -> None:
        """Adds an entry. Raises ExtensionError with every problem: a name that is taken or of the wrong form, facts of
        the wrong kind, and what the table's check finds."""
        with _lock:
            if problems := [f"{self.kind} {str(name)[:64]!r}: {problem}" for problem in self.problems(name, entry)]:
                raise ExtensionError(problems)
            self._entries[name] = entry
            self._packages[name] = _loading.package
            if _loading.package:
                _loading.added.append((self, name))

    def problems(self, name: str, entry: T) -> list[str]:
        """Returns every problem of an entry that is to be added with this name."""
        found = []
        if not (isinstance(name, str) and NAME.fullmatch(name)):
            found.append(
                "a name is lower-case letters, digits, '_', '-', '+' and '.', at most 64, and begins with a letter or "
                "a digit"
            )
        elif name in self._entries:
            found.append(f"the name is taken by {self.owner(name)}")
        types = {type(known) for known in self._entries.values()}
        if not isinstance(entry, tuple(types)):
            known = " or ".join(sorted(known.__name__ for known in types))
            return [*found, f"the entry must be of type {known}, is of type {type(entry).__name__}"]
        wrong = list(facts.problems(entry)) if is_dataclass(entry) else []
        if wrong or not self._check:
            return [*found, *wrong]
        try:
            found.extend(self._check(name, entry))  # also what it yields before it raises
        except ExtensionError as error:
            found.extend(error.problems)
        return found

    def remove(self, name: str) -> None:
        """Removes an entry that was added."""
        del self._entries[name]
        del self._packages[name]

    def package(self, name: str) -> str:
        """Returns the package that an entry came from, with its version if that is not this project: "phalanx",
        "phalanx-eager 1.0"; empty for one that this process added itself."""
        if name not in self._packages:
            return OWN
        return str(self._packages[name] or "")

    def code(self, name: str, fact: str) -> Any:
        """Returns the function or class that an entry's fact of type `facts.Lazy` states, imported if it is a place.
        Raises ExtensionError, naming the package, if it cannot be imported."""
        place = getattr(self[name], fact)
        if not isinstance(place, str):
            return place
        with package_code(f"{self.kind} {name!r} of {self.owner(name)}: its {fact}, {place}, cannot be loaded"):
            return _imported(place)

    def owner(self, name: str) -> str:
        """Returns whose entry this is, for a message: "package phalanx-eager 1.0", "this process"."""
        package = self.package(name)
        return f"package {package}" if package else "this process"

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


class View(Mapping[str, U]):
    """The entries of a table as something else, by the same names; each is made once."""

    def __init__(self, table: Mapping[str, Any], make: Callable[[str, Any], U]):
        self._table, self._make = table, make
        self._made: dict[str, tuple[Any, U]] = {}

    def __getitem__(self, name: str) -> U:
        entry = self._table[name]
        if name not in self._made or self._made[name][0] is not entry:
            self._made[name] = entry, self._make(name, entry)
        return self._made[name][1]

    def __contains__(self, name: object) -> bool:
        return name in self._table

    def __iter__(self) -> Iterator[str]:
        return iter(self._table)

    def __len__(self) -> int:
        return len(self._table)


class _Loading:
    """The state of loading: which package adds entries now, what was added, and how it ended."""

    def __init__(self) -> None:
        self.package: Package | None = None
        self.added: list[tuple[Registry[Any], str]] = []
        self.begun = self.ended = False
        self.failure: ExtensionError | None = None
        self.modules: dict[str, Package] = {}
        """Top-level modules of the packages."""


_lock, _loading = RLock(), _Loading()


def load_installed() -> None:
    """Loads the entry points of all installed packages, once. Raises ExtensionError, naming the package, if one of them
    fails; the same one whenever it is called again."""
    with _lock if not _loading.ended else nullcontext():
        if not _loading.begun:
            _load_all()
        elif not _loading.ended:  # an extension that looks a name up while it is loaded
            return
    if _loading.failure:
        raise ExtensionError(_loading.failure.problems) from _loading.failure.__cause__


def _load_all() -> None:
    _loading.begun = True
    try:
        for package, point in _entry_points():
            _load(package, point)
        _loading.ended = True
    except ExtensionError as error:
        _loading.failure, _loading.ended = error, True
    finally:
        if _loading.failure or not _loading.ended:
            for table, name in _loading.added:
                table.remove(name)
        _loading.begun = _loading.ended  # an interrupted process may begin again
        _loading.package, _loading.added = None, []


def installed() -> dict[Package, list[str]]:
    """Returns the installed packages that extend Phalanx, sorted, with the top-level modules of their entry points.
    Nothing is loaded."""
    modules: dict[Package, set[str]] = {}
    for package, point in _entry_points():
        modules.setdefault(package, set()).add(_top_level(point))
    return {package: sorted(names) for package, names in modules.items()}


def blamed(error: BaseException) -> str:
    """Returns "package NAME VERSION: " if the code of a package that extends Phalanx raised an error, else nothing. A
    PhalanxError is blamed on the function that raised it, any other error on those that called it, too."""
    modules, trace = [], error.__traceback__
    while trace:
        modules.append(trace.tb_frame.f_globals.get("__name__", "").partition(".")[0])
        trace = trace.tb_next
    if isinstance(error, PhalanxError):
        modules = modules[-1:]
    found = [_loading.modules[module] for module in modules if module in _loading.modules]
    return f"package {found[-1]}: " if found and not isinstance(error, ExtensionError) else ""


@contextmanager
def noting_package() -> Iterator[None]:
    """Adds a note to an error that is no message for the user if a package's code raised it."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, PhalanxError) and (package := blamed(error)):
            error.add_note(f"phalanx: raised in code of {package[:-2]}, which extends Phalanx")
        raise


def _entry_points() -> list[tuple[Package, EntryPoint]]:
    """Returns the entry points of the group with their packages, in the same order in every process."""
    if not any(map(_extends, sys.path)):
        return []
    from importlib.metadata import entry_points  # takes longer than all of the search above

    points = [(_package_of(point), point) for point in entry_points(group=GROUP)]
    return sorted(points, key=lambda each: (each[0].name, each[0].version, each[1].name, each[1].value))


def _package_of(point: EntryPoint) -> Package:
    try:
        return Package(str(point.dist.name), str(point.dist.version)) if point.dist else Package("?", "")
    except (KeyError, TypeError, ValueError, OSError):  # metadata without a name, or without a file
        return Package("?", "")


def _extends(folder: str) -> bool:
    """Returns whether a folder of the path has a package with entry points of the group."""
    try:
        with os.scandir(folder or ".") as entries:
            metadata = [entry.path for entry in entries if entry.name.endswith(_METADATA)]
    except OSError:
        return False
    return any(GROUP in _text(os.path.join(path, "entry_points.txt")) for path in metadata)


def _text(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def _load(package: Package, point: EntryPoint) -> None:
    """Calls an entry point. Raises ExtensionError, naming the package, if that fails."""
    _loading.package = package
    _loading.modules[_top_level(point)] = package
    its = f"its entry point {point.name} = {point.value}"
    try:
        with package_code(f"{its} failed", passing=(ExtensionError,)):
            function = point.load()
            if not callable(function):
                raise ExtensionError(f"{its} is no function")
            function()
    except ExtensionError as error:
        raise ExtensionError([f"package {package}: {problem}" for problem in error.problems]) from error


def _top_level(point: EntryPoint) -> str:
    return point.module.partition(".")[0]


@lru_cache(256)
def _imported(place: str) -> Any:
    """Returns what "package.module:name" stands for."""
    module, _, path = place.partition(":")
    found = importlib.import_module(module)
    for name in path.split("."):
        found = getattr(found, name)
    return found
