"""Runs of queries in which attention is computed block by block."""

from __future__ import annotations

import pytest

from phalanx.blocks.attention import LEAST_RUN, MOST_MASKED, largest_run, whole_run


@pytest.mark.parametrize(
    ("queries", "keys", "run"),
    [(100, 100, LEAST_RUN), (4096, 4096, 512), (4096, 8192, 512), (2**15, 2**15, 1024), (2**26, 2**26, 1)],
)
def test_a_run_is_an_eighth_of_the_queries_and_its_mask_is_bounded(queries, keys, run):
    assert whole_run(queries, keys) == run
    assert run * min(keys, MOST_MASKED) <= MOST_MASKED


@pytest.mark.parametrize(
    ("seq_len", "ring", "window", "largest"),
    [
        (100, 1, 0, (100, 100)),
        (4096, 1, 0, (512, 4096)),
        (4096, 2, 0, (2048, 2048)),
        (4096, 1, 1024, (256, 1279)),
        (4096, 2, 1024, (1024, 1024)),
    ],
)
def test_the_largest_run_has_the_most_keys(seq_len, ring, window, largest):
    assert largest_run(seq_len, ring, window) == largest
