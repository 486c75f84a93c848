"""Sliding-window attention: which keys a query sees, in one pass, in runs of queries, and one token at a time."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from model.kinds import KINDS, MOE_AND_MLA, build, tokens
from phalanx.model.attention import CoreAttention, visible
from phalanx.model.cache import Cache
from phalanx.model.documents import Documents
from phalanx.model.seeding import Noise
from phalanx.partition import tensor_slices as sequence
from phalanx.partition.tensor_slices import window_blocks

MODELS = {kind: (KINDS | MOE_AND_MLA)[kind] for kind in ("gpt2", "llama", "mixtral", "deepseek")}


def sees(query: int, key: int, window: int) -> bool:
    """The definition, as transformers states it for Mistral."""
    return query - window < key <= query if window else key <= query


@given(st.integers(1, 9), st.integers(0, 9), st.integers(0, 12), st.data())
def test_a_query_sees_the_last_keys_up_to_its_own(seq, earlier, window, data):
    keys = earlier + seq
    rows = st.lists(st.integers(0, 2), min_size=keys, max_size=keys)
    documents = data.draw(st.none() | st.lists(rows, min_size=1, max_size=3))
    places = torch.arange(keys)
    mask = visible(places[earlier:], places, window, None if documents is None else Documents(torch.tensor(documents)))
    if documents is None:
        assert mask.tolist() == [[sees(q, k, window) for k in range(keys)] for q in range(earlier, keys)]
        return
    for row, seen in zip(documents, mask[:, 0].tolist(), strict=True):
        assert seen == [[sees(q, k, window) and row[q] == row[k] for k in range(keys)] for q in range(earlier, keys)]


@given(st.integers(0, 20), st.integers(1, 20), st.integers(0, 20), st.integers(1, 20), st.integers(1, 30))
def test_blocks_hold_every_visible_pair_once(first_query, queries, first_key, keys, window):
    of_q, of_k = range(first_query, first_query + queries), range(first_key, first_key + keys)
    blocks = runs_of_three(of_q, of_k, window)
    held = [(q, k) for rows, columns in blocks for q in rows for k in columns]
    assert len(held) == len(set(held))
    assert (
        {(q, k) for q in of_q for k in of_k if sees(q, k, window)} <= set(held) <= {(q, k) for q in of_q for k in of_k}
    )
    assert all(columns for _, columns in blocks)


def runs_of_three(queries: range, keys: range, window: int) -> list[tuple[range, range]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sequence, "LEAST_RUN", 3)
        return list(window_blocks(queries, keys, window))


def test_work_grows_with_the_window():
    """Mistral 7B over 32,768 tokens: a quarter more than its window leaves, an eighth of the square."""
    pairs = sum(len(q) * len(k) for q, k in window_blocks(range(32768), range(32768), 4096))
    assert pairs < 1.26 * 32768 * 4096 < 32768**2 / 6


def plainly(q: Tensor, k: Tensor, v: Tensor, window: int, documents: Tensor | None) -> Tensor:
    """A query after the other, and only what it sees."""
    batch, heads, seq, size = q.shape
    group, keys = heads // k.shape[1], k.shape[2]
    rows = []
    for b, h, i in ((b, h, i) for b in range(batch) for h in range(heads) for i in range(seq)):
        place = keys - seq + i
        seen = [j for j in range(keys) if sees(place, j, window)]
        if documents is not None:
            seen = [j for j in seen if documents[b, j] == documents[b, place]]
        scores = k[b, h // group, seen] @ q[b, h, i] / math.sqrt(size)
        rows.append(scores.softmax(0) @ v[b, h // group, seen])
    return torch.stack(rows).view(batch, heads, seq, v.shape[-1])


@pytest.mark.parametrize("run", [3, 128])
@pytest.mark.parametrize("with_documents", [False, True])
@pytest.mark.parametrize(("seq", "keys", "kv_heads", "width", "window"), [
    (11, 11, 4, 6, 4), (11, 11, 2, 6, 1), (5, 11, 1, 4, 3), (1, 11, 2, 8, 4), (11, 11, 4, 6, 10),
    (11, 11, 2, 6, 0), (5, 11, 1, 4, 0),
])  # fmt: skip
def test_attention_and_its_gradients_by_definition(
    monkeypatch, seq, keys, kv_heads, width, window, with_documents, run
):
    monkeypatch.setattr(sequence, "LEAST_RUN", run)
    monkeypatch.setattr("phalanx.model.attention.whole_run", lambda queries, keys: run)
    torch.manual_seed(1)
    shapes = [(4, seq, 6), (kv_heads, keys, 6), (kv_heads, keys, width), (4, seq, width)]
    *inputs, gradient = (torch.randn(2, *shape, dtype=torch.float64) for shape in shapes)
    documents = (torch.rand(2, keys + 2) < 0.3).cumsum(1) if with_documents else None
    core = CoreAttention(replace(MODELS["llama"], window=window), 0)
    results = []
    for attention in (
        lambda q, k, v: core(q, k, v, None, None if documents is None else Documents(documents)),
        lambda q, k, v: plainly(q, k, v, window, documents),
    ):
        leaves = [x.clone().requires_grad_() for x in inputs]
        o = attention(*leaves)
        results.append([o, *torch.autograd.grad(o, leaves, gradient)])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("window", [12, 100])
def test_a_window_over_the_whole_sequence_is_none(kind, dropout, window):
    model, inputs = replace(MODELS[kind], dropout=dropout), tokens(MODELS[kind], 2, 12)
    noise = Noise(seed=1, step=0, sample_ids=[0, 1]) if dropout else None
    assert torch.equal(build(replace(model, window=window))(inputs, noise=noise), build(model)(inputs, noise=noise))


@pytest.mark.parametrize("kind", ["gpt2", "deepseek"])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_nothing_before_the_window_has_influence(kind, dropout):
    """Through two layers of windows of 3, a token reaches the four after it."""
    model = replace(MODELS[kind], dropout=dropout, window=3, n_layers=2, moe=MODELS["gpt2"].moe)
    transformer, inputs = build(model), tokens(model, 2, 12)
    noise = Noise(seed=1, step=0, sample_ids=[0, 1]) if dropout else None
    x = transformer.embed(inputs).detach().requires_grad_()
    out = transformer.through(transformer.blocks, x, torch.arange(12), noise, None, None)
    (gradient,) = torch.autograd.grad(out[:, 9].square().sum(), x)
    reached = gradient.abs().sum((0, 2)) > 0
    assert reached.tolist() == [5 <= position <= 9 for position in range(12)]


def test_the_backward_pass_needs_no_more_than_without_a_window(monkeypatch):
    """As the memory model counts it: q, k, v, the output, its log-sum-exp."""
    monkeypatch.setattr(sequence, "LEAST_RUN", 4)

    def saved(window: int) -> int:
        held: dict[int, int] = {}

        def pack(x: Tensor) -> Tensor:
            held[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        core = CoreAttention(replace(MODELS["llama"], window=window), 0)
        q, k, v = (torch.randn(2, heads, 64, 8, requires_grad=True) for heads in (4, 2, 2))
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            core(q, k, v, None)
        return sum(held.values())

    assert saved(9) == saved(0)


@pytest.mark.parametrize("kind", MODELS)
def test_a_cache_shows_a_token_its_window_alone(kind):
    model = replace(MODELS[kind], window=4)
    transformer, inputs = build(model), tokens(model, 2, 12)
    expected, cache, found = transformer(inputs), Cache(model.seq_len), []
    for start, stop in ((0, 6), (6, 8), *((i, i + 1) for i in range(8, 12))):
        found.append(transformer(inputs[:, start:stop], cache=cache))
    torch.testing.assert_close(torch.cat(found, dim=1), expected, rtol=1e-9, atol=1e-9)
    assert not torch.allclose(expected, build(replace(model, window=0))(inputs))
