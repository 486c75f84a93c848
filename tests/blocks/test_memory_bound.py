"""Memory-bound operators and rings, worked out by hand."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.blocks.attention import (
    LEAST_RUN,
    MOST_MASKED,
    RingKeys,
    largest_run,
    ring_hops,
    ring_keys,
    whole_run,
    zigzag_runs,
)
from phalanx.blocks.kinds import block, block_kinds
from phalanx.blocks.operator import Operator, Place, place_of
from phalanx.blocks.residual import embedding, head
from phalanx.config.layout import Layout
from phalanx.config.model import MLA, ModelConfig, MoE

# The numbers that memory-bound operators read and write, worked out by hand from what each must touch once.


D, HEADS, KV_HEADS, HEAD, WIDTH, TOKENS, VOCAB = 48, 4, 2, 12, 100, 64, 1000
GPT = ModelConfig(n_layers=1, d_model=D, n_heads=HEADS, d_ff=WIDTH, seq_len=TOKENS, vocab_size=VOCAB)
LLAMA = replace(GPT, n_kv_heads=KV_HEADS, positions="rope", norm="rmsnorm", activation="swiglu")
MIXTURE = replace(LLAMA, moe=MoE(n_experts=8, top_k=2, d_ff=WIDTH))
LATENT = replace(LLAMA, n_kv_heads=0, mla=MLA(q_rank=20, kv_rank=16, rope_head_dim=8, nope_head_dim=4, v_head_dim=6))
STREAM = TOKENS * D


def numbers(*operators: Operator) -> dict[str, tuple[float, float]]:
    """Numbers read and written by each memory-bound part, forward and backward."""
    return {part.name: (part.forward, part.backward) for one in operators for part in one.memory_bound}


def of_block(model: ModelConfig, layout: Layout | None = None) -> dict[str, tuple[float, float]]:
    return numbers(*block(place_of(model, layout or Layout()), block_kinds(model)[0]))


def test_a_plain_block():
    """A norm reads and writes the stream; backward it reads the gradient and its input, and writes a gradient. A sum
    reads two tensors and writes one; backward the gradient is read and written. An activation reads and writes the
    hidden width; backward it reads the gradient and its input, and writes a gradient."""
    assert of_block(GPT) == {
        "attn_norm": (2 * STREAM, 3 * STREAM),
        "attn residual": (3 * STREAM, 2 * STREAM),
        "mlp_norm": (2 * STREAM, 3 * STREAM),
        "mlp.activation": (2 * TOKENS * WIDTH, 3 * TOKENS * WIDTH),
        "mlp residual": (3 * STREAM, 2 * STREAM),
    }


def test_dropout_writes_and_reads_a_mask_of_a_byte_per_number():
    assert of_block(replace(GPT, dropout=0.1))["mlp residual"] == (3.5 * STREAM, 2.5 * STREAM)


def test_rotary_positions_and_a_gated_activation():
    """Queries and keys are read and written; SwiGLU reads two tensors and writes one, backward it reads the gradient
    and both inputs and writes two gradients."""
    turned = 2 * TOKENS * (HEADS + KV_HEADS) * HEAD
    assert of_block(LLAMA)["rotary"] == (turned, turned)
    assert of_block(LLAMA)["mlp.activation"] == (3 * TOKENS * WIDTH, 5 * TOKENS * WIDTH)


def test_latent_attention_normalises_the_compressions_and_joins_the_heads():
    """Queries and keys of every head, positions included, are read and written once each."""
    found, joined = of_block(LATENT), 2 * 2 * TOKENS * HEADS * (8 + 4)
    assert found["q_norm"] == (2 * TOKENS * 20, 3 * TOKENS * 20)
    assert found["kv_norm"] == (2 * TOKENS * 16, 3 * TOKENS * 16)
    assert found["heads"] == (joined, joined)
    assert found["rotary"] == (2 * TOKENS * 2 * HEADS * 8,) * 2


def test_a_ring_merges_the_output_of_each_step_but_the_first():
    """Two outputs are read and one written, in fp32, which counts twice; backward two gradients."""
    output = TOKENS // 4 * HEADS * HEAD
    assert of_block(LLAMA, Layout(cp=4))["ring merge"] == (3 * 6 * output, 3 * 4 * output)


def test_a_mixture_of_experts():
    """Scores are read and written four times, in fp32, which counts twice; rows are read and
    written in the order of their experts, and summed to tokens; backward a token's gradients are summed, and the
    gradient of a sum is read for every row, with the row for its gate. With expert ranks rows are copied once more on
    the other side. Each of eight experts gets a fourth of the tokens."""
    rows = TOKENS * 2
    row, token = rows * D, TOKENS * D
    found = of_block(MIXTURE)
    assert found["route"] == (8 * TOKENS * 8,) * 2
    assert found["dispatch"] == (2 * row, row + token)
    assert found["combine"] == (row + token, 3 * row)
    assert found["experts.activation"] == (3 * rows * WIDTH, 5 * rows * WIDTH)
    spread = of_block(MIXTURE, Layout(dp_shard=4, ep=4))
    assert spread["dispatch"] == (4 * row, 3 * row + token)
    assert spread["combine"] == (3 * row + token, 5 * row)
    assert spread["experts.activation"] == found["experts.activation"]


@pytest.mark.parametrize("tp", [1, 4])
def test_the_ends_of_a_model(tp: int):
    """The embedding reads a row and a position and writes their sum. The loss reads or writes logits in fp32, which
    counts twice, four times forward and three times backward. Tensor ranks share the vocabulary."""
    place = place_of(GPT, Layout(tp=tp))
    logits = TOKENS * VOCAB // tp
    assert numbers(embedding(place, VOCAB), *head(place, VOCAB)) == {
        "embedding": (3 * STREAM, 3 * STREAM),
        "final norm": (2 * STREAM, 3 * STREAM),
        "loss": (8 * logits, 6 * logits),
    }


@pytest.mark.parametrize("sp", [False, True])
def test_tensor_ranks_share_the_hidden_width_and_with_sp_the_stream(sp: bool):
    found, whole = of_block(LLAMA, Layout(tp=2, sp=sp)), of_block(LLAMA)
    assert {name for name in whole if found[name] == whole[name]} == (
        set() if sp else {"attn_norm", "attn residual", "mlp_norm", "mlp residual"}
    )
    assert all(2 * found[name][0] == whole[name][0] for name in whole if sp or name in ("rotary", "mlp.activation"))


def test_sequences_add_up():
    one, three = (block(Place(GPT, sequences=n), block_kinds(GPT)[0]) for n in (1, 3))
    assert numbers(*three) == {name: (3 * ahead, 3 * back) for name, (ahead, back) in numbers(*one).items()}


# The keys that the positions of a ring send each other, against every pair of a query and a key.

SHAPES = st.tuples(st.integers(1, 3), st.integers(2, 6), st.integers(1, 3))
"""Tokens of a chunk, positions of the ring, slices."""


def by_definition(chunk: int, ring: int, slices: int, window: int) -> list[dict[tuple[int, int], int]]:
    """For each slice, the keys so far of one position that a query of another sees, by both positions."""
    tokens = 2 * chunk * ring

    def held(position: int, seen: range) -> list[int]:
        return [part * tokens + at for part in seen for run in zigzag_runs(tokens, ring, position) for at in run]

    return [
        {
            (of, to): sum(
                any(key <= query < key + window for query in held(to, range(last, last + 1)))
                for key in held(of, range(last + 1))
            )
            for of in range(ring)
            for to in range(ring)
            if of != to
        }
        for last in range(slices)
    ]


@settings(max_examples=60)
@given(SHAPES, st.data())
def test_a_position_sends_the_keys_that_others_see(shape, data):
    chunk, ring, slices = shape
    window = data.draw(st.integers(1, 2 * chunk * ring * slices))
    position = data.draw(st.integers(0, ring - 1))
    seen = by_definition(chunk, ring, slices, window)
    found = ring_keys(2 * chunk * ring * slices, ring, slices, window, position)
    for numbers, side in ((found.sent, 0), (found.received, 1)):
        expected = [many for each in seen for pair, many in each.items() if pair[side] == position and many]
        assert Counter(numbers) == Counter(expected)
    hops = {(to - of) % ring for (of, to), many in seen[-1].items() if many}
    assert set(ring_hops(2 * chunk * ring, ring, slices, window)) == hops


@given(SHAPES, st.data())
def test_the_time_counts_the_position_that_sends_most(shape, data):
    chunk, ring, _ = shape
    window = data.draw(st.integers(1, 2 * chunk * ring))
    every = [sum(ring_keys(2 * chunk * ring, ring, 1, window, position).sent) for position in range(ring)]
    assert sum(ring_keys(2 * chunk * ring, ring, 1, window).sent) == max(every)


def test_by_hand():
    """Four positions of two chunks of 4 tokens, and a window of 3: the last two keys of each chunk go to the position
    of the next chunk. The first position has no chunk after its second one; the last one's chunks are neighbours."""
    assert [ring_keys(32, 4, 1, 3, position) for position in range(4)] == [
        RingKeys((2,), (2,)),
        RingKeys((2, 2), (2, 2)),
        RingKeys((2, 2), (2, 2)),
        RingKeys((2,), (2,)),
    ]
    assert ring_hops(32, 4, 1, 3) == (1, 3)
    assert ring_hops(32, 4, 1, 1) == ()


MODEL = ModelConfig(n_layers=4, d_model=64, n_heads=8, n_kv_heads=2, seq_len=4096, window=128, full_every=4)


@pytest.mark.parametrize(("layout", "heads"), [(Layout(cp=4), 2), (Layout(cp=8, cp_ulysses=2), 1)])
def test_messages_of_layers_of_two_kinds(layout, heads):
    """Keys and values of 127 tokens to two neighbours; full layers send the whole parts around the ring."""
    kinds, each = block_kinds(MODEL), 3 * heads * 2 * 8
    assert kinds == (kinds[0],) * 3 + (kinds[0]._replace(window=0),)
    sends = [
        [one for operator in block(place_of(MODEL, layout, 3), kind) for one in operator.messages if one.axis == "ring"]
        for kind in (kinds[0], kinds[3])
    ]
    assert [(one.elements, one.number, one.forward, one.backward) for one in sends[0]] == [
        (127 * each, "activation", 2, 2),
        (127 * each, "wide", 0, 2),
    ]
    assert [(one.elements, one.number, one.forward, one.backward) for one in sends[1]] == [
        (1024 * each, "activation", 3, 3),
        (1024 * each, "wide", 0, 3),
    ]


def test_a_window_over_the_whole_sequence_is_no_kind_of_its_own():
    assert block_kinds(replace(MODEL, window=4096)) == block_kinds(replace(MODEL, window=0))


# Runs of queries in which attention is computed block by block.


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
