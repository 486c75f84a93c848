"""The context rule: each token but the first is scored once, with the stated context."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.config.job import IGNORE
from phalanx.errors import JobError
from phalanx.evaluate.text import batches, count, legal_stride, windows

SIZES = st.tuples(st.integers(0, 60), st.integers(1, 12), st.integers(1, 12)).filter(lambda each: each[2] <= each[1])


@given(SIZES)
def test_each_token_is_scored_once_with_the_context_that_the_stride_leaves(sizes):
    tokens, context, stride = sizes
    scored = {}
    found = list(windows(tokens, context, stride))
    for number, window in enumerate(found):
        assert window.start == number * stride
        assert window.length <= context
        for place in range(window.start + window.length - window.scored, window.start + window.length):
            assert place + 1 not in scored
            scored[place + 1] = place + 1 - window.start
    assert set(scored) == set(range(1, tokens))
    assert len(found) == count(tokens, context, stride)
    assert all(before >= min(token, context - stride + 1) for token, before in scored.items())


@given(SIZES, st.integers(1, 3), st.integers(1, 3))
def test_all_ranks_together_have_every_target_in_equally_many_batches(sizes, micro_batch, ranks):
    tokens, context, stride = sizes
    text = np.arange(tokens) + 5
    found = list(windows(tokens, context, stride))
    options = {"context": context, "micro_batch": micro_batch, "ranks": ranks}
    made = [list(batches(text, found, rank=rank, **options)) for rank in range(ranks)]
    assert len({len(each) for each in made}) == 1
    targets = [micro.targets[micro.targets != IGNORE] for each in made for micro in each]
    assert sorted(np.concatenate([*targets, np.empty(0, np.int64)]).tolist()) == text[1:].tolist()
    for micro in (micro for each in made for micro in each):
        scored = micro.targets != IGNORE
        assert np.array_equal(micro.tokens[scored] + 1, micro.targets[scored])


def test_documents_are_numbered_from_each_windows_first():
    text = np.array([3, 9, 9, 4, 9, 5, 9, 9, 6])  # separator 9 9
    found = list(windows(len(text), 4, 4))
    micro = next(batches(text, found, context=4, micro_batch=2, separator=(9, 9)))
    assert micro.documents is not None
    assert micro.documents.tolist() == [[0, 0, 0, 1], [0, 0, 0, 0]]
    assert next(batches(text, found, context=4, micro_batch=2)).documents is None


def test_illegal_windows_are_refused_with_the_nearest_legal_ones():
    assert legal_stride(0, 0, 16) == (16, 16)
    assert legal_stride(8, 2, 16) == (8, 2)
    with pytest.raises(JobError, match=r"1 ≤ --context 20 ≤ seq_len 16 does not hold; nearest legal: 16"):
        legal_stride(20, 0, 16)
    with pytest.raises(JobError, match=r"1 ≤ --stride 9 ≤ context 8 does not hold.*nearest legal: 8"):
        legal_stride(8, 9, 16)
