"""What a wrong value most likely meant, or which legal ones lie nearest: the end of every message of refusal."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(name: str, choices: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The choice that a mistyped name most likely meant, or None where none is as alike as `cutoff` (0 to 1)."""
    close = difflib.get_close_matches(name, list(choices), n=1, cutoff=cutoff)
    return close[0] if close else None


def nearest_divisors(n: int, wanted: int, count: int = 3) -> str:
    """The divisors of n that lie nearest to `wanted`, as text: "2, 4, 8"."""
    return nearest_of([d for d in range(1, n + 1) if n % d == 0] if n <= 1_000_000 else [1], wanted, count)


def nearest_of(legal: Iterable[int], wanted: int, count: int = 3) -> str:
    """The numbers that lie nearest to `wanted`, as text."""
    near = sorted(sorted(legal, key=lambda d: (abs(d - wanted), d))[:count])
    return ", ".join(map(str, near))
