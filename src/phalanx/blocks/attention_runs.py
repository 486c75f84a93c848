"""The runs of queries in which attention is computed block by block, where no fused kernel does it in one."""

from __future__ import annotations

LEAST_RUN = 128
"""Fewest queries that are computed in one call, where there are as many."""
CAPPED_RUNS = 8
"""Runs of queries in which capped or masked scores of whole sequences are computed: an eighth of a sequence sees on
average half of the keys, and a sixteenth more."""
MOST_CAPPED_SCORES = 2**24
"""Most capped scores per sequence, of all heads on a rank, that are in memory at once; longer runs are divided."""
MOST_MASKED = 2**25
"""Most elements per sequence of the mask of a run without a window; longer runs are divided."""
MOST_SCORES = 2**26
"""Most scores of a micro-batch that are in memory at once where they are computed step by step."""
DRAWN = 2
"""Random bytes per element of a dropout mask, which are there for one sequence at a time (model/seeding.py)."""
CAPPED_TENSORS = 3
"""Tensors of capped scores at once in the backward pass: probabilities, their gradient, and the slope of the cap."""


def window_run(window: int, least: int = LEAST_RUN) -> int:
    """Returns the queries of a run with a window: a quarter of it, so that a run reads at most five keys for four that
    a query sees."""
    return max(least, window // 4)


def whole_run(queries: int, keys: int, least: int = LEAST_RUN) -> int:
    """Returns the queries of a run without a window, of `queries` in all, which see up to `keys` keys."""
    return max(1, min(max(least, -(-queries // CAPPED_RUNS)), MOST_MASKED // keys))


def largest_run(seq_len: int, ring: int, window: int, slices: int = 1) -> tuple[int, int]:
    """Returns the queries and the keys of the largest run on a rank, of sequences that a ring cuts (1: no ring) and
    that pass in slices."""
    if window:
        chunk = seq_len if ring == 1 else seq_len // (2 * ring)
        rows = chunk if chunk <= window else min(chunk, window_run(window))
        return rows, min(chunk, rows + window - 1)
    keys, queries = seq_len // ring, seq_len // ring // slices
    return min(queries, whole_run(queries, keys)) if ring == 1 else queries, keys


def capped_scores(heads: int, seq_len: int, ring: int, window: int) -> tuple[int, int]:
    """Returns the queries of the largest run, and the capped scores per sequence that it has in memory at once, on a
    rank with `heads` heads of sequences that a ring cuts (1: no ring)."""
    rows, keys = largest_run(seq_len, ring, window)
    rows = max(1, min(rows, MOST_CAPPED_SCORES // (heads * keys)))
    return rows, heads * rows * keys
