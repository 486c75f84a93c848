"""Stages and batches: cut where the slowest stage is fastest, written down, and multiplied out."""

import time

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from partition.cuts import every_cut
from phalanx.blocks.parameters import parameter_shapes
from phalanx.config.layout import Layout
from phalanx.config.model import ModelConfig
from phalanx.config.presets import PRESETS
from phalanx.errors import JobError
from phalanx.partition.cut import LayerCosts, cut, describe, layer_costs, stage_costs, stages_of
from phalanx.partition.derived import (
    DEFAULT_GLOBAL_BATCH,
    Batch,
    even,
    parse_cut,
    ranges,
    solve,
    stage_shapes,
    written_stages,
)


def test_a_v_of_stages_gives_its_ranks_equal_layers():
    model = ModelConfig(n_layers=6, d_model=64, n_heads=4, vocab_size=65)
    cuts = {name: stages_of(model, Layout(pp=2, schedule=name), 4) for name in ("zb_v", "interleaved_1f1b")}
    assert [len(stage) for stage in cuts["zb_v"]] == [2, 1, 2, 1]
    assert [len(stage) for stage in cuts["interleaved_1f1b"]] == [1, 2, 2, 1]
    written = stages_of(model, Layout(pp=2, schedule="zb_v", pp_cut="1+1+1+3"), 4)
    assert [len(stage) for stage in written] == [1, 1, 1, 3]


# Stages are cut where the slowest is as fast as it can be: held against every possible cut.


cost = st.integers(0, 20) | st.floats(0, 20, allow_subnormal=False)


@st.composite
def pipelines(draw):
    """Layers' costs, a number of stages, and what the first and the last stage have besides."""
    layers = draw(st.lists(cost, min_size=1, max_size=8))
    return LayerCosts(layers, draw(cost), draw(cost)), draw(st.integers(1, len(layers)))


@settings(deadline=None)
@given(pipelines())
def test_the_slowest_stage_is_as_fast_as_any_cut_makes_it_and_the_rest_is_even(pipeline):
    costs, stages = pipeline
    found = cut(costs.layers, stages, costs.first, costs.last)
    assert [layer for stage in found for layer in stage] == list(range(len(costs.layers)))
    assert len(found) == stages
    assert all(found)
    all_costs = [stage_costs(other, costs) for other in every_cut(len(costs.layers), stages)]
    slowest = min(map(max, all_costs))
    each = stage_costs(found, costs)
    assert max(each) == pytest.approx(slowest, rel=1e-8)
    squares = min(sum(c * c for c in other) for other in all_costs if max(other) <= slowest)
    assert sum(c * c for c in each) <= squares * (1 + 1e-8)


@pytest.mark.parametrize(
    ("layers", "stages", "last", "sizes"),
    [
        (8, 4, 0, [2, 2, 2, 2]),
        (6, 4, 0, [1, 1, 2, 2]),
        (13, 4, 0, [3, 3, 3, 4]),
        (8, 4, 2, [2, 2, 3, 1]),
        (12, 4, 4, [3, 4, 4, 1]),
        (3, 3, 9, [1, 1, 1]),
        (5, 1, 9, [5]),
    ],
)
def test_equal_layers_are_dealt_out_evenly_and_a_head_takes_layers_off_the_last_stage(layers, stages, last, sizes):
    assert cut([1] * layers, stages, last=last) == ranges(sizes)


@given(st.integers(1, 40), st.data())
def test_without_a_head_equal_layers_make_stages_that_differ_by_one_at_most(layers, data):
    stages = data.draw(st.integers(1, layers))
    sizes = [len(stage) for stage in cut([0.1] * layers, stages)]
    assert sizes == sorted(len(stage) for stage in even(layers, stages))


def test_a_heavy_layer_is_counted_where_it_is():
    assert cut([1, 1, 1, 1, 6, 1, 1], 3) == (range(4), range(4, 5), range(5, 7))
    assert cut([1] * 6, 3, first=3) == (range(1), range(1, 3), range(3, 6))


def test_128_layers_are_cut_in_a_fraction_of_a_second():
    begin = time.process_time()
    for stages in (1, 32, 64, 128):
        cut([7] * 128, stages, last=30)
    assert time.process_time() - begin < 1


def test_more_stages_than_layers_are_refused():
    with pytest.raises(
        JobError, match="8 stages need at least as many layers, the model has 6; nearest legal: 6 stages"
    ):
        cut([1] * 6, 8)


def test_a_model_is_cut_by_the_flops_of_its_blocks_and_its_head():
    gpt2 = PRESETS["gpt2"]
    costs = layer_costs(gpt2)
    assert 4 < costs.last / costs.layers[0] < 5
    assert stages_of(gpt2, Layout(pp=4), 4) == ranges([3, 4, 4, 1])
    assert describe(stages_of(gpt2, Layout(pp=4), 4), costs) == "3 + 4 + 4 + 1 layers, slowest stage 1.33 × the mean"


def test_the_vocabulary_of_the_tokenizer_counts_where_the_model_leaves_it_open():
    model = ModelConfig(n_layers=8)
    assert len(stages_of(model, Layout(pp=2), 2, vocab=50_000)[1]) < len(stages_of(model, Layout(pp=2), 2, vocab=50)[1])
    with pytest.raises(JobError, match="no tokenizer is at hand"):
        stages_of(model, Layout(pp=2), 2)


def test_a_cut_of_the_users_own_is_taken_as_it_is():
    layout = Layout(pp=4, pp_cut="1+5+1+1")
    assert stages_of(ModelConfig(n_layers=8), layout, 4, vocab=50) == ranges([1, 5, 1, 1])
    with pytest.raises(JobError, match=r"1\+5\+1\+1 are 4 stages, the pipeline has 8"):
        stages_of(ModelConfig(n_layers=8), layout, 8, vocab=50)


def test_as_many_stages_as_layers_leave_no_choice():
    assert cut([3, 1, 4, 1, 5], 5, first=9, last=2) == ranges([1, 1, 1, 1, 1])


def test_one_stage_has_everything():
    assert cut([3, 1, 4], 1, first=9, last=2) == ranges([3])


def test_layers_that_cost_nothing_go_somewhere():
    for stages in (1, 2, 3):
        found = cut([0, 0, 0], stages)
        assert [layer for stage in found for layer in stage] == [0, 1, 2]
        assert all(found)


def test_units_do_not_change_a_cut():
    """FLOPs are numbers of twenty digits, seconds of minus six."""
    costs = [7.0, 3, 3, 9, 2, 2, 2, 5, 1]
    for factor in (1e-9, 1.0, 1e15):
        scaled = [factor * each for each in costs]
        assert cut(scaled, 4, factor, 4 * factor) == cut(costs, 4, 1, 4)


def test_dense_layers_before_those_with_experts_are_cut_by_what_they_cost():
    model = PRESETS["deepseek-v3"]
    costs = layer_costs(model)
    for stages in (4, 16):
        each = stage_costs(stages_of(model, Layout(pp=stages), stages), costs)
        assert max(each) <= sum(each) / stages + max(costs.layers)


# What a stage holds, and how a user writes the stages down.


def test_layers_are_written_with_plus_signs():
    assert parse_cut("3+5 + 4+4") == (3, 5, 4, 4)
    assert parse_cut("7") == (7,)
    for text in ("", "3+", "3,4", "3+-1", "a+b", "3++4", "1.5+2"):
        with pytest.raises(JobError, match="is not a list of layers per stage"):
            parse_cut(text)


def test_every_reason_why_a_cut_does_not_fit_is_told_with_a_legal_one():
    assert written_stages("3+5", 2, 8) == (range(3), range(3, 8))
    with pytest.raises(JobError) as caught:
        written_stages("3+0+4", 4, 8)
    assert caught.value.problems == [
        "3+0+4 are 3 stages, the pipeline has 4; legal: 2+2+2+2",
        "3+0+4 leaves stage 1 without a layer: embedding and head belong to the stages of the first and the last "
        "layer, so it would have no weights and only pass on its input; legal: 2+2+2+2",
        "3+0+4 = 7 layers, the model has 8; legal: 2+2+2+2",
    ]
    with pytest.raises(JobError, match="the pipeline has 3$"):
        written_stages("1+1", 3, 2)


@given(st.integers(1, 60), st.data())
def test_even_stages_cover_all_layers_in_order(layers, data):
    stages = even(layers, data.draw(st.integers(1, layers)))
    sizes = [len(stage) for stage in stages]
    assert stages == ranges(sizes)
    assert stages[-1].stop == layers
    assert 1 <= min(sizes) <= max(sizes) <= min(sizes) + 1


@pytest.mark.parametrize("tied", [True, False])
@given(sizes=st.lists(st.integers(1, 3), min_size=1, max_size=4))
def test_the_stages_together_hold_the_model_and_a_tied_head_once_more(tied, sizes):
    model = ModelConfig(n_layers=sum(sizes), tied=tied, vocab_size=10)
    found = [stage_shapes(model, [stage]) for stage in ranges(sizes)]
    names = [name for shapes in found for name in shapes]
    copies = ["embed.weight"] if tied and len(sizes) > 1 else []
    assert sorted(names) == sorted([*parameter_shapes(model), *copies])
    assert {"embed.weight", "positions.weight"} <= found[0].keys()
    assert {"final_norm.weight", "embed.weight" if tied else "head.weight"} <= found[-1].keys()


def test_a_rank_with_the_first_and_the_last_stage_holds_a_tied_matrix_once():
    model = ModelConfig(n_layers=4, vocab_size=10)
    shapes = stage_shapes(model, [range(1), range(3, 4)])
    assert [name for name in parameter_shapes(model) if not name.startswith(("blocks.1.", "blocks.2."))] == list(shapes)


# The batch equation: any two of its three unknowns give the third, or a message with the equation.

small = st.integers(1, 12)


@given(micro=small, accumulation=small, replicate=small, shard=small)
def test_what_is_left_out_is_derived(micro, accumulation, replicate, shard):
    whole = Layout(dp_replicate=replicate, dp_shard=shard, micro_batch=micro, accumulation=accumulation)
    batch = solve(0, whole)
    ranks = replicate * shard
    assert batch == Batch(micro * accumulation * ranks, micro, accumulation, ranks)
    assert solve(batch.global_batch, whole) == batch
    parts = {"dp_replicate": replicate, "dp_shard": shard}
    assert solve(batch.global_batch, Layout(**parts, micro_batch=micro)) == batch
    assert solve(batch.global_batch, Layout(**parts, accumulation=accumulation)) == batch


@given(global_batch=st.integers(0, 60), micro=st.integers(0, 5), accumulation=st.integers(0, 5), ranks=small)
def test_the_equation_holds_or_is_refused(global_batch, micro, accumulation, ranks):
    layout = Layout(dp_replicate=ranks, micro_batch=micro, accumulation=accumulation)
    try:
        batch = solve(global_batch, layout)
    except ValueError as error:
        assert f"data ranks {ranks}" in str(error)
        return
    assert batch.global_batch == batch.micro_batch * batch.accumulation * batch.data_ranks
    assert min(batch.micro_batch, batch.accumulation) >= 1
    assert not global_batch or batch.global_batch == global_batch
    assert not micro or batch.micro_batch == micro


def test_a_silent_job_has_the_same_global_batch_on_any_number_of_ranks():
    assert solve(0, Layout()).global_batch == solve(0, Layout(dp_replicate=4)).global_batch == DEFAULT_GLOBAL_BATCH


@pytest.mark.parametrize(
    ("sequences", "pp", "accumulation"),
    [(16, 1, 1), (16, 2, 4), (16, 3, 8), (16, 4, 8), (24, 4, 8), (21, 3, 7), (16, 9, 16), (6, 4, 6), (7, 2, 7)],
)
def test_a_pipeline_gets_two_micro_batches_a_rank_where_nothing_is_said(sequences, pp, accumulation):
    for ranks in (1, 2):
        batch = solve(sequences * ranks, Layout(pp=pp, dp_replicate=ranks))
        assert batch == Batch(sequences * ranks, sequences // accumulation, accumulation, ranks)


def test_a_pipeline_takes_the_micro_batches_that_are_given():
    assert solve(16, Layout(pp=4, accumulation=2)) == Batch(16, 8, 2, 1)
    assert solve(16, Layout(pp=4, micro_batch=8)) == Batch(16, 8, 2, 1)


def test_the_message_shows_the_equation_and_the_nearest_legal_batches():
    with pytest.raises(ValueError) as caught:
        solve(10, Layout(dp_replicate=2, dp_shard=2, micro_batch=2))
    assert str(caught.value) == (
        "global_batch 10 ≠ micro_batch 2 × accumulation ? × data ranks 4 (dp_replicate 2 × dp_shard 2): "
        "nearest legal global_batch: 8 or 16"
    )
    with pytest.raises(ValueError, match="global_batch 12 agrees"):
        solve(24, Layout(dp_replicate=2, micro_batch=2, accumulation=3))


@given(global_batch=st.integers(1, 200), micro=small, ranks=small)
def test_the_suggested_batches_are_legal(global_batch, micro, ranks):
    layout = Layout(dp_replicate=ranks, micro_batch=micro)
    assume(global_batch % (micro * ranks))
    with pytest.raises(ValueError) as caught:
        solve(global_batch, layout)
    for legal in str(caught.value).rsplit(": ", 1)[1].split(" or "):
        assert solve(int(legal), layout).global_batch == int(legal)
