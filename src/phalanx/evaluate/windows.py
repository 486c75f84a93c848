"""The context rule: which tokens are read to predict which, so that each token is scored once.

Window k reads the `context` tokens from token k × stride on, or those that are left, and predicts the token after each
of them. It scores the predictions that no window before it scored: all of the first window, the last `stride` of any
other. So the first token of the text is never scored, and every scored token but the first `context` ones has at least
`context` - `stride` + 1 tokens before it. With stride = context, the windows are the samples that training reads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from phalanx.config.job import IGNORE
from phalanx.data.loader import MicroBatch
from phalanx.errors import JobError


@dataclass(frozen=True)
class ContextWindow:
    """One window: it reads `length` tokens from `start` on and scores the last `scored` of its predictions."""

    start: int
    length: int
    scored: int


def windows(tokens: int, context: int, stride: int) -> Iterator[ContextWindow]:
    """Yields the windows over a text of so many tokens, 1 ≤ stride ≤ context."""
    predictions, done, start = tokens - 1, 0, 0
    while done < predictions:
        end = min(start + context, predictions)
        yield ContextWindow(start, end - start, end - done)
        done = end
        start += stride


def count(tokens: int, context: int, stride: int) -> int:
    """Returns the number of windows."""
    predictions = tokens - 1
    return 0 if predictions < 1 else 1 + max(0, -(-(predictions - context) // stride))


def legal_stride(context: int, stride: int, seq_len: int) -> tuple[int, int]:
    """Returns context and stride, where 0 means seq_len and the context. Raises JobError with every problem."""
    context = context or seq_len
    legal = min(max(context, 1), seq_len)
    problems = []
    if not 1 <= context <= seq_len:
        problems.append(f"1 ≤ --context {context} ≤ seq_len {seq_len} does not hold; nearest legal: {legal}")
    stride = stride or legal
    if not 1 <= stride <= legal:
        problems.append(
            f"1 ≤ --stride {stride} ≤ context {legal} does not hold, and tokens between windows would never be "
            f"scored; nearest legal: {min(max(stride, 1), legal)}"
        )
    if problems:
        raise JobError(problems)
    return context, stride


def batches(
    tokens: np.ndarray,
    found: Sequence[ContextWindow],
    *,
    context: int,
    micro_batch: int,
    rank: int = 0,
    ranks: int = 1,
    separator: Sequence[int] = (),
    documents: np.ndarray | None = None,
) -> Iterator[MicroBatch]:
    """Yields the micro-batches of one of `ranks` over the windows of `tokens` (n,).

    Every rank gets the same number of micro-batches, as collectives require. Rows and ends of windows that are padded,
    and predictions that an earlier window scored, have IGNORE as their target. With a `separator`, or the number of
    each token's document in `documents` (n,), micro-batches contain the documents (data.document_mask)."""
    if documents is None and separator:
        documents = _documents(tokens, separator)
    for first in range(0, len(found), ranks * micro_batch):
        own = list(islice(found, first + rank * micro_batch, first + (rank + 1) * micro_batch))
        inputs = np.zeros((micro_batch, context), dtype=np.int64)
        targets = np.full((micro_batch, context), IGNORE, dtype=np.int64)
        numbers = np.zeros((micro_batch, context), dtype=np.int64)
        for row, window in enumerate(own):
            end = window.start + window.length
            inputs[row, : window.length] = tokens[window.start : end]
            scored = slice(window.length - window.scored, window.length)
            targets[row, scored] = tokens[end + 1 - window.scored : end + 1]
            if documents is not None:
                numbers[row, : window.length] = documents[window.start : end] - documents[window.start]
                numbers[row, window.length :] = numbers[row, window.length - 1]
        ids = np.full(micro_batch, -1, dtype=np.int64)
        ids[: len(own)] = first + rank * micro_batch + np.arange(len(own))
        yield MicroBatch(inputs, targets, ids, numbers if documents is not None else None)


def _documents(tokens: np.ndarray, separator: Sequence[int]) -> np.ndarray:
    """Returns the document number of each token, (n,): a document ends with the last token of a separator."""
    ends = np.ones(len(tokens), dtype=np.int64)
    for back, token in enumerate(reversed(separator)):
        matches = tokens == token
        ends &= np.concatenate((np.zeros(min(back, len(tokens)), dtype=bool), matches[: len(tokens) - back]))
    return ends.cumsum() - ends
