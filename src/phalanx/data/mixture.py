"""A mixture: samples of several prepared folders, drawn by weight.

Global sample numbers are taken in rounds of ROUND. In each round every source has a fixed number of places, in
proportion to its weight, in a keyed order of the round. So the source of a number, and how many samples of that source
came before, are computed from (seed, number) alone: resuming needs one number, and the number of ranks does not matter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from phalanx.data.loader import MicroBatch, ShardData, TokenData
from phalanx.data.order import sample_ids
from phalanx.errors import DataError

ROUND = 1 << 14
"""Samples of a round: the weights hold exactly over each, to one part in this many."""


def shares(weights: Sequence[float]) -> np.ndarray:
    """Returns the places of each source in a round, by largest remainder: (sources,) int64, of sum ROUND. Raises
    DataError for weights that are not positive and finite, or too small for one place."""
    if not weights or not all(math.isfinite(weight) and weight > 0 for weight in weights):
        raise DataError(f"the weights of a mixture are {list(weights)}: expected numbers above 0")
    exact = np.array(weights) / max(weights)
    exact *= ROUND / exact.sum()
    places = np.floor(exact).astype(np.int64)
    places[np.argsort(places - exact, kind="stable")[: ROUND - places.sum()]] += 1
    if not places.all():
        raise DataError(f"the weights of a mixture are {list(weights)}: each must be at least 1/{ROUND} of their sum")
    return places


def draw(first: int, count: int, places: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the source of each of the global sample numbers first .. first+count-1, and its number among that
    source's samples: (count,) int64 each. Every number within a source occurs once."""
    rounds = np.arange(first, first + count, dtype=np.int64) // ROUND
    slots = sample_ids(first, count, ROUND, seed)
    ends = places.cumsum()
    chosen = np.searchsorted(ends, slots, side="right")
    return chosen, rounds * places[chosen] + slots - (ends - places)[chosen]


class MixedData(ShardData):
    """The samples of several sources, by weight. The samples of a source follow those of the source before in number.
    A source is read in its own order, again from its beginning when all its samples were read.

    Raises DataError for bad weights, or sources that differ in tokenizer or sequence length."""

    def __init__(self, sources: Sequence[TokenData], weights: Sequence[float]):
        if not sources or len(sources) != len(weights):
            raise DataError(f"a mixture of {len(sources)} sources has {len(weights)} weights")
        self.sources, self.places = list(sources), shares(weights)
        head = self.sources[0]
        super().__init__(head.folder, head.split, head.seq_len)
        for source in self.sources[1:]:
            same = source.index.tokenizer == head.index.tokenizer and source.document_mask == head.document_mask
            if not same or source.seq_len != head.seq_len:
                raise DataError(
                    f"a mixture of {head.folder} and {source.folder}: expected one tokenizer, one sequence length and "
                    "one document_mask for all sources"
                )
        self.document_mask = head.document_mask
        self._ends = np.cumsum([source.sample_count for source in self.sources])
        self.sample_count = int(self._ends[-1])
        self.tokens = sum(source.tokens for source in self.sources)

    def source_of(self, ids: np.ndarray) -> np.ndarray:
        """Returns the source of each sample: (n,) int64."""
        return np.searchsorted(self._ends, ids, side="right")

    def read(self, first: int, count: int) -> np.ndarray:
        raise ValueError("a mixture has no single stream of tokens; read its sources")

    def order(self, first: int, count: int, seed: int) -> np.ndarray:
        chosen, numbers = draw(first, count, self.places, seed)
        ids = [
            self._start(source) + int(self.sources[source].order(number, 1, seed)[0])
            for source, number in zip(chosen.tolist(), numbers.tolist(), strict=True)
        ]
        return np.array(ids, dtype=np.int64)

    def source_tokens(self, first: int, count: int, seed: int) -> list[int]:
        """Returns the tokens of each source in these global sample numbers."""
        chosen, _ = draw(first, count, self.places, seed)
        return (np.bincount(chosen, minlength=len(self.sources)) * self.seq_len).tolist()

    def valid_tokens(self, first: int, count: int, seed: int) -> int:
        return count * self.seq_len

    def micro_batch(self, ids: np.ndarray, numbers: np.ndarray) -> MicroBatch:
        parts = []
        for row, source in enumerate(self.source_of(ids).tolist()):
            one = slice(row, row + 1)
            parts.append(self.sources[source].micro_batch(ids[one] - self._start(source), numbers[one]))
        documents = [part.documents for part in parts if part.documents is not None]
        return MicroBatch(
            np.concatenate([part.tokens for part in parts]),
            np.concatenate([part.targets for part in parts]),
            numbers,
            np.concatenate(documents) if documents else None,
        )

    def _start(self, source: int) -> int:
        return int(self._ends[source]) - self.sources[source].sample_count
