"""How keys and values reach the places of a ring, and how their gradients return.

Both ways yield every place's keys in an order in which a place sends and gets one message at a time, and all ranks make
the same calls.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from phalanx.blocks.attention import ring_hops
from phalanx.comm.axis import Axis, Pending
from phalanx.parallel.ring_blocks import Sight


class Travel(Protocol):
    """The messages of one pass through a layer."""

    def arriving(self) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yields places with their keys and values, (batch, kv_heads, keys, size), this rank's own first. The next ones
        are in flight while the caller uses these."""
        ...

    def give_back(self, source: int, gradients: Tensor) -> None:
        """Takes this rank's contribution to the gradients of the keys and values of `source`, both in one buffer. Each
        place's follows its keys and values, before the next ones."""
        ...

    def collected(self) -> tuple[Tensor, Tensor]:
        """Returns the gradients of this rank's keys and values, after all contributions."""
        ...


def travel(sight: Sight, k: Tensor, v: Tensor) -> Travel:
    """Returns the way of this rank's keys `k` and values `v`: around the ring, or with a window straight to the places
    that see them."""
    return Straight(sight, k, v) if sight.window else Around(sight.ring, k, v)


def pair(k: Tensor, v: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Returns a buffer for keys and values of the shapes of `k` and `v`, or for their gradients, in one message, and
    its two parts."""
    return _split(torch.empty(k.numel() + v.numel(), dtype=dtype, device=k.device), k.shape, v.shape)


def _split(both: Tensor, k: torch.Size, v: torch.Size) -> tuple[Tensor, Tensor, Tensor]:
    return both, both[: k.numel()].view(k), both[k.numel() :].view(v)


class Around:
    """All keys and values travel around the ring. Their gradients follow them, accumulate every rank's contribution,
    and reach the owner, which has kept its own, with the last hop."""

    def __init__(self, ring: Axis, k: Tensor, v: Tensor):
        self.ring, self.k, self.v = ring, k, v
        self.home: Tensor | None = None
        self.moving: tuple[Pending, Tensor] | None = None

    def arriving(self) -> Iterator[tuple[int, Tensor, Tensor]]:
        ring, source = self.ring, self.ring.rank
        here, keys, values = pair(self.k, self.v, self.k.dtype)
        keys.copy_(self.k)
        values.copy_(self.v)
        for _ in range(ring.size - 1):
            there, next_keys, next_values = pair(self.k, self.v, self.k.dtype)
            moving = ring.rotate(there, here)
            yield source, keys, values
            moving.wait()
            source = (source - 1) % ring.size
            here, keys, values = there, next_keys, next_values
        yield source, keys, values

    def give_back(self, source: int, gradients: Tensor) -> None:
        if source == self.ring.rank:
            self.home = gradients
            return
        self._take_in(gradients)
        received = torch.empty_like(gradients)
        self.moving = self.ring.rotate(received, gradients), received

    def collected(self) -> tuple[Tensor, Tensor]:
        assert self.home is not None, "a ring's first keys are its own"
        self._take_in(self.home)
        _, of_k, of_v = _split(self.home, self.k.shape, self.v.shape)
        return of_k, of_v

    def _take_in(self, gradients: Tensor) -> None:
        """Adds the contributions of the earlier ranks to the gradients of a block."""
        if self.moving is not None:
            pending, received = self.moving
            pending.wait()
            gradients += received


class Straight:
    """With a window a place sends its last keys and values straight to the few places that see them, and their
    gradients come straight back. To the others it sends nothing."""

    def __init__(self, sight: Sight, k: Tensor, v: Tensor):
        self.sight, self.ring, self.k, self.v = sight, sight.ring, k, v
        self.hops = ring_hops(sight.tokens * self.ring.size, self.ring.size, sight.slices, sight.window)
        self.home: tuple[Tensor, Tensor] | None = None
        self.moving: tuple[Pending, tuple[Tensor, Tensor, Tensor], list[slice]] | None = None

    def arriving(self) -> Iterator[tuple[int, Tensor, Tensor]]:
        source, keys, values = self.ring.rank, self.k, self.v
        for hops in self.hops:
            after, before = self._places(hops)
            columns = self.sight.keys_for(after)
            sent, *parts = pair(*self._sized(sum(run.stop - run.start for run in columns)), self.k.dtype)
            for part, whole in zip(parts, (self.k, self.v), strict=True):
                torch.cat([whole[:, :, run] for run in columns], dim=2, out=part)
            received, next_keys, next_values = pair(*self._sized(self.sight.arriving(before)), self.k.dtype)
            moving = self.ring.shift(received, sent, hops)
            yield source, keys, values
            moving.wait()
            source, keys, values = before, next_keys, next_values
        yield source, keys, values

    def give_back(self, source: int, gradients: Tensor) -> None:
        if source == self.ring.rank:
            self.home = _split(gradients, self.k.shape, self.v.shape)[1:]
            return
        self._take_in()
        hops = (self.ring.rank - source) % self.ring.size
        columns = self.sight.keys_for(self._places(hops)[0])
        received = pair(*self._sized(sum(run.stop - run.start for run in columns)), gradients.dtype)
        self.moving = self.ring.shift(received[0], gradients, -hops), received, columns

    def collected(self) -> tuple[Tensor, Tensor]:
        assert self.home is not None, "a place's first keys are its own"
        self._take_in()
        of_k, of_v = self.home
        return of_k, of_v

    def _places(self, hops: int) -> tuple[int, int]:
        """Returns the places so far after this one, and before it."""
        return (self.ring.rank + hops) % self.ring.size, (self.ring.rank - hops) % self.ring.size

    def _sized(self, keys: int) -> tuple[Tensor, Tensor]:
        """Returns keys and values in the shape of `keys` of them."""
        k, v = (x[:, :, :1].expand(-1, -1, keys, -1) for x in (self.k, self.v))
        return k, v

    def _take_in(self) -> None:
        """Adds the contributions that a place has sent to the gradients of the keys that it got from here."""
        if self.moving is None:
            return
        pending, (_, *parts), columns = self.moving
        pending.wait()
        assert self.home is not None
        for whole, part in zip(self.home, parts, strict=True):
            start = 0
            for run in columns:
                length = run.stop - run.start
                whole[:, :, run] += part[:, :, start : start + length]
                start += length
