"""Latent attention, caches of unequal sequences, and masks of documents."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

import phalanx.model.documents
from generate.texts import generate
from model.kinds import ATTENTION_KINDS, KINDS, MOE_AND_MLA, STRUCTURE_KINDS, build, tokens
from phalanx.blocks.attention import cache_columns
from phalanx.config.model import MLA, ModelConfig, RopeScaling
from phalanx.model.attention import CoreAttention, LatentAttention, visible
from phalanx.model.cache import Cache
from phalanx.model.documents import Documents
from phalanx.model.layers import rotary_frequencies
from phalanx.model.seeding import Noise

_LATENT = {
    "compressed queries": MOE_AND_MLA["deepseek"],
    "plain queries, biases, LayerNorm": MOE_AND_MLA["latent"],
    "values larger than keys": replace(
        MOE_AND_MLA["latent"], mla=MLA(kv_rank=4, rope_head_dim=2, nope_head_dim=3, v_head_dim=9)
    ),
}
latent = pytest.mark.parametrize("model", _LATENT.values(), ids=_LATENT.keys())


def attention(model: ModelConfig) -> LatentAttention:
    attn = build(model).blocks["0"].attn
    assert isinstance(attn, LatentAttention)
    return attn


@latent
def test_attention_equals_a_reference_written_in_loops(model: ModelConfig):
    attn = attention(model)
    x = torch.randn(2, 9, model.d_model, dtype=torch.float64)
    rotary = build(model).rotary(torch.arange(9), torch.float64)
    expected = np.stack([reference(attn, model, sequence.numpy()) for sequence in x])
    np.testing.assert_allclose(attn(x, rotary, None, None).detach().numpy(), expected, rtol=1e-10, atol=1e-10)


def reference(attn: LatentAttention, model: ModelConfig, x: np.ndarray) -> np.ndarray:
    """DeepSeek-V2, equations 9 to 19 with the norms of its released code: one position and head at a time."""
    weights = {name: p.detach().numpy() for name, p in attn.named_parameters()}
    mla, heads, seq = model.mla, model.n_heads, len(x)

    def linear(name: str, x: np.ndarray) -> np.ndarray:
        return x @ weights[f"{name}.weight"].T + weights.get(f"{name}.bias", 0.0)

    def norm(name: str, x: np.ndarray) -> np.ndarray:
        if model.norm == "layernorm":
            x = x - x.mean(-1, keepdims=True)
        y = x / np.sqrt((x * x).mean(-1, keepdims=True) + model.norm_eps)
        return y * weights[f"{name}.weight"] + weights.get(f"{name}.bias", 0.0)

    def turn(part: np.ndarray, position: int) -> np.ndarray:
        out, half = part.copy(), mla.rope_head_dim // 2
        for pair in range(half):
            angle = position / model.rope_theta ** (2 * pair / mla.rope_head_dim)
            a, b = part[pair], part[pair + half]
            out[pair] = a * math.cos(angle) - b * math.sin(angle)
            out[pair + half] = b * math.cos(angle) + a * math.sin(angle)
        return out

    q = linear("wq_b", norm("q_norm", linear("wq_a", x))) if mla.q_rank else linear("wq", x)
    q = q.reshape(seq, heads, mla.nope_head_dim + mla.rope_head_dim)
    compressed = linear("wkv_a", x)
    kv = linear("wkv_b", norm("kv_norm", compressed[:, : mla.kv_rank])).reshape(seq, heads, -1)
    shared_key = np.array([turn(token, position) for position, token in enumerate(compressed[:, mla.kv_rank :])])
    out = np.zeros((seq, heads, mla.v_head_dim))
    for position in range(seq):
        for head in range(heads):
            plain = q[position, head, : mla.nope_head_dim]
            turned = turn(q[position, head, mla.nope_head_dim :], position)
            scores = np.array(
                [
                    (plain @ kv[key, head, : mla.nope_head_dim] + turned @ shared_key[key])
                    / math.sqrt(mla.nope_head_dim + mla.rope_head_dim)
                    for key in range(position + 1)
                ]
            )
            exponentials = np.exp(scores - scores.max())
            out[position, head] = exponentials / exponentials.sum() @ kv[: position + 1, head, mla.nope_head_dim :]
    return linear("wo", out.reshape(seq, -1))


@latent
def test_a_layer_computes_with_the_heads_that_its_weights_have(model: ModelConfig):
    """Two halves of the heads, as tensor parallelism would hold them, add up to the whole attention."""
    model = replace(model, bias=False)
    x = torch.randn(2, 9, model.d_model, dtype=torch.float64)
    rotary = build(model).rotary(torch.arange(9), torch.float64)
    whole, parts = attention(model)(x, rotary, None, None), []
    for half in range(2):
        attn = attention(model)
        for linear in (attn.wq_b if attn.compresses_queries else attn.wq, attn.wkv_b):
            linear.weight = torch.nn.Parameter(linear.weight.chunk(2, dim=0)[half])
        attn.wo.weight = torch.nn.Parameter(attn.wo.weight.chunk(2, dim=1)[half])
        parts.append(attn(x, rotary, None, None))
    torch.testing.assert_close(parts[0] + parts[1], whole, rtol=1e-12, atol=1e-12)


@latent
def test_what_is_cached_are_whole_keys_and_values(model: ModelConfig):
    attn, x = attention(model), torch.randn(1, 6, model.d_model, dtype=torch.float64)
    rotary = build(model).rotary(torch.arange(6), torch.float64)
    cache = Cache(6)
    attn(x, rotary, None, cache)
    keys, values = cache.extend(attn.layer, torch.empty(1, 4, 0, model.head_size), torch.empty(1, 4, 0, 1))
    assert (keys.shape[1], keys.shape[3]) == (model.n_heads, model.head_size)
    assert (values.shape[1], values.shape[3]) == (model.n_heads, model.mla.v_head_dim)


@pytest.mark.parametrize("name", MOE_AND_MLA)
def test_greedy_text_equals_one_forward_pass_a_token(name: str):
    model = MOE_AND_MLA[name]
    transformer, inputs = build(model), tokens(model, 3, 3)
    expected = inputs
    for _ in range(10):
        best = transformer(expected[:, -model.seq_len :])[:, -1].argmax(dim=-1)
        expected = torch.cat((expected, best[:, None]), dim=1)
    assert torch.equal(generate(transformer, inputs, max_new_tokens=10, temperature=0), expected)


def test_only_the_rotary_part_has_frequencies():
    model = MOE_AND_MLA["deepseek"]
    assert rotary_frequencies(model, torch.device("cpu")).tolist() == pytest.approx([1.0, 10_000**-0.5])
    stretched = replace(model, rope_scaling=RopeScaling(kind="linear", factor=2.0))
    assert rotary_frequencies(stretched, torch.device("cpu")).tolist() == pytest.approx([0.5, 10_000**-0.5 / 2])


@pytest.mark.parametrize("name", ["deepseek", "latent"])
def test_distances_are_all_that_positions_say(name: str):
    transformer, inputs = build(MOE_AND_MLA[name]), tokens(MOE_AND_MLA[name], 1, 8)
    shifted = transformer(inputs, positions=torch.arange(100, 108))
    torch.testing.assert_close(shifted, transformer(inputs), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["deepseek", "latent"])
def test_documents_in_one_sequence_are_as_each_alone(name: str):
    model = replace(MOE_AND_MLA[name])
    transformer, inputs = build(model), tokens(model, 1, 10)
    documents = Documents(torch.tensor([[0] * 4 + [1] * 6]))
    whole = transformer(inputs, documents=documents)
    torch.testing.assert_close(whole[:, 4:], transformer(inputs[:, 4:]), rtol=1e-9, atol=1e-9)


# The cache of a batch whose sequences differ in length: each row has the logits that it has alone.

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


@pytest.mark.parametrize(("prompt", "new", "capacity"), [(3, 300, 700), (256, 1, 700), (300, 1, 700), (300, 200, 500)])
def test_a_cache_has_the_columns_that_are_predicted(prompt: int, new: int, capacity: int):
    """Prompts longer than the first columns, too."""
    keys, alone, batch = torch.zeros(1, 2, 1, 4), Cache(capacity), Cache(capacity)
    alone.extend(0, keys.expand(1, 2, prompt, 4), keys.expand(1, 2, prompt, 4))
    alone.length = prompt
    batch.append(alone, copies=2)
    for batch.length in range(prompt, prompt + new):
        batch.extend(0, keys.expand(2, 2, 1, 4), keys.expand(2, 2, 1, 4))
    assert {part.shape[2] for part in batch.tensors()} == {cache_columns(prompt + new, capacity)}


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


# Document masks: several documents in one sequence, of which none sees another.

LENGTHS = ((5, 1, 6), (2, 3, 7))
"""Tokens of each document, sample by sample."""


def numbered(lengths: tuple[tuple[int, ...], ...]) -> Tensor:
    """The number of each token's document: (samples, tokens)."""
    return torch.stack([torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in lengths])


@pytest.mark.parametrize("kind", ["gpt2", "llama", "llama 3.1"])
def test_a_model_computes_documents_as_each_alone(kind):
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
