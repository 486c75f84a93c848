"""Stages of uneven size: the slowest rank of a cut against those of all other cuts."""

from dataclasses import replace

import pytest

from partition.cuts import every_cut
from phalanx.config.clusters import cluster_of
from phalanx.config.layout import Layout
from phalanx.config.presets import PRESETS
from phalanx.cost.frameworks import PHALANX
from phalanx.cost.spec import StepSpec
from phalanx.partition import derived as batch
from phalanx.partition.derived import even, ranges
from phalanx.plan.refine import PipelineRanks, stages_of_ranks
from phalanx.schedule import catalogue

LLAMA = replace(PRESETS["llama3-8b"], n_layers=11)
DEEPSEEK = replace(PRESETS["deepseek-v3"], n_layers=10, moe=replace(PRESETS["deepseek-v3"].moe, n_experts=16))


def ranks_of(model, layout: Layout, memory_gib: float = 80) -> PipelineRanks:
    cluster = cluster_of("dgx-h100:1")
    cluster = replace(cluster, accelerator=replace(cluster.accelerator, memory_gib=memory_gib))
    solved = batch.solve(16 * layout.data_ranks, layout)
    stages = catalogue.stages(layout.schedule, layout.pp, layout.pp_chunks)
    complete = replace(layout, micro_batch=solved.micro_batch, accumulation=solved.accumulation)
    spec = StepSpec(model, cluster, complete, solved, "bf16", 2, PHALANX, even(model.n_layers, stages))
    found = PipelineRanks(spec)
    found.calibrated(spec)
    return found


def slowest(ranks: PipelineRanks, stages) -> float:
    counts = ranks.counts(stages)
    return max(ranks.seconds(rank, ranks.held(rank, counts)) for rank in range(len(ranks.flights)))


@pytest.mark.parametrize(
    ("model", "memory"), [(LLAMA, 80), (LLAMA, 38), (replace(LLAMA, vocab_size=250_880), 80), (DEEPSEEK, 160)]
)
def test_no_cut_of_a_stage_a_rank_has_a_faster_slowest_rank(model, memory):
    ranks = ranks_of(model, Layout(pp=4, dp_shard=2, micro_batch=1, recompute="full"), memory)
    best = min(slowest(ranks, stages) for stages in every_cut(model.n_layers, 4))
    found = stages_of_ranks(ranks, even(model.n_layers, 4))
    assert [layer for stage in found for layer in stage] == list(range(model.n_layers))
    assert slowest(ranks, found) == pytest.approx(best, rel=1e-6)


@pytest.mark.parametrize("schedule", ["interleaved_1f1b", "zb_v", "dualpipe_v"])
def test_layers_leave_the_slowest_of_ranks_with_several_stages(schedule):
    chunks = 2 if schedule == "interleaved_1f1b" else 0
    model = replace(LLAMA, vocab_size=250_880, n_layers=16)
    ranks = ranks_of(model, Layout(pp=4, dp_shard=2, schedule=schedule, pp_chunks=chunks, micro_batch=1))
    start = even(16, 8)
    found = stages_of_ranks(ranks, start)
    every = [slowest(ranks, stages) for stages in every_cut(16, 8)]
    assert slowest(ranks, found) < slowest(ranks, start)
    # A local search: near the best of all cuts.
    assert slowest(ranks, found) <= 1.05 * min(every)


def test_where_nothing_fits_there_is_no_cut():
    for layout in (Layout(pp=4, dp_shard=2), Layout(pp=4, dp_shard=2, schedule="zb_v")):
        ranks = ranks_of(LLAMA, replace(layout, micro_batch=1), 1.0)
        assert stages_of_ranks(ranks, ranges([1, 1, 1, 8] if ranks.stages == 4 else [1] * 7 + [4])) == ()
