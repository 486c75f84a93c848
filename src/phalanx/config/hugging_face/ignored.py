"""Fields of a config.json that a user leaves out on purpose: model.ignore_config."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from phalanx.errors import JobError
from phalanx.nearest import did_you_mean

FIELD = "model.ignore_config"
Described = TypeVar("Described")


def read_without(
    values: Mapping[str, Any], ignored: Sequence[str], read: Callable[[Mapping[str, Any]], Described]
) -> Described:
    """Returns what `read` makes of a configuration without some of its fields, named as in "rope_scaling.factor".

    Raises JobError for names that it does not have, or that it does not refuse; and for what is still refused."""
    names = dict.fromkeys(ignored)
    problems = []
    for name in names:
        if not _removed(copy.deepcopy(dict(values)), name):
            problems.append(f"{FIELD} names {name}, which the file does not have{did_you_mean(name, _names(values))}")
        elif name not in _refused(_without(values, names.keys() - {name}), read):
            problems.append(f"{FIELD} names {name}, which is not refused: remove it from the list")
    if problems:
        raise JobError(problems)
    return read(_without(values, names))


def _without(values: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    left = copy.deepcopy(dict(values))
    for name in names:
        _removed(left, name)
    return left


def _refused(values: Mapping[str, Any], read: Callable[[Mapping[str, Any]], object]) -> set[str]:
    """Returns the names of the fields that are refused."""
    try:
        read(values)
    except JobError as error:
        return {problem.partition(" ")[0] for problem in error.problems}
    return set()


def _removed(values: dict[str, Any], name: str) -> bool:
    """Removes a field; returns whether it was there."""
    *outer, last = name.split(".")
    for each in outer:
        values = values.get(each, {})
        if not isinstance(values, dict):
            return False
    return values.pop(last, None) is not None


def _names(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in values.items():
        yield f"{prefix}{name}"
        if isinstance(value, dict):
            yield from _names(value, f"{prefix}{name}.")
