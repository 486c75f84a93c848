"""Document masks: several documents in one sequence, of which none sees another."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

import phalanx.model.documents
from model.kinds import KINDS, build, tokens
from phalanx.model.attention import CoreAttention, visible
from phalanx.model.documents import Documents
from phalanx.model.seeding import Noise

LENGTHS = ((5, 1, 6), (2, 3, 7))
"""Tokens of each document, sample by sample."""


def numbered(lengths: tuple[tuple[int, ...], ...]) -> Tensor:
    """The number of each token's document: (samples, tokens)."""
    return torch.stack([torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in lengths])


@pytest.mark.parametrize("kind", ["gpt2", "llama", "llama 3.1"])
def test_documents_in_one_sequence_are_as_each_alone(kind):
    model = KINDS[kind]
    transformer, packed = build(model), tokens(model, 2, 12)
    logits = transformer(packed, documents=Documents(numbered(LENGTHS)))
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
    logits = transformer(packed, documents=Documents(torch.zeros(2, 12, dtype=torch.int64)))
    torch.testing.assert_close(logits, transformer(packed), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_gradients_do_not_cross_documents(dropout):
    model = replace(KINDS["gpt2"], dropout=dropout)
    transformer, packed, documents = build(model), tokens(model, 2, 12), numbered(LENGTHS)
    noise = Noise(seed=1, step=0, sample_ids=[0, 1]) if dropout else None
    x = transformer.embed(packed).detach().requires_grad_()
    out = transformer.through(transformer.blocks, x, torch.arange(12), noise, None, Documents(documents))
    chosen = documents == 1
    (gradient,) = torch.autograd.grad(out[chosen].square().sum(), x)
    assert (gradient[~chosen] == 0).all()
    assert (gradient[chosen].abs().sum(-1) > 0).all()


def test_dropout_meets_the_same_masks_with_documents():
    model = replace(KINDS["gpt2"], dropout=0.3)
    transformer, packed = build(model), tokens(model, 2, 12)
    noise = Noise(seed=1, step=0, sample_ids=[0, 1])
    one = Documents(torch.zeros(2, 12, dtype=torch.int64))
    torch.testing.assert_close(transformer(packed, noise=noise, documents=one), transformer(packed, noise=noise))


@given(
    documents=st.lists(st.lists(st.integers(0, 3), min_size=6, max_size=6), min_size=1, max_size=3),
    seq=st.integers(1, 6),
)
def test_a_query_sees_its_document_up_to_itself(documents, seq):
    places = torch.arange(6)
    seen = visible(places[6 - seq :], places, documents=Documents(torch.tensor(documents)))
    assert seen.shape == (len(documents), 1, seq, 6)
    for sample, row in enumerate(documents):
        for query in range(seq):
            place = 6 - seq + query
            expected = [key <= place and row[key] == row[place] for key in range(6)]
            assert seen[sample, 0, query].tolist() == expected


def test_flash_attention_gets_runs_of_the_tokens_of_all_sequences(monkeypatch):
    documents = Documents(torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 2]]))
    monkeypatch.setattr(phalanx.model.documents, "ROWS_PER_DOCUMENT", 5)
    first, second = documents.packed
    assert (first.tokens, first.bounds.tolist(), first.bounds.dtype, first.longest) == (
        slice(0, 5),
        [0, 2, 5],
        torch.int32,
        3,
    )
    assert (second.tokens, second.bounds.tolist(), second.longest) == (slice(5, 10), [0, 4, 5], 4)
    (alone,) = documents.part(slice(1, 2)).packed[:1]
    assert alone.bounds.tolist() == [0, 4]
    moved = documents.to(torch.device("meta"))  # which could not count them itself
    assert [(part.tokens, part.bounds.device.type) for part in moved.packed] == [
        (slice(0, 5), "meta"),
        (slice(5, 10), "meta"),
    ]


def saved_bytes(core: CoreAttention, seq: int, keys: int, noise: Noise | None, documents: Documents | None) -> int:
    """What attention keeps for its backward pass, each storage once."""
    q, k, v = (torch.randn(2, 4, length, 8, requires_grad=True) for length in (seq, keys, keys))
    kept: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with saved_tensors_hooks(pack, lambda x: x):
        core(q, k, v, noise, documents)
    return sum(kept.values())


def test_attention_keeps_no_mask():
    """Neither that of documents nor that of a later slice of a sequence, nor beside the scores that dropout keeps."""
    seq, documents = 24, Documents(torch.arange(24).expand(2, -1) // 5)
    fused = 4 * 2 * 4 * seq * (4 * 8 + 1)  # q, k, v, the output and its log-sum-exp
    core = CoreAttention(KINDS["gpt2"], 0)
    assert saved_bytes(core, seq, seq, None, None) == saved_bytes(core, seq, seq, None, documents) == fused
    assert saved_bytes(core, 1 + seq // 2, seq, None, None) < fused
    dropping = CoreAttention(replace(KINDS["gpt2"], dropout=0.3), 0)
    noise = Noise(seed=1, step=0, sample_ids=[0, 1])
    assert saved_bytes(dropping, seq, seq, noise, None) == saved_bytes(dropping, seq, seq, noise, documents)
