"""Which ranks talk to which, and that every collective is measured among them."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from phalanx.cost.fit import COLLECTIVES
from phalanx.data.files import silent
from phalanx.errors import JobError
from phalanx.launch.ranks import SINGLE, Ranks
from phalanx.machine import clock, links
from phalanx.machine.clock import WINDOW


@given(nodes=st.integers(1, 9), per_node=st.integers(1, 9))
def test_groups_are_on_one_node_or_have_one_rank_of_each(nodes, per_node):
    for part in links.partitions(nodes * per_node, per_node):
        flat = [rank for members in part.members for rank in members]
        assert len(set(flat)) == len(flat)
        assert 0 in part.members[0]
        for members in part.members:
            assert len(members) == part.group.ranks
            places = {rank // per_node for rank in members}
            assert len(places) == (1 if part.place == "intra" else len(members))
            assert {b - a for a, b in pairwise(members)} == {part.group.stride}


def test_group_sizes_are_powers_of_two_and_all():
    assert [part.group.ranks for part in links.partitions(6, 6)] == [2, 4, 6]
    assert [len(part.members) for part in links.partitions(6, 6)] == [3, 1, 1]
    assert [(part.place, part.group.ranks) for part in links.partitions(8, 4)] == [
        ("intra", 2),
        ("intra", 4),
        ("inter", 2),
    ]
    assert links.partitions(8, 4)[2].members == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert links.partitions(1, 1) == []


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        (SINGLE, "needs at least two ranks; there is one: --nproc-per-node 2"),
        (Ranks(0, 4, 0, None, None, "mpich"), "mpich does not say how many of the 4 ranks are on a node"),
        (Ranks(0, 5, 0, 2, 0, "torchrun"), "5 ranks with 2 on this node"),
    ],
)
def test_ranks_that_cannot_be_measured_are_refused(ranks, message):
    with pytest.raises(JobError, match=message):
        links.per_node_of(ranks)


def measure(ranks, per_node):
    """On ranks that lie on nodes of so many, as far as the measurement can see."""
    before = links.SIZES
    links.SIZES = {True: [1024, 2**18]}
    budget, clock.QUICK_BUDGET_S = clock.QUICK_BUDGET_S, 0.0
    try:
        place = Ranks(ranks.rank, ranks.world, ranks.rank % per_node, per_node, ranks.rank // per_node, "test")
        return links.measure(place, torch.device("cpu"), COLLECTIVES, True, silent)
    finally:
        links.SIZES = before
        clock.QUICK_BUDGET_S = budget


@pytest.mark.parametrize(("world", "per_node"), [(3, 3), (4, 2)])
def test_every_collective_is_measured_in_every_group(ranks, world, per_node):
    found = ranks(measure, world, per_node)
    assert all(one == found[0] for one in found)
    for fitted in found[0]:
        assert [(t.collective, t.payload) for t in fitted.transfers] == [
            (name, size) for name in COLLECTIVES for size in (1024, 2**18)
        ]
        assert all(t.seconds > 0 for t in fitted.transfers)
        assert fitted.link.gbs > 0
        assert fitted.quality.rounds >= WINDOW
        assert fitted.link.latency_us > 0
    sizes = {(fitted.place, fitted.group.ranks) for fitted in found[0]}
    assert sizes == ({("intra", 2), ("intra", 3)} if world == 3 else {("intra", 2), ("inter", 2)})
    widest = links.chosen(found[0], "intra")
    assert widest is not None
    assert widest.group.ranks == per_node
    assert (links.chosen(found[0], "inter") is None) == (world == per_node)
