"""Memory of a pipeline rank: its own stages, and the micro-batches that it has in flight."""

from dataclasses import astuple, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost.exact_state import state_bytes
from phalanx.blocks.parameters import count
from phalanx.config.layout import Layout
from phalanx.config.model import ModelConfig
from phalanx.partition.derived import ranges
from phalanx.schedule import catalogue
from phalanx.schedule.check import in_flight

VOCAB = 100
GPT = ModelConfig(n_layers=8, d_model=64, n_heads=4, seq_len=16)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("pp_cut", [(2, 2, 2, 2), (1, 3, 3, 1)])
def test_the_stages_together_have_the_state_of_the_model_and_of_a_tied_matrix_twice(tied, pp_cut):
    model = replace(GPT, tied=tied)
    parts = [state_bytes(model, Layout(pp=4), "bf16", vocab=VOCAB, stages=[stage]) for stage in ranges(pp_cut)]
    embedding = VOCAB * model.d_model if tied else 0
    parameters = count(model, VOCAB) + embedding
    assert [sum(column) for column in zip(*map(astuple, parts), strict=True)] == [
        2 * parameters,
        2 * parameters,
        12 * parameters,
    ]


def test_a_rank_holds_every_stage_that_its_schedule_gives_it():
    for name, held in (("dualpipe", [0, 3]), ("zb_v", [0, 7]), ("interleaved_1f1b", [0, 4])):
        schedule = catalogue.build(name, 4, 8)
        assert schedule.stages_on(0) == held
        cut = ranges([8 // schedule.stages] * schedule.stages)
        stages = [cut[number] for number in held]
        found = state_bytes(GPT, Layout(pp=4), "fp32", vocab=VOCAB, stages=stages)
        whole = state_bytes(GPT, Layout(), "fp32", vocab=VOCAB)
        block = state_bytes(GPT, Layout(), "fp32", vocab=VOCAB, stages=[range(1, 2)])
        rest = 0 if 7 in stages[-1] else 2 * GPT.d_model  # of the final norm, where the last stage is elsewhere
        missing = 8 - sum(map(len, stages))
        assert found.parameters == whole.parameters - missing * block.parameters - 4 * rest
    assert state_bytes(GPT, Layout(), vocab=VOCAB) == state_bytes(GPT, Layout(), vocab=VOCAB, stages=[range(8)])


def test_stages_are_sharded_like_whole_models():
    stages = [range(2, 4)]
    one = state_bytes(GPT, Layout(pp=4), "bf16", vocab=VOCAB, stages=stages)
    for zero in (1, 2, 3):
        layout = Layout(pp=4, dp_shard=2, zero=zero)
        found = state_bytes(GPT, layout, "bf16", vocab=VOCAB, stages=stages)
        divided = (one.parameters // (2 if zero > 2 else 1), one.gradients // (2 if zero > 1 else 1))
        assert (found.parameters, found.gradients, found.optimizer) == (*divided, one.optimizer // 2)


@given(st.sampled_from(sorted(catalogue.SCHEDULES)), st.integers(2, 4), st.integers(4, 8))
def test_with_equal_weights_the_peak_is_the_number_of_activations_in_flight(name, ranks, micro_batches):
    schedule = catalogue.build(name, ranks, micro_batches)
    counts = in_flight(schedule)
    for rank in range(ranks):
        peak = schedule.peak_live_activations(rank, [1] * schedule.stages) / schedule.slices
        assert peak == counts[rank] / schedule.slices


def test_the_closed_forms_of_the_papers_hold_for_uneven_stages():
    layers = [3, 5, 4, 4]
    gpipe, alternating = catalogue.build("gpipe", 4, 8), catalogue.build("1f1b", 4, 8)
    assert [gpipe.peak_live_activations(rank, layers) for rank in range(4)] == [8 * n for n in layers]
    assert [alternating.peak_live_activations(rank, layers) for rank in range(4)] == [4 * 3, 3 * 5, 2 * 4, 1 * 4]
    last_alone = [0, 0, 0, 1]
    assert [alternating.peak_live_activations(rank, last_alone) for rank in range(4)] == last_alone
