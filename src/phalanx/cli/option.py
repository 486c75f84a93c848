"""An option of a verb with a value, beside the fields of a job."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from phalanx.config import values


@dataclass(frozen=True)
class Option:
    """An option of a verb with a value: `--steps 2`, `--steps=2`."""

    kind: Any
    default: Any
    about: str
    at_least: int | None = None
    many: bool = False
    """May have several values, which are then a tuple. In a verb that takes a job, they are all words up to the next
    that begins with `--` or names a YAML file; elsewhere the option is repeated."""
    like: str = ""
    """With `many`: a regular expression for the beginning of later words; any word if it is empty."""
    empty: str = ""
    """What to say where the value is the empty text."""
    value: str = ""
    """The name of the value on help pages, such as FILE; that of its kind if it is empty."""
    rare: bool = False
    """The short help page only names it."""

    def convert(self, texts: Sequence[str]) -> tuple[Any, ...]:
        """Converts the given texts. Raises ValueError that says what was expected."""
        if not any(texts):
            raise ValueError(f"is empty: {self.empty}" if texts and self.empty else "needs a value")
        converted = tuple(values.convert(text, self.kind) for text in texts)
        if self.at_least is not None and min(converted) < self.at_least:
            raise ValueError(f"must be at least {self.at_least}, is {min(converted)}")
        return converted


def repeated_option(flag: str, first: Any, second: Any) -> list[str]:
    """Returns the problem of an option that is given twice with two values."""
    return [f"{flag} {first} and {flag} {second}: give one of them"] if first != second else []
