"""A part of benchmarks.gpu: its cases, and the table that shows them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.gpu.results import Outcome, Row
from benchmarks.gpu.setting import Setting


class SkippedError(Exception):
    """Raised when a case does not apply on this machine; the message says why."""


@dataclass(frozen=True)
class Case:
    """One measurement, which can be made without the others."""

    name: str
    measure: Callable[[], dict[str, Any]]
    """Returns its figures. Raises CaseError, or SkippedError."""


@dataclass(frozen=True)
class Part:
    """A group of cases with one table."""

    name: str
    """The name for `--only`."""
    title: str
    cases: Callable[[Setting], Sequence[Case]]
    table: Callable[[Mapping[str, Outcome]], Sequence[Row]]
