"""What tensor ranks hold: together everything, each element counted once, and whole heads."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.job.model import Model
from phalanx.job.parameters import parameter_shapes
from phalanx.job.pieces import KEY_VALUE_ROWS, VOCABULARY_ROWS, Piece, padded_vocabulary, piece


@st.composite
def cut_models(draw: st.DrawFn) -> tuple[Model, int, int]:
    """A model, a vocabulary and a number of tensor ranks that the checks of a job let through."""
    tp = draw(st.integers(1, 6))
    kv_heads = draw(st.sampled_from([n for n in range(1, 13) if n % tp == 0 or tp % n == 0]))
    step = kv_heads if kv_heads % tp == 0 else tp
    model = Model(
        n_layers=draw(st.integers(1, 2)),
        d_model=draw(st.integers(1, 9)),
        n_heads=step * draw(st.integers(1, 3)),
        n_kv_heads=kv_heads,
        head_dim=2 * draw(st.integers(1, 3)),
        d_ff=tp * draw(st.integers(1, 5)),
        seq_len=draw(st.integers(1, 6)),
        norm=draw(st.sampled_from(["layernorm", "rmsnorm"])),
        positions=draw(st.sampled_from(["learned", "rope"])),
        activation=draw(st.sampled_from(["gelu", "swiglu"])),
        bias=draw(st.booleans()),
        qkv_bias=draw(st.booleans()),
        tied=draw(st.booleans()),
    )
    return model, draw(st.integers(1, 30)), tp


@settings(max_examples=60)
@given(cut_models())
def test_first_pieces_tile_every_parameter_exactly_once(case):
    model, vocab, tp = case
    for name, whole in parameter_shapes(model, vocab).items():
        pieces = [piece(name, whole, model, tp, rank) for rank in range(tp)]
        counted = np.zeros(whole, dtype=int)
        for each in pieces:
            assert each.whole == whole
            assert min(each.shape) > 0
            assert each.shape == pieces[0].shape  # every rank's program is the same
            if not each.first:
                continue
            if each.dim is None:
                counted += 1
            else:
                held = [slice(None)] * len(whole)
                held[each.dim] = slice(each.start, each.start + each.real)
                counted[tuple(held)] += 1
        assert (counted == 1).all(), name


@settings(max_examples=60)
@given(cut_models())
def test_only_the_vocabulary_is_padded(case):
    model, vocab, tp = case
    for name, whole in parameter_shapes(model, vocab).items():
        pieces = [piece(name, whole, model, tp, rank) for rank in range(tp)]
        if pieces[0].dim is None:
            continue
        padding = sum(each.size - each.real for each in pieces)
        expected = padded_vocabulary(vocab, tp) - vocab if name.endswith(VOCABULARY_ROWS) else 0
        assert padding == expected, name
        assert all(0 <= each.real <= each.size for each in pieces)


@settings(max_examples=60)
@given(cut_models())
def test_each_rank_has_the_key_value_heads_that_its_queries_read(case):
    model, vocab, tp = case
    queries_each, group = model.n_heads // tp, model.n_heads // model.kv_heads
    for name, whole in parameter_shapes(model, vocab).items():
        if not name.endswith(KEY_VALUE_ROWS):
            continue
        pieces = [piece(name, whole, model, tp, rank) for rank in range(tp)]
        for rank, each in enumerate(pieces):
            needed = {query // group for query in range(rank * queries_each, (rank + 1) * queries_each)}
            start = each.start if each.dim == 0 else 0
            held = each.size if each.dim == 0 else whole[0]
            assert (start % model.head_size, held % model.head_size) == (0, 0)
            assert needed == set(range(start // model.head_size, (start + held) // model.head_size))
            assert each.copies == max(1, tp // model.kv_heads)
            assert each.first == (rank % each.copies == 0)
            first = rank - rank % each.copies
            assert all(pieces[first + i].start == each.start for i in range(each.copies))


@given(st.integers(1, 10**6), st.integers(1, 64))
def test_padding_is_less_than_a_row_a_rank(vocab, tp):
    padded = padded_vocabulary(vocab, tp)
    assert padded % tp == 0
    assert 0 <= padded - vocab < tp


def test_by_hand():
    model = Model(n_layers=1, d_model=8, n_heads=4, n_kv_heads=2, vocab_size=10, head_dim=2)
    assert piece("embed.weight", (10, 8), model, 4, 3) == Piece((10, 8), 0, 9, 3)
    assert piece("embed.weight", (10, 8), model, 4, 3).real == 1
    assert piece("blocks.0.attn.wk.weight", (4, 8), model, 4, 1) == Piece((4, 8), 0, 0, 2, copies=2, first=False)
    assert piece("blocks.0.attn.wk.weight", (4, 8), model, 4, 2) == Piece((4, 8), 0, 2, 2, copies=2, first=True)
    assert piece("blocks.0.attn.wo.weight", (8, 8), model, 4, 1) == Piece((8, 8), 1, 2, 2)
    assert piece("blocks.0.attn.wo.bias", (8,), model, 4, 1) == Piece((8,), copies=4, first=False)
    assert piece("blocks.0.mlp.up.bias", (32,), model, 4, 1) == Piece((32,), 0, 8, 8)
    assert piece("final_norm.weight", (8,), model, 1, 0) == Piece((8,))


def test_a_piece_beyond_the_vocabulary_is_all_padding():
    last = piece("head.weight", (3, 2), Model(), 8, 7)
    assert (last.start, last.size, last.real, prod(last.shape)) == (7, 1, 0, 2)


def test_what_is_not_cut_has_no_padding():
    with pytest.raises(AssertionError, match="only a cut dimension is padded"):
        _ = Piece((3,)).real
