"""An axis's collectives against the backend's own, and what the ledger and recordings count."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from phalanx.comm import axis as axes
from phalanx.comm.axis import LATENCY_BOUND_BYTES, Axis, Ledger, StagedAxis
from phalanx.comm.calls import Recording, recorded
from phalanx.cost.communication import sent_bytes
from phalanx.launch.watchdog import heartbeat
from phalanx.launch.watchdog.heartbeat import Phase
from phalanx.units import gib

# An axis's collectives against the backend's own, which take other ways, and what they count.


DTYPES = [torch.float32, torch.float64, torch.bfloat16]


def axis_of(ranks, kind: type[Axis] = Axis, shared: bool = True) -> Axis:
    everyone = dist.distributed_c10d._get_default_group()
    axis = kind("tp", ranks.world, ranks.rank, everyone, Ledger())
    return axis.share() if shared else axis


def data(ranks, *shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Small whole numbers, other ones on each rank: every order of adding them gives the same bits."""
    generator = torch.Generator().manual_seed(ranks.rank)
    return torch.randint(-8, 9, shape, generator=generator).to(dtype)


def compare_all(ranks, dtype, kind, shared):
    """Every collective of the axis equals torch's; returns what went over the axis."""
    axis, world = axis_of(ranks, kind, shared), ranks.world
    assert (axis.shared is not None) == shared
    large = LATENCY_BOUND_BYTES // dtype.itemsize + 3
    for shape in ((1,), (3, 5), (large,)):
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX):
            mine = data(ranks, *shape, dtype=dtype)
            expected = mine.clone()
            dist.all_reduce(expected, op)
            axis.all_reduce(mine, op).wait()
            assert torch.equal(mine, expected), (shape, op)
    for n in (1, 7, large):
        whole = data(ranks, world * n, dtype=dtype)
        expected = torch.empty(n, dtype=dtype)
        dist.reduce_scatter_tensor(expected, whole.clone())
        part = torch.empty(n, dtype=dtype)
        kept = whole.clone()
        axis.reduce_scatter(part, whole).wait()
        assert torch.equal(part, expected)
        assert torch.equal(whole, kept)  # a part of its own leaves the whole alone
        place = whole.view(world, n)[ranks.rank]
        axis.reduce_scatter(place, whole).wait()
        assert torch.equal(place, expected)

        part = data(ranks, n, dtype=dtype)
        expected = torch.empty(world * n, dtype=dtype)
        dist.all_gather_into_tensor(expected, part)
        whole = torch.full((world * n,), -99.0).to(dtype)
        axis.all_gather(whole, part).wait()
        assert torch.equal(whole, expected)
        whole = torch.full((world * n,), -99.0).to(dtype)
        place = whole.view(world, n)[ranks.rank]
        place.copy_(part)
        axis.all_gather(whole, place).wait()
        assert torch.equal(whole, expected)

        x = data(ranks, n, dtype=dtype)
        expected = x.clone()
        dist.broadcast(expected, 0)
        axis.broadcast(x).wait()
        assert torch.equal(x, expected)

        sizes = [(ranks.rank + 2 * other) % 3 * n for other in range(world)]
        counts = [(other + 2 * ranks.rank) % 3 * n for other in range(world)]
        x = data(ranks, sum(sizes), 2, dtype=dtype)
        expected = torch.empty(sum(counts), 2, dtype=dtype)
        dist.all_to_all_single(expected, x, counts, sizes)
        received = torch.empty_like(expected)
        axis.all_to_all(received, x, counts, sizes).wait()
        assert torch.equal(received, expected)
        whole, expected = data(ranks, world * n, dtype=dtype), torch.empty(world * n, dtype=dtype)
        dist.all_to_all_single(expected, whole)
        received = torch.empty_like(whole)
        axis.all_to_all(received, whole).wait()
        assert torch.equal(received, expected)

        gone, came = data(ranks, n, dtype=dtype), torch.empty(n, dtype=dtype)
        axis.rotate(came, gone).wait()
        every = torch.empty(world * n, dtype=dtype)
        dist.all_gather_into_tensor(every, gone)
        assert torch.equal(came, every.view(world, n)[ranks.rank - 1])
        axis.shift(came, gone, -1).wait()
        assert torch.equal(came, every.view(world, n)[(ranks.rank + 1) % world])
    return {kind: entry.calls for (_, kind), entry in axis.ledger.entries.items()}


@pytest.mark.parametrize("kind", [Axis, StagedAxis])
@pytest.mark.parametrize("shared", [False, True], ids=["sockets", "shared memory"])
@pytest.mark.parametrize("world", [2, 3, 5])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_collective_equals_the_backends(ranks, world, dtype, shared, kind):
    for calls in ranks(compare_all, world, dtype, kind, shared):
        assert calls == {
            "all_reduce": 6,
            "reduce_scatter": 6,
            "all_gather": 6,
            "broadcast": 3,
            "all_to_all": 6,
            "send": 6,
        }


def several_under_way(ranks):
    """Collectives started one after the other and awaited in the opposite order."""
    axis, world = axis_of(ranks), ranks.world
    sums = [torch.full((size,), float(ranks.rank + size)) for size in (4, LATENCY_BOUND_BYTES, 9)]
    gathered = torch.empty(world * 3)
    pending = [axis.all_reduce(x) for x in sums]
    pending.append(axis.all_gather(gathered, torch.full((3,), float(ranks.rank))))
    for work in reversed(pending):
        work.wait()
    for x, size in zip(sums, (4, LATENCY_BOUND_BYTES, 9), strict=True):
        assert (x == sum(rank + size for rank in range(world))).all()
    assert gathered.tolist() == [float(rank) for rank in range(world) for _ in range(3)]


@pytest.mark.parametrize("world", [2, 4])
def test_collectives_may_overlap(ranks, world):
    ranks(several_under_way, world)


def nan_in_a_maximum(ranks):
    axis = axis_of(ranks)
    x = torch.tensor([1.0, float("nan") if ranks.rank == 1 else 2.0])
    axis.all_reduce(x, dist.ReduceOp.MAX).wait()
    return x


def test_a_nan_on_one_rank_is_the_maximum_on_all(ranks):
    for x in ranks(nan_in_a_maximum, 3):
        assert x[0] == 1
        assert x[1].isnan()


def another_reduction(ranks):
    axis_of(ranks).all_reduce(torch.ones(2), dist.ReduceOp.PRODUCT).wait()


def test_small_reductions_are_sums_and_maxima(ranks):
    with pytest.raises(ValueError, match="SUM or MAX"):
        ranks(another_reduction, 2)


def the_order_of_adding(ranks):
    """Values whose sum depends on the order, at two places of a buffer: the same sum at both, on every rank."""
    axis = axis_of(ranks)
    whole = torch.full((3 * 4,), [1e8, 1.0, -1e8][ranks.rank])
    part = torch.empty(4)
    axis.reduce_scatter(part, whole).wait()
    small = torch.full((5,), [1e8, 1.0, -1e8][ranks.rank])
    axis.all_reduce(small).wait()
    return {*part.tolist(), *small.tolist()}


def test_a_sum_does_not_depend_on_its_place(ranks):
    found = ranks(the_order_of_adding, 3)
    assert all(values == found[0] and len(values) == 1 for values in found)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_rank_alone_keeps_what_it_has_and_counts_nothing(dtype):
    axis = Axis("tp")
    x = torch.arange(6).to(dtype)
    for start in (axis.all_reduce, axis.broadcast):
        start(x).wait()
        assert torch.equal(x, torch.arange(6).to(dtype))
    axis.all_reduce(x, dist.ReduceOp.MAX).wait()
    assert torch.equal(x, torch.arange(6).to(dtype))
    out = torch.empty_like(x)
    axis.all_gather(out, x).wait()
    assert torch.equal(out, x)
    out.zero_()
    axis.reduce_scatter(out, x).wait()
    assert torch.equal(out, x)
    axis.all_gather(x, x).wait()  # in place
    axis.reduce_scatter(x, x).wait()
    assert torch.equal(x, out)
    assert axis.ledger.traffic() == {}
    assert str(axis) == "tp 0/1"


# The ledger adds up calls and bytes by axis and collective, for programs and for people.


def filled() -> Ledger:
    ledger = Ledger()
    for _ in range(4):
        ledger.add("tp", "all_reduce", 1000, 4)
    ledger.add("tp", "all_gather", 600, 4)
    ledger.add("dp_shard", "reduce_scatter", 2**21, 2)
    return ledger


def test_bytes_by_axis_and_collective():
    assert filled().traffic() == {
        "dp_shard": {"reduce_scatter": 2**20},
        "tp": {"all_gather": 450, "all_reduce": 6000},
    }
    assert filled().traffic(steps=2) == {
        "dp_shard": {"reduce_scatter": 2**19},
        "tp": {"all_gather": 225, "all_reduce": 3000},
    }


def test_lines_for_a_person():
    assert filled().lines(steps=2) == [
        f"dp_shard: reduce-scatter {gib(2**19)} in 0.5 calls",
        f"tp: all-gather {gib(225)} in 0.5 calls, all-reduce {gib(3000)} in 2 calls",
    ]
    assert Ledger().lines(steps=1) == []


def test_clearing_starts_anew():
    ledger = filled()
    ledger.clear()
    assert ledger.traffic() == {}
    ledger.add("tp", "all_reduce", 8, 2)
    assert ledger.traffic() == {"tp": {"all_reduce": 8}}


@given(
    st.lists(st.tuples(st.sampled_from(["all_reduce", "all_gather", "broadcast"]), st.integers(0, 10**9)), max_size=9)
)
def test_entries_are_sums_of_calls(calls):
    ledger = Ledger()
    for collective, payload in calls:
        ledger.add("cp", collective, payload, 3)
    for collective in {name for name, _ in calls}:
        payloads = [payload for name, payload in calls if name == collective]
        assert ledger.entries["cp", collective].calls == len(payloads)
        expected = sum(sent_bytes(collective, payload, 3) for payload in payloads)
        assert ledger.traffic()["cp"][collective] == pytest.approx(expected)


# Recordings of collectives: names as the ledger's, times in order, and everything as before afterwards.


def collectives(ranks):
    """Calls on an axis of two ranks, recorded. Returns them, and whether the class is as before."""
    group = torch.distributed.distributed_c10d._get_default_group()
    axis = Axis("tp", 2, ranks.rank, group)
    methods, wait, beat = dict(vars(Axis)), axes._Then.wait, heartbeat.own()
    recording = Recording()
    with recorded(recording):
        heartbeat.enter(Phase.OPTIMIZER)
        sums = [torch.ones(4), torch.ones(30_000)]
        works = [axis.all_reduce(x) for x in sums]
        for work in works:
            work.wait()
        x = torch.zeros(3)
        axis.send(x, 1) if ranks.rank == 0 else axis.receive(x, 0)
        axis.reduce_scatter(torch.empty(2), torch.ones(4)).wait()
        Axis("alone").all_reduce(torch.ones(2)).wait()
    same = dict(vars(Axis)) == methods and axes._Then.wait is wait and heartbeat.own() is beat
    axis.all_reduce(torch.ones(2)).wait()
    return (
        [vars(call) for call in recording.calls],
        [phase for _, phase in recording.phases],
        same,
        axis.ledger.traffic(),
    )


def test_every_collective_is_recorded_under_its_ledger_name(ranks):
    (first, phases, same, traffic), (second, *_) = ranks(collectives, 2)
    assert same
    assert phases[-1] is Phase.OPTIMIZER
    assert [call["collective"] for call in first] == ["all_reduce", "all_reduce", "send", "reduce_scatter"]
    assert {call["collective"] for call in first} == traffic["tp"].keys()
    assert [(call["sends"], call["receives"]) for call in (first[2], second[2])] == [(True, False), (False, True)]
    assert [call["bytes"] for call in first] == [16, 120_000, 12, 16]
    for mine, theirs in zip(first, second, strict=True):
        assert mine["axis"] == "tp"
        assert mine["sequence"] == theirs["sequence"]
        assert mine["main"]
        assert 0 < mine["start"] <= mine["launched"] <= mine["waited"] <= mine["done"]
    assert first[0]["channel"] == second[0]["channel"] == first[3]["channel"]
    assert [call["sequence"] for call in (first[0], first[1], first[3])] == [
        first[0]["sequence"],
        first[0]["sequence"] + 1,
        first[0]["sequence"] + 2,
    ]
