"""Which tokens of sequences of several documents each position of a ring holds, and which keys go from one to another.

A sequence is cut into equal chunks. Every position gets as many of them, chosen by what attention within documents
costs (MagiAttention, 2025: dispatch by area), so that all attend to about as many keys; a position then needs only the
keys of its own documents. All sequences of a micro-batch are cut alike, by their summed cost. Positions without
documents are those of blocks/attention.py, in zig-zag.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from phalanx.blocks.attention import LEAST_RUN, zigzag_runs
from phalanx.blocks.kinds import block_kinds
from phalanx.config.model import ModelConfig
from phalanx.partition.tensor_slices import window_blocks

CHUNKS = 16
"""Most chunks of a sequence per position: more balance better, and cut more documents."""
Numbers = NDArray[np.int64]
"""The document number of each token of some sequences, (batch, seq): others in the documents before and after it."""
Places = Sequence[Sequence[range]]
"""The tokens of each position of a ring, as ascending runs."""


@dataclass(frozen=True)
class RingBlock:
    """Queries of this rank and keys of one place of the ring that are computed in one call."""

    queries: slice
    keys: slice
    causal: bool = False
    masked: bool = False
    """Documents or windows end within the block."""
    window: int = 0
    """If a window alone ends there: how many keys the last query sees, whose own is the last of a `causal` block."""
    row: slice = field(default_factory=lambda: slice(None))
    """The sequences of the micro-batch that it is of."""


def windowed(queries: slice, keys: slice, rows: range, columns: range, window: int, batch: slice) -> RingBlock:
    """Returns the block of queries at positions `rows` and keys at positions `columns`, before them or up to the same
    end, with a window."""
    block = RingBlock(queries, keys, causal=rows == columns and len(rows) <= window, row=batch)
    if block.causal or (rows.start >= columns.stop - 1 and rows.stop - columns.start <= window):
        return block
    return replace(block, causal=rows.stop == columns.stop, masked=True, window=window - (rows.stop - columns.stop))


def chunks_per_place(tokens: int, ring: int) -> int:
    """Returns the chunks of a sequence of `tokens` tokens that each of `ring` positions gets."""
    return max(n for n in range(1, CHUNKS + 1) if not tokens // ring % n)


def begins_of(numbers: Numbers) -> NDArray[np.bool_]:
    """Returns whether a document begins at each token, (batch, seq)."""
    return np.concatenate((np.ones((len(numbers), 1), np.bool_), np.diff(numbers, axis=1) != 0), axis=1)


def first_tokens(numbers: Numbers) -> Numbers:
    """Returns the position of the first token of each token's document, (batch, seq) as `numbers`."""
    places = np.arange(numbers.shape[1])
    return np.maximum.accumulate(np.where(begins_of(numbers), places, 0), axis=1)


def chunked(numbers: Numbers, size: int) -> Numbers:
    """Returns chunks of `size` tokens as documents, counted from the start of each document."""
    within = np.arange(numbers.shape[1]) - first_tokens(numbers)
    return (within % size == 0).cumsum(axis=1)


def keys_seen(numbers: Numbers, model: ModelConfig) -> Numbers:
    """Returns the keys that each token sees within its document, summed over the layers of a model: (batch, seq)."""
    within = np.arange(numbers.shape[1]) - first_tokens(numbers)
    found = np.zeros_like(within)
    for window, layers in Counter(kind.window for kind in block_kinds(model)).items():
        seen = within % window if window and model.window_kind == "chunks" else within
        found += layers * (np.minimum(seen + 1, window) if window else seen + 1)
    return found


class Assignment(NamedTuple):
    """The chunks of every position of a ring."""

    places: tuple[tuple[range, ...], ...]
    """The tokens of each position, as runs in order."""
    pairs: tuple[int, ...]
    """The pairs of queries and keys of each position, over all sequences and layers."""

    @property
    def imbalance(self) -> float:
        """The most pairs of a position over their mean."""
        return max(self.pairs) * len(self.pairs) / max(1, sum(self.pairs))


def assign(seen: Numbers, ring: int) -> Assignment:
    """Distributes sequences whose tokens see so many keys (`keys_seen`) over the positions of a ring.

    The chunks are dealt from the costliest down, `ring` at a time, of which the position with the least so far gets the
    costliest: all get as many, and the pairs of two positions differ by no more than a chunk's can."""
    tokens = seen.shape[1]
    each = chunks_per_place(tokens, ring)
    costs = seen.sum(0).reshape(each * ring, -1).sum(1)
    owners, loads = np.empty(len(costs), np.int64), np.zeros(ring, np.int64)
    for dealt in np.argsort(-costs, kind="stable").reshape(each, ring):
        order = np.argsort(loads, kind="stable")
        owners[dealt] = order
        loads[order] += costs[dealt]
    size = tokens // len(costs)
    places = (np.repeat(owners, size) == place for place in range(ring))
    return Assignment(tuple(tuple(_runs(np.flatnonzero(mine))) for mine in places), tuple(loads.tolist()))


def pairs_of(seen: Numbers, places: Places) -> Assignment:
    """Returns the pairs of positions that hold given tokens."""
    every = seen.sum(0)
    pairs = (sum(int(every[run.start : run.stop].sum()) for run in runs) for runs in places)
    return Assignment(tuple(map(tuple, places)), tuple(pairs))


def long_tailed(tokens: int, sequences: int = 1, mean: float = 1 / 8) -> Numbers:
    """Returns the documents (sequences, tokens) of an example: log-normal lengths with sigma 1.5, about as of pages of
    the web, with a mean of this share of a sequence; longer ones are cut. Always the same."""
    draw = np.random.default_rng(0)
    lengths = np.exp(1.5 * draw.standard_normal(sequences * (16 + int(8 / mean))) - 1.5**2 / 2) * mean * tokens
    ends = np.cumsum(np.maximum(1, lengths).astype(np.int64))
    numbers = np.searchsorted(ends, np.arange(sequences * tokens), side="right").reshape(sequences, tokens)
    return numbers.astype(np.int64)


def imbalances(model: ModelConfig, ring: int) -> dict[str, float]:
    """Returns the most pairs of a position over their mean in an example of documents, by cost and by position."""
    seen = keys_seen(long_tailed(model.seq_len, 64), model)
    zigzag = [zigzag_runs(model.seq_len, ring, place) for place in range(ring)]
    cuts = [(assign(row, ring), pairs_of(row, zigzag)) for row in np.split(seen, len(seen))]
    means = np.mean([[cut.imbalance for cut in each] for each in cuts], axis=0).tolist()
    return dict(zip(("documents", "position"), means, strict=True))


class DocumentCut:
    """The keys of every other position that the queries of one attend to, in layers with one window (0: none)."""

    def __init__(self, numbers: Numbers, places: Places, place: int, window: int):
        self.places, self.place, self.window = places, place, window
        self.numbers = numbers
        self.owners = np.empty(numbers.shape[1], np.int64)
        self.indices = np.empty_like(self.owners)
        """The position of the ring that holds each token, and the token's index there."""
        for number, runs in enumerate(places):
            held = np.concatenate([np.arange(run.start, run.stop) for run in runs])
            self.owners[held], self.indices[held] = number, np.arange(len(held))
        cut = begins_of(numbers)
        cut[:, 1:] |= np.diff(self.owners) != 0
        self.segments = list[NDArray[np.int64]]()
        """The runs of tokens of one document at one position, (runs, 3) a sequence: start, stop, first key."""
        for row, firsts in zip(cut, first_tokens(numbers), strict=True):
            starts = np.flatnonzero(row)
            lowest = np.maximum(firsts[starts], starts - window + 1) if window else firsts[starts]
            self.segments.append(np.stack((starts, np.append(starts[1:], len(row)), lowest), axis=1))
        needed = [self._needed(each) for each in range(len(places))]
        self.columns = [np.flatnonzero(needed[place] & (self.owners == source)) for source in range(len(places))]
        self.columns[place] = np.flatnonzero(self.owners == place)
        self.keys = [list(_runs(columns)) for columns in self.columns]
        """Positions of the keys that each place sends here, as ascending runs; all of its own."""
        sent = (np.flatnonzero(needed[other] & (self.owners == place)) for other in range(len(places)))
        self.sent = [[slice(run.start, run.stop) for run in _runs(self.indices[keys])] for keys in sent]
        """Indices of the keys here that each place sees."""
        ring = len(places)
        self.hops = tuple(
            hops
            for hops in range(1, ring)
            if any((needed[(source + hops) % ring] & (self.owners == source)).any() for source in range(ring))
        )
        """The distances over which some position sends keys to one after it."""

    @cached_property
    def blocks(self) -> list[list[RingBlock]]:
        """By the place whose keys they are, blocks of queries and keys. Those on the diagonal come first: a query sees
        itself, so that all later blocks find a finite log-sum-exp."""
        found: list[list[RingBlock]] = [[] for _ in self.places]
        for row in range(len(self.segments)):
            mine, batch = self.mine(row), slice(row, row + 1)
            found[self.place][:0] = self._diagonal(mine.tolist(), batch)
            for source, columns in enumerate(self.columns):
                found[source] += self._blocks(mine, columns, batch)
        return found

    def mine(self, row: int) -> Numbers:
        """Returns the runs of this place's queries in a sequence, as `segments`."""
        return self.segments[row][self.owners[self.segments[row][:, 0]] == self.place]

    def _needed(self, place: int) -> NDArray[np.bool_]:
        """Returns the tokens whose keys the queries of a position see in some sequence."""
        depth = np.zeros(len(self.owners) + 1, np.int64)
        for segments in self.segments:
            _, stops, lowest = segments[self.owners[segments[:, 0]] == place].T
            np.add.at(depth, lowest, 1)
            np.add.at(depth, stops, -1)
        return depth[:-1].cumsum() > 0

    def _blocks(self, segments: Numbers, keys: Numbers, batch: slice) -> Iterator[RingBlock]:
        """Yields the blocks of runs of queries with a place's keys that lie before them."""
        first, last = np.searchsorted(keys, segments[:, 2]), np.searchsorted(keys, segments[:, 0])
        for (start, stop, _), low, high in zip(segments.tolist(), first.tolist(), last.tolist(), strict=True):
            index = int(self.indices[start])
            if high > low and not self.window:
                yield RingBlock(slice(index, index + stop - start), slice(low, high), row=batch)
            column = low
            for run in _runs(keys[low:high]) if self.window else ():
                yield from self._windowed(range(start, stop), index, run, column, batch)
                column += len(run)

    def _diagonal(self, segments: list[list[int]], batch: slice) -> Iterator[RingBlock]:
        """Yields the blocks of runs with their own keys; short runs in a row are one block with a mask."""
        number = 0
        while number < len(segments):
            start, stop, _ = segments[number]
            index, number, alone = int(self.indices[start]), number + 1, True
            while number < len(segments) and segments[number][0] == stop and segments[number][1] - start <= LEAST_RUN:
                stop, number, alone = segments[number][1], number + 1, False
            if self.window and stop - start > self.window:
                for block in self._windowed(range(start, stop), index, range(start, stop), index, batch):
                    yield block if alone else replace(block, causal=False, masked=True, window=0)
            else:
                own = slice(index, index + stop - start)
                yield RingBlock(own, own, causal=alone, masked=not alone, row=batch)

    def _windowed(self, queries: range, row: int, keys: range, column: int, batch: slice) -> Iterator[RingBlock]:
        """Yields the blocks within a window of runs of queries and keys, which stand from `row` and `column` on."""
        for rows, columns in window_blocks(queries, keys, self.window):
            places = (
                slice(run.start + offset, run.stop + offset)
                for run, offset in ((rows, row - queries.start), (columns, column - keys.start))
            )
            yield windowed(next(places), next(places), rows, columns, self.window, batch)


def _runs(positions: NDArray[np.int64]) -> Iterator[range]:
    """Yields ascending positions as runs."""
    if len(positions):
        for run in np.split(positions, np.flatnonzero(np.diff(positions) != 1) + 1):
            yield range(int(run[0]), int(run[-1]) + 1)
