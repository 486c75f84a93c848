"""The cache of a batch whose sequences differ in length: each row has the logits that it has alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from model.kinds import ATTENTION_KINDS, KINDS, MOE_AND_MLA, STRUCTURE_KINDS, build, tokens
from phalanx.config.model import ModelConfig
from phalanx.model.cache import Cache

ALL = {**KINDS, **MOE_AND_MLA, **ATTENTION_KINDS, **STRUCTURE_KINDS}
LONG = 24


def filled(transformer, text: torch.Tensor) -> Cache:
    cache = Cache(LONG)
    transformer(text[None], cache=cache)
    return cache


@torch.inference_mode()
@pytest.mark.parametrize("model", [replace(model, seq_len=LONG) for model in ALL.values()], ids=list(ALL))
def test_sequences_of_different_lengths_have_the_logits_of_each_alone(model: ModelConfig):
    """Joined after their prompts, then three tokens at once, rejected in part, then one at a time."""
    transformer = build(model)
    rows = [tokens(model, 1, length, seed=length)[0] for length in (3, 9, 1)]
    batch = Cache(LONG)
    for row in rows:
        batch.append(filled(transformer, row))
    assert batch.lengths == [3, 9, 1]
    proposed = tokens(model, 3, 3, seed=7)
    if not model.moe.capacity:  # which drops tokens by how many come together
        logits = transformer(proposed, cache=batch)
        for row, more, found in zip(rows, proposed, logits, strict=True):
            torch.testing.assert_close(found, transformer(torch.cat((row, more))[None])[0, -3:], rtol=1e-9, atol=1e-9)
        batch.rewind([1, 3, 2])
        rows = [torch.cat((row, more[:n])) for row, more, n in zip(rows, proposed, (2, 0, 1), strict=True)]
    batch.keep([2, 0])
    rows = [rows[2], rows[0]]
    for step in range(3):
        new = tokens(model, 2, 1, seed=step)
        logits = transformer(new, cache=batch)[:, -1]
        rows = [torch.cat((row, token)) for row, token in zip(rows, new, strict=True)]
        if not model.moe.capacity:
            for row, found in zip(rows, logits, strict=True):
                torch.testing.assert_close(found, transformer(row[None])[0, -1], rtol=1e-9, atol=1e-9)
    assert batch.lengths == [len(row) for row in rows]


@torch.inference_mode()
def test_a_cache_grows_and_moves_left_where_rewinding_leaves_columns_empty():
    model = replace(KINDS["llama"], seq_len=700)
    transformer = build(model)
    rows = [tokens(model, 1, 400, seed=1)[0], tokens(model, 1, 2, seed=2)[0]]
    batch = Cache(700)
    for row in rows:
        cache = Cache(700)
        transformer(row[None], cache=cache)
        batch.append(cache)
    for _ in range(5):  # the long one forgets, the short one grows
        more = tokens(model, 2, 60, seed=3)
        transformer(more, cache=batch)
        batch.rewind([120, 0])
        rows = [torch.cat((rows[0], more[0]))[:-120], torch.cat((rows[1], more[1]))]
    assert batch.lengths == [100, 302]
    assert batch.length == 302
    last = tokens(model, 2, 1, seed=4)
    logits = transformer(last, cache=batch)[:, -1]
    for row, token, found in zip(rows, last, logits, strict=True):
        kept = torch.cat((row[:100] if len(row) < 302 else row, token))
        torch.testing.assert_close(found, transformer(kept[None])[0, -1], rtol=1e-9, atol=1e-9)


def test_a_sequence_is_taken_out_of_a_batch():
    model = replace(KINDS["gpt2"], seq_len=LONG)
    transformer, batch = build(model), Cache(LONG)
    for length in (2, 5):
        batch.append(filled(transformer, tokens(model, 1, length, seed=length)[0]), copies=2)
    alone = batch.take(1)
    assert (batch.lengths, alone.lengths, alone.is_ragged) == ([2, 2, 5, 5], [2], False)
    new = torch.tensor([[3]])
    whole = torch.cat((tokens(model, 1, 2, seed=2)[0], new[0]))
    torch.testing.assert_close(
        transformer(new, cache=alone)[0, -1], transformer(whole[None])[0, -1], rtol=1e-9, atol=1e-9
    )
