"""An axis of the mesh as an object: what it cuts, what it refuses, what it sends, and how it is verified.

The catalogue (catalogue.py) has the project's own. A package adds an axis of data-parallel replicas, which lies outside
of dp_replicate: each place along it has whole replicas, reads other samples, and trains alone between two agreements.
The mesh, the batch equation, checks, predicted traffic and time, the run and `verify` then have it. What cuts models or
sequences is a part of the blocks' description, and not open to packages.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from phalanx.blocks.operator import Collective
from phalanx.config.job import Job
from phalanx.facts import Lazy, stated
from phalanx.registry import package_code
from phalanx.techniques.technique import Problem, no_problems

Cuts = Literal["samples", "state", "tokens", "matrices", "layers", "experts"]
SENT = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
"""Collectives that an agreement may be of."""


def every_step(options: Any) -> int:
    """Returns 1: ranks along the axis agree in every step."""
    return 1


@stated
@dataclass(frozen=True)
class AxisEntry:
    """An axis with its facts. Functions get the whole job, or the axis' own options: `job.layout.axes.NAME`."""

    title: str
    """One line for lists and logs."""
    source: str
    """Paper and section."""
    cuts: Cuts
    """What its ranks hold parts of; of a package's: samples."""
    options: type | None = None
    """A package's own fields: a frozen dataclass of plain values, each with a default, with a whole number `size`, the
    ranks along the axis, which is 1."""
    problems: Callable[[Job], Iterable[Problem]] = no_problems
    """What a layout with several ranks along it cannot have: the dotted path of the field at fault, and a message with
    the nearest legal choice."""
    every: Callable[[Any], int] = every_step
    """Steps from one agreement to the next, by the axis' options."""
    agree: Lazy | None = None
    """A package's function of the axis' collectives (comm/axis.py) and the optimizer's parameters on this rank, which
    gives all ranks along the axis the same."""
    messages: tuple[tuple[Collective, float], ...] = ()
    """The collectives of one agreement, each with the multiple of the bytes of the rank's parameters, in the
    optimizer's precision, that it is over."""
    layouts: tuple[str, ...] = ()
    """Layouts that `verify` compares with one process: the axis alone, in all its forms."""
    combined: tuple[str, ...] = ()
    """Its forms that `verify` combines with those of every other axis and technique."""
    differs: Callable[[Job], Iterable[Problem]] = no_problems
    """Why a job does not compute what one process computes: the field, and a message with the nearest legal choice."""


def problems(name: str, entry: AxisEntry) -> Iterator[str]:
    """Yields what contradicts the facts of an axis that is added."""
    if entry.options is None:  # of the project's own
        return
    hints = typing.get_type_hints(entry.options) if dataclasses.is_dataclass(entry.options) else {}
    if hints.get("size") is not int or not entry.options.__dataclass_params__.frozen:
        yield f"options must be a frozen dataclass with a whole number size, is {entry.options.__name__}"
        return
    if entry.cuts != "samples":
        yield f"cuts must be samples for an axis of a package, is {entry.cuts}"
    if entry.agree is None:
        yield "agree is missing: its ranks would never have the same parameters"
    if not entry.messages:
        yield "messages are missing: what an agreement sends could not be predicted"
    yield from (
        f"messages name {sent!r}, which is none of {', '.join(SENT)}" for sent, _ in entry.messages if sent not in SENT
    )
    without = [each.name for each in dataclasses.fields(entry.options) if each.default is dataclasses.MISSING]
    yield from (f"options.{each} needs a default" for each in without)
    with package_code("its facts cannot be computed"):
        if without:
            return
        options: Any = entry.options()
        if options.size != 1:
            yield f"the default size must be 1, is {options.size}"
        if not isinstance(steps := entry.every(entry.options()), int) or steps < 1:
            yield f"every must return a whole number of at least 1, returns {steps!r}"
