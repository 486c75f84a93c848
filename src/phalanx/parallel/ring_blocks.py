"""The blocks of queries and keys that one place of a ring computes with, and what it sends to the others.

Places of the ring have zig-zag parts (blocks/attention.py), so that with a causal mask all compute the same at every
hop.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from phalanx.blocks.attention import reached_runs, sliced_runs
from phalanx.comm.axis import Axis
from phalanx.model.attention_blocks import Seen
from phalanx.model.blocked_attention import Reach
from phalanx.model.noise import Noise, scale
from phalanx.model.window import visible
from phalanx.partition.tensor_slices import window_blocks


@dataclass(frozen=True)
class Dropping:
    """Dropout of attention probabilities."""

    noise: Noise
    p: float
    site: str
    n_heads: int

    def keep(self, queries: Tensor, keys: int) -> Tensor:
        """Returns the mask of kept probabilities of some queries and the first keys: (batch, heads, queries, keys)."""
        whole = self.noise.seq_len or keys
        places = queries, torch.arange(keys, device=queries.device)
        return self.noise.keep_heads(self.p, self.site, self.n_heads, (whole, whole), queries.device, places)


@dataclass(frozen=True)
class RingBlock:
    """Queries of this rank and keys of one place of the ring that are computed in one call."""

    queries: slice
    keys: slice
    causal: bool = False
    masked: bool = False
    """Documents or windows end within the block."""


def zigzag(place: int, source: int, tokens: int, earlier: int) -> list[RingBlock]:
    """Returns the blocks of the `tokens` queries of a place of the ring with the keys of place `source`: as many, after
    `earlier` keys of earlier slices of the sequence, which all queries see.

    Of two places that share a sequence in zig-zag, all of the later one's queries see the first half of the other's
    keys, and the second half of the earlier one's queries see all keys: in both cases half of all pairs."""
    everything, half, last = slice(tokens), tokens // 2, earlier + tokens
    if source == place:
        blocks = [RingBlock(everything, slice(earlier, last), causal=True)]
        return [*blocks, RingBlock(everything, slice(earlier))] if earlier else blocks
    if source < place:
        return [RingBlock(everything, slice(earlier + half))]
    blocks = [RingBlock(slice(half, tokens), slice(last))]
    return [*blocks, RingBlock(slice(half), slice(earlier))] if earlier else blocks


class Sight:
    """The visibility of every place's keys to one rank's queries, and with a window the keys that places send each
    other."""

    def __init__(self, ring: Axis, tokens: int, slices: int, reach: Reach, dropping: Dropping | None):
        self.ring, self.dropping, self.tokens, self.slices = ring, dropping, tokens, slices
        self.window, self.documents, self.scoring = reach.window, reach.documents, reach.scoring
        self.queries = self._own_keys()[-2:]
        """Positions of this rank's queries, as two runs."""
        places = range(ring.size)
        if self.window:
            self.keys = [self._reached(ring.rank, source) for source in places]
            self.keys[ring.rank] = self._own_keys()
            self.blocks = [self._within_window(source) for source in places]
        else:
            self.keys = [sliced_runs(tokens * ring.size, ring.size, source, slices) for source in places]
            self.blocks = [zigzag(ring.rank, source, tokens, (slices - 1) * tokens) for source in places]
        """Positions of the keys that a place sends here, as runs, and their blocks, both by the place."""
        if self.documents is not None:
            if not self.window:
                self.blocks = [_halved(blocks, tokens // 2) for blocks in self.blocks]
            self.blocks = self._within_documents()

    def keys_for(self, place: int) -> list[slice]:
        """Returns the indices of this rank's keys that a place sees, as slices; some may be empty."""
        indices, start = [], 0
        for own, run in zip(self._own_keys(), self._reached(place, self.ring.rank), strict=True):
            indices.append(_part(slice(start, start + len(own)), own, run))
            start += len(own)
        return indices

    def arriving(self, source: int) -> int:
        """Returns the number of keys that a place sends here."""
        return sum(map(len, self.keys[source]))

    def keep(self, device: torch.device) -> Tensor | None:
        """Returns which probabilities dropout keeps, (batch, heads, queries, all places' keys by position), if any."""
        if self.dropping is None:
            return None
        return self.dropping.keep(_positions(self.queries, device), self.slices * self.tokens * self.ring.size)

    def seen(self, source: int, block: RingBlock, keep: Tensor | None, device: torch.device) -> Seen:
        """Returns which keys of one block its queries see."""
        mask = None
        if block.masked:
            mask = visible(*self._positions(source, block, device), self.window, self.documents)
            mask = mask.view(-1, 1, *mask.shape[-2:])
        causal = block.causal and mask is None
        if keep is None or self.dropping is None:
            return Seen(causal, mask)
        keep = keep[:, :, block.queries][..., _positions(self.keys[source], device)[block.keys]]
        return Seen(causal, mask, keep, scale(self.dropping.p))

    def _within_window(self, source: int) -> list[RingBlock]:
        """Returns the blocks inside the window, each of one run of queries and one of keys. The diagonal comes first: a
        query sees itself, so that all later blocks find a finite log-sum-exp."""
        diagonal, others, start = list[RingBlock](), list[RingBlock](), 0
        for keys in self.keys[source]:
            for number, queries in enumerate(self.queries):
                for rows, columns in window_blocks(queries, keys, self.window):
                    causal = rows == columns and len(rows) <= self.window
                    every = rows.start >= columns.stop - 1 and rows.stop - columns.start <= self.window
                    of_queries = _part(slice(number * len(queries), (number + 1) * len(queries)), queries, rows)
                    of_keys = _part(slice(start, start + len(keys)), keys, columns)
                    block = RingBlock(of_queries, of_keys, causal=causal, masked=not (causal or every))
                    (diagonal if queries == keys else others).append(block)
            start += len(keys)
        return diagonal + others

    def _within_documents(self) -> list[list[RingBlock]]:
        """Returns the blocks in which queries and keys share documents, marked where these differ within a block."""
        masks = (self._same(source, block) for source, blocks in enumerate(self.blocks) for block in blocks)
        # One wait for the device, not one a block.
        verdicts = iter(torch.stack([torch.stack([same.any(), same.all()]) for same in masks]).tolist())
        judged = [[(block, *next(verdicts)) for block in blocks] for blocks in self.blocks]
        return [
            [replace(block, masked=block.masked or not every) for block, some, every in blocks if some]
            for blocks in judged
        ]

    def _same(self, source: int, block: RingBlock) -> Tensor:
        """Returns where queries and keys of a block are of one document, (batch, queries, keys)."""
        assert self.documents is not None
        numbers = self.documents.numbers
        queries, keys = self._positions(source, block, numbers.device)
        return numbers[:, queries, None] == numbers[:, None, keys]

    def _positions(self, source: int, block: RingBlock, device: torch.device) -> tuple[Tensor, Tensor]:
        """Returns the positions of a block's queries and of its keys."""
        return _positions(self.queries, device)[block.queries], _positions(self.keys[source], device)[block.keys]

    def _own_keys(self) -> list[range]:
        """Returns the positions of this rank's keys as runs: two per slice of the sequences."""
        return sliced_runs(self.tokens * self.ring.size, self.ring.size, self.ring.rank, self.slices)

    def _reached(self, place: int, source: int) -> list[range]:
        """Returns the positions of the keys of `source` that a place sees, as runs, some of which may be empty."""
        return reached_runs(self.tokens * self.ring.size, self.ring.size, self.slices, self.window, place, source)


def _positions(runs: list[range], device: torch.device) -> Tensor:
    return torch.cat([torch.arange(run.start, run.stop, device=device) for run in runs])


def _part(block: slice, positions: range, run: range) -> slice:
    """Returns the indices within a block of a run of its positions."""
    return slice(block.start + run.start - positions.start, block.start + run.stop - positions.start)


def _halved(blocks: list[RingBlock], half: int) -> list[RingBlock]:
    """Splits blocks into parts of one chunk of queries and one of keys. The diagonal comes first: a query sees itself,
    so that all later parts find a finite log-sum-exp."""
    halves = []
    for block in blocks:
        for i, queries in enumerate(_steps(block.queries, half)):
            for j, keys in enumerate(_steps(block.keys, half)):
                if not block.causal or j <= i:
                    halves.append(RingBlock(queries, keys, causal=block.causal and i == j))
    return sorted(halves, key=lambda piece: not piece.causal)


def _steps(run: slice, length: int) -> Iterator[slice]:
    return (slice(start, start + length) for start in range(run.start or 0, run.stop, length))
