"""Integers that ranks contribute to a collective. Every sum is exact, also in bf16, so results are compared exactly."""

from __future__ import annotations

import torch
from torch import Tensor

EXACT = 256
"""bf16 has 8 significant bits: integers up to 256, and sums of them that stay below, are exact."""
EXACT_WIDE = 2**22
"""The same for fp32, with room to spare."""
CONTRIBUTORS = 16
"""Most ranks that contribute to one element: with more, a sum would leave the exact range. Which ranks these are
differs from element to element, so all of them are tested."""


def integers(rank: int, ranks: int, n: int, start: int = 0, *, unit: int = 1, exact: int = EXACT) -> Tensor:
    """Returns elements `start` to `start + n` of a rank's contribution, int64 of shape (n,).

    They are multiples of `unit`, and the sum over the ranks of a group of `ranks` is below `exact`. Raises ValueError
    where there are no such numbers but 0.
    """
    sharers = min(ranks, CONTRIBUTORS)
    count = exact // (sharers * unit)
    if count < 2:
        raise ValueError(f"multiples of {unit} from {sharers} ranks do not stay below {exact}")
    place = torch.arange(start, start + n)
    apart = -(-ranks // CONTRIBUTORS)
    return (7 * place + 13 * rank) % count * unit * ((place + rank) % apart == 0)


def total(ranks: int, n: int, start: int = 0, *, unit: int = 1, exact: int = EXACT) -> Tensor:
    """Returns the sum of all ranks' contributions, int64 of shape (n,)."""
    found = torch.zeros(n, dtype=torch.int64)
    for rank in range(ranks):
        found += integers(rank, ranks, n, start, unit=unit, exact=exact)
    return found


def extreme(ranks: int, n: int, *, largest: bool) -> Tensor:
    """Returns the elementwise maximum or minimum of all ranks' contributions, int64 of shape (n,)."""
    found = integers(0, ranks, n)
    for rank in range(1, ranks):
        other = integers(rank, ranks, n)
        found = torch.maximum(found, other) if largest else torch.minimum(found, other)
    return found
