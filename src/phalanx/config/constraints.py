"""The range or form of a field's values, as it stands in the field's type: `n_layers: Annotated[int, Interval(1)] = 4`.

`check/job.py` compares every field of a job with its range; config/fields.py `constraints` lists them.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class Interval:
    """The smallest and the largest legal value, and bounds that are not legal themselves; of a tuple, those of each of
    its values. A word in place of a number is legal."""

    least: float = -math.inf
    most: float = math.inf
    above: float = -math.inf
    below: float = math.inf

    @property
    def words(self) -> str:
        """The range in a few words, such as "≥ 0, < 1"."""
        if math.isfinite(self.least) and math.isfinite(self.most):
            return f"{self.least:g} to {self.most:g}"
        bounds = (("≥", self.least), (">", self.above), ("≤", self.most), ("<", self.below))
        return ", ".join(f"{sign} {bound:g}" for sign, bound in bounds if math.isfinite(bound))

    def problem(self, value: float | str | tuple[float, ...]) -> str:
        """Returns what is wrong with a value or a tuple of them, or nothing."""
        values = value if isinstance(value, tuple) else (value,)
        if all(isinstance(v, str) or (self.least <= v <= self.most and self.above < v < self.below) for v in values):
            return ""
        if math.isfinite(self.above):
            most = f" and at most {self.most:g}" if math.isfinite(self.most) else ""
            most = f" and below {self.below:g}" if math.isfinite(self.below) else most
            must = f"must be above {self.above}{most}"
        elif not math.isfinite(self.least):
            must = f"must be below {self.below}"
        elif math.isfinite(self.below):
            must = f"must lie in [{self.least}, {self.below})"
        elif math.isfinite(self.most):
            must = f"must lie between {self.least} and {self.most}"
        else:
            must = f"must be at least {self.least}" if self.least else "must not be negative"
        return f"{must}, {'are' if isinstance(value, tuple) else 'is'} {value}"


@dataclass(frozen=True)
class Printable:
    """A text without control characters."""

    words: ClassVar[str] = "printable"

    def problem(self, value: str) -> str:
        """Returns what is wrong with a value, or nothing."""
        return "" if value.isprintable() else f"must be printable, is {value[:_SHOWN]!r}"


@dataclass(frozen=True)
class FolderName:
    """The name of one folder: printable, not a path, not hidden, and at most `longest` bytes of UTF-8. May be empty."""

    longest: int

    words: ClassVar[str] = "the name of a folder"

    def problem(self, value: str) -> str:
        """Returns what is wrong with a value and the nearest legal name, or nothing."""
        names = [name for part in value.split("/") if (name := part.lstrip("."))]
        printable = "".join(char if char.isprintable() else "-" for char in names[-1]) if names else ""
        legal = printable.encode()[: self.longest].decode(errors="ignore")
        if value == legal:
            return ""
        return (
            f"must be the name of one folder: printable, without / and a leading dot, at most {self.longest} bytes; is "
            f"{value[:_SHOWN]!r}{'…' if len(value) > _SHOWN else ''}; nearest legal: {legal or 'run'}"
        )


@dataclass(frozen=True)
class Matches:
    """A text of a certain form, or empty."""

    pattern: str
    """A regular expression for the whole text."""
    form: str
    """The form in words, with an example."""

    @property
    def words(self) -> str:
        return self.form

    def problem(self, value: str) -> str:
        """Returns what is wrong with a value, or nothing."""
        legal = not value or re.fullmatch(self.pattern, value)
        return "" if legal else f"must be {self.form}, is {value[:_SHOWN]!r}"


@dataclass(frozen=True)
class StoreUrl:
    """The URL of a place on an object store, without credentials; may be empty."""

    words: ClassVar[str] = "a URL"

    def problem(self, value: str) -> str:
        """Returns what is wrong with a value, or nothing. The value is not repeated: it may hold a secret."""
        if not value:
            return ""
        scheme, found, rest = value.partition("://")
        host = rest.partition("/")[0]
        user = host.partition("@")[0] if "@" in host else ""
        # On Azure the container stands before the account.
        if (user and not scheme.startswith(("abfs", "az", "wasb"))) or re.search(":|%3a", user, re.IGNORECASE):
            return (
                "must not hold credentials, which would be saved with the run and its checkpoints: the store's library "
                "takes them from the environment (AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE)"
            )
        if not found or not rest.strip("/") or not re.fullmatch("[a-z][a-z0-9+.-]*", scheme):
            return "must be the URL of a place on a store, such as s3://BUCKET/PREFIX"
        if not value.isprintable() or re.search(r"[?#*\[\]\s]|::", rest):
            return "must be the plain URL of a place on a store, without spaces, ?, #, *, [, ] and ::"
        return ""


@dataclass(frozen=True)
class Example:
    """A value for examples, as YAML, of a field whose type alone gives no telling one."""

    text: str


_SHOWN = 80  # characters of a wrong text in a message

Constraint = Interval | Printable | FolderName | Matches | StoreUrl
