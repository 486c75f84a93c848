"""Whole matrices in the cost model: who computes with which, the seconds, and that bounds stay bounds."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from math import prod

import pytest

from phalanx.config.clusters import cluster_of
from phalanx.config.job import Optimizer
from phalanx.config.layout import Layout
from phalanx.config.model import ModelConfig
from phalanx.config.presets import PRESETS
from phalanx.cost.held import Content, contents
from phalanx.cost.kernels import rate
from phalanx.cost.matrices import matrix_seconds, matrix_work
from phalanx.cost.spec import StepSpec
from phalanx.optimizers.entry import newton_schulz_flops
from phalanx.partition.derived import Batch
from plan.questions import request
from plan.test_bounds import compare

LLAMA = PRESETS["llama3-8b"]
MUON = Optimizer(name="muon")


def spec_of(model: ModelConfig, layout: Layout, optimizer: Optimizer = MUON) -> StepSpec:
    return StepSpec(model, cluster_of("eos:8"), layout, Batch(1, 1, 1, 1), optimizer=optimizer)


def content(spec: StepSpec) -> Content:
    return contents(spec)[0]


def work_of(spec: StepSpec):
    held = content(spec)
    return matrix_work(spec, tuple(held.of_kind.items()), (held.embedding, held.head))


@pytest.mark.parametrize("layout", [Layout(dp_shard=64), Layout(dp_shard=64, zero=1), Layout(tp=8, dp_shard=8)])
def test_every_rank_has_near_the_mean_work(layout):
    (work,) = work_of(spec_of(LLAMA, layout))
    assert work.moved == 1
    assert work.elements * layout.tp == 32 * sum(
        prod(shape) for shape in ((4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), *[(14336, 4096)] * 3)
    )
    load = [sum(newton_schulz_flops(*shape) * number for shape, number in owned) for owned in work.owned]
    total = 32 * (2 * newton_schulz_flops(4096, 4096) + 2 * newton_schulz_flops(1024, 4096))
    total += 96 * newton_schulz_flops(14336, 4096)
    assert 1 <= max(load) / (total / 64) < 1.35


def test_small_matrices_in_one_bucket_stay_at_home():
    spec = spec_of(replace(PRESETS["tiny"], vocab_size=65), Layout(dp_shard=2, zero=2))
    assert [work.moved for work in work_of(spec)] == [0]


def test_experts_are_shared_by_fewer_ranks():
    model = PRESETS["mixtral-8x7b"]
    works = {work.experts: work for work in work_of(spec_of(model, Layout(dp_shard=16, ep=8)))}
    assert works[True].ranks == 2
    assert works[False].ranks == 16
    owned = Counter(dict(works[True].owned[0]))
    assert owned.total() == 32 * 3 / 2


def test_element_optimizers_have_no_matrices():
    spec = spec_of(LLAMA, Layout(dp_shard=64), Optimizer())
    assert work_of(spec) == ()
    assert matrix_seconds(spec, content(spec)) == 0


def test_seconds_are_those_of_the_products_and_messages():
    spec = spec_of(LLAMA, Layout())
    alone = matrix_seconds(spec, content(spec))
    flops = 32 * sum(
        newton_schulz_flops(*shape)
        for shape in ((4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), *[(14336, 4096)] * 3)
    )
    assert alone == pytest.approx(flops / rate(spec.cluster.accelerator, "fp32"), rel=0.05)
    narrow = spec_of(LLAMA, Layout(), replace(MUON, newton_schulz="bf16"))
    assert matrix_seconds(narrow, content(narrow)) < 0.2 * alone
    shared = spec_of(LLAMA, Layout(dp_shard=64))
    assert alone / 64 < matrix_seconds(shared, content(shared)) < alone / 40


@pytest.mark.parametrize("name", ["llama3-8b", "mixtral-8x7b"])
def test_bounds_hold_with_whole_matrices(name):
    one = replace(request(name, "dgx-h100:2", 64), optimizer=MUON)
    assert compare(one, random.Random(name)) >= 10
