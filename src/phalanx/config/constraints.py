"""The range or form of a field's values, as it stands in the field's type: `n_layers: Annotated[int, AtLeast(1)] = 4`.

`check/job.py` compares every field of a job with its range; config/fields.py `constraints` lists them.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass


@dataclass(frozen=True)
class AtLeast:
    """The smallest legal value; of a tuple, that of each of its values. A word in place of a number is legal."""

    least: float

    @property
    def words(self) -> str:
        """The range in a few words."""
        return f"≥ {self.least:g}"

    def problem(self, value: float | str | tuple[float, ...]) -> str:
        """Returns what is wrong with a value or a tuple of them, or nothing."""
        if isinstance(value, str):
            return ""
        if min(value) >= self.least if isinstance(value, tuple) else value >= self.least:
            return ""
        is_ = "are" if isinstance(value, tuple) else "is"
        return f"must be at least {self.least}, {is_} {value}" if self.least else f"must not be negative, {is_} {value}"


@dataclass(frozen=True)
class Above:
    """A lower bound that is not legal itself, and the largest legal value, if there is one."""

    bound: float
    most: float = math.inf

    @property
    def words(self) -> str:
        """The range in a few words."""
        return f"> {self.bound:g}" + (f", ≤ {self.most:g}" if math.isfinite(self.most) else "")

    def problem(self, value: float) -> str:
        """Returns what is wrong with a value, or nothing."""
        if self.bound < value <= self.most:
            return ""
        most = f" and at most {self.most:g}" if math.isfinite(self.most) else ""
        return f"must be above {self.bound}{most}, is {value}"


@dataclass(frozen=True)
class Below:
    """An upper bound that is not legal itself."""

    bound: float

    @property
    def words(self) -> str:
        """The range in a few words."""
        return f"< {self.bound:g}"

    def problem(self, value: float) -> str:
        """Returns what is wrong with a value, or nothing."""
        return "" if value < self.bound else f"must be below {self.bound}, is {value}"


@dataclass(frozen=True)
class Between:
    """The smallest and the largest legal value."""

    least: float
    most: float

    @property
    def words(self) -> str:
        """The range in a few words."""
        return f"{self.least:g} to {self.most:g}"

    def problem(self, value: float) -> str:
        """Returns what is wrong with a value, or nothing."""
        inside = self.least <= value <= self.most
        return "" if inside else f"must lie between {self.least} and {self.most}, is {value}"


@dataclass(frozen=True)
class HalfOpen:
    """The smallest legal value, and an upper bound that is not legal; of a tuple, the range of each of its values."""

    least: float
    bound: float

    @property
    def words(self) -> str:
        """The range in a few words."""
        return f"≥ {self.least:g}, < {self.bound:g}"

    def problem(self, value: float | tuple[float, ...]) -> str:
        """Returns what is wrong with a value or a tuple of them, or nothing."""
        values = value if isinstance(value, tuple) else (value,)
        if all(self.least <= each < self.bound for each in values):
            return ""
        return f"must lie in [{self.least}, {self.bound}), {'are' if isinstance(value, tuple) else 'is'} {value}"


@dataclass(frozen=True)
class Printable:
    """A text without control characters."""

    @property
    def words(self) -> str:
        """The range in a few words."""
        return "printable"

    def problem(self, value: str) -> str:
        """Returns what is wrong with a value, or nothing."""
        return "" if value.isprintable() else f"must be printable, is {value[:_SHOWN]!r}"


@dataclass(frozen=True)
class FolderName:
    """The name of one folder: printable, not a path, not hidden, and at most `longest` bytes of UTF-8. May be empty."""

    longest: int

    @property
    def words(self) -> str:
        """The range in a few words."""
        return "the name of a folder"

    def problem(self, value: str) -> str:
        """Returns what is wrong with a value and the nearest legal name, or nothing."""
        legal = self._nearest(value)
        if value == legal:
            return ""
        return (
            f"must be the name of one folder: printable, without / and a leading dot, at most {self.longest} bytes; is "
            f"{value[:_SHOWN]!r}{'…' if len(value) > _SHOWN else ''}; nearest legal: {legal or 'run'}"
        )

    def _nearest(self, value: str) -> str:
        names = [name for part in value.split("/") if (name := part.lstrip("."))]
        printable = "".join(char if char.isprintable() else "-" for char in names[-1]) if names else ""
        return printable.encode()[: self.longest].decode(errors="ignore")


@dataclass(frozen=True)
class Matches:
    """A text of a certain form, or empty."""

    pattern: str
    """A regular expression for the whole text."""
    form: str
    """The form in words, with an example."""

    @property
    def words(self) -> str:
        """The range in a few words."""
        return self.form

    def problem(self, value: str) -> str:
        """Returns what is wrong with a value, or nothing."""
        legal = not value or re.fullmatch(self.pattern, value)
        return "" if legal else f"must be {self.form}, is {value[:_SHOWN]!r}"


@dataclass(frozen=True)
class StoreUrl:
    """The URL of a place on an object store, without credentials; may be empty."""

    @property
    def words(self) -> str:
        """The range in a few words."""
        return "a URL"

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


_SHOWN = 80  # characters of a wrong text in a message

Constraint = AtLeast | Above | Below | Between | HalfOpen | Printable | FolderName | Matches | StoreUrl
