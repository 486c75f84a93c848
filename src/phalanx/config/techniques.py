"""The section `techniques` of a job: options of techniques that packages add, each a dataclass of the package's.

The table of techniques (phalanx.techniques.catalogue) fills OPTIONS when a package adds one: fields of a job are read
here, below everything that a technique is made of."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

from phalanx.registry import load_installed

P = ParamSpec("P")
T = TypeVar("T")
SECTION = "techniques"
OPTIONS: dict[str, type] = {}
"""The options of techniques from packages, by name."""


def once(function: Callable[P, T]) -> Callable[P, T]:
    """Makes a function of the job's fields compute its result once for each state of OPTIONS."""

    @functools.cache
    def computed(options: tuple[tuple[str, type], ...], *args: Any) -> T:
        return function(*args)  # pyright: ignore[reportCallIssue] -- of no keywords

    @functools.wraps(function)
    def known(*args: P.args, **_: P.kwargs) -> T:
        return computed((*OPTIONS.items(),), *args)

    return known


def options_of(name: str) -> type | None:
    """Returns the options of a technique from a package, which is loaded if it has to be; None if there is none."""
    if name not in OPTIONS:
        load_installed()
    return OPTIONS.get(name)


def load_for(path: str) -> None:
    """Loads the packages if a dotted path is of their techniques, so that its field is known."""
    section, _, rest = path.partition(".")
    if section == SECTION:
        options_of(rest.partition(".")[0])


@dataclass(frozen=True)
class Techniques:
    """Techniques that packages add (docs/reference/extending.md); each is a section of its own."""

    chosen: tuple[tuple[str, Any], ...] = ()
    """Names and options of those whose options are not the defaults, sorted."""

    def __getattr__(self, name: str) -> Any:
        """The options of a technique by its name."""
        if name.startswith("_"):
            raise AttributeError(name)
        kind = OPTIONS.get(name)
        found = dict(self.chosen).get(name) or (kind and kind())
        if found is None:
            raise AttributeError(f"no technique {name!r}")
        return found

    def having(self, name: str, options: Any) -> Techniques:
        """Returns the same with other options of one technique."""
        rest = {other: its for other, its in self.chosen if other != name}
        more = {name: options} if options != OPTIONS[name]() else {}
        return Techniques(tuple(sorted((rest | more).items(), key=lambda item: item[0])))
