"""Every field of a job as its readers need it: type, default, range, meaning and an example, from the dataclasses.

The help pages, docs/reference/job.md and the JSON schema are views of it. The meaning of a field is the text below it
in its dataclass; the meaning of a section is the dataclass's docstring.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import itertools
import sys
import typing
from dataclasses import dataclass
from typing import Any

from phalanx.config.added import once
from phalanx.config.constraints import Constraint, Example
from phalanx.config.fields import children, constraints, get, leaves, metadata, name_of, short_names
from phalanx.config.job import Job
from phalanx.config.values import row_of

MEASURED = "cluster.calibration"
"""The section that `phalanx bench` writes: help leaves it out."""


@dataclass(frozen=True)
class FieldReference:
    """One field of a job."""

    path: str
    """Dotted path: layout.tp."""
    kind: Any
    default: Any
    ranges: tuple[Constraint, ...]
    about: str
    example: str
    """A value as YAML that is legal for the field alone, and not its default where there is another."""

    @property
    def section(self) -> str:
        return self.path.rpartition(".")[0]

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2]

    @property
    def short(self) -> str:
        """The shortest name that the command line takes for it."""
        return next(
            (name for name, path in short_names().items() if path == self.path and name == self.name), self.path
        )

    @property
    def choices(self) -> tuple[Any, ...]:
        """All legal values, if the type lists them."""
        return typing.get_args(self.kind) if typing.get_origin(self.kind) is typing.Literal else ()

    @property
    def named(self) -> list[str]:
        """The values that have names: those that the type lists, perhaps beside numbers, true and false."""
        kinds = (self.kind,) if self.choices else (self.kind, *typing.get_args(self.kind))
        listed = [typing.get_args(kind) for kind in kinds if typing.get_origin(kind) is typing.Literal]
        return [*map(str, itertools.chain.from_iterable(listed)), *(["true", "false"] if bool in kinds else [])]

    @property
    def type_words(self) -> str:
        """The type with its range: "integer, ≥ 1"."""
        limits = [words for each in self.ranges if (words := each.words)]
        return ", ".join([type_words(self.kind), *limits])


@once
def fields() -> dict[str, FieldReference]:
    """Returns every field of a job by dotted path, in order of definition."""
    job, ranges = Job(), constraints()
    texts = {
        f"{section}.{name_of(name)}": text
        for section, cls in _classes().items()
        for name, text in texts_below(cls).items()
    }
    found = {}
    for path, kind in leaves().items():
        default, told = get(job, path), [each.text for each in metadata()[path] if isinstance(each, Example)]
        example = told[0] if told else _example(kind, default)
        found[path] = FieldReference(path, kind, default, ranges.get(path, ()), texts.get(path, ""), example)
    return found


@once
def section_texts() -> dict[str, str]:
    """Returns the meaning of every section that has fields, by dotted path, in order of definition."""
    return {
        section: " ".join((inspect.getdoc(kind) or "").split())
        for section, kind in _classes().items()
        if any(field.section == section for field in fields().values())
    }


def shown(value: Any) -> str:
    """Returns a value as a job file has it: true, [0.9, 0.95], '' for an empty text."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return f"[{', '.join(map(str, value))}]"
    return repr(value) if isinstance(value, str) and (not value or not value.strip()) else f"{value}"


@once
def _classes() -> dict[str, type]:
    """Returns the dataclass of every section by dotted path."""
    found: dict[str, type] = {}

    def walk(cls: type, prefix: str) -> None:
        for name, kind in children(cls).items():
            if dataclasses.is_dataclass(kind):
                found[f"{prefix}{name}"] = typing.cast(type, kind)
                walk(typing.cast(type, kind), f"{prefix}{name}.")

    walk(Job, "")
    return found


def texts_below(cls: type) -> dict[str, str]:
    """Returns the text below every field of a dataclass."""
    body = next(
        statement.body
        for statement in _module(cls.__module__).body
        if isinstance(statement, ast.ClassDef) and statement.name == cls.__name__
    )
    found: dict[str, str] = {}
    for statement, below in itertools.pairwise(body):
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
            continue
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) and isinstance(below.value.value, str):
            found[statement.target.id] = " ".join(below.value.value.split())
    return found


@functools.cache
def _module(name: str) -> ast.Module:
    return ast.parse(inspect.getsource(sys.modules[name]))


def type_words(kind: Any) -> str:
    """Returns a type in words: "integer", or the choices."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Literal:
        return ", ".join(str(choice) for choice in arguments if choice != "")
    if row := row_of(kind):
        return f"list of mappings: {', '.join(field.name for field in dataclasses.fields(row))}"
    if origin is tuple:
        inner = type_words(arguments[0])
        return f"list of {inner}s" if arguments[1:] == (...,) else f"{len(arguments)} {inner}s"
    if arguments:
        return " or ".join(map(type_words, arguments))
    return {int: "integer", float: "number", bool: "true or false", str: "text"}[kind]


def _example(kind: Any, default: Any) -> str:
    if typing.get_origin(kind) is typing.Literal:
        return shown(next((choice for choice in reversed(typing.get_args(kind)) if choice != default), default))
    if kind is bool or bool in typing.get_args(kind):
        return shown(not default or default == "auto")
    if kind is int:
        return shown(2 * default if default > 1 else 2)
    if kind is float:
        return f"{default / 2 if 0 < default <= 1 else default * 2 or 0.1:g}"
    return shown(default)
