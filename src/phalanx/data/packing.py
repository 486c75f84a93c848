"""Ranges of tokens, conversations or documents, packed into samples by best fit.

Every rank knows the samples, and the valid tokens of every step, from the lengths alone, without reading or asking."""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass
from typing import Any

import numpy as np

from phalanx.config.job import IGNORE
from phalanx.data.index import token_ids
from phalanx.data.loader import MicroBatch, ShardData, TokenData
from phalanx.errors import DataError


def pack(lengths: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """Packs items of `lengths` (items,), each from 1 to `capacity`, into bins of `capacity`.

    Returns the items in the order of their bins, (items,) int64, and where each bin begins, (bins + 1,) int64: bin b
    holds items[starts[b] : starts[b + 1]]. The result depends on the lengths alone."""
    free: list[int] = []
    """Room that some bin has left, in ascending order, each once."""
    bins_with: dict[int, list[int]] = {}
    bins = 0
    bin_of = np.empty(len(lengths), dtype=np.int64)
    order = np.argsort(-lengths, kind="stable")
    for item, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        place = bisect_left(free, length)
        if place == len(free):
            chosen, room = bins, capacity
            bins += 1
        else:
            room = free[place]
            chosen = bins_with[room].pop()
            if not bins_with[room]:
                del bins_with[room], free[place]
        bin_of[item] = chosen
        if left := room - length:
            if left not in bins_with:
                bins_with[left] = []
                insort(free, left)
            bins_with[left].append(chosen)
    items = np.argsort(bin_of, kind="stable")
    return items, np.searchsorted(bin_of[items], np.arange(bins + 1))


def one_each(items: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the result of `pack` with a bin for each item."""
    return np.arange(items), np.arange(items + 1)


PADDING = 0
"""The token id of padding, which no token of a conversation sees and whose targets do not count."""


@dataclass(frozen=True)
class PackingFacts:
    """The numbers of conversations, or documents, of a split that are used, cut and left out at one sequence length."""

    conversations: int
    """Those of a split, or its documents."""
    truncated: int
    """Conversations that were too long, and lost their end; documents in several parts."""
    dropped: int
    """Conversations that are left out: too long, or without an answer in what is left of them; documents of a token."""
    samples: int
    positions: int
    """Inputs of all samples: samples × seq_len."""
    used: int
    """Those that are not padding."""
    counted: int
    """Those whose target counts in the loss."""
    imbalance: float
    """Pairs of tokens that attend to each other in the sample with most of them, relative to the mean."""
    unpacked: int | None = None
    """Documents that samples without packing would cut; None for conversations."""

    @property
    def efficiency(self) -> float:
        """The share of the positions that is not padding."""
        return self.used / self.positions if self.positions else 0.0

    def line(self) -> str:
        """Returns the facts as `key: value` pairs."""
        what, cut = "conversations", f"truncated: {self.truncated:,}"
        if self.unpacked is not None:
            what, cut = "documents", f"cut: {self.truncated:,} (without packing {self.unpacked:,})"
        return (
            f"{what}: {self.conversations:,}  samples: {self.samples:,}  {cut}  dropped: {self.dropped:,}  "
            f"used: {self.efficiency:.1%} of positions  counted: {self.counted / max(1, self.used):.1%} of used  "
            f"most attention: {self.imbalance:.2f} x mean"
        )


class RangeData(ShardData):
    """Samples of ranges of a split's tokens, one each or several, and padding. A range of n tokens takes n - 1
    positions: its inputs are all but the last token, its targets all but the first."""

    facts: PackingFacts

    def arrange(self, starts: np.ndarray, positions: np.ndarray, counted: np.ndarray, *, packs: bool) -> None:
        """Makes samples of ranges that begin at tokens `starts` of the split and take `positions`, of which `counted`
        targets count in the loss: (ranges,) int64 each. With `packs` by best fit, otherwise one each."""
        items, self._bounds = pack(positions, self.seq_len) if packs else one_each(len(positions))
        self._starts, self._positions, counted = starts[items], positions[items], counted[items]
        self.sample_count = len(self._bounds) - 1
        self.most_conversations = int(np.diff(self._bounds).max())
        self._counted_in = np.add.reduceat(counted, self._bounds[:-1])
        self._used_in = np.add.reduceat(self._positions, self._bounds[:-1])

    def sums(self) -> dict[str, Any]:
        """Returns the facts of the samples as they are arranged."""
        attended = np.add.reduceat(self._positions**2, self._bounds[:-1])
        return {
            "samples": self.sample_count,
            "positions": self.sample_count * self.seq_len,
            "used": int(self._used_in.sum()),
            "counted": int(self._counted_in.sum()),
            "imbalance": float(attended.max() / attended.mean()),
        }

    def inputs_and_targets(self, first: int, positions: int) -> tuple[np.ndarray, np.ndarray]:
        """Reads a range from token `first` of the split on: (positions,) int64 each."""
        stored = self.read(first, positions + 1)
        plain = token_ids(stored, self.index).astype(np.int64)
        return plain[:-1], np.where(self.counts(stored[1:]), plain[1:], IGNORE)

    def counts(self, stored: np.ndarray) -> np.ndarray | bool:
        """Returns which stored tokens (n,) count in the loss as targets."""
        return True

    def valid_tokens(self, first: int, count: int, seed: int) -> int:
        return int(self._counted_in[self.order(first, count, seed)].sum())

    @property
    def tokens_in_pass(self) -> int:
        return self.facts.counted

    def used_positions(self, first: int, count: int, seed: int) -> int:
        return int(self._used_in[self.order(first, count, seed)].sum())

    def micro_batch(self, ids: np.ndarray, numbers: np.ndarray) -> MicroBatch:
        shape = len(ids), self.seq_len
        tokens = np.full(shape, PADDING, dtype=np.int64)
        targets = np.full(shape, IGNORE, dtype=np.int64)
        conversations = np.full(shape, -1, dtype=np.int64)
        for row, sample in enumerate(ids.tolist()):
            place = 0
            for number, item in enumerate(range(self._bounds[sample], self._bounds[sample + 1])):
                end = place + int(self._positions[item])
                inputs = self.inputs_and_targets(int(self._starts[item]), end - place)
                tokens[row, place:end], targets[row, place:end] = inputs
                conversations[row, place:end] = number
                place = end
        self._require_in_vocabulary(max(int(tokens.max(initial=0)), int(targets.max(initial=0))))
        documents = None
        if self.document_mask:  # padding is a document of its own
            documents = np.where(conversations < 0, self.most_conversations, conversations)
        return MicroBatch(
            tokens,
            targets,
            numbers,
            documents,
            conversations=conversations,
            most_conversations=self.most_conversations,
        )


class BestFitDocuments(RangeData):
    """The documents of one split of a text, packed whole into samples by best fit; those longer than a sample are cut
    into parts of seq_len positions and a rest (Ding et al. 2024, "Fewer truncations improve language modeling"). No
    token predicts the first one of another document."""

    document_mask = True

    def __init__(self, text: TokenData):
        super().__init__(text.folder, text.split, text.seq_len)
        starts, seq_len = text.document_starts(), self.seq_len
        tokens = np.diff(np.append(starts, self.tokens))
        parts = -(-(tokens - 1) // seq_len)
        of = np.repeat(np.arange(len(parts)), parts)
        before = (np.arange(len(of)) - np.repeat(np.cumsum(parts) - parts, parts)) * seq_len
        positions = np.minimum(seq_len, (tokens - 1)[of] - before)
        if not len(of):
            raise DataError(f"{self.folder}: no document of split {self.split} has two tokens")
        self.arrange(starts[of] + before, positions, positions, packs=True)
        self.facts = PackingFacts(
            conversations=len(tokens),
            truncated=int((parts > 1).sum()),
            dropped=int((parts == 0).sum()),
            unpacked=int((starts // seq_len < (starts + tokens - 1) // seq_len).sum()),
            **self.sums(),
        )
