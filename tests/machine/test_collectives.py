"""Checks of collectives, and the integers that they are made with."""

from __future__ import annotations

import platform
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from phalanx.comm.axis import Axis
from phalanx.config.layout import Layout
from phalanx.machine import collectives as check
from phalanx.machine.collectives import ALL, CONTRIBUTORS, EXACT, extreme, integers, total
from phalanx.machine.self_test import axes_to_test
from phalanx.parallel import mesh as meshes

# The integers of the self-test: exact in bf16 at any number of ranks, and every rank counts.


@given(ranks=st.integers(1, 400), n=st.integers(0, 50), start=st.integers(0, 1000))
def test_every_partial_sum_is_exact_in_bf16(ranks, n, start):
    narrow, exact = torch.zeros(n, dtype=torch.bfloat16), torch.zeros(n, dtype=torch.int64)
    for rank in range(ranks):
        exact += integers(rank, ranks, n, start)
        narrow += integers(rank, ranks, n, start).to(torch.bfloat16)
    assert torch.equal(narrow.to(torch.int64), exact)
    assert torch.equal(total(ranks, n, start), exact)
    assert bool((exact < EXACT).all())


@given(ranks=st.integers(2, 200), rank=st.integers(0, 199))
def test_every_rank_changes_some_element(ranks, rank):
    """A rank whose contribution got lost is noticed."""
    assert bool(integers(rank % ranks, ranks, 512).any())


def test_ranks_contribute_different_values():
    for ranks in (2, 3, 8, CONTRIBUTORS):
        rows = torch.stack([integers(rank, ranks, 31) for rank in range(ranks)])
        assert len({tuple(row.tolist()) for row in rows}) == ranks
        assert torch.equal(extreme(ranks, 31, largest=True), rows.amax(0))
        assert torch.equal(extreme(ranks, 31, largest=False), rows.amin(0))


def test_a_part_of_a_contribution_is_that_of_the_whole():
    assert torch.equal(integers(2, 5, 100)[30:40], integers(2, 5, 10, 30))


def test_averages_need_room():
    assert bool((total(8, 9, unit=8) % 8 == 0).all())
    with pytest.raises(ValueError, match="multiples of 64 from 16 ranks do not stay below 256"):
        integers(0, 64, 1, unit=64)


# Checks of collectives: all of them are right on gloo, and an injected fault is named with rank, call and values.


CPU = torch.device("cpu")


def check_all(ranks, layout):
    mesh = meshes.build(layout, "cpu")
    axes, same = axes_to_test(mesh)
    return [check.check_axis(axis, name, CPU, lambda: None) for name, axis, _ in axes], same


def with_fault(ranks, fault):
    """Checks the world while rank 1 has a fault."""
    if ranks.rank == 1:
        fault()
    try:
        return check_all(ranks, Layout(dp_replicate=ranks.world))[0][0]
    finally:
        for name, method in ORIGINAL.items():
            setattr(Axis, name, method)


ORIGINAL = {name: getattr(Axis, name) for name in ("all_gather", "all_reduce", "reduce_scatter")}


def a_wrong_element():
    """An all-gather that has another value at one place."""

    def all_gather(self, whole, part):
        pending = ORIGINAL["all_gather"](self, whole, part)
        return After(pending, lambda: whole[4].add_(1) if whole.numel() == 1032 else None)

    Axis.all_gather = all_gather


def a_wrong_contribution():
    def all_reduce(self, x, *op):
        if x.numel() == 7 and x.dtype == torch.float64 and not op:
            x[3] += 2
        return ORIGINAL["all_reduce"](self, x, *op)

    Axis.all_reduce = all_reduce


def a_write_beside():
    """A reduce-scatter that writes beyond its output."""

    def reduce_scatter(self, part, whole):
        pending = ORIGINAL["reduce_scatter"](self, part, whole)
        beyond = part.storage_offset() and part.numel() == 4
        return After(pending, lambda: part.as_strided((5,), (1,))[4].fill_(9) if beyond else None)

    Axis.reduce_scatter = reduce_scatter


class After:
    def __init__(self, pending, then):
        self.pending, self.then = pending, then

    def wait(self):
        self.pending.wait()
        self.then()


@pytest.mark.parametrize(
    "layout",
    [Layout(dp_replicate=2), Layout(dp_replicate=3), Layout(tp=2, pp=2)],
    ids=lambda layout: layout.line(),
)
def test_all_collectives_are_right(ranks, layout):
    every = ranks(check_all, layout.world, layout)
    assert all(one == every[0] for one in every)
    axes, same = every[0]
    assert [found.axis for found in axes] == (["pp", "tp", "world"] if layout.tp > 1 else ["dp_replicate"])
    assert same == ({} if layout.tp > 1 else {"world": "dp_replicate"})
    for found in axes:
        assert found.ok, found
        assert found.refused == {}
        assert found.checked > 15 * len(ALL)


def test_experts_and_context_have_axes_of_their_own(ranks):
    axes, same = ranks(check_all, 4, Layout(cp=4, cp_ulysses=2, ep=2))[0]
    assert {found.axis: found.ranks for found in axes} == {"dp_shard_cp": 4, "ring": 2, "ulysses": 2}
    assert same == {"cp": "dp_shard_cp", "ep": "ulysses", "edp": "ring", "world": "dp_shard_cp"}
    assert all(found.ok for found in axes)


def test_a_wrong_element_is_named(ranks):
    found = ranks(with_fault, 2, a_wrong_element)[0]
    assert not found.ok
    assert {(wrong.rank, wrong.collective, wrong.place) for wrong in found.wrong} == {(1, "all_gather", 4)}
    first = found.wrong[0]
    assert first.got == first.expected + 1
    assert first.line() == (
        f"rank 1 ({platform.node()}): all-gather of 516 × fp32 per rank on dp_replicate: element 4 is {first.got:g}, "
        f"expected {first.expected:g} (1 wrong element)"
    )


def test_a_wrong_contribution_is_seen_by_all(ranks):
    found = ranks(with_fault, 3, a_wrong_contribution)[0]
    assert [(wrong.rank, wrong.dtype, wrong.elements, wrong.place) for wrong in found.wrong] == [
        (rank, "fp64", 7, 3) for rank in range(3)
    ]
    assert all(wrong.got == wrong.expected + 2 for wrong in found.wrong)


def test_a_write_beside_the_tensor_is_named(ranks):
    found = ranks(with_fault, 2, a_write_beside)[0]
    (wrong,) = found.wrong
    assert (wrong.rank, wrong.place) == (1, -1)
    assert wrong.line().endswith("wrote to 1 element beside the tensor")


def refuses(ranks):
    """Rank 1 alone has no average, as with another backend."""
    mesh = meshes.build(Layout(dp_replicate=2), "cpu")
    mine = check.RankChecks(mesh.axis("dp_replicate"), "dp_replicate", CPU)
    if ranks.rank == 1:
        mine.found.refused["all_reduce_avg (fp32)"] = "not here"
    return mine.of_all_ranks()


def refuses_what_training_makes(ranks):
    """No rank has an all-reduce of bf16."""
    mesh = meshes.build(Layout(dp_replicate=2), "cpu")

    def refuse(*_):
        raise RuntimeError("no bf16 here")

    broken = replace(next(each for each in ALL if each.name == "all_reduce"), make=refuse)
    mine = check.RankChecks(mesh.axis("dp_replicate"), "dp_replicate", CPU)
    mine.check(broken, "bf16", 4, "plain")
    mine.check(replace(broken, name="all_reduce_avg", of_axis=False), "bf16", 4, "plain")
    return mine.of_all_ranks()


def test_a_call_of_training_that_every_rank_refuses_is_a_failure(ranks):
    found = ranks(refuses_what_training_makes, 2)[0]
    assert not found.ok
    assert found.differs == [
        "all_reduce (bf16) on dp_replicate, which training makes: every rank refused it: no bf16 here"
    ]
    assert set(found.refused) == {"all_reduce (bf16)", "all_reduce_avg (bf16)"}


def test_a_call_that_only_some_ranks_refuse_is_a_failure(ranks):
    found = ranks(refuses, 2)[0]
    assert not found.ok
    assert found.differs == ["all_reduce_avg (fp32) on dp_replicate: only rank 1 refused it: not here"]


def test_a_lost_peer_is_no_refusal():
    def lost(axis, x, out):
        raise RuntimeError("Connection closed by peer")

    class Alone(Axis):
        def __init__(self):
            super().__init__("tp", 2)

    collective = check.AxisCollective("send", lost, *(lambda rank, ranks, n: torch.zeros(n, dtype=torch.int64),) * 2)
    with pytest.raises(RuntimeError, match="closed by peer"):
        check.RankChecks(Alone(), "tp", CPU).check(collective, "fp32", 3, "plain")
