"""Every rank's place on the mesh, and what process groups leave behind."""

from __future__ import annotations

import gc
import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from phalanx.config import layout_line
from phalanx.config.job import Job, Train
from phalanx.config.layout import AXES, Layout
from phalanx.config.model import ModelConfig
from phalanx.errors import JobError
from phalanx.parallel import mesh
from phalanx.parallel.mesh import build, lines, place
from phalanx.partition.tensor_slices import cp_coordinates
from phalanx.train.step import Stepper

# Every rank's place on the mesh, by arithmetic and by torch's own mesh.


degree = st.integers(1, 4)


@given(st.fixed_dictionaries(dict.fromkeys(AXES, degree)))
def test_places_are_unique_and_innermost_axes_are_neighbours(degrees):
    layout = Layout(**degrees)
    places = [tuple(place(layout, rank)[1].values()) for rank in range(layout.world)]
    assert places == sorted(set(places))
    assert places[-1] == tuple(degrees[axis] - 1 for axis in AXES)


@given(
    st.fixed_dictionaries(dict.fromkeys(AXES, degree)), st.data(), st.sampled_from(["ulysses", "ring"]), st.integers(0)
)
def test_axes_that_are_made_of_others(degrees, data, inner, rank):
    """Ranks along an axis are those whose coordinates along the others are alike."""

    def divisor_of(n):
        return data.draw(st.sampled_from([d for d in range(1, n + 1) if n % d == 0]))

    ulysses, ep = divisor_of(degrees["cp"]), divisor_of(degrees["cp"] * degrees["dp_shard"])
    etp = data.draw(st.sampled_from([0, 1, degrees["tp"]]))
    folds = degrees["tp"] if etp == 1 else 1
    layout = Layout(**degrees, cp_ulysses=ulysses, cp_inner=inner, ep=ep * folds, etp=etp)
    rank %= layout.world
    every, (_, here) = lines(layout), place(layout, rank)
    shard = here["dp_shard"] * layout.cp + here["cp"]
    assert every["shard"].place(rank) == shard
    expert = shard % ep * folds + (here["tp"] if folds > 1 else 0)
    assert (every["ep"].place(rank), every["edp"].place(rank)) == (expert, shard // ep)
    assert (every["ring"].place(rank), every["ulysses"].place(rank)) == cp_coordinates(layout, here["cp"])
    for axis in ("pp", "dp_replicate", "cp", "tp"):
        assert (every[axis].size, every[axis].place(rank)) == (degrees[axis], here[axis])
    assert every["ep"].size * every["edp"].size == layout.shard_ranks * folds
    assert every["shard"].size == layout.shard_ranks
    assert every["ring"].size * every["ulysses"].size == every["cp"].size


def the_sums_along(ranks, layout, axes):
    mesh, found = build(layout, "cpu"), {}
    for axis in axes:
        total = torch.tensor([float(ranks.rank)])
        mesh.axis(axis).all_reduce(total).wait()
        found[axis] = int(total)
    return found, mesh.owns_loss, mesh.data_rank, sorted(mesh.ledger.traffic())


def test_groups_along_axes_that_are_made_of_others(ranks):
    layout = Layout(dp_shard=2, cp=2, tp=2, ep=2, cp_ulysses=2)
    axes = ("shard", "cp", "ring", "ulysses", "ep", "edp", "tp")
    for rank, (found, speaks, data_rank, named) in enumerate(ranks(the_sums_along, 8, layout, axes)):
        tp, cp = rank % 2, rank // 2 % 2
        both = 2 * (rank - 2 * cp) + 2
        assert found["shard"] == 12 + 4 * tp
        assert found["cp"] == found["ulysses"] == found["ep"] == both
        assert (found["ring"], found["edp"], found["tp"]) == (rank, 2 * (rank % 4) + 4, 2 * (rank - tp) + 1)
        assert (speaks, data_rank) == (tp == 0, rank // 4)
        assert named == ["cp", "dp_shard_cp", "edp", "ep", "tp"]


def the_group_of_an_axis(ranks, layout):
    mesh = build(layout, "cpu")
    sums = {}
    for axis, size in mesh.sizes.items():
        if size > 1:
            total = torch.tensor([ranks.rank])
            assert (mesh.axis(axis).size, mesh.axis(axis).rank) == (size, mesh.coordinates[axis])
            mesh.axis(axis).all_reduce(total).wait()
            sums[axis] = int(total)
    return mesh.coordinates, sums, str(mesh), mesh.data_rank, mesh.owns_loss


def test_groups_join_the_ranks_that_differ_along_one_axis(ranks):
    layout = Layout(dp_replicate=2, tp=2)
    results = ranks(the_group_of_an_axis, 4, layout)
    for rank, (coordinates, sums, text, data_rank, speaks) in enumerate(results):
        assert (coordinates["dp_replicate"], coordinates["tp"]) == divmod(rank, 2)
        assert sums == {"dp_replicate": rank + (rank + 2) % 4, "tp": 4 * (rank // 2) + 1}
        assert text == "dp_replicate 2 × tp 2 (4 ranks)"
        assert data_rank == rank // 2
        assert speaks == (rank % 2 == 0)


def the_neighbours_along_an_axis(ranks, layout, axis, size):
    mesh = build(layout, "cpu")
    found = mesh.neighbours(axis, size)
    members = torch.zeros(found.size, dtype=torch.int64)
    found.all_gather(members, torch.tensor([ranks.rank])).wait()
    return found.rank, members.tolist(), mesh.ledger.traffic().get(found.name, {})


@pytest.mark.parametrize(
    ("layout", "axis", "size", "expected"),
    [
        (Layout(tp=4), "tp", 2, [[0, 1], [2, 3]]),
        (Layout(tp=4), "tp", 4, [[0, 1, 2, 3]]),
        (Layout(dp_shard=2, tp=4), "tp", 2, [[0, 1], [2, 3], [4, 5], [6, 7]]),
        (Layout(dp_shard=4, tp=2), "shard", 2, [[0, 2], [1, 3], [4, 6], [5, 7]]),
    ],
    ids=str,
)
def test_neighbours_along_an_axis_form_axes_of_their_own(ranks, layout, axis, size, expected):
    for rank, (place_there, members, traffic) in enumerate(
        ranks(the_neighbours_along_an_axis, layout.world, *(layout, axis, size))
    ):
        assert members in expected
        assert members.index(rank) == place_there
        assert traffic == {"all_gather": 8 * (size - 1)}


def some_places_of_a_pipeline(ranks, layout):
    """What rank 0 and the last of each pipeline have together, or None; whether this rank's losses count."""
    mesh = build(layout, "cpu")
    ends = (0, layout.pp - 1)
    members = None
    if mesh.coordinates["pp"] in ends:
        found = mesh.among("pp", ends)
        members = torch.zeros(found.size, dtype=torch.int64)
        found.all_gather(members, torch.tensor([ranks.rank])).wait()
        assert members[found.rank] == ranks.rank
        members = members.tolist()
    return mesh.coordinates["pp"], members, mesh.owns_loss, mesh.is_sharded


@pytest.mark.parametrize("layout", [Layout(pp=2), Layout(pp=3, dp_replicate=2), Layout(pp=4, tp=2)], ids=Layout.line)
def test_some_places_of_an_axis_form_an_axis_of_their_own(ranks, layout):
    inner = layout.world // layout.pp
    for rank, (place_there, members, speaks, shards) in enumerate(
        ranks(some_places_of_a_pipeline, layout.world, layout)
    ):
        assert place_there == rank // inner
        ends = [rank % inner, rank % inner + (layout.pp - 1) * inner]
        assert members == (ends if rank in ends else None)
        assert speaks == (rank % layout.tp == 0)
        assert shards


def round_the_lanes(ranks, layout):
    """Each rank sends its number to both neighbours, up first, and receives in the other order."""
    mesh = build(layout, "cpu")
    up, down = mesh.p2p_groups("pp")
    mine, place, last = torch.tensor([ranks.rank]), mesh.coordinates["pp"], layout.pp - 1
    works, got = [], {}
    if place < last:
        works.append(up.start_send(mine, place + 1))
    if place:
        works.append(down.start_send(mine, place - 1))
    for group, source in ((down, place + 1), (up, place - 1)):
        if 0 <= source <= last:
            got[source] = torch.zeros(1, dtype=torch.int64)
            group.start_receive(got[source], source).wait()
    for work in works:
        work.wait()
    names = up.name, down.name, up.size, down.rank
    return names, {source: int(x) for source, x in got.items()}, mesh.ledger.traffic()["pp"]


@pytest.mark.parametrize("layout", [Layout(pp=3), Layout(pp=2, tp=2)], ids=Layout.line)
def test_lanes_carry_messages_up_and_down_a_pipeline(ranks, layout):
    inner = layout.world // layout.pp
    for rank, (names, got, traffic) in enumerate(ranks(round_the_lanes, layout.world, layout)):
        place_there = rank // inner
        neighbours = [p for p in (place_there - 1, place_there + 1) if 0 <= p < layout.pp]
        assert names == ("pp", "pp", layout.pp, place_there)
        assert got == {p: rank + (p - place_there) * inner for p in neighbours}
        assert traffic == {"send": 8 * len(neighbours)}


def test_one_neighbour_is_the_rank_itself():
    assert build(Layout(), "cpu").neighbours("tp", 1).size == 1
    assert build(Layout(), "cpu").among("pp", [0]).size == 1
    assert [group.size for group in build(Layout(), "cpu").p2p_groups("pp")] == [1, 1]


def test_one_process_has_no_groups():
    mesh = build(Layout(), "cpu")
    assert (str(mesh), mesh.data_ranks, mesh.data_rank) == ("one rank", 1, 0)
    assert mesh.owns_loss
    assert not mesh.is_sharded
    for axis in (*mesh.lines, "world"):
        assert (mesh.axis(axis).size, mesh.axis(axis).rank, mesh.axis(axis).group) == (1, 0, None)


def test_a_layout_for_another_number_of_processes_is_refused():
    with pytest.raises(JobError, match="needs 4 processes, but 1 were started"):
        build(Layout(dp_replicate=2, tp=2), "cpu")


def the_timeouts_of_all_groups(ranks, layout, timeout_s):
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s))
    mesh = build(layout, "cpu")
    for name in mesh.lines:
        mesh.p2p_groups(name)
        mesh.messages(name, timeout_s)
        mesh.neighbours(name, mesh.axis(name).size)
    groups = [group for group in dist.distributed_c10d._world.pg_map if isinstance(group, dist.ProcessGroup)]
    return [group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in groups]


@pytest.mark.parametrize(
    "layout", [Layout(dp_replicate=2, dp_shard=2, tp=2), Layout(pp=2, cp=4, cp_ulysses=2, ep=2), Layout(tp=2)]
)
def test_every_group_has_the_timeout_of_the_run(ranks, layout):
    """Not torch's 30 minutes."""
    for timeouts in ranks(the_timeouts_of_all_groups, layout.world, layout, 77.0):
        assert len(timeouts) > 3
        assert set(timeouts) == {77.0}


# What a call leaves behind in a rank's process: process groups have threads, which live as long as the groups.


def built(ranks, line: str) -> int:
    """Build a replica and leave it; the threads that there were before, without what waits for the collector."""
    gc.collect()
    before = len(os.listdir("/proc/self/task"))
    model = ModelConfig(n_layers=1, d_model=16, n_heads=2, seq_len=8)
    job = Job(model=model, layout=layout_line.parse(line), train=Train(global_batch=2))
    Stepper(job, mesh.build(job.layout, "cpu"), torch.device("cpu"), 64)
    return before


@pytest.mark.parametrize("line", ["dp_replicate=2", "dp_shard=2,zero=1"])
def test_groups_are_gone_after_a_call(ranks, line: str) -> None:
    ranks(built, 2, line)
    first, *_ = ranks(built, 2, line)
    for _ in range(2):
        last, *_ = ranks(built, 2, line)
    assert last <= first
