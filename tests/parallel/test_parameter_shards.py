"""Shares of parameters: fragments, buckets, and updates of whole matrices."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from covering import also_whole
from phalanx.blocks.parameters import parameter_shapes
from phalanx.comm.axis import Axis
from phalanx.config import layout_line
from phalanx.config.job import Job, Train
from phalanx.config.layout import Layout
from phalanx.config.model import MLA, ModelConfig, MoE
from phalanx.model.seeding import derive_seed, initial_value
from phalanx.model.transformer import Transformer
from phalanx.optimizers.entry import is_hidden_matrix
from phalanx.parallel import mesh as meshes
from phalanx.parallel.apply import apply
from phalanx.parallel.mesh import build
from phalanx.parallel.parameter_shards import MatrixUpdates, ParameterShard, counted, cut, wholes
from phalanx.parallel.zero import Bucket, Slot, fill
from phalanx.partition.matrices import equal_cut
from phalanx.partition.tensor_slices import TensorSlice, slice_of

# Fragments: shares of parameters that the ranks of any layout put together again, and sums that count each once.


SHAPE = ModelConfig(n_layers=1, d_model=8, n_heads=4, n_kv_heads=2, d_ff=20, seq_len=4, tied=False, activation="swiglu")
VOCAB = 11
ALONE = build(Layout(), "cpu")


@settings(max_examples=60)
@given(rows=st.integers(1, 9), columns=st.integers(1, 9), tp=st.integers(1, 5), embeds=st.booleans())
def test_a_cut_parameter_is_put_together_again(rows, columns, tp, embeds):
    name, whole = ("embed.weight", (rows, columns)) if embeds else ("blocks.0.attn.wo.weight", (rows, columns * tp))
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
        Layout(dp_shard=2, tp=2, zero=3),
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


UNTIED = [Layout(pp=2, schedule="dualpipe", accumulation=2), Layout(pp=2, dp_shard=2, tiles=2, accumulation=2)]
TIED = [
    Layout(pp=2, accumulation=2),
    Layout(pp=4, schedule="gpipe", accumulation=2),
    Layout(pp=2, schedule="zb_v", accumulation=2),
    Layout(pp=2, dp_shard=2, tp=2, zero=1, accumulation=2, bucket_mb=0.001),
]


@pytest.mark.parametrize(
    ("layout", "tied"),
    [
        *((layout, False) for layout in (*UNTIED, *also_whole(*TIED))),
        *((layout, True) for layout in (*TIED, *also_whole(*UNTIED))),
    ],
    ids=lambda value: value.line() if isinstance(value, Layout) else "tied" if value else "",
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


# Buckets: parameters in groups, each group's buffer in equal shares, and gradients gathered in it.

sizes = st.lists(st.integers(1, 40), min_size=1, max_size=8)


def parameters(counts: list[int], dtype: torch.dtype = torch.float32) -> list[tuple[str, nn.Parameter]]:
    return [(f"p{i}", nn.Parameter(torch.full((n,), float(i), dtype=dtype))) for i, n in enumerate(counts)]


def bucket(counts: list[int], size: int = 1, rank: int = 0, transient: bool = False, dtype=torch.float32) -> Bucket:
    """As on one rank of a shard axis of `size`, without anybody else."""
    starts, each = equal_cut(counts, size)
    slots = [Slot(name, parameter, start) for (name, parameter), start in zip(parameters(counts), starts, strict=True)]
    return Bucket(slots, Axis("dp_shard", size, rank), Axis("dp_replicate"), transient, dtype, each)


@given(sizes, st.floats(0.5, 300))
def test_filling_keeps_the_order_and_reaches_the_size(counts, bytes_each):
    named = parameters(counts)
    groups = fill(named, bytes_each)
    assert [entry for group in groups for entry in group] == named
    for group in groups[:-1]:
        without_last = sum(p.nbytes for _, p in group[:-1])
        assert without_last < bytes_each <= without_last + group[-1][1].nbytes
    assert groups[-1]


@settings(max_examples=60)
@given(sizes, st.integers(1, 9))
def test_owned_ranges_tile_every_parameter_exactly_once(counts, ranks):
    covered = [[0] * n for n in counts]
    for rank in range(ranks):
        mine = bucket(counts, ranks, rank)
        assert mine.length % ranks == 0
        assert 0 <= mine.length - sum(counts) < ranks
        assert mine.share == slice(mine.length // ranks * rank, mine.length // ranks * (rank + 1))
        owned = list(mine.owned())
        assert [slot.name for slot, _, _ in owned] == [f"p{i}" for i in range(len(counts))]
        for number, (slot, start, stop) in enumerate(owned):
            if start == stop:
                continue
            assert mine.share.start <= start < stop <= mine.share.stop
            for place in range(start - slot.start, stop - slot.start):
                covered[number][place] += 1
    assert covered == [[1] * n for n in counts]


@settings(max_examples=30)
@given(sizes, st.integers(2, 5))
def test_sharded_parameters_lie_in_the_buffer(counts, ranks):
    here = bucket(counts, ranks)
    expected = [float(i) for i, n in enumerate(counts) for _ in range(n)]
    assert here.parameters.tolist() == expected + [0.0] * (here.length - len(expected))
    here.parameters.add_(1)
    assert all((slot.parameter == i + 1).all() for i, slot in enumerate(here.slots))


def test_unsharded_parameters_stay_where_they_are():
    here = bucket([3, 4])
    assert here.parameters.numel() == 0
    assert [(start, stop) for _, start, stop in here.owned()] == [(0, 3), (3, 7)]


def backward(here: Bucket, value: float) -> None:
    """A micro-batch: every parameter's gradient comes, or is added to what is there."""
    here.expect()
    for slot in here.slots:
        gradient = torch.full_like(slot.parameter, value)
        slot.parameter.grad = gradient if slot.parameter.grad is None else slot.parameter.grad.add_(gradient)
        here.take(slot)
    assert here.waiting == 0


@pytest.mark.parametrize("transient", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_micro_batches_add_up_in_the_buffer(transient, dtype):
    """Whether autograd adds to the buffer itself or each gradient is taken in, and again after a step."""
    here = bucket([3, 4], transient=transient, dtype=dtype)
    for _ in range(2):
        for value in (1.0, 2.0, 4.0):
            backward(here, value)
        assert here.gradients is not None
        assert here.gradients.dtype == dtype
        assert here.gradients[:7].tolist() == [7.0] * 7
        stays = not transient and dtype == torch.float32
        assert all((slot.parameter.grad is not None) == stays for slot in here.slots)
        here.clear()
        assert all(slot.parameter.grad is None for slot in here.slots)


def reduced(ranks, transient: bool, every: bool):
    """This rank's share of the sum of two micro-batches' gradients, and whether the whole gradient is still there."""
    everyone = dist.distributed_c10d._get_default_group()
    here = bucket([5, 4], ranks.world, ranks.rank, transient)
    here.shard = Axis("dp_shard", ranks.world, ranks.rank, everyone)
    found, kept = [], False
    for _ in range(2):  # two steps: what the first left must not come back
        for number in range(2):
            backward(here, float(10**number * (ranks.rank + 1)))
            if every or number == 1:
                here.reduce()
                here.settle()
        assert here.reduced is not None
        found = here.reduced.tolist()
        kept = here.gradients is not None
        here.clear()
    return found, kept


@pytest.mark.parametrize("every", [False, True])
def test_shares_of_the_sum(ranks, every):
    results = ranks(reduced, 3, True, every)
    assert results == [([66.0] * 3, False)] * 3
    if not every:
        assert ranks(reduced, 3, False, False) == [([66.0] * 3, True)] * 3


# Updates of whole matrices: what ranks compute of shared ones is what one process computes of the whole.

FEW = 29
LLAMA = ModelConfig(
    n_layers=2, d_model=20, n_heads=4, n_kv_heads=1, head_dim=6, d_ff=36, seq_len=16,
    norm="rmsnorm", positions="rope", activation="swiglu", bias=False, tied=False,
)  # fmt: skip
EXPERTS = dataclasses.replace(
    LLAMA,
    n_kv_heads=4,
    bias=True,
    moe=MoE(n_experts=4, top_k=2, d_ff=12, n_dense_layers=1, n_shared=1),
    mla=MLA(q_rank=12, kv_rank=10, rope_head_dim=4, nope_head_dim=6, v_head_dim=5),
)


def cubed(x: Tensor) -> Tensor:
    """Depends on all of a matrix."""
    return x @ x.mT @ x


def whole_of(name: str, shape: tuple[int, ...]) -> Tensor:
    generator = torch.Generator().manual_seed(derive_seed(0, name))
    return torch.randn(shape, dtype=torch.float64, generator=generator)


def differences(ranks, job: Job) -> tuple[dict[str, float], int, bool]:
    mesh = meshes.build(job.layout, "cpu")
    with torch.device("meta"):
        model = Transformer(job.model, FEW).double()
    replica = apply(model, job, mesh, torch.device("cpu"))
    updates = MatrixUpdates(replica.shards, mesh.axis("tp"))
    here = {}
    for shard in replica.shards:
        here[shard.name] = torch.empty_like(shard.value)
        shard.assign(whole_of(shard.whole_name, shard.tensor_slice.whole), here[shard.name])
    mesh.ledger.clear()
    updates.apply({name: here[name] for name in updates.names}, cubed)
    found = {}
    for shard in replica.shards:
        expected, whole = torch.empty_like(shard.value), whole_of(shard.whole_name, shard.tensor_slice.whole)
        matrix = is_hidden_matrix(shard.whole_name, whole.shape)
        assert matrix == (shard.name in updates.names)
        shard.assign(cubed(whole) if matrix else whole, expected)
        error = (here[shard.name] - expected).abs()
        found[shard.name] = float(error.max()) / float(whole.norm() ** 3) if error.numel() else 0.0
    travel = any(m.holder is None for group in updates.groups for m in group.matrices)
    return found, len(updates.groups), travel


@pytest.mark.parametrize(
    ("model", "line"),
    [
        (LLAMA, "accumulation=1"),
        (LLAMA, "dp_replicate=2"),
        (LLAMA, "dp_shard=3,zero=1"),
        (LLAMA, "dp_shard=3,zero=2,bucket_mb=0.01"),
        (LLAMA, "dp_shard=3"),
        (LLAMA, "dp_shard=2,tiles=2"),
        (LLAMA, "tp=2,dp_shard=2"),
        (LLAMA, "tp=4,sp=true"),
        (EXPERTS, "dp_shard=4,ep=2"),
        (EXPERTS, "dp_shard=2,tp=2,sp=true,ep=2,etp=1"),
        *also_whole(
            (LLAMA, "tp=2,dp_shard=2,zero=1,pp=2"),
            (EXPERTS, "dp_shard=4,ep=2,zero=1"),
            (EXPERTS, "dp_shard=2,cp=2,ep=2,tp=2,zero=2"),
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_ranks_compute_what_one_process_computes(ranks, model, line):
    layout = dataclasses.replace(layout_line.parse(line), micro_batch=1)
    job = Job(model=model, layout=layout, train=Train(global_batch=layout.data_ranks * layout.pp, precision="fp64"))
    for rank, (found, groups, _) in enumerate(ranks(differences, layout.processes, job)):
        assert groups
        assert max(found.values()) < 1e-12, f"rank {rank}: {found}"
