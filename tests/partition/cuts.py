"""Every way to cut layers into stages, against which the best cut is compared."""

from collections.abc import Iterator
from itertools import combinations


def every_cut(layers: int, stages: int) -> Iterator[tuple[range, ...]]:
    for ends in combinations(range(1, layers), stages - 1):
        yield tuple(range(a, b) for a, b in zip((0, *ends), (*ends, layers), strict=True))
