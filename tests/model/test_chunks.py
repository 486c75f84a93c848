"""Attention in chunks: what a cache, documents and dropout see of them is what whole sequences see."""

from __future__ import annotations

import pytest
import torch

from phalanx.config.model import ModelConfig, QueryGrowth
from phalanx.model.attention import CoreAttention
from phalanx.model.cache import Cache
from phalanx.model.documents import Documents
from phalanx.model.seeding import initialise
from phalanx.model.transformer import Transformer

MODEL = ModelConfig(
    n_layers=4,
    d_model=32,
    n_kv_heads=2,
    vocab_size=50,
    seq_len=24,
    window=7,
    window_kind="chunks",
    full_every=4,
    nope_every=4,
    qk_norm="unit",
    query_growth=QueryGrowth(rate=0.3, length=5),
    norm="rmsnorm",
    positions="rope",
    activation="swiglu",
    bias=False,
    init_std=0.3,
)


@pytest.fixture
def model() -> Transformer:
    model = Transformer(MODEL).double()
    initialise(model, MODEL, 0)
    return model.eval()


def tokens(length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(50, (1, length), generator=torch.Generator().manual_seed(seed))


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert (found - expected).abs().max() <= 1e-12


@torch.no_grad()
@pytest.mark.parametrize("first", [1, 6, 7, 16])
def test_a_cache_continues_chunks(model: Transformer, first: int):
    text, cache = tokens(24), Cache(24)
    parts = [model(text[:, :first], cache=cache), model(text[:, first : first + 3], cache=cache)]
    parts += [model(text[:, place : place + 1], cache=cache) for place in range(first + 3, 24)]
    close(torch.cat(parts, 1), model(text))


@torch.no_grad()
def test_sequences_of_several_lengths_have_chunks_of_their_own(model: Transformer):
    texts, cache = [tokens(length, length) for length in (16, 9)], Cache(24)
    for text in texts:
        alone = Cache(24)
        model(text[:, :-2], cache=alone)
        cache.append(alone)
    assert cache.is_ragged
    found = model(torch.cat([text[:, -2:] for text in texts]), cache=cache)
    for row, text in enumerate(texts):
        close(found[row], model(text)[0, -2:])


@torch.no_grad()
def test_chunks_begin_with_each_document():
    torch.manual_seed(0)
    core = CoreAttention(MODEL, 0)
    q, k, v = (torch.randn(1, heads, 24, 8, dtype=torch.float64) for heads in (4, 2, 2))
    numbers = torch.tensor([[0] * 10 + [1] * 14])
    found = core(q, k, v, None, Documents(numbers))
    for part in (slice(0, 10), slice(10, 24)):
        close(found[:, :, part], core(q[:, :, part], k[:, :, part], v[:, :, part], None))
    places = torch.arange(24)
    seen = (places[:, None] >= places) & (places[:, None] // 7 == places // 7)
    scores = (q @ k.repeat_interleave(2, 1).mT * 8**-0.5).masked_fill(~seen, float("-inf"))
    close(core(q, k, v, None), scores.softmax(-1) @ v.repeat_interleave(2, 1))
