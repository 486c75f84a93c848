"""What a stage holds, and how a user writes the stages down."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.blocks.parameters import parameter_shapes
from phalanx.config.model import ModelConfig
from phalanx.errors import JobError
from phalanx.partition.derived import even, parse_cut, ranges, stage_shapes, written_stages


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
