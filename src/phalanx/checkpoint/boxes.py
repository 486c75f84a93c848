"""Boxes, the rectangular parts of tensors, as pure arithmetic. Imports no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod

MOST_DIVIDED = 4
"""Most dimensions along which boxes divide a tensor. Layouts divide at most three, those of an expert's weight."""


@dataclass(frozen=True)
class Box:
    """A rectangular part of a tensor."""

    offsets: tuple[int, ...]
    """The first index of the box along each dimension of the whole tensor."""
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, shape: Sequence[int]) -> Box:
        """Returns the box that is all of a tensor of `shape`."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def elements(self) -> int:
        return prod(self.sizes)

    def fits(self, shape: Sequence[int]) -> bool:
        """Returns whether the box lies within a tensor of `shape`."""
        bounds = zip(self.offsets, self.sizes, shape, strict=False)
        return len(self.offsets) == len(self.sizes) == len(shape) and all(
            offset >= 0 and size >= 0 and offset + size <= whole for offset, size, whole in bounds
        )

    def moved(self, dim: int, by: int, size: int) -> Box:
        """Returns the box `by` indices further along `dim`, with another size there."""
        offsets, sizes = list(self.offsets), list(self.sizes)
        offsets[dim] += by
        sizes[dim] = size
        return replace(self, offsets=tuple(offsets), sizes=tuple(sizes))

    def intersection(self, other: Box) -> Box | None:
        """Returns the box that both have in common, or None if that is empty."""
        offsets, sizes = [], []
        for mine, n, theirs, m in zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True):
            first, end = max(mine, theirs), min(mine + n, theirs + m)
            if end <= first:
                return None
            offsets.append(first)
            sizes.append(end - first)
        return Box(tuple(offsets), tuple(sizes))

    def within(self, outer: Box) -> tuple[slice, ...]:
        """Returns the indices of this box in a tensor that holds `outer` only."""
        places = zip(self.offsets, self.sizes, outer.offsets, strict=True)
        return tuple(slice(offset - first, offset - first + size) for offset, size, first in places)

    def key(self, tensor: str, shape: Sequence[int]) -> str:
        """Returns the name of the box in a shard file: the tensor's own name for a whole tensor, otherwise the name
        with the box's indices, such as "head.weight[0:8,0:16]"."""
        if self == Box.of(shape):
            return tensor
        places = zip(self.offsets, self.sizes, strict=True)
        return f"{tensor}[{','.join(f'{offset}:{offset + size}' for offset, size in places)}]"


def tiles(boxes: Sequence[Box], shape: Sequence[int]) -> bool:
    """Returns whether boxes hold every element of a tensor of `shape` exactly once, in time linear in their number.

    The number of boxes that hold an element is a function on the grid. Its mixed difference along all dimensions is not
    zero only at the corners of boxes, where it is the sum of their signs, and determines the function. So the boxes
    tile the tensor exactly if their corners add up to those of the whole. Boxes that divide more than MOST_DIVIDED
    dimensions are never said to tile."""
    if not all(box.fits(shape) for box in boxes) or sum(box.elements for box in boxes) != prod(shape):
        return False
    divided = [dim for dim, size in enumerate(shape) if any(box.sizes[dim] != size for box in boxes if box.elements)]
    if len(divided) > MOST_DIVIDED:
        return False
    corners: Counter[tuple[int, ...]] = Counter()
    for sign, box in [(-1, Box.of(shape)), *((1, box) for box in boxes)]:
        if box.elements:
            edges = [((box.offsets[dim], 1), (box.offsets[dim] + box.sizes[dim], -1)) for dim in divided]
            for corner in product(*edges):
                corners[tuple(place for place, _ in corner)] += sign * prod(edge for _, edge in corner)
    return not any(corners.values())


def flat_boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """Yields the boxes that make up elements `start` to `stop` - 1 of a flattened tensor of `shape`, in their order: at
    most 2 × dimensions - 1 of them, each contiguous in the flattened tensor."""
    if stop <= start:
        return
    if not shape:
        yield Box((), ())
        return
    inner = tuple(shape[1:])
    row = prod(inner)
    first, last = -(-start // row), stop // row
    if first > last:  # all within one row
        yield from _in_row(inner, first - 1, start, stop)
        return
    if start < first * row:
        yield from _in_row(inner, first - 1, start, first * row)
    if first < last:
        yield Box((first, *(0 for _ in inner)), (last - first, *inner))
    if last * row < stop:
        yield from _in_row(inner, last, last * row, stop)


def _in_row(inner: tuple[int, ...], number: int, start: int, stop: int) -> Iterator[Box]:
    row = prod(inner)
    for box in flat_boxes(inner, start - number * row, stop - number * row):
        yield Box((number, *box.offsets), (1, *box.sizes))
