"""The job on fewer nodes: the same global batch, and the user's layout with fewer data ranks where that is legal."""

import pytest

from phalanx.check.load import load_words
from phalanx.cli.auto_layout import words_for
from phalanx.config import overrides
from phalanx.errors import JobError

NODES = ("run.nnodes=1:4", "run.rdzv_endpoint=node-a:29400", "model.n_layers=4", "train.global_batch=24")


def words(nodes: int, *more: str) -> list[str]:
    return list(words_for(load_words(overrides.parse([*NODES, *more])), nodes))


@pytest.mark.parametrize(
    ("layout", "nodes", "expected"),
    [
        ("dp_replicate=4", 3, "dp_replicate=3"),
        ("dp_replicate=4,tp=2", 1, "tp=2"),
        ("dp_shard=8,tp=2", 2, "dp_shard=4,tp=2"),
        ("dp_shard=4,zero=2,accumulation=2", 1, "dp_replicate=1"),
        ("pp=2,dp_replicate=2,dp_shard=2,accumulation=3", 2, "dp_shard=2,pp=2"),
    ],
)
def test_data_ranks_are_given_up_first_and_accumulation_makes_up_for_them(layout, nodes, expected):
    assert words(nodes, layout) == [
        f"run.nnodes={nodes}",
        f"cluster.nodes={nodes}",
        "train.global_batch=24",
        f"layout={expected}",
    ]


def test_on_all_nodes_the_layout_is_the_job_s():
    assert words(4, "dp_replicate=4") == ["run.nnodes=4", "cluster.nodes=4"]


def test_a_layout_that_does_not_divide_is_planned_anew():
    machine = ("cluster=dgx-h100:4", "cluster.devices_per_node=1", "train.precision=bf16", "model.vocab_size=256")
    found = words(2, "tp=4", *machine)
    assert found[:4] == ["run.nnodes=2", "cluster.nodes=2", "cluster.devices_per_node=1", "train.global_batch=24"]
    assert found[4].startswith("layout=")


def test_what_is_wrong_with_nodes_is_said_with_the_nearest_legal_value():
    with pytest.raises(JobError) as caught:
        words(1, "run.nnodes=3:2", "run.rdzv_endpoint=", "dp_replicate=4")
    assert any("run.nnodes=3:2: is 3:2; nearest legal: 2:3" in problem for problem in caught.value.problems)
    assert any("nodes need both, such as nnodes=2 rdzv_endpoint=HOST:29400" in p for p in caught.value.problems)
    with pytest.raises(JobError, match=r"4 ranks are not divisible by 3 nodes; nearest legal: 1, 2, 4"):
        words(1, "run.nnodes=3", "dp_replicate=4")
    with pytest.raises(JobError, match=r"must be HOST:PORT, such as node-a:29400"):
        words(1, "run.rdzv_endpoint=node-a", "dp_replicate=4")
