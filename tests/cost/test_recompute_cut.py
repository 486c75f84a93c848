"""Recomputation layer by layer in the cost model: where all layers do the same it is `recompute`, else in between."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.config.cluster import Cluster
from phalanx.config.clusters import cluster_of
from phalanx.config.layout import Layout
from phalanx.config.presets import PRESETS
from phalanx.cost.frameworks import PHALANX
from phalanx.cost.job_spec import with_recompute_budget
from phalanx.cost.prediction import hardware_flops_per_step, predict
from phalanx.cost.spec import StepSpec
from phalanx.cost.traffic import step_traffic
from phalanx.partition import derived as batch
from phalanx.partition.derived import MODES, Mode, even, written

LLAMA, MIXTRAL = (PRESETS[name] for name in ("llama3-8b", "mixtral-8x7b"))


def spec(layout: Layout, model=LLAMA) -> StepSpec:
    solved = batch.solve(8 * layout.data_ranks, layout)
    return StepSpec(model, cluster_of("dgx-h100:4"), layout, solved, framework=PHALANX)


LAYOUTS = st.builds(
    Layout,
    tp=st.sampled_from([1, 2]),
    pp=st.sampled_from([1, 2, 4]),
    schedule=st.sampled_from(["1f1b", "interleaved_1f1b", "zb_v"]),
    dp_shard=st.sampled_from([1, 2]),
    zero=st.sampled_from([1, 3]),
    cp=st.sampled_from([1, 2]),
    sp=st.booleans(),
    sp_regather=st.booleans(),
    micro_batch=st.just(1),
)


@settings(max_examples=60, deadline=None)
@given(LAYOUTS, st.sampled_from(MODES), st.integers(1, 31), st.sampled_from([LLAMA, MIXTRAL]))
def test_layers_that_all_do_the_same_are_predicted_as_one(layout: Layout, mode: Mode, first: int, model) -> None:
    whole = replace(layout, recompute=mode)
    for text in (f"{model.n_layers}*{mode}", f"{first}*{mode}+{model.n_layers - first}*{mode}"):
        cut = replace(layout, recompute_cut=text)
        assert predict(spec(cut, model)) == predict(spec(whole, model))
        chunks = {"1f1b": 1}.get(layout.schedule, 2)
        stages = even(model.n_layers, layout.pp * chunks)
        traffic = [
            step_traffic(model, each, batch.solve(8 * layout.data_ranks, layout), precision="bf16", stages=stages)
            for each in (cut, whole)
        ]
        assert traffic[0] == traffic[1]


@pytest.mark.parametrize("tp", [1, 4])
def test_fewer_layers_recomputed_take_less_time_and_more_memory(tp: int) -> None:
    layout = Layout(dp_shard=32 // tp, tp=tp, micro_batch=1)
    cuts = ["32*full", "24*full+8*none", "16*full+8*selective+8*none", "8*full+24*none", "32*none"]
    found = [predict(spec(replace(layout, recompute_cut=cut))) for cut in cuts]
    flops = [hardware_flops_per_step(LLAMA, replace(layout, recompute_cut=cut), 8) for cut in cuts]
    assert [one.step_time_s for one in found] == sorted((one.step_time_s for one in found), reverse=True)
    assert [one.fullest.peak for one in found] == sorted(one.fullest.peak for one in found)
    assert flops == sorted(flops, reverse=True)
    block = (flops[0] - flops[-1]) / 32
    assert flops[3] - flops[-1] == pytest.approx(8 * block)


def test_layers_are_those_of_the_model_wherever_their_stage_is() -> None:
    """The first rank has most micro-batches in flight: there recomputing saves more."""
    layout = Layout(pp=4, micro_batch=1)
    first, last = (predict(spec(replace(layout, recompute_cut=cut))) for cut in ("8*full+24*none", "24*none+8*full"))
    none = predict(spec(layout))
    assert first.memory[0].peak < none.memory[0].peak
    assert [one.peak for one in first.memory[1:]] == [one.peak for one in none.memory[1:]]
    assert last.memory[3].peak < none.memory[3].peak
    assert first.fullest.peak < last.fullest.peak


def budgeted(budget: float, **fields) -> StepSpec:
    return with_recompute_budget(spec(Layout(recompute=budget, micro_batch=1, **fields)))


@pytest.mark.parametrize("fields", [{"dp_shard": 32}, {"dp_shard": 8, "tp": 4, "sp": True}])
def test_a_budget_buys_time_by_seconds_per_byte(fields) -> None:
    """More bytes never cost time; none are above the budget; and no mixture of two modes is faster with as few."""
    none, full = (predict(budgeted(budget, **fields)) for budget in (1.0, 0.0))
    assert written(budgeted(1.0, **fields).layout) == "none"
    assert written(budgeted(0.0, **fields).layout) == "full"
    found = [predict(budgeted(step / 8, **fields)) for step in range(9)]
    assert [one.step_time_s for one in found] == sorted((one.step_time_s for one in found), reverse=True)
    kept = [one.fullest.activations for one in found]
    assert kept == sorted(kept)
    least, most = full.fullest.activations, none.fullest.activations
    for step, one in enumerate(kept):
        assert one <= least + step / 8 * (most - least) + 1
    half = predict(budgeted(0.5, **fields))
    for lean, large in combinations(("full", "selective", "mlp", "products", "none"), 2):
        for many in range(4, LLAMA.n_layers, 4):
            other = predict(
                spec(Layout(micro_batch=1, recompute_cut=f"{many}*{lean}+{LLAMA.n_layers - many}*{large}", **fields))
            )
            if other.fullest.activations <= half.fullest.activations:
                assert other.step_time_s >= 0.999 * half.step_time_s, (many, lean, large)


def test_a_budget_needs_no_known_device() -> None:
    known = budgeted(0.4, dp_shard=8)
    bare = replace(spec(Layout(recompute=0.4, micro_batch=1, dp_shard=8)), cluster=Cluster())
    assert with_recompute_budget(bare).layout == known.layout
