"""Fragments: shares of parameters that the ranks of any layout put together again, and sums that count each once."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.blocks.parameters import parameter_shapes
from phalanx.config.job import Job, Train
from phalanx.config.layout import Layout
from phalanx.config.model import ModelConfig
from phalanx.model.seeding import initial_value
from phalanx.model.transformer import Transformer
from phalanx.parallel.apply import apply
from phalanx.parallel.mesh import build
from phalanx.parallel.parameter_shards import ParameterShard, counted, cut, wholes
from phalanx.partition.tensor_slices import TensorSlice, slice_of

SHAPE = ModelConfig(n_layers=1, d_model=8, n_heads=4, n_kv_heads=2, d_ff=20, seq_len=4, tied=False, activation="swiglu")
VOCAB = 11
ALONE = build(Layout(), "cpu")


@settings(max_examples=60)
@given(rows=st.integers(1, 9), columns=st.integers(1, 9), tp=st.integers(1, 5), embeds=st.booleans())
def test_a_cut_parameter_is_put_together_again(rows, columns, tp, embeds):
    name, whole = ("embed.weight", (rows, columns)) if embeds else ("attn.wo.weight", (rows, columns * tp))
    tensor = torch.rand(whole) + 1
    tensor_slices = [slice_of(name, whole, SHAPE, tp, rank) for rank in range(tp)]
    parts = [cut(tensor, each) for each in tensor_slices]
    for part, each in zip(parts, tensor_slices, strict=True):
        assert part.shape == each.shape
        assert int((part == 0).sum()) == (each.size - each.real if each.dim is not None else 0) * columns
    firsts = [part for part, each in zip(parts, tensor_slices, strict=True) if each.first]
    dim = tensor_slices[0].dim
    together = firsts[0] if dim is None else torch.cat(firsts, dim).narrow(dim, 0, whole[dim])
    assert torch.equal(together, tensor)


@settings(max_examples=60)
@given(rows=st.integers(1, 6), columns=st.integers(1, 6), share=st.tuples(st.integers(0, 40), st.integers(0, 40)))
def test_a_share_is_taken_out_of_the_whole(rows, columns, share):
    size = rows * columns
    start, stop = sorted(min(place, size) for place in share)
    tensor = torch.arange(float(size)).view(rows, columns)
    value = torch.full((stop - start,), -1.0)
    shard = ParameterShard("w", (TensorSlice((rows, columns)),), 0, start, value)
    shard.assign(tensor)
    assert value.tolist() == list(range(start, stop))
    moment = torch.zeros(stop - start)
    shard.assign(tensor + 1, into=moment)
    assert moment.tolist() == list(range(start + 1, stop + 1))
    assert value.tolist() == list(range(start, stop))


def test_matrices_decay_even_where_a_share_of_one_is_flat():
    shares = {
        name: ParameterShard(name, (TensorSlice(shape),), 0, 0, torch.ones(3))
        for name, shape in {"w": (2, 3), "b": (3,)}.items()
    }
    assert shares["w"].decays
    assert not shares["b"].decays


def test_one_process_reads_out_copies():
    value = torch.ones(2, 3, requires_grad=True)
    shard = ParameterShard("w", (TensorSlice((2, 3)),), 0, 0, value)
    assert dict(wholes([shard], {"w": value}, ALONE, keep=False)) == {}
    found = dict(wholes([shard], {"w": value}, ALONE, keep=True))
    assert torch.equal(found["w"], torch.ones(2, 3))
    assert not found["w"].requires_grad


def whole_values(ranks, layout: Layout):
    """The initial values put together on the last rank; how many elements all ranks count; and whether another whole
    tensor, put in by shares, comes out as it was."""
    with torch.device("meta"):
        model = Transformer(SHAPE, VOCAB).double()
    mesh = build(layout, "cpu")
    job = Job(model=SHAPE, layout=layout, train=Train(seed=3))
    replica = apply(model, job, mesh, torch.device("cpu"))  # kept: its groups go with it
    shards = replica.shards
    last = ranks.rank == ranks.world - 1
    found = dict(wholes(shards, {f.name: f.value for f in shards}, mesh, last))
    elements = torch.zeros(len(shards))
    for number, shard in enumerate(shards):
        if any(shard is each for each in counted(shards)):
            real = torch.ones(shard.tensor_slice.whole)
            mine = torch.zeros_like(shard.value)
            shard.assign(real, into=mine)
            elements[number] = mine.sum()
    mesh.axis("world").all_reduce(elements).wait()
    others = {f.name: torch.randn(f.tensor_slice.whole, generator=torch.Generator().manual_seed(7)) for f in shards}
    shares = {f.name: torch.empty(f.value.shape) for f in shards}
    for shard in shards:
        shard.assign(others[shard.name], into=shares[shard.name])
    same = dict(wholes(shards, shares, mesh, True))
    assert all(torch.equal(same[name], tensor) for name, tensor in others.items())
    return list(found), found, elements, [f.tensor_slice.whole for f in shards]


@pytest.mark.parametrize(
    "layout",
    [
        Layout(),
        Layout(dp_shard=2, zero=1, bucket_mb=0.001),
        Layout(dp_shard=3, zero=2),
        Layout(dp_shard=3, zero=3),
        Layout(tp=2),
        Layout(tp=4, sp=True),
        Layout(dp_shard=2, tp=2, zero=1),
        Layout(dp_shard=2, tp=4, zero=3),
    ],
    ids=lambda layout: layout.line() or "one process",
)
def test_the_ranks_of_a_layout_hold_everything_once(ranks, layout):
    results = ranks(whole_values, layout.world, layout)
    for names, found, elements, shapes in results[:-1]:
        assert (names, found) == ([], {})
        assert torch.equal(elements, results[-1][2])
        assert shapes == results[-1][3]
    names, found, elements, shapes = results[-1]
    for name, shape, count in zip(names, shapes, elements.tolist(), strict=True):
        assert torch.equal(found[name], initial_value(name, shape, SHAPE, 3).double()), name
        assert count == found[name].numel(), name


def pipeline_values(ranks, layout: Layout, shape: ModelConfig):
    """The initial values put together on rank 0, and the names that this rank counts."""
    with torch.device("meta"):
        model = Transformer(shape, VOCAB).double()
    mesh = build(layout, "cpu")
    job = Job(model=shape, layout=layout, train=Train(seed=3, global_batch=layout.data_ranks * layout.accumulation))
    replica = apply(model, job, mesh, torch.device("cpu"))  # kept: its groups go with it
    shards = replica.shards
    found = dict(wholes(shards, {f.name: f.value for f in shards}, mesh, ranks.rank == 0))
    return found, [(f.whole_name, f.value.numel()) for f in counted(shards)], [f.whole_name for f in shards]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    "layout",
    [
        Layout(pp=2, accumulation=2),
        Layout(pp=4, schedule="gpipe", accumulation=2),
        Layout(pp=2, schedule="zb_v", accumulation=2),
        Layout(pp=2, schedule="dualpipe", accumulation=2),
        Layout(pp=2, dp_shard=2, tiles=2, accumulation=2),
        Layout(pp=2, dp_shard=2, tp=2, zero=1, accumulation=2, bucket_mb=0.001),
    ],
    ids=Layout.line,
)
def test_a_pipeline_brings_all_stages_to_its_first_rank_and_counts_everything_once(ranks, layout, tied):
    shape = dataclasses.replace(SHAPE, n_layers=4, tied=tied)
    results = ranks(pipeline_values, layout.world, layout, shape)
    expected = parameter_shapes(shape, VOCAB)
    assert all(found == {} for found, _, _ in results[1:])
    whole = results[0][0]
    assert whole.keys() == expected.keys()
    for name, size in expected.items():
        assert torch.equal(whole[name], initial_value(name, size, shape, 3).double()), name
    if layout.tp == 1:
        elements = dict.fromkeys(expected, 0)
        for _, mine, _ in results:
            for name, count in mine:
                elements[name] += count
        assert elements == {name: torch.Size(size).numel() for name, size in expected.items()}
    if tied:
        inner = layout.world // layout.pp
        holders = {rank // inner for rank, (_, _, names) in enumerate(results) if "embed.weight" in names}
        assert holders == ({0} if layout.schedule == "zb_v" else {0, layout.pp - 1})
