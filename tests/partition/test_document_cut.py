"""Sequences of documents that are cut over a ring by what attention within documents costs."""

from dataclasses import replace
from itertools import chain, combinations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from phalanx.config.layout import Layout
from phalanx.config.model import ModelConfig
from phalanx.partition import documents, tensor_slices
from phalanx.partition.documents import (
    DocumentCut,
    assign,
    assigned,
    chunked,
    chunks_per_place,
    keys_seen,
    long_tailed,
    mostly_whole,
    pairs_of,
    whole_documents,
)
from phalanx.partition.tensor_slices import zigzag_runs

MODEL = ModelConfig(n_layers=1, d_model=4, n_heads=1, seq_len=1 << 20)


@st.composite
def numbers(draw):
    ring, share, rows = draw(st.integers(2, 5)), draw(st.integers(1, 24)), draw(st.integers(1, 2))
    ends = draw(st.lists(st.booleans(), min_size=rows * ring * share, max_size=rows * ring * share))
    return ring, np.array(ends).reshape(rows, -1).cumsum(axis=1)


@given(numbers(), st.integers(0, 9), st.booleans())
def test_every_token_has_one_place_and_pairs_differ_by_no_more_than_a_chunks(case, window, chunks):
    ring, numbers = case
    model = replace(MODEL, window=window, window_kind="chunks" if chunks and window else "sliding")
    seen = keys_seen(numbers, model)
    # A token sees as many keys as a mask has.
    i = np.arange(numbers.shape[1])
    mask = (numbers[:, :, None] == numbers[:, None]) & (i[:, None] >= i)
    if chunks and window:
        finer = chunked(numbers, window)
        mask &= finer[:, :, None] == finer[:, None]
    elif window:
        mask &= i[:, None] - i < window
    assert (seen == mask.sum(-1)).all()

    found = assign(seen, ring)
    for each in (found, mostly_whole(numbers, seen, ring)):
        held = [[position for run in runs for position in run] for runs in each.places]
        assert sorted(chain.from_iterable(held)) == list(i)
        assert all(own == sorted(own) and len(own) == len(i) // ring for own in held)
        assert list(each.pairs) == [int(seen[:, own].sum()) for own in held]
        assert pairs_of(seen, each.places) == each
    chunk = len(i) // ring // chunks_per_place(len(i), ring)
    costs = seen.sum(0).reshape(-1, chunk).sum(1)
    assert max(found.pairs) - min(found.pairs) <= costs.max() - costs.min()


@given(numbers(), st.integers(0, 9), st.sampled_from([1, 2, 128]))
def test_blocks_hold_every_pair_once_and_only_the_keys_that_they_need_are_sent(case, window, least):
    ring, numbers = case
    documents.LEAST_RUN = tensor_slices.LEAST_RUN = least
    try:
        _check_blocks(ring, numbers, window)
    finally:
        documents.LEAST_RUN = tensor_slices.LEAST_RUN = 128


def _check_blocks(ring, numbers, window):
    places = assign(keys_seen(numbers, replace(MODEL, window=window)), ring).places
    cuts = [DocumentCut(numbers, places, place, window) for place in range(ring)]
    held = [np.concatenate([np.arange(run.start, run.stop) for run in runs]) for runs in places]
    i = np.arange(numbers.shape[1])
    mask = (numbers[:, :, None] == numbers[:, None]) & (i[:, None] >= i) & (i[:, None] - i < (window or len(i)))
    found = np.zeros_like(mask, dtype=int)
    for place, cut in enumerate(cuts):
        first = np.zeros(numbers.shape, bool)  # queries that some block has already shown a key
        for source in [place, *(other for other in range(ring) if other != place)]:
            keys = np.array([position for run in cut.keys[source] for position in run], dtype=int)
            sent = np.concatenate([held[source][run] for run in cuts[source].sent[place]] or [keys[:0]])
            if source != place:
                assert (sent == keys).all()
                needed = mask[:, held[place]].any((0, 1)) & np.isin(i, held[source])
                assert (keys == np.flatnonzero(needed)).all()
                assert not len(keys) or (place - source) % ring in cut.hops
            for block in cut.blocks[source]:
                (row,), rows, columns = range(len(numbers))[block.row], held[place][block.queries], keys[block.keys]
                part = np.ix_(np.array([row]), rows, columns)
                assert not block.causal or list(rows) == list(columns)
                shown = rows[:, None] >= columns if block.causal else np.ones((len(rows), len(columns)), bool)
                assert block.masked or (mask[part][0] == shown).all()
                found[part] += mask[part]
                seen = mask[part][0].any(1)
                assert seen.all() or first[row, rows].all()  # a block with a blind query is not a query's first
                first[row, rows] |= seen
    assert (found == mask).all()


@given(st.lists(st.integers(1, 12), min_size=1, max_size=9), st.integers(2, 4), st.integers(1, 2))
def test_whole_documents_fill_every_place_wherever_few_enough_to_try_all_ways_do(lengths, parts, first):
    lengths += [-sum(lengths) % parts] * (sum(lengths) % parts > 0)
    numbers, tokens = np.repeat(np.arange(len(lengths)), lengths)[None], sum(lengths)
    seen, filling, documents.FILLING = keys_seen(numbers, MODEL), documents.FILLING, first
    try:
        found = whole_documents(numbers, seen, parts)
    finally:
        documents.FILLING = filling
    halves = any(sum(lengths[n] for n in some) * 2 == tokens for some in subsets(range(len(lengths))))
    if parts == 2:
        assert (found is not None) == halves
    if found is not None:
        held = [np.concatenate([np.arange(run.start, run.stop) for run in runs]) for runs in found.places]
        assert found.whole
        assert sorted(chain.from_iterable(held)) == list(range(tokens))
        assert {len(own) for own in held} == {tokens // parts}
        assert list(found.pairs) == [int(seen[:, own].sum()) for own in held]
        assert sum(len(np.unique(numbers[0, own])) for own in held) == len(lengths)  # no document is on two
        assert not any(DocumentCut(numbers, found.places, place, 0).hops for place in range(parts))


def test_long_documents_alone_are_at_several_positions_where_that_costs_little_more():
    model, layout = replace(MODEL, seq_len=4096, d_model=256, n_heads=4), Layout(cp=4)
    lengths = [2000, *[131] * 16]
    numbers = np.repeat(np.arange(17), lengths)[None]
    found, chunks = assigned(numbers, model, layout), assign(keys_seen(numbers, model), 4)
    assert not found.whole
    assert found.imbalance < 1.01
    at = [
        {place for place in range(4) if any(run.start < end and start < run.stop for run in found.places[place])}
        for start, end in zip(np.cumsum([0, *lengths]), np.cumsum(lengths), strict=False)
    ]
    assert len(at[0]) == 4
    assert sum(len(each) > 1 for each in at[1:]) <= 3
    sent, before = (DocumentCut(numbers, cut.places, 0, 0).exchanged.sum() for cut in (found, chunks))
    assert sent < 0.9 * before


def subsets(items):
    return chain.from_iterable(combinations(items, n) for n in range(len(items) + 1))


def test_long_documents_are_cut_and_short_ones_stay_whole_on_the_ranks_or_at_the_places_of_the_ring():
    model, usp = replace(MODEL, seq_len=4096, d_model=256, n_heads=4), Layout(cp=4, cp_ulysses=2)
    whole = np.zeros((1, 4096), int)
    assert not assigned(whole, model, usp).whole
    halves = whole + (np.arange(4096) >= 2048)
    on_the_ring = assigned(halves, model, usp)
    assert on_the_ring.whole
    assert len(on_the_ring.places) == 2
    assert not on_the_ring.skips(usp)
    assert assigned(halves, model, Layout(cp=2)).skips(Layout(cp=2))
    short = np.repeat(np.arange(64), 64)[None]
    for layout in (usp, Layout(cp=2, cp_ulysses=2), Layout(cp=4)):
        assert assigned(short, model, layout).skips(layout)
    # One document of half the tokens costs what the short ones of the other half do not.
    uneven = np.where(np.arange(4096) < 2048, 0, short)
    assert whole_documents(uneven, keys_seen(uneven, model), 2) is not None
    assert not assigned(uneven, model, Layout(cp=2)).whole
    assert assigned(whole, model, Layout(cp=2, cp_ulysses=2)).places == ((range(4096),),)


def test_a_long_tail_is_balanced_where_zig_zag_is_not():
    seen = keys_seen(long_tailed(8192), MODEL)
    assert seen.sum() * 4 < 8192 * 8193 // 2  # a fraction of what one document has
    for ring in (2, 4):
        zigzag = pairs_of(seen, [zigzag_runs(8192, ring, place) for place in range(ring)])
        assert assign(seen, ring).imbalance < 1.05 < zigzag.imbalance
    whole = keys_seen(np.zeros((1, 8192), int), MODEL)
    assert assign(whole, 4).imbalance < 1.001
