"""Predicted bytes of a step: the closed forms of the papers, where nothing is padded, and what holds for any layout.

tests/parallel/test_predicted_traffic.py holds the same functions to real steps, to the byte."""

from __future__ import annotations

import dataclasses
import timeit

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.blocks.parameters import count, parameter_shapes
from phalanx.config.layout import Layout
from phalanx.config.model import ModelConfig, MoE
from phalanx.config.presets import PRESETS
from phalanx.cost.traffic import step_traffic
from phalanx.errors import JobError
from phalanx.partition.cut import stages_of
from phalanx.partition.derived import Batch, even
from phalanx.schedule.catalogue import SCHEDULES, stages

SHAPE = ModelConfig(
    n_layers=4, d_model=96, n_heads=8, n_kv_heads=4, seq_len=96, vocab_size=96, tied=False, positions="rope"
)
D = 4 * count(SHAPE)
AROUND = 4 * sum(rows * width for rows, width in [(96, 96), (96, 96), (2, 96)])
"""Bytes of embedding, head and final norm."""
BATCH = Batch(96, 2, 3, 0)
STREAM = 2 * 96 * 96 * 4
"""Bytes of a micro-batch's residual stream."""
MIXTURE = dataclasses.replace(SHAPE, moe=MoE(n_experts=8, top_k=2, d_ff=48))

divisors = st.sampled_from([2, 3, 4, 6, 8])


def test_one_rank_sends_nothing():
    assert step_traffic(SHAPE, Layout(), BATCH) == {}
    assert step_traffic(SHAPE, Layout(dp_replicate=4, data_parallel="threads"), BATCH) == {}


@given(divisors)
def test_ddp_and_zero_1_and_2_send_twice_the_parameters(ranks):
    part = (ranks - 1) / ranks
    world = {"world": {"all_reduce": pytest.approx(2 * 24 * part)}}
    ddp = {"dp_replicate": {"all_reduce": pytest.approx(2 * D * part)}}
    assert step_traffic(SHAPE, Layout(dp_replicate=ranks), BATCH) == ddp | world
    for zero in (1, 2):
        both = {"all_gather": pytest.approx(D * part), "reduce_scatter": pytest.approx(D * part)}
        assert step_traffic(SHAPE, Layout(dp_shard=ranks, zero=zero), BATCH) == {"dp_shard": both} | world


@given(divisors)
def test_zero_3_gathers_blocks_twice_a_micro_batch_and_what_is_around_them_once(ranks):
    part = (ranks - 1) / ranks
    found = step_traffic(SHAPE, Layout(dp_shard=ranks), BATCH)["dp_shard"]
    assert found["all_gather"] == pytest.approx(BATCH.accumulation * (2 * D - AROUND) * part)
    assert found["reduce_scatter"] == pytest.approx(D * part)
    kept = step_traffic(SHAPE, Layout(dp_shard=ranks, reshard=False), BATCH)["dp_shard"]
    assert kept["all_gather"] == pytest.approx(BATCH.accumulation * D * part)
    sharded = step_traffic(SHAPE, Layout(dp_shard=ranks, accumulate="sharded"), BATCH)["dp_shard"]
    assert sharded["reduce_scatter"] == pytest.approx(BATCH.accumulation * D * part)


@given(divisors, st.sampled_from([1, 2, 3]))
def test_hybrid_sharding_sums_shares_over_replicas(ranks, zero):
    found = step_traffic(SHAPE, Layout(dp_replicate=4, dp_shard=ranks, zero=zero), BATCH)
    assert found["dp_replicate"] == {"all_reduce": pytest.approx(2 * D / ranks * 3 / 4)}


@given(st.integers(2, 64), st.sampled_from([1, 2, 3]))
def test_padding_costs_less_than_a_row_a_rank_and_parameter(ranks, zero):
    found = step_traffic(SHAPE, Layout(dp_shard=ranks, zero=zero), BATCH)["dp_shard"]["reduce_scatter"]
    least = D * (ranks - 1) / ranks
    row = 4 * SHAPE.ff_size * len(parameter_shapes(SHAPE))
    assert least <= found < least + ranks * row


@given(st.sampled_from([2, 4, 8]))
def test_tensor_parallel_sends_4_streams_a_block_and_one_more_pass_with_recomputation(ranks):
    part = (ranks - 1) / ranks
    loss = 3 * 2 * 96 * 4

    def sent(layout: Layout) -> dict[str, float]:
        copies = max(1, ranks // SHAPE.kv_heads)
        of_heads = 2 * 4 * 12 * 97 * 4 / BATCH.accumulation if copies > 1 else 0  # keys and values on two ranks each
        found = step_traffic(SHAPE, layout, BATCH)["tp"]
        found["all_reduce"] -= 2 * of_heads * BATCH.accumulation * (copies - 1) / copies
        return {name: value / BATCH.accumulation / part for name, value in found.items()}

    assert sent(Layout(tp=ranks)) == {"all_reduce": pytest.approx(2 * ((4 * 4 + 2) * STREAM + loss))}
    again = sent(Layout(tp=ranks, recompute="full"))["all_reduce"]
    assert again == pytest.approx(2 * ((4 * 6 + 2) * STREAM + loss))
    cut = sent(Layout(tp=ranks, sp=True))
    assert cut["all_gather"] == cut["reduce_scatter"] == pytest.approx((4 * 4 + 2) * STREAM)
    assert sent(Layout(tp=ranks, sp=True, sp_regather=True))["all_gather"] == pytest.approx((4 * 6 + 2) * STREAM)


@given(st.sampled_from([2, 3, 4, 6]), st.sampled_from(["fp32", "bf16"]))
def test_a_ring_sends_keys_and_values_twice_and_their_gradients_in_fp32(ranks, precision):
    width = {"fp32": 4, "bf16": 2}[precision]
    numbers = 2 * SHAPE.n_layers * 2 * 96 // ranks * SHAPE.kv_heads * SHAPE.head_size * BATCH.accumulation
    found = step_traffic(SHAPE, Layout(cp=ranks), BATCH, precision=precision)
    assert found["cp"] == {"send": pytest.approx((ranks - 1) * numbers * (2 * width + 4))}
    for recompute in ("selective", "full"):
        again = step_traffic(SHAPE, Layout(cp=ranks, recompute=recompute), BATCH, precision=precision)["cp"]
        assert again == {"send": pytest.approx((ranks - 1) * numbers * (3 * width + 4))}


@given(st.sampled_from([2, 4]))
def test_ulysses_exchanges_queries_keys_values_and_outputs(ranks):
    once = 4 * 2 * 96 // ranks * SHAPE.head_size * (2 * SHAPE.n_heads + 2 * SHAPE.kv_heads) * (ranks - 1) / ranks
    found = step_traffic(SHAPE, Layout(cp=ranks, cp_ulysses=ranks), BATCH)["cp"]
    assert found == {"all_to_all": pytest.approx(SHAPE.n_layers * BATCH.accumulation * 2 * once)}


def test_both_orders_of_ring_and_ulysses_send_the_same():
    near, far = (Layout(cp=4, cp_ulysses=2, cp_inner=inner) for inner in ("ulysses", "ring"))
    assert step_traffic(SHAPE, near, BATCH) == step_traffic(SHAPE, far, BATCH)


@given(st.sampled_from([2, 4, 8]), st.sampled_from(["none", "full"]))
def test_rows_go_to_experts_and_back_and_so_do_their_gradients(ranks, recompute):
    layout = Layout(dp_shard=8, ep=ranks, recompute=recompute)
    rows = 2 * SHAPE.n_layers * BATCH.accumulation * 2 * 96 * 2 * (ranks - 1) / ranks
    passes = 3 if recompute == "full" else 2
    balanced = step_traffic(MIXTURE, layout, BATCH)
    assert balanced["ep"]["all_to_all"] == pytest.approx(passes * rows * MIXTURE.d_model * 4)
    assert step_traffic(MIXTURE, layout, BATCH, rows=(rows / 2, rows / 2)) == balanced
    assert step_traffic(MIXTURE, layout, BATCH, rows=(0, 0))["ep"].keys() == {"all_gather"}


@given(st.sampled_from(sorted(SCHEDULES)), st.sampled_from([2, 4]))
def test_a_micro_batch_crosses_every_boundary_between_ranks_once_each_way(name, ranks):
    layout = Layout(pp=ranks, schedule=name)
    number = stages(name, ranks)
    model = dataclasses.replace(SHAPE, n_layers=8)
    parts = even(8, number)
    batch = Batch(64, 2, 8, 1)
    sent = sum(
        step_traffic(model, layout, batch, stages=parts, rank=rank).get("pp", {}).get("send", 0)
        for rank in range(ranks)
    )
    inside = {"zb_v", "v_half", "dualpipe_v"}
    crossed = number - 2 if name in inside else number - 1  # the point of a V lies on one rank
    assert sent == 2 * crossed * 8 * STREAM


@given(
    *[st.sampled_from(sizes) for sizes in ([1, 2], [1, 3], [1, 2], [1, 2], [1, 2])],
    st.sampled_from([1, 2, 3]),
    st.booleans(),
)
def test_only_axes_with_several_ranks_send(replicate, shard, cp, tp, pp, zero, sp):
    layout = Layout(dp_replicate=replicate, dp_shard=shard, cp=cp, tp=tp, pp=pp, zero=zero, sp=sp and tp > 1)
    parts = even(SHAPE.n_layers, pp)
    found = step_traffic(SHAPE, layout, BATCH, stages=parts)
    shards = "dp_shard" if cp == 1 else "dp_shard_cp"
    sizes = {"dp_replicate": replicate, shards: shard * cp, "cp": cp, "tp": tp, "pp": pp, "world": layout.world}
    assert found.keys() == {axis for axis, ranks in sizes.items() if ranks > 1}
    assert all(sent > 0 for by in found.values() for sent in by.values())


@pytest.mark.parametrize("sync", ["local_sgd", "diloco"])
def test_replicas_that_are_apart_send_their_parameters_once_in_so_many_steps(sync):
    found = step_traffic(SHAPE, Layout(dp_replicate=4, sync=sync, sync_every=10), BATCH, precision="bf16")
    of_masters = 2 * D * 3 / 4 / 10
    assert found == {"dp_replicate": {"all_gather": pytest.approx(76.8), "all_reduce": pytest.approx(of_masters)}}


def test_what_cannot_be_known_is_said():
    with pytest.raises(JobError, match="pp_cut"):
        step_traffic(SHAPE, Layout(pp=2), BATCH)
    with pytest.raises(JobError, match="vocab_size"):
        step_traffic(dataclasses.replace(SHAPE, vocab_size=0), Layout(dp_shard=2), BATCH)
    assert step_traffic(SHAPE, Layout(pp=2, pp_cut="1+3"), BATCH, rank=1)


def test_a_planner_can_ask_thousands_of_times():
    model, layout = PRESETS["llama3-405b"], Layout(tp=8, pp=16, dp_shard=128, sp=True)
    parts = stages_of(model, layout, 16)
    batch = Batch(2048, 1, 16, 128)
    seconds = timeit.repeat(lambda: step_traffic(model, layout, batch, precision="bf16", stages=parts), number=1)
    assert min(seconds) < 2e-3
