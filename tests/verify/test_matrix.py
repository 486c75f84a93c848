"""The layouts that are compared by default."""

import itertools

import pytest

from phalanx.config.layout import Layout
from phalanx.config.layout_line import parse
from phalanx.schedule.catalogue import SCHEDULES
from phalanx.verify import select as matrix

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
        {"hpz": 2, "accumulation": 2},
        {"accumulate": "sharded", "zero": 2},
        {"accumulate": "sharded", "zero": 3},
        {"dp_replicate": 2, "dp_shard": 2, "zero": 3},
        {"tp": 2, "sp": False},
        {"tp": 4},
        {"tp": 2, "sp": True},
        {"sp_regather": True},
        {"recompute": "selective"},
        {"recompute": "full"},
        {"recompute_cut": "1*full+1*selective+1*products+1*none", "pp": 1},
        {"recompute_cut": "1*full+2*selective+1*none", "pp": 2, "tp": 2, "sp_regather": True},
        {"loss_chunk": 24},
        {"data_parallel": "threads"},
        {"pp": 2, "schedule": "1f1b"},
        {"pp": 4},
        {"pp": 2, "accumulate": "sharded"},
        *({"cp": cp, "cp_ulysses": 1} for cp in (2, 4)),
        {"cp": 2, "cp_ulysses": 2},
        *({"cp": 4, "cp_ulysses": 2, "cp_inner": inner} for inner in ("ulysses", "ring")),
        {"dp_replicate": 2, "dp_shard": 2, "cp": 2},
        *({"dp_shard": shard, "ep": ep} for shard, ep in ((2, 2), (4, 2), (4, 4))),
        {"cp": 2, "ep": 2, "dp_shard": 1},
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
    layouts = list(matrix.products(4))
    assert len(set(layouts)) == len(layouts)
    assert {(x.dp_replicate, x.dp_shard, x.cp, x.tp) for x in layouts} == {
        (r, s, c, t)
        for r, s, c, t in itertools.product(range(1, 5), range(1, 5), (1, 2), range(1, 5))
        if 2 <= r * s * c * t <= 4
    }
    assert Layout(cp=2, zero=1, recompute="full") in layouts
    assert Layout(dp_shard=2, tp=2, sp=True, zero=1, recompute="selective") in layouts
    assert not any(layout.sp and layout.tp == 1 for layout in layouts)


def test_schedules_are_every_one_on_pipelines_of_three_sizes():
    layouts = list(matrix.every_schedule(4))
    assert len(set(layouts)) == len(layouts) == 9 * len(SCHEDULES)
    assert {layout.schedule for layout in layouts} == set(SCHEDULES)
    assert {(x.pp, x.accumulation) for x in layouts} == {(p, m) for p in (2, 3, 4) for m in (p, 2 * p, p + 1)}
    assert all(x == Layout(pp=x.pp, schedule=x.schedule, accumulation=x.accumulation) for x in layouts)
    assert {layout.pp for layout in matrix.every_schedule(3)} == {2, 3}
    assert list(matrix.every_schedule(1)) == []


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
        ("dp_shard=8,cp=8,cp_ulysses=2,tp=8", 8, "dp_shard=2,cp=2,cp_ulysses=2,tp=2"),
        ("dp_shard=4,cp=16,cp_ulysses=4", 8, "dp_shard=2,cp=4,cp_ulysses=4"),
        ("dp_shard=2,cp=6,cp_ulysses=3,cp_inner=ring", 8, "dp_shard=2,cp=3,cp_ulysses=3,cp_inner=ring"),
        ("dp_shard=2,cp=4,cp_ulysses=2,cp_inner=ring", 2, "cp=2,cp_ulysses=2,cp_inner=ring"),
        ("cp=4,cp_ulysses=2,cp_inner=ring", 1, "dp_replicate=1"),
        ("dp_shard=64,ep=16,tp=2", 8, "dp_shard=4,ep=4,tp=2"),
        ("dp_shard=9,cp=2,ep=6", 8, "dp_shard=3,cp=2,ep=6"),
        ("dp_shard=6,ep=3", 4, "dp_shard=3,ep=3"),
        ("pp=4,schedule=zb_v,pp_chunks=2,pp_slices=2,pp_cut=1+1", 1, "dp_replicate=1"),
    ],
)
def test_a_large_layout_keeps_its_techniques(line, max_ranks, expected):
    assert matrix.reduced(parse(line), max_ranks) == parse(expected)
