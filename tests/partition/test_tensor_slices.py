"""What ranks hold of tensors, matrices and sequences."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain, pairwise
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.blocks.operator import is_expert
from phalanx.blocks.parameters import parameter_shapes
from phalanx.config.layout import Layout
from phalanx.config.model import MLA, ModelConfig, MoE
from phalanx.optimizers.entry import newton_schulz_flops
from phalanx.partition.matrices import (
    Owner,
    Piece,
    ShardRanges,
    SharedMatrix,
    bucket_cut,
    equal_cut,
    rounds,
    row_ranges,
    sent_elements,
)
from phalanx.partition.tensor_slices import (
    TensorSlice,
    cp_coordinates,
    experts_of,
    padded_vocabulary,
    rank_positions,
    ring_positions,
    slice_of,
)

# What tensor ranks hold: together everything, each element counted once, and whole heads.


VOCABULARY_ROWS = ("embed.weight", "head.weight")
KEY_VALUE_ROWS = ("attn.wk.weight", "attn.wk.bias", "attn.wv.weight", "attn.wv.bias")

MIXTRAL = ModelConfig(
    n_layers=1,
    d_model=6,
    n_heads=12,
    n_kv_heads=6,
    head_dim=2,
    d_ff=12,
    vocab_size=12,
    activation="swiglu",
    moe=MoE(n_experts=5, d_ff=12),
)
DEEPSEEK = replace(
    MIXTRAL,
    n_layers=2,
    moe=MoE(n_experts=5, d_ff=12, n_shared=2, n_dense_layers=1, bias_balanced=True),
    mla=MLA(q_rank=5, kv_rank=7, rope_head_dim=2, nope_head_dim=3, v_head_dim=4),
)


@st.composite
def cut_models(draw: st.DrawFn) -> tuple[ModelConfig, int, int]:
    """A model, a vocabulary and a number of tensor ranks that the checks of a job let through."""
    tp = draw(st.integers(1, 6))
    kv_heads = draw(st.sampled_from([n for n in range(1, 13) if n % tp == 0 or tp % n == 0]))
    step = kv_heads if kv_heads % tp == 0 else tp
    layers = draw(st.integers(1, 2))
    moe, mla = MoE(), MLA()
    if draw(st.booleans()):
        moe = MoE(
            n_experts=draw(st.integers(1, 5)),
            d_ff=tp * draw(st.integers(1, 5)),
            n_shared=draw(st.integers(0, 2)),
            n_dense_layers=draw(st.integers(0, layers - 1)),
            bias_balanced=draw(st.booleans()),
        )
    if draw(st.booleans()):
        sizes = [draw(st.integers(1, 5)) for _ in range(4)]
        mla = MLA(draw(st.integers(0, 3)), sizes[0], 2 * sizes[1], sizes[2], sizes[3])
    model = ModelConfig(
        n_layers=layers,
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
        moe=moe,
        mla=mla,
    )
    return model, draw(st.integers(1, 30)), tp


@settings(max_examples=60)
@given(cut_models())
def test_first_pieces_tile_every_parameter_exactly_once(case):
    model, vocab, tp = case
    for name, whole in parameter_shapes(model, vocab).items():
        slices = [slice_of(name, whole, model, tp, rank) for rank in range(tp)]
        counted = np.zeros(whole, dtype=int)
        for each in slices:
            assert each.whole == whole
            assert min(each.shape) > 0
            assert each.shape == slices[0].shape  # every rank's program is the same
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
        slices = [slice_of(name, whole, model, tp, rank) for rank in range(tp)]
        if slices[0].dim is None:
            continue
        padding = sum(each.size - each.real for each in slices)
        expected = padded_vocabulary(vocab, tp) - vocab if name.endswith(VOCABULARY_ROWS) else 0
        assert padding == expected, name
        assert all(0 <= each.real <= each.size for each in slices)


@settings(max_examples=60)
@given(cut_models())
def test_each_rank_has_the_key_value_heads_that_its_queries_read(case):
    model, vocab, tp = case
    queries_each, group = model.n_heads // tp, model.n_heads // model.kv_heads
    for name, whole in parameter_shapes(model, vocab).items():
        if not name.endswith(KEY_VALUE_ROWS):
            continue
        slices = [slice_of(name, whole, model, tp, rank) for rank in range(tp)]
        for rank, each in enumerate(slices):
            needed = {query // group for query in range(rank * queries_each, (rank + 1) * queries_each)}
            start = each.start if each.dim == 0 else 0
            held = each.size if each.dim == 0 else whole[0]
            assert (start % model.head_size, held % model.head_size) == (0, 0)
            assert needed == set(range(start // model.head_size, (start + held) // model.head_size))
            assert each.copies == max(1, tp // model.kv_heads)
            assert each.first == (rank % each.copies == 0)
            first = rank - rank % each.copies
            assert all(slices[first + i].start == each.start for i in range(each.copies))


@settings(max_examples=30)
@given(st.sampled_from([MIXTRAL, DEEPSEEK]), st.sampled_from([1, 2, 3, 6, 12]), st.booleans())
def test_cut_and_put_together_again_experts_and_latent_attention_are_whole(model, tp, bias):
    model = replace(model, bias=bias)
    for name, shape in parameter_shapes(model).items():
        whole = np.arange(prod(shape)).reshape(shape)
        slices = [slice_of(name, shape, model, tp, rank) for rank in range(tp)]
        if slices[0].dim is None:
            continue
        dim = slices[0].dim
        parts = [whole.take(range(p.start, p.start + p.size), axis=dim) for p in slices if p.first]
        assert (np.concatenate(parts, axis=dim) == whole).all(), name


@settings(max_examples=60)
@given(cut_models())
def test_latent_attention_is_cut_between_heads(case):
    """Queries, keys and values of a head, and what the output reads of it, lie on one rank."""
    model, vocab, tp = case
    of_a_head = {
        "attn.wq.weight": model.head_size,
        "attn.wq_b.weight": model.head_size,
        "attn.wkv_b.weight": model.mla.nope_head_dim + model.mla.v_head_dim,
        "attn.wo.weight": model.v_head_size,
    }
    for name, whole in parameter_shapes(model, vocab).items():
        width = of_a_head.get(name.partition(".")[2].partition(".")[2])
        if width is None or tp == 1:
            continue
        for rank in range(tp):
            each = slice_of(name, whole, model, tp, rank)
            heads = model.n_heads // tp
            assert (each.start, each.size) == (rank * heads * width, heads * width), name


def test_what_serves_all_heads_and_the_router_are_whole():
    whole = {
        name for name, shape in parameter_shapes(DEEPSEEK).items() if slice_of(name, shape, DEEPSEEK, 2, 1).dim is None
    }
    latent = {"wq_a.weight", "wq_a.bias", "q_norm.weight", "q_norm.bias", "kv_norm.weight", "kv_norm.bias"}
    latent |= {"wkv_a.weight", "wkv_a.bias", "wo.bias"}
    of_a_block = {f"attn.{name}" for name in latent}
    of_a_block |= {f"{norm}.{leaf}" for norm in ("attn_norm", "mlp_norm") for leaf in ("weight", "bias")}
    experts = {"router.weight", "router.bias", "experts.down.bias", "shared.down.bias"}
    expected = {f"blocks.{layer}.{name}" for layer in (0, 1) for name in of_a_block}
    expected |= {"blocks.0.mlp.down.bias"} | {f"blocks.1.moe.{name}" for name in experts}
    assert whole == expected | {"positions.weight", "final_norm.weight", "final_norm.bias"}


@given(st.integers(1, 40), st.integers(1, 16))
def test_every_expert_is_on_one_rank_and_ranks_have_equally_many(each, ep):
    held = [experts_of(each * ep, ep, rank) for rank in range(ep)]
    assert [expert for mine in held for expert in mine] == list(range(each * ep))
    assert {len(mine) for mine in held} == {each}


def test_routed_experts_are_told_by_name():
    names = {name for name in parameter_shapes(DEEPSEEK) if is_expert(name)}
    leaves = {f"{matrix}.{leaf}" for matrix in ("up", "gate", "down") for leaf in ("weight", "bias")}
    assert names == {f"blocks.1.moe.experts.{leaf}" for leaf in leaves}


@given(st.integers(1, 10**6), st.integers(1, 64))
def test_padding_is_less_than_a_row_a_rank(vocab, tp):
    padded = padded_vocabulary(vocab, tp)
    assert padded % tp == 0
    assert 0 <= padded - vocab < tp


def test_by_hand():
    model = ModelConfig(n_layers=1, d_model=8, n_heads=4, n_kv_heads=2, vocab_size=10, head_dim=2)
    assert slice_of("embed.weight", (10, 8), model, 4, 3) == TensorSlice((10, 8), 0, 9, 3)
    assert slice_of("embed.weight", (10, 8), model, 4, 3).real == 1
    assert slice_of("blocks.0.attn.wk.weight", (4, 8), model, 4, 1) == TensorSlice(
        (4, 8), 0, 0, 2, copies=2, first=False
    )
    assert slice_of("blocks.0.attn.wk.weight", (4, 8), model, 4, 2) == TensorSlice(
        (4, 8), 0, 2, 2, copies=2, first=True
    )
    assert slice_of("blocks.0.attn.wo.weight", (8, 8), model, 4, 1) == TensorSlice((8, 8), 1, 2, 2)
    assert slice_of("blocks.0.attn.wo.bias", (8,), model, 4, 1) == TensorSlice((8,), copies=4, first=False)
    assert slice_of("blocks.0.mlp.up.bias", (32,), model, 4, 1) == TensorSlice((32,), 0, 8, 8)
    assert slice_of("final_norm.weight", (8,), model, 1, 0) == TensorSlice((8,))
    assert slice_of("blocks.0.moe.experts.up.weight", (5, 12, 6), MIXTRAL, 3, 1) == TensorSlice((5, 12, 6), 1, 4, 4)
    assert slice_of("blocks.0.moe.experts.gate.bias", (5, 12), MIXTRAL, 3, 2) == TensorSlice((5, 12), 1, 8, 4)
    assert slice_of("blocks.0.moe.experts.down.weight", (5, 6, 12), MIXTRAL, 3, 1) == TensorSlice((5, 6, 12), 2, 4, 4)
    assert slice_of("blocks.1.moe.shared.up.weight", (24, 6), DEEPSEEK, 3, 1) == TensorSlice((24, 6), 0, 8, 8)
    assert slice_of("blocks.1.moe.shared.down.weight", (6, 24), DEEPSEEK, 3, 1) == TensorSlice((6, 24), 1, 8, 8)
    assert slice_of("blocks.1.attn.wq_b.weight", (60, 5), DEEPSEEK, 3, 1) == TensorSlice((60, 5), 0, 20, 20)


def test_a_piece_beyond_the_vocabulary_is_all_padding():
    last = slice_of("embed.weight", (3, 2), ModelConfig(), 8, 7)
    assert (last.start, last.size, last.real, prod(last.shape)) == (7, 1, 0, 2)


def test_what_is_not_cut_has_no_padding():
    with pytest.raises(AssertionError, match="only a cut dimension is padded"):
        _ = TensorSlice((3,)).real


# Whole matrices on single ranks: cuts of buckets between matrices, and owners of matrices that ranks share.

parameters = st.lists(
    st.one_of(
        st.tuples(st.integers(1, 60), st.just(0)),  # may be cut anywhere
        st.integers(1, 60).map(lambda n: (n, n)),  # a matrix
        st.tuples(st.integers(1, 12), st.integers(2, 6)).map(lambda pair: (pair[0] * pair[1], pair[0])),  # experts
    ),
    min_size=1,
    max_size=14,
)


@settings(max_examples=300)
@given(parameters, st.integers(1, 9))
def test_a_cut_bucket_cuts_no_matrix_or_is_equal(held, ranks):
    sizes, matrices = (tuple(column) for column in zip(*held, strict=True))
    starts, each = bucket_cut(sizes, matrices, ranks)
    taken = sorted((start, start + size) for start, size in zip(starts, sizes, strict=True))
    assert all(stop <= start for (_, stop), (start, _) in pairwise(taken)), "they overlap"
    assert taken[0][0] >= 0
    assert taken[-1][1] <= each * ranks
    equal = equal_cut(sizes, ranks)
    if (starts, each) == equal:
        return
    for start, size, matrix in zip(starts, sizes, matrices, strict=True):
        boundaries = [place - start for place in range(0, each * ranks, each) if start < place < start + size]
        assert not matrix or all(boundary % matrix == 0 for boundary in boundaries)
    whole = sum(size for size, matrix in zip(sizes, matrices, strict=True) if matrix)
    assert (each - equal.each) * ranks <= whole / ranks + ranks


def test_equal_matrices_need_no_padding():
    assert bucket_cut((10, 7, 10, 10, 3, 10), (10, 0, 10, 10, 0, 10), 2).each == 25
    # Two single ones, and a stack of four experts, between which shares may end.
    starts, each = bucket_cut((6, 24, 6), (6, 6, 6), 3)
    assert each == 12
    assert starts[1] == 0


def test_a_bucket_of_one_matrix_keeps_its_equal_cut():
    assert bucket_cut((4096 * 4096,), (4096 * 4096,), 64) == equal_cut((4096 * 4096,), 64)


def test_without_matrices_or_ranks_the_cut_is_equal():
    assert bucket_cut((5, 9), (0, 0), 4) == equal_cut((5, 9), 4)
    assert bucket_cut((5, 9), (5, 9), 1) == equal_cut((5, 9), 1)


@given(st.integers(1, 40), st.integers(1, 5), st.integers(1, 9))
def test_rows_are_distributed_as_by_chunk(rows, columns, ranks):
    import torch

    chunks = torch.arange(rows * columns).view(rows, columns).chunk(ranks)
    ranges = row_ranges(rows, rows * columns, ranks)
    for rank in range(ranks):
        start, stop = ranges.of(rank)
        expected = chunks[rank].flatten().tolist() if rank < len(chunks) else []
        assert list(range(start, stop)) == expected


shapes = st.tuples(st.integers(1, 9), st.integers(1, 9))


@settings(max_examples=200)
@given(st.lists(st.tuples(shapes, st.booleans()), min_size=1, max_size=20), st.integers(1, 6), st.integers(1, 4))
def test_every_matrix_has_one_owner_and_stays_where_it_is_whole(held, ranks, tp):
    matrices = []
    for number, (shape, apart) in enumerate(held):
        size = prod(shape)
        ranges = row_ranges(shape[0], size, ranks) if apart else ShardRanges(size, size, -size * (number % ranks))
        matrices.append(SharedMatrix(shape, (Piece(ranges, 0, size),)))
    plan = rounds(matrices, ranks, tp)
    assert sorted(n for owners in plan for n in owners) == list(range(len(matrices)))
    for owners in plan:
        for n, owner in owners.items():
            assert 0 <= owner.rank < ranks
            assert 0 <= owner.tp < tp
            if matrices[n].holder is not None:
                assert owner.rank == matrices[n].holder
    for matrix in matrices:
        assert sum(matrix.on(rank) for rank in range(ranks)) == matrix.size


def test_free_matrices_balance_the_work():
    """64 ranks, llama3-8b's 224 matrices in FSDP's rows: nobody has more than 1.35 times the mean."""
    layer = [(4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), (14336, 4096), (14336, 4096), (4096, 14336)]
    matrices = [SharedMatrix(s, (Piece(row_ranges(s[0], prod(s), 64), 0, prod(s)),)) for s in layer * 32]
    load = [0] * 64
    for owners in rounds(matrices, 64, 1):
        for n, owner in owners.items():
            load[owner.rank] += newton_schulz_flops(*matrices[n].shape)
    assert max(load) / (sum(load) / 64) == pytest.approx(1.2, abs=0.15)


def test_each_way_sends_what_is_not_at_home():
    ranges = row_ranges(4, 12, 2)
    matrices = [SharedMatrix((4, 3), (Piece(ranges, 0, 12),))]
    owners = {0: Owner(1, 0)}
    assert sent_elements(matrices, owners, 0, 1, 0, 1) == (6, 0)
    assert sent_elements(matrices, owners, 1, 1, 0, 1) == (6, 0)
    # Over four tensor ranks, two with each slice: the owner returns three, of the others the first with a slice sends.
    here = [sent_elements(matrices, owners, 1, 4, rank, 2).tp for rank in range(4)]
    assert here == [36, 0, 12, 0]


# Which positions a context-parallel rank holds.


@st.composite
def cut(draw: st.DrawFn, slices: int = 4) -> tuple[Layout, int, int]:
    """A legal layout, the length of its sequences, and how many parts travel a pipeline."""
    ring, ulysses, parts = draw(st.integers(1, 5)), draw(st.integers(1, 5)), draw(st.integers(1, slices))
    layout = Layout(cp=ring * ulysses, cp_ulysses=ulysses, cp_inner=draw(st.sampled_from(["ulysses", "ring"])))
    whole = layout.cp * (2 if ring > 1 and ulysses % 2 else 1)
    return layout, parts * whole * draw(st.integers(1, 6)), parts


def held(layout: Layout, seq_len: int, rank: int, slices: int = 1) -> list[int]:
    return list(chain.from_iterable(rank_positions(layout, seq_len, rank, slices)))


@given(cut())
def test_every_position_is_held_once_and_each_rank_holds_as_many(case):
    layout, seq_len, slices = case
    each = [held(layout, seq_len, rank, slices) for rank in range(layout.cp)]
    assert sorted(chain.from_iterable(each)) == list(range(seq_len))
    assert {len(positions) for positions in each} == {seq_len // layout.cp}


@given(cut())
def test_ranks_hold_positions_in_order_and_in_few_runs(case):
    layout, seq_len, slices = case
    for rank in range(layout.cp):
        runs = rank_positions(layout, seq_len, rank, slices)
        assert all(len(run) for run in runs)
        assert len(runs) <= (1 if layout.ring == 1 else 2) * slices
        assert held(layout, seq_len, rank, slices) == sorted(held(layout, seq_len, rank, slices))


@given(cut(slices=1))
def test_all_places_of_a_ring_see_as_many_keys(case):
    """Pairs of a query and a key that it sees: query at position p sees p + 1 keys."""
    layout, seq_len, _ = case
    pairs = [
        sum(position + 1 for run in ring_positions(layout, seq_len, place) for position in run)
        for place in range(layout.ring)
    ]
    assert pairs == [seq_len * (seq_len + 1) // 2 // layout.ring] * layout.ring


@given(cut(slices=1))
def test_ulysses_ranks_in_order_hold_their_groups_tokens_in_order(case):
    layout, seq_len, _ = case
    by_place = {cp_coordinates(layout, rank): rank for rank in range(layout.cp)}
    assert len(by_place) == layout.cp
    for ring in range(layout.ring):
        ranks = [by_place[ring, ulysses] for ulysses in range(layout.cp_ulysses)]
        together = list(chain.from_iterable(held(layout, seq_len, rank) for rank in ranks))
        assert together == list(chain.from_iterable(ring_positions(layout, seq_len, ring)))


@given(cut())
def test_a_slice_is_dealt_out_as_a_sequence_of_its_own(case):
    layout, seq_len, slices = case
    tokens = seq_len // slices
    for rank in range(layout.cp):
        alone = held(layout, tokens, rank)
        again = [part * tokens + position for part in range(slices) for position in alone]
        assert held(layout, seq_len, rank, slices) == again


@given(cut(slices=1))
def test_neighbouring_ranks_are_those_of_the_inner_kind(case):
    layout, _, _ = case
    inner = {"ulysses": (layout.cp_ulysses, 1), "ring": (layout.ring, 0)}[layout.cp_inner]
    for rank in range(layout.cp - 1):
        if rank % inner[0] != inner[0] - 1:
            here, there = cp_coordinates(layout, rank), cp_coordinates(layout, rank + 1)
            assert there[inner[1]] == here[inner[1]] + 1
            assert there[1 - inner[1]] == here[1 - inner[1]]


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        (Layout(), [[range(8)]]),
        (Layout(cp=2), [[range(2), range(6, 8)], [range(2, 4), range(4, 6)]]),
        (Layout(cp=2, cp_ulysses=2), [[range(4)], [range(4, 8)]]),
        (Layout(cp=4, cp_ulysses=2), [[range(2)], [range(6, 8)], [range(2, 4)], [range(4, 6)]]),
        (Layout(cp=4, cp_ulysses=2, cp_inner="ring"), [[range(2)], [range(2, 4)], [range(6, 8)], [range(4, 6)]]),
    ],
)
def test_eight_tokens(layout, expected):
    assert [rank_positions(layout, 8, rank) for rank in range(layout.cp)] == expected
