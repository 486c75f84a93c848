"""Likely meanings of a wrong value or path and nearest legal values, for error messages."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Mapping
from math import isqrt
from pathlib import Path

_MOST_RUNS = 8
"""Most runs that a message lists."""


def nearest(name: str, choices: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Returns the choice that a mistyped name most likely means, or None if no similarity reaches `cutoff` (0 to 1)."""
    close = difflib.get_close_matches(name, list(choices), n=1, cutoff=cutoff)
    return close[0] if close else None


def did_you_mean(name: str, choices: Iterable[str]) -> str:
    """Returns the end of a message about a mistyped name, "; did you mean gpt2?", or nothing if no choice is close."""
    meant = nearest(name, choices)
    return f"; did you mean {meant}?" if meant else ""


def nearest_divisors(n: int, wanted: int) -> str:
    """Returns the divisors of n that are nearest to `wanted`, as text: "2, 4, 8"."""
    return nearest_of(divisors(n), wanted)


def divisors(n: int) -> list[int]:
    """Returns every divisor of n >= 1 in ascending order, in sqrt(n) steps."""
    low = [d for d in range(1, isqrt(n) + 1) if n % d == 0]
    return low + [n // d for d in reversed(low) if d * d != n]


def nearest_of(legal: Iterable[int], wanted: int, count: int = 3) -> str:
    """Returns the numbers that are nearest to `wanted`, as text."""
    near = sorted(sorted(legal, key=lambda d: (abs(d - wanted), d))[:count])
    return ", ".join(map(str, near))


def multiples(n: int, near: int, count: int = 4) -> list[int]:
    """Returns up to 2 × `count` positive multiples of n >= 1 around `near`."""
    low = near // n
    return [n * factor for factor in range(max(1, low - count + 1), low + count + 1)]


class Misfit(str):
    """A message about numbers that do not fit each other: their equation, and the nearest values of a field that fit
    it. `check/causes.py` narrows the values to those that are legal in the whole job."""

    equation: str
    choices: dict[str, list[int]]
    """Values by the dotted path of each field whose change alone makes the equation hold, the field at fault first."""
    after: str
    wanted: int

    def __new__(cls, equation: str, wanted: int, choices: Mapping[str, Iterable[int]], after: str = "") -> Misfit:
        """Returns the message. `wanted` is the value of the first field; `after` is said behind its nearest values."""
        listed = {path: list(values) for path, values in choices.items()}
        path, values = next(iter(listed.items()))
        found = super().__new__(cls, misfit(equation, path, nearest_of(values, wanted)) + after)
        found.equation, found.choices, found.after, found.wanted = equation, listed, after, wanted
        return found


def misfit(equation: str, path: str, values: str) -> str:
    """Returns the words about an equation that does not hold, and values of the field at `path` with which it does."""
    return f"{equation}; nearest {path.rpartition('.')[2]}: {values}"


def near_file(path: Path) -> str:
    """Returns the end of a message about a file that is not there, "; did you mean data/train.txt?", or nothing."""
    try:
        names = [each.name for each in path.parent.iterdir()]
    except OSError:
        return f": there is no folder {path.parent}"
    meant = nearest(path.name, names)
    return f"; did you mean {path.parent / meant}?" if meant else ""


def no_run(path: Path, lacks: str) -> str:
    """Returns the message about a path that is no run's directory, since it has no such files, with the nearest run
    beside it or in runs/."""
    known = sorted({str(config.parent) for at in (path.parent, Path("runs")) for config in at.glob("*/config.yaml")})
    by_name = {Path(run).name: run for run in known}
    meant = nearest(path.name, by_name)
    more = f" and {len(known) - _MOST_RUNS} more" if len(known) > _MOST_RUNS else ""
    hint = f"; did you mean {by_name[meant]}?" if meant else ""
    hint = hint or (f"; there are: {', '.join(known[:_MOST_RUNS])}{more}" if known else "")
    what = f"it has {lacks}" if os.path.isdir(path) else "there is no such folder"
    what = "it is a file" if os.path.isfile(path) else what
    return f"no run in {path}: {what}{hint}"
