"""Memory that ranks of one machine share: room that is used again, peers that go, and where there is none."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

from phalanx.comm import shared
from phalanx.comm.axis import Axis, Ledger


def axis_of(ranks) -> Axis:
    group = dist.distributed_c10d._get_default_group()
    return Axis("tp", ranks.world, ranks.rank, group, Ledger()).share()


def many_calls(ranks):
    """More calls than an outbox has slots, of random sizes, some awaited later; returns the bytes of the room used."""
    generator, late, used = torch.Generator().manual_seed(0), [], 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared, "SLOTS", 16)
        axis = axis_of(ranks)
        assert axis.shared is not None
        for number in range(80):
            size = int(torch.randint(1, 5000, (), generator=generator))
            x = torch.full((size,), float(number + ranks.rank))
            late.append((axis.all_reduce(x), x, sum(number + rank for rank in range(ranks.world))))
            came = torch.empty(size)
            axis.rotate(came, torch.full((size,), float(ranks.rank))).wait()
            assert (came == (ranks.rank - 1) % ranks.world).all()
            used = max(used, max(each.end for each in axis.shared._in_flight) - axis.shared.mine.head)
            if len(late) == 3:
                for pending, total, expected in reversed(late):
                    pending.wait()
                    assert (total == expected).all()
                late.clear()
        for pending, _, _ in late:
            pending.wait()
    return used


@pytest.mark.parametrize("world", [2, 3])
def test_room_and_slots_are_used_again(ranks, world):
    for used in ranks(many_calls, world):
        assert 0 < used < 16 * 5000 * 4


def much_in_flight(ranks):
    """One rank sends more messages than there are slots, faster than the other reads."""
    x, found = torch.empty(1), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared, "SLOTS", 8)
        axis = axis_of(ranks)
        for number in range(100):
            if ranks.rank == 0:
                axis.send(torch.full((1,), float(number)), 1)
            else:
                axis.receive(x, 0)
                found.append(x.item())
    return found


def test_a_writer_waits_for_slots(ranks):
    assert ranks(much_in_flight, 2)[1] == [float(number) for number in range(100)]


def sums_in_any_order(ranks):
    """The bits of sums of random values in each type, on every rank."""
    axis, found = axis_of(ranks), []
    generator = torch.Generator().manual_seed(ranks.rank)
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        x = torch.randn(70_000, generator=generator, dtype=torch.float64).to(dtype)
        whole, part = x[: 69_999 // ranks.world * ranks.world].clone(), torch.empty(69_999 // ranks.world, dtype=dtype)
        axis.all_reduce(x).wait()
        axis.reduce_scatter(part, whole).wait()
        found.append(torch.equal(part, x[part.numel() * ranks.rank :][: part.numel()]))
        found.append(x.double().sum().item())
    return found


@pytest.mark.parametrize("world", [2, 4])
def test_a_sum_has_the_same_bits_on_every_rank_and_in_every_collective(ranks, world):
    first, *others = ranks(sums_in_any_order, world)
    assert first[::2] == [True] * 4
    assert all(other == first for other in others)


def one_leaves(ranks):
    axis = axis_of(ranks)
    assert axis.shared is not None
    if ranks.rank == 1:
        axis.shared.leave()
        return ""
    with pytest.raises(RuntimeError, match="Connection closed by peer: rank 1 of the group has ended") as raised:
        axis.all_reduce(torch.ones(3)).wait()
    return str(raised.value)


def test_a_rank_that_leaves_ends_the_waits_for_it(ranks):
    assert ranks(one_leaves, 2)[0]


def one_does_not_come(ranks):
    axis = axis_of(ranks)
    assert axis.shared is not None
    if ranks.rank == 1:
        dist.barrier()
        return ""
    axis.shared._timeout_s = lambda: 0.05
    with pytest.raises(RuntimeError, match="Timed out waiting 0.05 s for rank 1 of the group"):
        axis.all_reduce(torch.ones(3)).wait()
    dist.barrier()
    return ""


def test_a_rank_that_does_not_come_is_not_waited_for_forever(ranks):
    ranks(one_does_not_come, 2)


def without(ranks, reason: str):
    """Whether an axis shares memory where one rank cannot; its sum."""

    def fails(*_: object) -> None:
        raise OSError("no address space")

    with pytest.MonkeyPatch.context() as patch:
        if ranks.rank == ranks.world - 1:
            if reason == "variable":
                patch.setenv(shared.SOCKETS, "1")
            else:
                patch.setattr(shared.os, reason, fails)
        axis, x = axis_of(ranks), torch.ones(2)
        axis.all_reduce(x).wait()
    return axis.shared is not None, x.tolist()


@pytest.mark.parametrize("reason", ["variable", "memfd_create", "pidfd_open"])
def test_where_one_rank_cannot_share_all_use_sockets(ranks, reason):
    assert ranks(without, 3, reason) == [(False, [3.0, 3.0])] * 3


def descriptors(ranks):
    """Open descriptors before and after groups have come and gone."""
    found = []
    for _ in range(4):
        axis = axis_of(ranks)
        axis.all_reduce(torch.ones(2)).wait()
        del axis
        found.append(len(os.listdir("/proc/self/fd")))
    return found


def test_outboxes_leave_no_descriptors(ranks):
    for found in ranks(descriptors, 2):
        assert found[1:] == found[:-1]
