"""Refined layouts: faster in the simulator than equal stages, within the memory, and told where they are no better."""

from dataclasses import replace

import pytest
from benchmarks.cutting import CASES, compared

from phalanx.config.clusters import cluster_of
from phalanx.config.layout import Layout
from phalanx.config.presets import PRESETS
from phalanx.cost.frameworks import PHALANX
from phalanx.cost.rank_memory import needed_bytes
from phalanx.partition.derived import modes
from phalanx.plan.branch import Search, simulated
from phalanx.plan.plan import Candidate
from phalanx.plan.planner import search
from phalanx.plan.refine import refined, refinement
from phalanx.plan.space import PlanRequest
from phalanx.simulate.step import step_seconds

LLAMA = PRESETS["llama3-8b"]


def request(nodes: int = 1, sequences: int = 64, memory_gib: float = 0.0, model=LLAMA, **fixed) -> PlanRequest:
    cluster = cluster_of(f"dgx-h100:{nodes}")
    memory = memory_gib or cluster.accelerator.memory_gib
    cluster = replace(cluster, accelerator=replace(cluster.accelerator, memory_gib=memory))
    return PlanRequest(model, cluster, sequences, framework=PHALANX, fixed=fixed)


def candidate(asked: PlanRequest, layout: Layout) -> Candidate:
    return Candidate.of(asked.spec(layout))


def limit(asked: PlanRequest) -> float:
    return asked.cluster.accelerator.memory_gib * 2**30


@pytest.mark.parametrize("spec", CASES, ids=lambda spec: f"{spec.name}, {spec.layout.schedule}")
def test_models_with_unlike_layers_gain_over_equal_stages(spec):
    """A vocabulary of 250,880, dense layers first, 126 layers on 16 stages; two stages a rank."""
    found = compared(spec)
    assert found.mixed <= found.seconds <= found.flops
    assert found.seconds < found.even
    if spec.layout.recompute == "full":
        assert found.mixed < 0.95 * found.seconds
    if spec.layout.schedule == "v_half":
        assert found.seconds < 0.98 * found.even  # the cut by FLOPs evens a V's ranks, too


def test_layers_recompute_what_there_is_no_room_for_and_no_more():
    asked = request(memory_gib=60)
    full = candidate(asked, Layout(pp=4, dp_shard=2, zero=1, recompute="full", micro_batch=2))
    none = asked.spec(replace(full.layout, recompute="none"))
    assert needed_bytes(none) > limit(asked) > needed_bytes(full.spec)
    found = refined(asked, full)
    assert needed_bytes(full.spec) < needed_bytes(found.spec) <= limit(asked)
    assert step_seconds(none) < found.seconds < full.seconds
    every = modes(found.layout.recompute_cut, LLAMA.n_layers)
    assert {"none", "mlp"} <= set(every), "faster than full recomputation where MLPs are enough"
    stages = found.spec.stages
    # The first rank has the most in flight.
    kept = [sum(every[layer] == "none" for layer in stage) for stage in stages]
    assert kept[0] < kept[1] < kept[-1]


def test_without_a_pipeline_as_many_layers_keep_theirs_as_fit():
    asked = request(memory_gib=60)
    full = candidate(asked, Layout(dp_shard=8, recompute="full", micro_batch=1))
    found = refined(asked, full)
    every = modes(found.layout.recompute_cut or found.layout.recompute, LLAMA.n_layers)
    kept = every.count("none")
    assert "products" in every, "faster than full recomputation, leaner than none"
    assert kept < LLAMA.n_layers
    more = f"{LLAMA.n_layers - kept - 1}*products+{kept + 1}*none"
    assert needed_bytes(found.spec) <= limit(asked)
    assert needed_bytes(asked.spec(replace(found.layout, recompute_cut=more))) > limit(asked)


def test_a_cut_that_does_not_fit_gives_layers_to_ranks_with_fewer_in_flight():
    layout = Layout(pp=8, zero=1, micro_batch=1)
    needed = needed_bytes(request().spec(layout)) / 2**30
    asked = request(memory_gib=0.93 * needed, recompute="none")
    uniform = candidate(asked, layout)
    assert not uniform.prediction.fits
    found = refined(asked, uniform)
    assert needed_bytes(found.spec) <= limit(asked)
    sizes = [len(stage) for stage in found.spec.stages]
    assert sizes[0] < sizes[-2]
    assert found.layout.recompute_cut == ""


def test_what_is_fixed_stays():
    layout = Layout(pp=4, dp_shard=2, zero=1, recompute="full", micro_batch=2, pp_cut="8+8+8+8")
    asked = request(memory_gib=60, pp_cut="8+8+8+8", recompute="full")
    assert refinement(asked, asked.spec(layout)) is None
    asked = request(memory_gib=60, pp_cut="8+8+8+8")
    found = refined(asked, candidate(asked, layout))
    assert found.layout.pp_cut == "8+8+8+8"
    assert found.layout.recompute_cut


@pytest.mark.parametrize("layout", [Layout(dp_shard=8, micro_batch=1), Layout(pp=4, dp_shard=2, micro_batch=1)])
def test_where_nothing_helps_it_is_the_same_one(layout):
    asked = request(model=replace(LLAMA, vocab_size=256))
    uniform = candidate(asked, layout)
    assert refined(asked, uniform) is uniform


def test_a_search_tells_of_refined_layouts_where_they_are_faster():
    model = replace(LLAMA, vocab_size=250_880)
    asked = request(model=model, pp=4, cp=2, schedule="1f1b", micro_batch=1)
    asked = replace(asked, cluster=cluster_of("dgx-a100-40gb:1"))
    plan, one = search(asked), Search(asked)
    best, uniform = plan.best[0], simulated(one.best())[0]
    assert best.layout.recompute_cut
    assert best.prediction.fits
    assert best.seconds < 0.95 * uniform.seconds


def test_where_nothing_fits_as_it_is_the_nearest_are_refined():
    layout = Layout(pp=8, zero=1, micro_batch=1)
    needed = needed_bytes(request().spec(layout)) / 2**30
    fixed = {"pp": 8, "micro_batch": 1, "recompute": "none", "schedule": "1f1b"}
    asked = request(memory_gib=0.93 * needed, **fixed)
    assert not Search(asked).best().predicted
    best = search(asked).best[0]
    assert best.layout.pp_cut
    assert best.prediction.fits
