"""The batch equation: any two of its three unknowns give the third, or a message with the equation."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from phalanx.config.layout import Layout
from phalanx.partition.derived import DEFAULT_GLOBAL_BATCH, Batch, solve

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
