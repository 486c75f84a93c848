"""Sections of a job whose fields packages state: `techniques`, and `layout.axes`.

The tables of techniques and of axes fill TECHNIQUE_OPTIONS and AXIS_OPTIONS when a package adds one: fields of a job
are read here, below everything that a technique or an axis is made of."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar, ParamSpec, Self, TypeVar

from phalanx.errors import ExtensionError
from phalanx.registry import Check, Registry, load_installed

P = ParamSpec("P")
T = TypeVar("T")
TECHNIQUES, AXES = "techniques", "layout.axes"
TECHNIQUE_OPTIONS: dict[str, type] = {}
"""The options of techniques from packages, by name."""
AXIS_OPTIONS: dict[str, type] = {}
"""The options of axes from packages, by name; each has a `size`."""
ADDED: Mapping[str, dict[str, type]] = {TECHNIQUES: TECHNIQUE_OPTIONS, AXES: AXIS_OPTIONS}
"""The options of both kinds by the section in which each has a section of its own."""


class OptionsTable(Registry[T]):
    """A table of entries with options, which tells the reader of jobs those of packages' entries."""

    def __init__(self, kind: str, entries: Mapping[str, T], check: Check[T], options: dict[str, type]):
        super().__init__(kind, entries, check)
        self._options = options

    def add(self, name: str, entry: T) -> None:
        if getattr(entry, "options", self) is None:
            raise ExtensionError(
                f"{self.kind} {name!r}: options are missing: a frozen dataclass of its fields in a job"
            )
        super().add(name, entry)
        self._options[name] = getattr(entry, "options")  # noqa: B009 -- of both kinds of entries

    def remove(self, name: str) -> None:
        super().remove(name)
        self._options.pop(name, None)


def once(function: Callable[P, T]) -> Callable[P, T]:
    """Makes a function of the job's fields compute its result once for each state of ADDED."""

    @functools.cache
    def computed(options: tuple[tuple[str, type], ...], *args: Any) -> T:
        return function(*args)  # pyrefly: ignore[invalid-param-spec] -- of no keywords

    @functools.wraps(function)
    def known(*args: P.args, **_: P.kwargs) -> T:
        return computed((*TECHNIQUE_OPTIONS.items(), *AXIS_OPTIONS.items()), *args)

    return known


def load_for(path: str) -> None:
    """Loads the packages if a dotted path is of what they add, so that its field is known."""
    for section, options in ADDED.items():
        if f"{path}.".startswith(f"{section}.") and path[len(section) + 1 :].partition(".")[0] not in options:
            load_installed()


@dataclass(frozen=True)
class _Added:
    """What packages add to one section of a job, each with a section of its own."""

    chosen: tuple[tuple[str, Any], ...] = ()
    """Names and options of those whose options are not the defaults, sorted."""
    options: ClassVar[dict[str, type]]
    kind: ClassVar[str]

    def __getattr__(self, name: str) -> Any:
        """The options of one by its name."""
        if name.startswith("_"):
            raise AttributeError(name)
        kind = self.options.get(name)
        found = dict(self.chosen).get(name) or (kind and kind())
        if found is None:
            raise AttributeError(f"no {self.kind} {name!r}")
        return found

    def having(self, name: str, options: Any) -> Self:
        """Returns the same with other options of one."""
        rest = {other: its for other, its in self.chosen if other != name}
        more = {name: options} if options != self.options[name]() else {}
        return type(self)(tuple(sorted((rest | more).items(), key=lambda item: item[0])))


@dataclass(frozen=True)
class Techniques(_Added):
    """Techniques that packages add (docs/reference/extending.md)."""

    options: ClassVar[dict[str, type]] = TECHNIQUE_OPTIONS
    kind: ClassVar[str] = "technique"


@dataclass(frozen=True)
class Axes(_Added):
    """Axes of the mesh that packages add (docs/reference/extending.md)."""

    options: ClassVar[dict[str, type]] = AXIS_OPTIONS
    kind: ClassVar[str] = "axis"

    @property
    def sizes(self) -> dict[str, int]:
        """Ranks along each, outermost first."""
        return {name: its.size for name, its in self.chosen if its.size > 1}

    @property
    def ranks(self) -> int:
        """The product of their sizes."""
        return prod(self.sizes.values()) if self.chosen else 1
