"""Samples of conversations: one each, or several packed into one, with the loss on the answers.

A sample is known from the table of lengths beside each shard: which conversations it holds, and how many of its targets
count. So every rank knows the valid tokens of every step without reading or asking, and the shards depend neither on
the sequence length nor on packing.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from phalanx.config.corpora import has_answers
from phalanx.config.job import IGNORE, Data
from phalanx.data.index import ANSWER, read_table, token_ids
from phalanx.data.loader import MicroBatch, ShardData
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
    """The numbers of conversations of a split that are used, cut and left out at one sequence length."""

    conversations: int
    truncated: int
    """Conversations that were too long, and lost their end."""
    dropped: int
    """Conversations that are left out: too long, or without an answer in what is left of them."""
    samples: int
    positions: int
    """Inputs of all samples: samples × seq_len."""
    used: int
    """Those that are not padding."""
    counted: int
    """Those whose target counts in the loss."""

    @property
    def efficiency(self) -> float:
        """The share of the positions that is not padding."""
        return self.used / self.positions if self.positions else 0.0

    def line(self) -> str:
        """Returns the facts as `key: value` pairs."""
        return (
            f"conversations: {self.conversations:,}  samples: {self.samples:,}  truncated: {self.truncated:,}  "
            f"dropped: {self.dropped:,}  used: {self.efficiency:.1%} of positions  "
            f"counted: {self.counted / max(1, self.used):.1%} of used"
        )


class ConversationData(ShardData):
    """The samples of one split of conversations, as data.packing, too_long, loss_on and document_mask say.

    A conversation of n tokens takes n - 1 positions: its inputs are all but the last token, its targets all but the
    first. Raises DataError if the folder is damaged, or if no conversation is left."""

    def __init__(self, folder: Path, split: str, seq_len: int, data: Data, *, verify: bool = False):
        super().__init__(folder, split, seq_len, verify=verify)
        self.document_mask, self.answers_only = data.document_mask, has_answers(data)
        shards = self.index.splits[split]
        tables = [read_table(folder, self.index, shard) for shard in shards]
        tokens, answers = np.concatenate([np.empty((0, 2), dtype=np.int64), *tables]).T
        starts = np.cumsum(tokens) - tokens
        self._positions = np.minimum(tokens - 1, seq_len)
        long = np.flatnonzero(tokens - 1 > seq_len)
        if data.too_long == "truncate":
            for conversation in long:  # the others are not read before they are needed
                kept = self.read(int(starts[conversation]) + 1, seq_len)
                answers[conversation] = np.count_nonzero(kept & ANSWER)
        else:
            answers[long] = 0
        self._starts = starts
        self._counted = answers if self.answers_only else np.where(answers > 0, self._positions, 0)
        usable = np.flatnonzero(self._usable(answers))
        lengths = self._positions[usable]
        items, self._bounds = pack(lengths, seq_len) if data.packing else one_each(len(usable))
        self._items = usable[items]
        self.sample_count = len(self._bounds) - 1
        if not self.sample_count:
            raise DataError(
                f"{folder}: none of the {len(tokens):,} conversations of split {split} has an answer within "
                f"model.seq_len {seq_len}: use a longer sequence, "
                f"{'data.too_long=truncate, ' if data.too_long != 'truncate' else ''}more rows, or another "
                "data.val_fraction"
            )
        self.most_conversations = int(np.diff(self._bounds).max())
        self._counted_in = np.add.reduceat(self._counted[self._items], self._bounds[:-1])
        self._used_in = np.add.reduceat(self._positions[self._items], self._bounds[:-1])
        self.facts = PackingFacts(
            conversations=len(tokens),
            truncated=int(np.isin(long, usable).sum()),
            dropped=len(tokens) - len(usable),
            samples=self.sample_count,
            positions=self.sample_count * seq_len,
            used=int(lengths.sum()),
            counted=int(self._counted_in.sum()),
        )

    def _usable(self, answers: np.ndarray) -> np.ndarray:
        """Returns which conversations (n,) are read, given the tokens of answers that each has: those with any."""
        return answers > 0

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
            for number, item in enumerate(self._items[self._bounds[sample] : self._bounds[sample + 1]].tolist()):
                end = place + int(self._positions[item])
                stored = self.read(int(self._starts[item]), end - place + 1)
                plain = token_ids(stored, self.index)
                tokens[row, place:end] = plain[:-1]
                counts = (stored[1:] & ANSWER > 0) | (not self.answers_only)
                targets[row, place:end] = np.where(counts, plain[1:].astype(np.int64), IGNORE)
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
