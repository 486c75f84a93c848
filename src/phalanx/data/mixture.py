"""A mixture: samples of several prepared folders, drawn by weight; and the opening of any split as what it holds.

Global sample numbers are taken in rounds of MIX_ROUND. Each source has a fixed number of places in a round, in
proportion to its weight and as evenly spaced as they can be, so every batch has nearly the weights. The source of a
number, and how many samples of that source came before, follow from the number alone: resuming needs one number, and
the number of ranks does not matter.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType

import numpy as np

from phalanx.config.corpora import CORPORA, MIX_ROUND, PAIR, has_prompts
from phalanx.config.job import Data, MixSource
from phalanx.data.conversations import ConversationData, PreferenceData, PromptData, ScoredPairs
from phalanx.data.index import read_index
from phalanx.data.loader import MicroBatch, ShardData, TokenData
from phalanx.data.megatron import MegatronData
from phalanx.data.packing import BestFitDocuments


@dataclass(frozen=True)
class Rounds:
    """The sources of the places of a round, which repeats for ever."""

    places: np.ndarray
    """(sources,) int64: the places of each, of sum MIX_ROUND."""

    @classmethod
    def of(cls, weights: Sequence[float]) -> Rounds:
        """Returns the round of positive weights, by largest remainder: they hold to one part in MIX_ROUND."""
        exact = np.array(weights, dtype=np.float64) / max(weights)
        exact *= MIX_ROUND / exact.sum()
        places = np.maximum(np.floor(exact).astype(np.int64), 1)
        places[np.argsort(places - exact, kind="stable")[: MIX_ROUND - places.sum()]] += 1
        while places.sum() > MIX_ROUND:  # tiny weights were rounded up to one place
            places[places.argmax()] -= 1
        return cls(places)

    @cached_property
    def _order(self) -> tuple[np.ndarray, np.ndarray]:
        """The source of each place of a round, and its number among that source's places: (MIX_ROUND,) int64 each."""
        source = np.repeat(np.arange(self.places.size), self.places)
        number = np.concatenate([np.arange(count) for count in self.places])
        # Place j of n lies at (2j + 1) / 2n of the round: whole numbers, so that every machine sorts alike.
        when = (2 * number + 1) * MIX_ROUND // (2 * self.places[source])
        order = np.lexsort((source, when))
        return source[order], number[order]

    def draw(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the source of global sample numbers, and the number among that source's samples: (n,) int64 each.
        Every number of a source occurs once."""
        source, number = (table[numbers % MIX_ROUND] for table in self._order)
        return source, numbers // MIX_ROUND * self.places[source] + number

    def drawn(self, end: int) -> np.ndarray:
        """Returns how many of the global sample numbers below `end` are of each source: (sources,) int64."""
        rounds, rest = divmod(end, MIX_ROUND)
        return rounds * self.places + np.bincount(self._order[0][:rest], minlength=self.places.size)


class MixedData(ShardData):
    """The samples of several sources, by weight. The samples of a source follow those of the source before in number.
    A source is read in its own order, and again in another order when all its samples were read. Its samples, or pairs,
    are drawn one by one."""

    def __init__(self, folder: Path, split: str, seq_len: int, mix: Sequence[MixSource], sources: Sequence[ShardData]):
        super().__init__(folder, split, seq_len)
        self.mix, self.sources = mix, sources
        self.rounds = Rounds.of([source.weight for source in mix])
        self.document_mask, self.group = sources[0].document_mask, sources[0].group
        self.most_conversations = max(source.most_conversations for source in sources)
        for source in sources:  # micro-batches of all have one form
            source.most_conversations = self.most_conversations
        self._ends = np.cumsum([source.sample_count for source in sources])
        self.sample_count = int(self._ends[-1])
        self._counted: dict[int, tuple[int, int]] = {}
        """By source: how many of its samples were counted before, and their tokens."""

    def order_of(self, numbers: np.ndarray, seed: int) -> np.ndarray:
        chosen, of_source = self.rounds.draw(numbers // self.group)
        of_source = of_source * self.group + numbers % self.group
        ids = np.empty(numbers.size, dtype=np.int64)
        for which, source in enumerate(self.sources):
            mine = chosen == which
            ids[mine] = self._start(which) + source.order_of(of_source[mine], seed)
        return ids

    def drawn(self, end: int) -> list[int]:
        """Returns how many samples of each source the global sample numbers below `end` are."""
        return (self.group * self.rounds.drawn(end // self.group)).tolist()

    def valid_tokens(self, first: int, count: int, seed: int) -> int:
        return sum(data.valid_tokens(*part, seed) for data, part in self._parts_of(first, count))

    def used_positions(self, first: int, count: int, seed: int) -> int:
        return sum(data.used_positions(*part, seed) for data, part in self._parts_of(first, count))

    def source_tokens(self, end: int, seed: int) -> dict[str, int]:
        for which, (data, drawn) in enumerate(zip(self.sources, self.drawn(end), strict=True)):
            before, tokens = self._counted.get(which, (0, 0))
            passes, before_passes = drawn // data.sample_count, before // data.sample_count
            if before > drawn or passes > before_passes:
                before, tokens = passes * data.sample_count, passes * data.tokens_in_pass
            self._counted[which] = drawn, tokens + data.counted_tokens(before, drawn - before, seed)
        return {source.path: self._counted[which][1] for which, source in enumerate(self.mix)}

    def source_facts(self) -> list[dict[str, float | str]]:
        total = sum(source.weight for source in self.mix)
        return [
            {"path": source.path, "weight": source.weight / total, "tokens": data.tokens_in_pass}
            for source, data in zip(self.mix, self.sources, strict=True)
        ]

    def parts(self, samples: int) -> list[tuple[str, float, ShardData, int]]:
        weights = self.rounds.places / MIX_ROUND
        return [
            (source.path, float(weight), data, min(data.sample_count, max(1, round(samples * float(weight)))))
            for source, weight, data in zip(self.mix, weights, self.sources, strict=True)
        ]

    def epoch_problems(self, samples: int) -> list[str]:
        found = []
        for number, (source, data, drawn) in enumerate(
            zip(self.mix, self.sources, self.drawn(samples), strict=True), start=1
        ):
            most = source.epochs * data.sample_count
            if source.epochs and drawn > most:
                found.append(
                    f"data.mix: item {number} ({source.path}): the run draws {drawn:,} of its samples, which is "
                    f"{drawn / data.sample_count:.2f} passes over its {data.sample_count:,}, and epochs is "
                    f"{source.epochs:g}; nearest legal: epochs={math.ceil(100 * drawn / data.sample_count) / 100:g}, "
                    f"or {most / drawn:.3g} of its share or of train.steps"
                )
        return found

    def micro_batch(self, ids: np.ndarray, numbers: np.ndarray) -> MicroBatch:
        chosen = np.searchsorted(self._ends, ids, side="right")
        rows: list[MicroBatch] = []
        for row, which in enumerate(chosen.tolist()):
            one = slice(row, row + 1)
            rows.append(self.sources[which].micro_batch(ids[one] - self._start(which), numbers[one]))
        return MicroBatch(
            np.concatenate([row.tokens for row in rows]),
            np.concatenate([row.targets for row in rows]),
            numbers,
            _joined([row.documents for row in rows]),
            _joined([row.reference for row in rows]),
            conversations=_joined([row.conversations for row in rows]),
            most_conversations=max(1, self.most_conversations),
        )

    def refer(self, values: np.ndarray) -> None:
        for which, data in enumerate(self.sources):
            data.refer(values[self._start(which) : self._ends[which]])

    def _parts_of(self, first: int, count: int) -> Iterator[tuple[ShardData, tuple[int, int]]]:
        """Yields each source with the first of its samples that these global sample numbers are, and their number."""
        for data, begin, end in zip(self.sources, self.drawn(first), self.drawn(first + count), strict=True):
            yield data, (begin, end - begin)

    def _start(self, which: int) -> int:
        return int(self._ends[which]) - self.sources[which].sample_count


def _joined(rows: Sequence[np.ndarray | None]) -> np.ndarray | None:
    """Returns the rows of a micro-batch as one array; None if they have none."""
    found = [row for row in rows if row is not None]
    return np.concatenate(found) if found else None


NONE: Mapping[Path, Collection[int]] = MappingProxyType({})


def open_split(
    folder: Path,
    split: str,
    seq_len: int,
    data: Data,
    damaged: Mapping[Path, Collection[int]] = NONE,
    *,
    scored: bool = False,
) -> ShardData:
    """Returns the samples of one split of a job's prepared folder; `damaged` are those of each folder of shards that
    are not read; `scored`: pairs are for a reward model. Raises DataError as their class does."""
    index = read_index(folder)
    found: list[ShardData] = []
    for each in index.folders(folder):
        own = read_index(each)
        if own.row_size:
            pairs = ScoredPairs if scored else PreferenceData
            kind = pairs if own.row_size == PAIR else ConversationData
            kind = PromptData if has_prompts(data) else kind
            found.append(kind(each, split, seq_len, data))
        else:
            text = MegatronData if own.elsewhere else TokenData
            of_text = text(each, split, seq_len, document_mask=data.document_mask, damaged=damaged.get(each, ()))
            packs = data.packing and CORPORA[data.corpus].rows is None
            found.append(BestFitDocuments(of_text) if packs else of_text)
    return MixedData(folder, split, seq_len, data.mix, found) if index.sources else found[0]
