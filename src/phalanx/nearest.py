"""Likely meanings of a wrong value and nearest legal values, for error messages."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from math import isqrt


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
