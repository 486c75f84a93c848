"""Stages are cut where the slowest is as fast as it can be: held against every possible cut."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partition.cuts import every_cut
from phalanx.config.layout import Layout
from phalanx.config.model import ModelConfig
from phalanx.config.presets import PRESETS
from phalanx.errors import JobError
from phalanx.partition.cut import LayerCosts, cut, describe, layer_costs, stage_costs, stages_of
from phalanx.partition.derived import even, ranges

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
