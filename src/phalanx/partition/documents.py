"""Which tokens of sequences of several documents each position of a ring holds, and which keys go from one to another.

A sequence is cut into equal chunks. Every position gets as many of them, chosen by what attention within documents
costs (MagiAttention, 2025: dispatch by area), so that all attend to about as many keys; a position then needs only the
keys of its own documents. Where documents are short, positions get whole ones instead, and exchange nothing (dynamic
context parallelism); where only some are, the long ones alone are cut. All sequences of a micro-batch are cut alike, by
their summed cost. Positions without documents are those of blocks/attention.py, in zig-zag.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from phalanx.blocks.attention import LEAST_RUN
from phalanx.blocks.kinds import block, block_kinds
from phalanx.blocks.operator import Place
from phalanx.blocks.parameters import matrix_flops_per_token
from phalanx.config.layout import Layout
from phalanx.config.model import ModelConfig
from phalanx.partition.tensor_slices import cp_coordinates, rank_share, window_blocks

CHUNKS = 16
"""Most chunks of a sequence per position: more balance better, and cut more documents."""
MORE_WORK = 0.05
"""The share of a rank's FLOPs that the fullest rank may have more with whole documents than with chunks by cost."""
FILLING = 8
"""Documents per position, the shortest, that at first fill up what the longer ones leave."""
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
    windows = Counter(kind.window for kind in block_kinds(model)).items()
    return sum((layers * keys_within(numbers, model, window) for window, layers in windows), np.zeros_like(numbers))


def keys_within(numbers: Numbers, model: ModelConfig, window: int) -> Numbers:
    """Returns the keys that each token sees within its document in a layer with a window (0: none): (batch, seq)."""
    within = np.arange(numbers.shape[1]) - first_tokens(numbers)
    seen = within % window if window and model.window_kind == "chunks" else within
    return np.minimum(seen + 1, window) if window else seen + 1


class Assignment(NamedTuple):
    """The tokens of every position of a ring, or of every cp rank."""

    places: tuple[tuple[range, ...], ...]
    """The tokens of each position, as runs in order."""
    pairs: tuple[int, ...]
    """The pairs of queries and keys of each position, over all sequences and layers."""
    whole: bool = False
    """Whether every document is at one position, so that positions exchange nothing."""

    @property
    def imbalance(self) -> float:
        """The most pairs of a position over their mean."""
        return max(self.pairs) * len(self.pairs) / max(1, sum(self.pairs))

    def skips(self, layout: Layout) -> bool:
        """Returns whether cp ranks exchange nothing in attention."""
        return self.whole and len(self.places) == layout.cp


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


def assigned(numbers: Numbers, model: ModelConfig, layout: Layout) -> Assignment:
    """Distributes the documents of a micro-batch: whole over all cp ranks, which then exchange nothing; or else whole,
    or all but the long ones whole, over the positions of the ring; each if the fullest rank's FLOPs exceed those of
    chunks by cost by at most `MORE_WORK`. Otherwise in chunks over the ring. All ranks find the same, from the
    documents alone."""
    seen = keys_seen(numbers, model)
    chunks = assign(seen, layout.ring)
    matrices = _matrices_in_pairs(model) * seen.size
    most = (1 + MORE_WORK) * (matrices + max(chunks.pairs) * layout.ring)
    ways = [(whole_documents, layout.cp), (whole_documents, layout.ring), (mostly_whole, layout.ring)]
    for way, parts in dict.fromkeys(ways):
        found = way(numbers, seen, parts) if parts > 1 else None
        if found and matrices + max(found.pairs) * parts <= most:
            return found
    return chunks


@cache
def _matrices_in_pairs(model: ModelConfig) -> float:
    """Returns the pairs of queries and keys, of the mean layer, whose FLOPs are those of all matrices for a token."""
    kinds = block_kinds(model)
    cores = [each.core for kind in kinds for each in block(Place(model), kind) if each.core]
    matrices = sum(matrix_flops_per_token(model, layer) for layer in range(model.n_layers))
    return matrices * len(cores) / sum(core.flops / core.pairs for core in cores)


def held(layout: Layout, places: Places, rank: int) -> tuple[int, Sequence[range]]:
    """Returns a cp rank's place among `places`, those of the cp ranks or of the ring, and the tokens that it holds."""
    if len(places) == layout.cp:
        return rank, places[rank]
    place = cp_coordinates(layout, rank)[0]
    return place, rank_share(layout, places[place], rank)


def whole_documents(numbers: Numbers, seen: Numbers, parts: int) -> Assignment | None:
    """Distributes whole documents over `parts` positions with as many tokens each; returns None if a document is longer
    than such a part, or no distribution is found.

    The longest are dealt to the position with the fewest pairs so far. Of the shortest some subset then fills each
    position exactly: the fewer these are, the better the balance, and the more, the likelier there is one. Where
    sequences of a micro-batch are cut alike, documents are the runs between tokens at which one begins in each."""
    tokens = numbers.shape[1]
    starts = np.flatnonzero(begins_of(numbers).all(axis=0))
    lengths, costs = np.diff(starts, append=tokens), np.add.reduceat(seen.sum(0), starts)
    order, last = np.argsort(-lengths, kind="stable"), FILLING * parts
    while lengths.max() * parts <= tokens:
        dealt = _dealt(
            lengths[order].tolist(), costs[order].tolist(), parts, tokens // parts, max(0, len(order) - last)
        )
        if dealt:
            owners = np.empty(len(order), np.int64)
            owners[order] = dealt
            held = np.repeat(owners, lengths)
            places = tuple(tuple(_runs(np.flatnonzero(held == place))) for place in range(parts))
            return Assignment(places, tuple(int(costs[owners == place].sum()) for place in range(parts)), whole=True)
        if last >= len(order):
            break
        last *= 2
    return None


def mostly_whole(numbers: Numbers, seen: Numbers, parts: int) -> Assignment:
    """Distributes documents over `parts` positions with as many tokens each, so that few are at several positions: in
    zig-zag those that are longer than such a part, or have more pairs. The others go, the longest first, to the
    position with the fewest pairs so far of those with room; where none has room, a document is cut to fill one."""
    tokens, pairs = numbers.shape[1], seen.sum(0)
    starts = np.flatnonzero(begins_of(numbers).all(axis=0))
    lengths, costs = np.diff(starts, append=tokens), np.add.reduceat(pairs, starts)
    long = np.maximum(lengths * parts / tokens, costs * parts / costs.sum()) > 1
    before, owners = np.append(0, pairs.cumsum()), np.empty(tokens, np.int64)
    rooms, loads, left = [tokens // parts] * parts, [0] * parts, list[tuple[int, int]]()

    def take(place: int, start: int, length: int) -> None:
        owners[start : start + length] = place
        rooms[place] -= length
        loads[place] += int(before[start + length] - before[start])

    for start, length, cut in zip(starts.tolist(), lengths.tolist(), long.tolist(), strict=True):
        chunk = cut * length // (2 * parts)
        for number in range(2 * parts) if chunk else ():
            take(min(number, 2 * parts - 1 - number), start + number * chunk, chunk)
        if rest := length - 2 * parts * chunk:
            heappush(left, (-rest, start + 2 * parts * chunk))
    while left:
        length, start = heappop(left)
        fitting = [place for place in range(parts) if rooms[place] >= -length]
        place = min(fitting, key=loads.__getitem__) if fitting else max(range(parts), key=rooms.__getitem__)
        taken = min(-length, rooms[place])
        take(place, start, taken)
        if taken < -length:
            heappush(left, (length + taken, start + taken))
    places = (tuple(_runs(np.flatnonzero(owners == place))) for place in range(parts))
    return Assignment(tuple(places), tuple(loads))


def _dealt(lengths: list[int], costs: list[int], parts: int, room: int, long: int) -> list[int]:
    """Returns the position of each document, the longest first, of `parts` with `room` tokens each: the first `long` by
    cost, the others by subsets that fill the positions exactly; an empty list if these are not there."""
    rooms, loads, owners = [room] * parts, [0] * parts, [0] * len(lengths)
    for number in range(long):
        fitting = [place for place in range(parts) if rooms[place] >= lengths[number]]
        if not fitting:
            return []
        owners[number] = place = min(fitting, key=loads.__getitem__)
        rooms[place] -= lengths[number]
        loads[place] += costs[number]
    left = list(range(long, len(lengths)))
    for place in sorted(range(parts), key=lambda place: -loads[place]):
        # Bit s of `sums[n]`: whether some of the first n that are left have s tokens together.
        sums, mask, missing = [1], (2 << rooms[place]) - 1, rooms[place]
        for number in left:
            sums.append(sums[-1] | sums[-1] << lengths[number] & mask)
        if not sums[-1] >> missing & 1:
            return []
        skipped = list[int]()
        for number, before in zip(reversed(left), reversed(sums[:-1]), strict=True):
            if before >> missing & 1:
                skipped.append(number)
            else:
                owners[number] = place
                missing -= lengths[number]
        left = skipped[::-1]
    return owners


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
        self.needed = needed = [self._needed(each) for each in range(len(places))]
        """Whether each place sees the keys of each token."""
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

    @property
    def exchanged(self) -> Numbers:
        """The keys that each place sends every other, (from, to); nothing to itself."""
        found = np.array([np.bincount(self.owners[each], minlength=len(self.places)) for each in self.needed]).T
        return np.where(np.eye(len(self.places), dtype=bool), 0, found)

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
