"""What attention within documents computes and sends, for predictions: means over the micro-batches of a sample of
documents, which cp ranks share as training does (partition/documents.py)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from phalanx.blocks.attention import CAPPED_RUNS, visible_pairs, zigzag_runs
from phalanx.blocks.kinds import block_kinds
from phalanx.blocks.operator import DocumentWork, RingCounts, WindowWork
from phalanx.config.layout import Layout
from phalanx.config.model import ModelConfig
from phalanx.hashed import Hashed, hashed_once
from phalanx.partition.derived import slices_of
from phalanx.partition.documents import (
    Assignment,
    DocumentCut,
    Numbers,
    assigned,
    begins_of,
    chunked,
    keys_seen,
    keys_within,
    long_tailed,
    pairs_of,
)
from phalanx.partition.tensor_slices import cut_by_position

MEANS = {"long": 1 / 8, "short": 1 / 64}
"""The mean lengths of examples of documents, in sequences."""
SAMPLED, SAMPLED_TOKENS = (8, 32), 2**20
"""Fewest and most sequences of a sample of documents, and the tokens from which on it has fewer than the most."""
SUMS = 256
"""Sums of micro-batches that are drawn from a sample, and the most micro-batches of one."""


@hashed_once
@dataclass(frozen=True)
class DocumentSample(Hashed):
    """The documents of some sequences, one after another, from which predictions take their means."""

    lengths: tuple[int, ...] = ()
    """Tokens of each, cut where sequences end; none: not known, and attention counts as in whole sequences."""

    @classmethod
    def of(cls, numbers: Numbers) -> DocumentSample:
        """Returns the documents of sequences."""
        return cls(tuple(np.diff(np.flatnonzero(begins_of(numbers)), append=numbers.size).tolist()))

    @classmethod
    def example(cls, seq_len: int, mean: float) -> DocumentSample:
        """Returns documents of log-normal lengths (`long_tailed`), `mean` tokens on average."""
        return cls.of(long_tailed(seq_len, sampled(seq_len), mean / seq_len))

    def numbers(self, seq_len: int) -> Numbers:
        """Returns them as numbers of the tokens of sequences."""
        return _numbers(self, seq_len)

    def share_of_pairs(self, model: ModelConfig) -> float:
        """Returns the pairs of a query and a key that they leave, of those of whole sequences."""
        rows = self.numbers(model.seq_len)
        return float(keys_seen(rows, model).sum() / keys_seen(np.zeros_like(rows[:1]), model).sum() / len(rows))


def sampled(seq_len: int) -> int:
    """Returns the sequences of a sample of documents."""
    return max(SAMPLED[0], min(SAMPLED[1], SAMPLED_TOKENS // seq_len))


@lru_cache(4)
def _numbers(sample: DocumentSample, seq_len: int) -> Numbers:
    every = np.repeat(np.arange(len(sample.lengths)), sample.lengths)
    return every[: len(every) // seq_len * seq_len].reshape(-1, seq_len)


def document_work(
    model: ModelConfig,
    layout: Layout,
    sequences: int,
    sample: DocumentSample | None,
    *,
    kernel: bool = True,
    waits: int = 1,
) -> DocumentWork | None:
    """Returns what attention within the documents of a sample computes and sends, in micro-batches of `sequences`; None
    where it is that of whole sequences. `kernel`: whether one gets documents as runs of tokens, and computes no others'
    pairs, on ranks that have whole sequences. Data ranks wait for the one with most pairs after every `waits`
    micro-batches."""
    if not sample or not sample.lengths or slices_of(layout) > 1:
        return None
    by_position = bool(cut_by_position(model, layout))
    if by_position and layout.ring > 1:
        return None
    degrees = Layout(cp=layout.cp, cp_ulysses=layout.cp_ulysses, cp_balance="position" if by_position else "auto")
    work, pairs = _work(model, degrees, sequences, sample, kernel)
    most = most_of(pairs, layout.data_ranks, waits)
    return work._replace(windows=tuple(each._replace(pairs=most * each.pairs) for each in work.windows))


@lru_cache(4096)
def most_of(pairs: tuple[float, ...], ranks: int, summed: int) -> float:
    """Returns the expected most of `ranks` ranks over their mean, each with a sum of `summed` draws of `pairs`: of
    sorted sums, the share ((i + 1) / n) ** ranks - (i / n) ** ranks of the largest is the i-th of n."""
    drawn = np.array(pairs)
    if summed > 1:
        drawn = np.random.default_rng(0).choice(drawn, (SUMS, min(summed, SUMS))).mean(axis=1)
    below = np.linspace(0, 1, len(drawn) + 1) ** ranks
    return float(np.sort(drawn) @ np.diff(below) / drawn.mean())


@lru_cache(1024)
def _work(
    model: ModelConfig, layout: Layout, sequences: int, sample: DocumentSample, kernel: bool
) -> tuple[DocumentWork, tuple[float, ...]]:
    """Returns it without waiting, and the pairs of each micro-batch, over all layers."""
    every, windows = _cuts(model, layout, sequences, sample), list[WindowWork]()
    pairs: NDArray[np.float64] = np.zeros(len(every))
    for window, layers in Counter(kind.window for kind in block_kinds(model)).items():
        own, ring = _of_window(model, layout, every, window, kernel)
        windows.append(WindowWork(window, float(np.mean(own)), ring))
        pairs = pairs + layers * np.array(own)
    exchanged = float(np.mean([layout.cp > 1 and not cut.skips(layout) for _, cut in every]))
    return DocumentWork(tuple(windows), exchanged), tuple(pairs.tolist())


@lru_cache(128)
def _cuts(
    model: ModelConfig, layout: Layout, sequences: int, sample: DocumentSample
) -> tuple[tuple[Numbers, Assignment], ...]:
    """Returns the documents of micro-batches, and how cp ranks share them."""
    rows = sample.numbers(model.seq_len)
    each = min(sequences, len(rows))
    micros = (rows[first : first + each] for first in range(0, len(rows) - each + 1, each))
    if layout.cp_balance == "position":
        zigzag = [zigzag_runs(model.seq_len, layout.ring, place) for place in range(layout.ring)]
        return tuple((micro, pairs_of(keys_seen(micro, model), zigzag)) for micro in micros)
    return tuple((micro, assigned(micro, model, layout)) for micro in micros)


def _of_window(
    model: ModelConfig, layout: Layout, every: Sequence[tuple[Numbers, Assignment]], window: int, kernel: bool
) -> tuple[list[float], tuple[RingCounts, ...]]:
    """Returns the pairs of the fullest rank in each micro-batch, and what each position of the ring exchanges, in
    layers with one window."""
    pairs, counts = list[float](), np.zeros((layout.ring, 4))
    for numbers, cut in every:
        parts, fullest = len(cut.places), int(np.argmax(cut.pairs))
        if parts == 1 and not kernel:  # runs of queries, with a mask of the keys up to their last
            runs = 1 if window else 1 + 1 / CAPPED_RUNS
            pairs.append(runs * visible_pairs(range(model.seq_len), window) / layout.cp)
            continue
        own = pairs_of(keys_within(numbers, model, window), cut.places[fullest : fullest + 1]).pairs[0]
        pairs.append(own / len(numbers) * parts / layout.cp)
        if parts == layout.ring > 1 and not cut.whole:
            chunks = window and model.window_kind == "chunks"
            sent = DocumentCut(chunked(numbers, window) if chunks else numbers, cut.places, 0, window).exchanged
            counts += np.stack([each for keys in (sent, sent.T) for each in (keys.sum(1), (keys > 0).sum(1))], axis=1)
    ring = tuple(RingCounts(*map(float, each)) for each in counts / len(every))
    return pairs, ring


def imbalances(model: ModelConfig, layout: Layout, sequences: int, sample: DocumentSample) -> dict[str, float]:
    """Returns the most pairs of a rank over their mean in a sample of documents, by cost and by position, and the share
    of its micro-batches of `sequences` that exchange nothing."""
    by_cost, zigzag = (_cuts(model, replace(layout, cp_balance=by), sequences, sample) for by in ("auto", "position"))
    both = zip(by_cost, zigzag, strict=True)
    every = [(cut.imbalance, other.imbalance, cut.skips(layout)) for (_, cut), (_, other) in both]
    return dict(zip(("documents", "position", "skipped"), map(float, np.mean(every, axis=0)), strict=True))
