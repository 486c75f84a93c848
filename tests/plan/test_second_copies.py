"""The planner gives layouts whose gathers cross slow links a second copy of the parameters, and gathers in fp8."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from covering import unless_whole
from phalanx.check.load import load_words
from phalanx.config.cluster import Link
from phalanx.config.clusters import cluster_of
from phalanx.config.overrides import parse
from phalanx.cost.prediction import predict
from phalanx.plan.plan import Candidate
from phalanx.plan.planner import choose, search
from phalanx.plan.space import PlanRequest, plan_request
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


def test_gathers_in_fp8_where_products_are_and_links_are_slow():
    words = ["model=llama3-8b", "cluster=dgx-h200:4", "cluster.inter.gbs=3", "train.global_batch=64", "dp_shard=32"]

    def chosen(*more: str, fixed: Collection[str] = ()) -> Candidate:
        fixed = [*fixed, *unless_whole(pp=1, cp=1)]
        job = load_words(parse([*words, *more])).job
        return choose(plan_request(job, 128256, {name: getattr(job.layout, name) for name in fixed})).best[0]

    best = chosen("train.precision=fp8")
    assert (best.layout.zero, best.layout.quantise_weights) == (3, "fp8")
    without = predict(replace(best.spec, layout=replace(best.layout, quantise_weights="none")))
    assert best.prediction.step_time_s < without.step_time_s
    assert chosen("train.precision=fp8", fixed=["quantise_weights"]).layout.quantise_weights == "none"
    assert chosen("train.precision=bf16").layout.quantise_weights == "none"
