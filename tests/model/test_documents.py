"""Document masks: several documents in one sequence, of which none sees another."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from model.kinds import KINDS, build, tokens
from phalanx.model.noise import Noise
from phalanx.model.window import visible

LENGTHS = ((5, 1, 6), (2, 3, 7))
"""Tokens of each document, sample by sample."""


def numbered(lengths: tuple[tuple[int, ...], ...]) -> Tensor:
    """The number of each token's document: (samples, tokens)."""
    return torch.stack([torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in lengths])


@pytest.mark.parametrize("kind", ["gpt2", "llama", "llama 3.1"])
def test_documents_in_one_sequence_are_as_each_alone(kind):
    model = KINDS[kind]
    transformer, packed = build(model), tokens(model, 2, 12)
    logits = transformer(packed, documents=numbered(LENGTHS))
    for sample, lengths in enumerate(LENGTHS):
        start = 0
        for length in lengths:
            places = slice(start, start + length)
            positions = torch.arange(start, start + length)
            alone = transformer(packed[sample : sample + 1, places], positions=positions)
            torch.testing.assert_close(logits[sample, places], alone[0], rtol=1e-9, atol=1e-9)
            start += length
    assert not torch.allclose(logits, transformer(packed))


def test_one_document_is_no_mask():
    model = KINDS["llama"]
    transformer, packed = build(model), tokens(model, 2, 12)
    logits = transformer(packed, documents=torch.zeros(2, 12, dtype=torch.int64))
    torch.testing.assert_close(logits, transformer(packed), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_gradients_do_not_cross_documents(dropout):
    model = replace(KINDS["gpt2"], dropout=dropout)
    transformer, packed, documents = build(model), tokens(model, 2, 12), numbered(LENGTHS)
    noise = Noise(seed=1, step=0, sample_ids=[0, 1]) if dropout else None
    x = transformer.embed(packed).detach().requires_grad_()
    out = transformer.through(transformer.blocks, x, torch.arange(12), noise, None, documents)
    chosen = documents == 1
    (gradient,) = torch.autograd.grad(out[chosen].square().sum(), x)
    assert (gradient[~chosen] == 0).all()
    assert (gradient[chosen].abs().sum(-1) > 0).all()


def test_dropout_meets_the_same_masks_with_documents():
    model = replace(KINDS["gpt2"], dropout=0.3)
    transformer, packed = build(model), tokens(model, 2, 12)
    noise = Noise(seed=1, step=0, sample_ids=[0, 1])
    one = torch.zeros(2, 12, dtype=torch.int64)
    torch.testing.assert_close(transformer(packed, noise=noise, documents=one), transformer(packed, noise=noise))


@given(
    documents=st.lists(st.lists(st.integers(0, 3), min_size=6, max_size=6), min_size=1, max_size=3),
    seq=st.integers(1, 6),
)
def test_a_query_sees_its_document_up_to_itself(documents, seq):
    places = torch.arange(6)
    seen = visible(places[6 - seq :], places, documents=torch.tensor(documents))
    assert seen.shape == (len(documents), 1, seq, 6)
    for sample, row in enumerate(documents):
        for query in range(seq):
            place = 6 - seq + query
            expected = [key <= place and row[key] == row[place] for key in range(6)]
            assert seen[sample, 0, query].tolist() == expected
