"""Every rank's place on the mesh, by arithmetic and by torch's own mesh."""

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from phalanx.errors import JobError
from phalanx.job.layout import AXES, Layout
from phalanx.parallel.mesh import build, place

degree = st.integers(1, 4)


@given(st.fixed_dictionaries(dict.fromkeys(AXES, degree)))
def test_places_are_unique_and_innermost_axes_are_neighbours(degrees):
    layout = Layout(**degrees)
    places = [tuple(place(layout, rank)[1].values()) for rank in range(layout.world)]
    assert places == sorted(set(places))
    assert places[-1] == tuple(degrees[axis] - 1 for axis in AXES)


def the_group_of_an_axis(ranks, layout):
    mesh = build(layout, "cpu")
    sums = {}
    for axis, size in mesh.sizes.items():
        if size > 1:
            total = torch.tensor([ranks.rank])
            dist.all_reduce(total, group=mesh.group(axis))
            sums[axis] = int(total)
    return mesh.coordinates, sums, str(mesh), mesh.data_rank


def test_groups_join_the_ranks_that_differ_along_one_axis(ranks):
    layout = Layout(dp_replicate=2, tp=2)
    results = ranks(the_group_of_an_axis, 4, layout)
    for rank, (coordinates, sums, text, data_rank) in enumerate(results):
        assert (coordinates["dp_replicate"], coordinates["tp"]) == divmod(rank, 2)
        assert sums == {"dp_replicate": rank + (rank + 2) % 4, "tp": 4 * (rank // 2) + 1}
        assert text == "dp_replicate 2 × tp 2 (4 ranks)"
        assert data_rank == rank // 2


def test_one_process_has_no_groups():
    mesh = build(Layout(), "cpu")
    assert (str(mesh), mesh.data_ranks, mesh.data_rank) == ("one rank", 1, 0)
    with pytest.raises(ValueError, match="axis tp has one rank"):
        mesh.group("tp")


def test_a_layout_for_another_number_of_processes_is_refused():
    with pytest.raises(JobError, match="needs 4 processes, but 1 were started"):
        build(Layout(dp_replicate=2, tp=2), "cpu")
