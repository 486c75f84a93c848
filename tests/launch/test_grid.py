"""Nodes × processes per node = processes of the layout."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.errors import JobError
from phalanx.launch.grid import GridRequest, ProcessGrid, solve


def grid(**what) -> tuple[int, int]:
    found = solve(GridRequest(**what))
    return found.nodes, found.per_node


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        ({"layout": 8}, (1, 8)),
        ({"layout": 8, "nnodes": "2"}, (2, 4)),
        ({"layout": 8, "per_node": "2"}, (4, 2)),
        ({"layout": 8, "nnodes": "2", "per_node": "4", "processes": 8}, (2, 4)),
        ({"layout": 8, "available": 2}, (2, 4)),
        ({"layout": 8, "available": 3}, (2, 4)),
        ({"layout": 8, "available": 4, "devices": 4}, (2, 4)),
        ({"layout": 8, "per_node": "auto", "devices": 4}, (2, 4)),
        ({"layout": 8, "per_node": "auto", "nnodes": "2"}, (2, 4)),
        ({"layout": 16, "per_node": "auto", "devices": 4, "cpu": True, "nnodes": "2"}, (2, 8)),
        ({"layout": 8, "cluster_nodes": 4}, (4, 2)),
        ({"layout": 8, "cluster_nodes": 1, "available": 2}, (1, 8)),
        ({"processes": 8, "nnodes": "2"}, (2, 4)),
        ({"nnodes": "2", "devices": 4}, (2, 4)),
        ({"available": 3, "per_node": "auto", "devices": 2}, (3, 2)),
    ],
)
def test_any_two_give_the_third(request_, expected):
    assert grid(**request_) == expected


def test_a_range_of_nodes():
    found = solve(GridRequest(layout=8, nnodes="1:4"))
    assert (found, found.nnodes, found.processes) == (ProcessGrid(4, 2, 1), "1:4", 8)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (
            {"layout": 4, "nnodes": "2", "per_node": "3", "layout_words": "tp=4"},
            "--nnodes 2 × --nproc-per-node 3 = 6 processes, but the layout tp=4 has 4; nearest legal: "
            "--nproc-per-node 2, or a layout of 6 processes",
        ),
        ({"layout": 4, "nnodes": "3"}, "4 processes, which are not divisible by 3; nearest legal: --nnodes 1, 2, 4"),
        ({"layout": 4, "processes": 8}, "--nproc 8, but the layout .* has 4 processes; nearest legal: --nproc 4"),
        ({"layout": 4, "nnodes": "4", "available": 2, "where": "it"}, "4 nodes, but it has 2; nearest .* --nnodes 2"),
        ({"layout": 8, "nnodes": "1", "devices": 4}, "8 processes per node, but a node has 4 devices"),
        ({"nnodes": "two"}, "expected a number of nodes"),
        ({"nnodes": "3:2", "layout": 6}, "nearest legal: --nnodes 2:3"),
        ({"per_node": "gpu", "layout": 6}, "expected a number of processes, or auto"),
        ({"nnodes": "2"}, "give --nproc-per-node"),
    ],
)
def test_what_does_not_fit_is_one_message_with_the_nearest_legal_choice(request_, message):
    with pytest.raises(JobError, match=message):
        solve(GridRequest(**request_))


@given(
    layout=st.integers(1, 64),
    nodes=st.integers(0, 8),
    per_node=st.integers(0, 8),
    available=st.integers(0, 8),
    devices=st.integers(0, 8),
)
def test_a_grid_is_the_layouts_or_a_message(layout, nodes, per_node, available, devices):
    request = GridRequest(
        str(nodes or ""), str(per_node or ""), layout=layout, available=available, devices=devices, where="it"
    )
    try:
        found = solve(request)
    except JobError:
        return
    assert found.processes == layout
    assert not nodes or found.nodes == nodes
    assert not per_node or found.per_node == per_node
    assert not available or found.nodes <= available
    assert not devices or found.per_node <= devices
