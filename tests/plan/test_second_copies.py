"""The planner gives layouts whose gathers cross slow links a second copy of the parameters."""

from __future__ import annotations

from dataclasses import replace

from phalanx.config.cluster import Link
from phalanx.config.clusters import cluster_of
from phalanx.cost.prediction import predict
from phalanx.plan.planner import search
from phalanx.plan.space import PlanRequest
from plan.questions import request

FORM = {"tp": 1, "pp": 1, "cp": 1, "dp_replicate": 1, "zero": 3, "reshard": True, "recompute": "full"}
"""ZeRO-3 over everything."""


def slow(**fixed) -> PlanRequest:
    one = request("llama3-8b", "dgx-h100:4", 32, **FORM, **fixed)
    return replace(one, cluster=replace(cluster_of("dgx-h100:4"), inter=Link(gbs=3, latency_us=10)))


def test_a_slow_network_gets_a_second_copy():
    best = search(slow()).best[0]
    assert best.layout.hpz == 8
    without = predict(replace(best.spec, layout=replace(best.layout, hpz=1)))
    assert without.step_time_s / best.prediction.step_time_s > 1.2


def test_what_is_fixed_stays():
    assert search(slow(hpz=1)).best[0].layout.hpz == 1
    assert search(slow(hpz=4)).best[0].layout.hpz == 4


def test_no_copy_where_it_does_not_fit():
    one = slow()
    memory = predict(search(replace(one, fixed={**one.fixed, "hpz": 1})).best[0].spec).fullest.needed / 2**30 + 0.5
    device = replace(one.cluster.accelerator, memory_gib=memory)
    best = search(replace(one, cluster=replace(one.cluster, accelerator=device))).best[0]
    assert best.layout.hpz == 1
