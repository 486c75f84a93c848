"""Runs of layers that recompute uniform_recompute: as they are written, and what each layer gets of them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.config.layout import Layout
from phalanx.config.layout_line import parse as parse_line
from phalanx.errors import JobError
from phalanx.partition.derived import MODES, RecomputeRun, modes, parse, recompute_of, uniform_recompute

RUNS = st.lists(st.builds(RecomputeRun, st.integers(1, 40), st.sampled_from(MODES)), min_size=1, max_size=6)


@given(RUNS)
def test_what_is_written_is_what_each_layer_does(runs):
    text = "+".join(map(str, runs))
    assert parse(text) == tuple(runs)
    every = [run.mode for run in runs for _ in range(run.layers)]
    layout = Layout(recompute_cut=text)
    assert [recompute_of(layout, layer, len(every)) for layer in range(len(every))] == every
    assert parse_line(layout.line()) == layout
    assert parse_line(f"tp=2,{layout.line()},sp=true") == Layout(tp=2, sp=True, recompute_cut=text)


def test_without_a_cut_every_layer_does_what_the_layout_says():
    assert modes("selective", 3) == ("selective",) * 3
    assert recompute_of(Layout(recompute="full"), 7, 8) == "full"
    assert uniform_recompute(Layout(recompute_cut="1*full+1*none"), "full") == Layout(recompute="full")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("8", r"'8' is not a list of runs of layers; write counts and modes joined by plus signs, such as 8\*full"),
        ("full+none", r"'full\+none' is not a list of runs"),
        ("2*full+", r"'2\*full\+' is not a list of runs"),
        ("2*ful+2*none", r"2\*ful: 'ful' is not a recomputation mode; did you mean full\? \(known: none, products"),
        ("2*full+0*none", r"0\*none has no layers: remove it"),
    ],
)
def test_what_is_no_list_of_runs(text, message):
    with pytest.raises(JobError, match=message):
        parse(text)


@given(RUNS, st.integers(1, 200))
def test_the_nearest_legal_cut_is_legal(runs, layers):
    text = "+".join(map(str, runs))
    if sum(run.layers for run in runs) == layers:
        return
    with pytest.raises(JobError, match="nearest legal") as caught:
        modes(text, layers)
    assert len(modes(str(caught.value).rpartition(" ")[2], layers)) == layers
