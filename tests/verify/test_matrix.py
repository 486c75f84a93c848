"""The layouts that are compared by default."""

import pytest

from phalanx.job.job import Job
from phalanx.job.layout import Layout
from phalanx.job.layout_line import parse
from phalanx.verify import matrix

LAYOUTS = [parse(line) for line in matrix.MATRIX]


def test_every_line_is_another_layout_of_at_most_8_ranks():
    assert len(set(LAYOUTS)) == len(LAYOUTS)
    assert all(layout.world <= 8 for layout in LAYOUTS)


@pytest.mark.parametrize(
    "technique",
    [
        {"dp_replicate": 2},
        {"accumulation": 2},
        {"dp_shard": 2, "zero": 1},
        {"dp_shard": 2, "zero": 2},
        {"dp_shard": 2, "zero": 3},
        {"reshard": False},
        {"accumulate": "sharded", "zero": 2},
        {"accumulate": "sharded", "zero": 3},
        {"dp_replicate": 2, "dp_shard": 2, "zero": 3},
        {"tp": 2, "sp": False},
        {"tp": 4},
        {"tp": 2, "sp": True},
        {"sp_regather": True},
        {"recompute": "selective"},
        {"recompute": "full"},
        {"loss_chunk": 24},
        {"data_parallel": "threads"},
        {"dp_replicate": 2, "dp_shard": 2, "tp": 2},
    ],
    ids=str,
)
def test_every_technique_is_there(technique):
    assert any(all(getattr(layout, name) == value for name, value in technique.items()) for layout in LAYOUTS)


def test_full_is_every_product_in_every_form():
    layouts = list(matrix.full(4))
    assert len(set(layouts)) == len(layouts)
    assert {(x.dp_replicate, x.dp_shard, x.tp) for x in layouts} == {
        (r, s, t) for r in range(1, 5) for s in range(1, 5) for t in range(1, 5) if 2 <= r * s * t <= 4
    }
    assert Layout(dp_shard=2, tp=2, sp=True, zero=1, recompute="selective") in layouts
    assert not any(layout.sp and layout.tp == 1 for layout in layouts)


@pytest.mark.parametrize(
    ("line", "max_ranks", "expected"),
    [
        ("dp_shard=64,tp=8", 8, "dp_shard=2,tp=4"),
        ("dp_replicate=16", 8, "dp_replicate=8"),
        ("dp_replicate=2,dp_shard=2,tp=2", 4, "dp_shard=2,tp=2"),
        ("dp_shard=3,tp=3", 8, "tp=3"),
        ("tp=4,sp=true", 8, "tp=4,sp=true"),
        ("dp_replicate=64,data_parallel=threads", 1, "dp_replicate=64,data_parallel=threads"),
    ],
)
def test_a_large_layout_keeps_its_techniques(line, max_ranks, expected):
    assert matrix.reduced(parse(line), max_ranks) == parse(expected)


def test_without_puts_fields_back():
    assert matrix.without(Layout(pp=4, tp=2), {"layout.pp", "model.moe.n_experts"}) == Layout(tp=2)
    assert matrix.without(Job().layout, set()) == Layout()
