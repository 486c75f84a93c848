"""Buckets: parameters in groups, each group's buffer in equal shares, and gradients gathered in it."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from phalanx.comm.axis import Axis
from phalanx.parallel.zero import Bucket, Slot, fill
from phalanx.partition.matrices import equal_cut

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
