"""The layouts that are compared by default."""

import pytest

from phalanx.job.job import Job
from phalanx.job.layout import Layout
from phalanx.job.layout_line import parse
from phalanx.schedule.catalogue import SCHEDULES
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
        {"pp": 2, "schedule": "1f1b"},
        {"pp": 4},
        {"pp": 2, "dp_replicate": 2},
        *({"pp": 2, "dp_shard": 2, "zero": zero} for zero in (1, 2, 3)),
        {"pp": 2, "accumulate": "sharded"},
        {"pp": 2, "tp": 2, "sp": True},
        {"schedule": "terapipe"},
        {"schedule": "zb_v", "recompute": "full"},
        {"schedule": "dualpipe"},
        {"schedule": "pipedream"},
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


def test_schedules_are_every_one_on_pipelines_of_three_sizes():
    layouts = list(matrix.schedules(4))
    assert len(set(layouts)) == len(layouts) == 9 * len(SCHEDULES)
    assert {layout.schedule for layout in layouts} == set(SCHEDULES)
    assert {(x.pp, x.accumulation) for x in layouts} == {(p, m) for p in (2, 3, 4) for m in (p, 2 * p, p + 1)}
    assert all(x == Layout(pp=x.pp, schedule=x.schedule, accumulation=x.accumulation) for x in layouts)
    assert {layout.pp for layout in matrix.schedules(3)} == {2, 3}
    assert list(matrix.schedules(1)) == []


@pytest.mark.parametrize(
    ("line", "max_ranks", "expected"),
    [
        ("dp_shard=64,tp=8", 8, "dp_shard=2,tp=4"),
        ("dp_replicate=16", 8, "dp_replicate=8"),
        ("dp_replicate=2,dp_shard=2,tp=2", 4, "dp_shard=2,tp=2"),
        ("dp_shard=3,tp=3", 8, "tp=3"),
        ("tp=4,sp=true", 8, "tp=4,sp=true"),
        ("dp_replicate=64,data_parallel=threads", 1, "dp_replicate=64,data_parallel=threads"),
        ("pp=16,dp_shard=8,tp=8,schedule=zb_v", 8, "pp=2,dp_shard=2,tp=2,schedule=zb_v"),
        ("pp=4,tp=2,pp_cut=1+2+3+2", 8, "pp=4,tp=2,pp_cut=1+2+3+2"),
        ("pp=4,tp=2,pp_cut=1+2+3+2", 4, "pp=2,tp=2"),
        ("pp=2,schedule=terapipe,pp_slices=8", 1, "dp_replicate=1"),
        ("pp=4,dp_replicate=8,schedule=mine.csv", 8, "pp=4,dp_replicate=2,schedule=mine.csv"),
        ("pp=16,tp=2,schedule=mine.csv", 8, "pp=16,schedule=mine.csv"),
    ],
)
def test_a_large_layout_keeps_its_techniques(line, max_ranks, expected):
    assert matrix.reduced(parse(line), max_ranks) == parse(expected)


def test_without_puts_fields_back():
    assert matrix.without(Layout(cp=4, tp=2), {"layout.cp", "model.moe.n_experts"}) == Layout(tp=2)
    pipeline = Layout(pp=4, tp=2, schedule="zb_v", pp_chunks=2, pp_slices=2, pp_cut="1+1")
    assert matrix.without(pipeline, {"layout.pp"}) == Layout(tp=2)
    assert matrix.without(pipeline, {"layout.tp"}) == Layout(
        pp=4, schedule="zb_v", pp_chunks=2, pp_slices=2, pp_cut="1+1"
    )
    assert matrix.without(Job().layout, set()) == Layout()
