"""The range of a field's values, as it stands in the field's type: `n_layers: Annotated[int, AtLeast(1)] = 4`.

`check/job.py` compares every field of a job with its range; config/fields.py `constraints` lists them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class AtLeast:
    """The smallest legal value."""

    least: float

    def problem(self, value: float) -> str:
        """Returns what is wrong with a value, or nothing."""
        if value >= self.least:
            return ""
        return f"must be at least {self.least}, is {value}" if self.least else f"must not be negative, is {value}"


@dataclass(frozen=True)
class Above:
    """A lower bound that is not legal itself."""

    bound: float

    def problem(self, value: float) -> str:
        """Returns what is wrong with a value, or nothing."""
        return "" if value > self.bound else f"must be above {self.bound}, is {value}"


@dataclass(frozen=True)
class Below:
    """An upper bound that is not legal itself."""

    bound: float

    def problem(self, value: float) -> str:
        """Returns what is wrong with a value, or nothing."""
        return "" if value < self.bound else f"must be below {self.bound}, is {value}"


@dataclass(frozen=True)
class Between:
    """The smallest and the largest legal value."""

    least: float
    most: float

    def problem(self, value: float) -> str:
        """Returns what is wrong with a value, or nothing."""
        inside = self.least <= value <= self.most
        return "" if inside else f"must lie between {self.least} and {self.most}, is {value}"


@dataclass(frozen=True)
class HalfOpen:
    """The smallest legal value, and an upper bound that is not legal; of a tuple, the range of each of its values."""

    least: float
    bound: float

    def problem(self, value: float | tuple[float, ...]) -> str:
        """Returns what is wrong with a value or a tuple of them, or nothing."""
        values = value if isinstance(value, tuple) else (value,)
        if all(self.least <= each < self.bound for each in values):
            return ""
        return f"must lie in [{self.least}, {self.bound}), {'are' if isinstance(value, tuple) else 'is'} {value}"


Constraint = AtLeast | Above | Below | Between | HalfOpen
