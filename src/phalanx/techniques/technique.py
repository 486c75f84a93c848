"""A technique as an object: what it asks of a job, refuses, costs, does to a rank's model, and how it is verified.

A technique changes how a job computes, and not how many ranks there are, which is an axis' part. The catalogue
(catalogue.py) has the project's own, in the order in which they compose; packages add theirs through
phalanx.extend.technique. `check`, `predict` and `plan`, parallel/apply.py, `verify` and the table of extensions go
through them, and name none.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from phalanx.config.added import TECHNIQUES, Techniques
from phalanx.config.fields import get
from phalanx.config.job import Job
from phalanx.facts import Lazy, stated
from phalanx.optimizers.entry import UpdateCosts
from phalanx.registry import package_code

Problem = tuple[str, str]
"""The dotted path of the field at fault, and the message."""
Condition = tuple[Callable[[Job], object], str]
"""Whether a field has an effect in a job, and when it has one, in words."""


def above(path: str, bound: int = 0, what: str = "", *, auto: bool = False) -> Condition:
    """Returns the condition that a field is above a bound, or with `auto` that the planner chooses the layout."""
    return lambda job: get(job, path) > bound or (auto and job.layout.auto), f"is for {what}{path} above {bound}"


def is_one_of(path: str, *values: str) -> Condition:
    """Returns the condition that a field has one of some values."""
    return lambda job: get(job, path) in values, f"is for {path}={' or '.join(values)}"


@dataclass(frozen=True)
class Effect:
    """The changes of a technique to the prediction of a step."""

    passes: float = 1.0
    """Factor on the memory-bound work of blocks (norms, activations, residuals)."""
    update: UpdateCosts = field(default_factory=UpdateCosts)
    """Costs of the update besides the optimizer's."""
    framework: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    """Figures of the framework (cost/spec.py) that are others, by name."""
    profile: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    """The same of its memory profile (blocks/operator.py)."""


def no_problems(job: Job) -> Iterable[Problem]:
    """Returns nothing: a technique that every job may have."""
    return ()


def no_effect(job: Job) -> Effect:
    """Returns the effect of a technique that costs nothing, or whose costs the description of a step has."""
    return Effect()


@stated
@dataclass(frozen=True)
class Technique:
    """A technique with its facts. Functions get the whole job; options of a package's technique are
    `job.techniques.NAME`."""

    title: str
    """One line for lists and logs."""
    source: str
    """Paper and section."""
    is_on: Callable[[Job], bool]
    """Whether a job asks for it."""
    fields: tuple[str, ...] = ()
    """Dotted paths of the fields that are its own, of a technique of the project."""
    options: type | None = None
    """A package's own fields: a frozen dataclass of plain values, each with a default, with which it is off."""
    problems: Callable[[Job], Iterable[Problem]] = no_problems
    """What it cannot be combined with: the dotted path of the field at fault, and a message with the nearest legal
    choice."""
    layout_problems: Callable[[Job], Iterable[Problem]] = no_problems
    """The same of what depends on the whole layout, and so waits for the planner's choice."""
    conditions: Mapping[str, Condition] = field(default_factory=lambda: MappingProxyType({}))
    """Fields that have an effect only sometimes, by dotted path."""
    effect: Callable[[Job], Effect] = no_effect
    """Its changes to the prediction of a step."""
    stage: Literal["layers", "blocks"] = "blocks"
    """When it is applied: to the layers of a model that is cut already, or to whole blocks after that."""
    apply: Lazy | None = None
    """The function that applies it to a rank's model under construction (parallel/apply.py)."""
    update: Lazy | None = None
    """A function of the job that returns one of (shard, values, step): called after every update of a parameter's
    shard, it may change the values that the optimizer wrote."""
    samples: Lazy | None = None
    """The class that makes the samples of each step while a run trains (generate/rollouts.py)."""
    layouts: tuple[str, ...] = ()
    """Layouts that `verify` compares with one process: the technique alone, in all its forms."""
    combined: tuple[str, ...] = ()
    """Its forms that `verify` combines with those of every other technique and axis."""
    differs: Callable[[Job], Iterable[Problem]] = no_problems
    """Why a job does not compute what one process computes: the field, and a message with the nearest legal choice."""
    compared_without: bool = False
    """Whether `verify` compares the layout of a job that differs without it, and not at all otherwise."""


_KINDS = (int, float, bool, str)


def problems(name: str, entry: Technique) -> Iterator[str]:
    """Yields what contradicts the facts of a technique that is added."""
    if entry.options is None:
        if not entry.fields:
            yield "it has no field that switches it on"
        return
    if wrong := list(_wrong_options(entry.options)):
        yield from wrong
        return
    if entry.apply is None and entry.update is None:
        yield "it does nothing: state apply, update or both"
    with package_code("its facts cannot be computed"):
        job = Job(techniques=Techniques(((name, entry.options()),)))
        if entry.is_on(job):
            yield "with the defaults of its options it must be off"
        effect = entry.effect(job)
        found = [*entry.problems(job), *entry.layout_problems(job)]
        if not isinstance(effect, Effect):
            yield f"effect must return an Effect, returns {type(effect).__name__}"
    own = {f"{TECHNIQUES}.{name}.{each.name}" for each in dataclasses.fields(entry.options)}
    for path in entry.conditions:
        if path not in own:
            yield f"conditions name {path}, which is no field of its options"
    for _, problem in found:
        yield f"with the defaults of its options it has the problem {problem!r} in the default job"


def _wrong_options(options: type) -> Iterator[str]:
    """Yields what is wrong with the class of a technique's options."""
    if not dataclasses.is_dataclass(options) or not options.__dataclass_params__.frozen:  # pyrefly: ignore[missing-attribute]
        yield f"options must be a frozen dataclass, is {options.__name__}"
        return
    if not (own := dataclasses.fields(options)):
        yield "options have no field that switches it on"
    hints = typing.get_type_hints(options)
    for each in own:
        kind = hints[each.name]
        if kind not in _KINDS and typing.get_origin(kind) is not Literal:
            yield f"options.{each.name} must be int, float, bool, str or a Literal, is {kind}"
        if each.default is dataclasses.MISSING:
            yield f"options.{each.name} needs a default"
