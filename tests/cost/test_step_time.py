"""The time of a step: where it goes, what hides, and what the papers measured."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.blocks.kinds import BlockKind
from phalanx.blocks.parameters import count
from phalanx.config.clusters import cluster_of
from phalanx.config.layout import Layout
from phalanx.config.presets import PRESETS
from phalanx.cost.communication import RankGroup, seconds
from phalanx.cost.frameworks import FRAMEWORKS, PHALANX, PHALANX_CPU
from phalanx.cost.held import ParameterCounts, contents
from phalanx.cost.kernels import STREAM_EFFICIENCY
from phalanx.cost.prediction import predict, step_parts
from phalanx.cost.rank_time import held_by, rank_time
from phalanx.cost.spec import Framework, StepSpec
from phalanx.cost.step_state import state_seconds
from phalanx.partition import derived as batch

MEGATRON_CORE = FRAMEWORKS["megatron-core"]


def spec(
    layout: Layout,
    sequences: int,
    model: str = "llama3-8b",
    cluster: str = "dgx-h100:8",
    framework: Framework = MEGATRON_CORE,
    products: str = "bf16",
) -> StepSpec:
    shape = replace(PRESETS[model], vocab_size=PRESETS[model].vocab_size or 256)
    return StepSpec(shape, cluster_of(cluster), layout, batch.solve(sequences, layout), products, 2, framework)


LAYOUTS = st.builds(
    Layout,
    tp=st.sampled_from([1, 2, 8]),
    pp=st.sampled_from([1, 2, 4]),
    dp_shard=st.sampled_from([1, 2, 8]),
    dp_replicate=st.sampled_from([1, 2]),
    cp=st.sampled_from([1, 2]),
    zero=st.sampled_from([1, 2]),
    recompute=st.sampled_from(["none", "selective", "full"]),
    micro_batch=st.just(1),
)


@settings(max_examples=60, deadline=None)
@given(LAYOUTS)
def test_parts_add_up_and_none_is_negative(layout: Layout) -> None:
    prediction = predict(spec(layout, 64))
    parts = prediction.parts.items()
    assert all(seconds >= 0 for _, seconds in parts)
    assert sum(seconds for _, seconds in parts) == pytest.approx(prediction.step_time_s)
    assert 0 < prediction.mfu < 0.9
    assert prediction.hfu >= prediction.mfu


@settings(max_examples=30, deadline=None)
@given(LAYOUTS)
def test_slower_links_and_devices_take_no_less(layout: Layout) -> None:
    whole = spec(layout, 64)
    slow = replace(whole.cluster, inter=replace(whole.cluster.inter, gbs=5), intra=replace(whole.cluster.intra, gbs=50))
    assert step_parts(replace(whole, cluster=slow)).total >= step_parts(whole).total * (1 - 1e-9)
    weak = replace(whole.cluster.accelerator, bf16_tflops=300.0)
    assert step_parts(replace(whole, cluster=replace(whole.cluster, accelerator=weak))).total > step_parts(whole).total


def test_recomputing_costs_a_forward_pass() -> None:
    none, full = (step_parts(spec(Layout(dp_shard=8, recompute=kind, micro_batch=1), 64)) for kind in ("none", "full"))
    assert full.recompute > 0.3 * none.products
    assert none.recompute == 0


def test_more_micro_batches_make_the_bubble_smaller() -> None:
    few, many = (predict(spec(Layout(pp=8, micro_batch=1), size)) for size in (8, 64))
    assert many.bubble < few.bubble / 4


def test_a_program_that_launches_slowly_waits() -> None:
    tiny = spec(Layout(micro_batch=1), 4, model="tiny")
    assert step_parts(replace(tiny, framework=replace(PHALANX, kernel_us=50))).host > 0.5 * step_parts(tiny).total


def test_gathering_in_narrow_links_shows() -> None:
    """FSDP over a slow network: parameters are there later than the block before them is done."""
    fast = step_parts(spec(Layout(dp_shard=64, micro_batch=1), 64))
    slow = spec(Layout(dp_shard=64, micro_batch=1), 64)
    slow = replace(slow, cluster=replace(slow.cluster, inter=replace(slow.cluster.inter, gbs=3)))
    assert step_parts(slow).exposed["dp_shard"] > 5 * fast.exposed["dp_shard"]


def test_a_compiler_removes_what_no_gradient_needs_and_sums_over_slices_late() -> None:
    maxtext = FRAMEWORKS["maxtext"]
    layout = Layout(dp_replicate=4, dp_shard=16, recompute="full", micro_batch=1)
    found, plain, early = (
        step_parts(spec(layout, 64, framework=framework))
        for framework in (maxtext, replace(maxtext, unrepeated=()), replace(maxtext, sums_late=False))
    )
    assert 0.7 < found.recompute / plain.recompute < 0.8, "an MLP's last product is a quarter of a forward pass"
    parameters = count(PRESETS["llama3-8b"])
    late = seconds(cluster_of("dgx-h100:8"), "all_reduce", 4 * parameters / 16, RankGroup(4, 16))
    assert found.exposed["dp_replicate"] == pytest.approx(late, rel=0.01), "in fp32, beside nothing"
    assert early.exposed.get("dp_replicate", 0.0) == 0


def test_owners_that_broadcast_their_tensors_wait_for_every_rank_of_the_ring() -> None:
    owners = replace(MEGATRON_CORE, broadcasts=True)

    def exposed(shard: int, replicas: int, framework: Framework) -> float:
        layout = Layout(dp_shard=shard, dp_replicate=replicas, zero=1, micro_batch=1)
        parts = step_parts(
            spec(layout, 4 * shard * replicas, cluster=f"dgx-a100:{shard * replicas // 8}", framework=framework)
        )
        return sum(parts.exposed.values())

    narrow, wide = exposed(8, 64, owners), exposed(512, 1, owners)
    assert wide > exposed(512, 1, MEGATRON_CORE), "no broadcast hides beside the forward pass"
    cluster = cluster_of("dgx-a100:64")
    one = seconds(cluster, "broadcast", 1.0, RankGroup(512))
    tensors = 32 * 7 + 3  # wq, wk and wv are one; embedding, norm and head
    assert wide - narrow > 0.9 * tensors * (one - seconds(cluster, "broadcast", 1.0, RankGroup(8)))
    assert exposed(64, 1, owners) < wide


@pytest.mark.parametrize("sp", [True, False])
def test_matrices_that_gather_for_themselves_send_more(sp: bool) -> None:
    each = replace(MEGATRON_CORE, gathers_each=True)
    layout = Layout(tp=8, dp_shard=8, sp=sp, micro_batch=1)
    together, apart = (
        step_parts(spec(layout, 8, framework=program)).exposed["tp"] for program in (MEGATRON_CORE, each)
    )
    cluster, hidden = cluster_of("dgx-h100:8"), 2.0 * 8192 * 4096
    one = seconds(cluster, "all_gather" if sp else "all_reduce", hidden, RankGroup(8))
    # Of q, k, v and of gate, up three more inputs in each block, and as many gradients; of the latter only, without sp.
    assert apart - together == pytest.approx(32 * 3 * (2 if sp else 1) * one, rel=0.15)


def test_logits_that_every_tensor_rank_has_cost_their_gathering_and_the_whole_loss() -> None:
    whole = replace(
        MEGATRON_CORE, whole_logits=True, memory_profile=replace(MEGATRON_CORE.memory_profile, whole_logits=True)
    )
    layout = Layout(tp=8, dp_shard=8, sp=True, micro_batch=1)
    one, other = (predict(spec(layout, 8, framework=program)) for program in (MEGATRON_CORE, whole))
    assert other.parts.streams > one.parts.streams
    assert other.parts.exposed["tp"] > one.parts.exposed["tp"]
    assert other.fullest.peak > one.fullest.peak
    alone = replace(layout, tp=1, sp=False)
    assert predict(spec(alone, 8, framework=whole)).step_time_s == predict(spec(alone, 8)).step_time_s


def test_a_loss_in_eager_mode_slows_down_the_last_stage_alone() -> None:
    eager = replace(MEGATRON_CORE, loss_passes=2.0)
    here = replace(spec(Layout(pp=4, dp_shard=2, micro_batch=1), 32), framework=eager)
    first, *_, last = contents(here)
    more, none = (
        rank_time(here, content).streams - rank_time(replace(here, framework=MEGATRON_CORE), content).streams
        for content in (last, first)
    )
    logits, bandwidth = 8192 * 128256, here.cluster.accelerator.bandwidth_gbs * 1e9 * STREAM_EFFICIENCY
    assert none == 0
    assert more == pytest.approx(28 * logits / bandwidth, rel=0.05)


def test_sharding_inside_groups_and_replicating_between_them_gains_on_many_nodes() -> None:
    """The Solar case: 480 devices as 6 replicas of 80 (ten nodes each) against all 480. Rings of 480 ranks take so long
    to go round that small blocks wait for their parameters."""
    flat, hybrid = Layout(dp_shard=480, micro_batch=1), Layout(dp_replicate=6, dp_shard=80, micro_batch=1)
    times = []
    for layout in (flat, hybrid):
        whole = spec(layout, 480, cluster="dgx-h100:60")
        times.append(step_parts(replace(whole, model=replace(whole.model, seq_len=2048))).total)
    assert times[1] < 0.95 * times[0]


def test_replicas_that_train_by_themselves_pay_for_averaging_once_in_many_steps() -> None:
    """Two nodes with a slow link: DiLoCo sends fp32 parameters, not gradients, and nothing computes meanwhile."""
    slow = replace(cluster_of("dgx-h100:2"), inter=replace(cluster_of("dgx-h100:2").inter, gbs=0.1))

    def exposed(**sync: Any) -> dict[str, float]:
        layout = Layout(dp_replicate=2, dp_shard=8, zero=1, micro_batch=1, **sync)
        return step_parts(replace(spec(layout, 64, cluster="dgx-h100:2"), cluster=slow)).exposed

    inside = step_parts(spec(Layout(dp_shard=8, zero=1, micro_batch=1), 32, cluster="dgx-h100:1")).exposed["dp_shard"]
    often, seldom = (exposed(sync="diloco", sync_every=steps) for steps in (10, 100))
    assert often["dp_shard"] == seldom["dp_shard"] == pytest.approx(inside)
    averaged = 4 * count(PRESETS["llama3-8b"]) / 8
    once = seconds(slow, "all_reduce", averaged, RankGroup(2, 8))
    assert seldom["dp_replicate"] == pytest.approx(once / 100, rel=1e-3)
    assert often["dp_replicate"] == pytest.approx(10 * seldom["dp_replicate"])
    assert exposed()["dp_shard"] > 100 * inside


def test_ranks_have_the_layers_of_a_written_cut() -> None:
    cut = "+".join(["1", *["2"] * 62, "1"])
    layout = Layout(pp=16, schedule="interleaved_1f1b", pp_chunks=4, pp_cut=cut, micro_batch=1)
    shares = [content.blocks for content in contents(spec(layout, 64, model="llama3-405b"))]
    assert shares == [7, *[8] * 14, 7]


def test_dense_layers_before_the_experts_are_told_apart() -> None:
    found = contents(spec(Layout(pp=4, micro_batch=1), 8, model="deepseek-v3"))
    dense, moe = BlockKind("latent", "dense"), BlockKind("latent", "experts")
    assert [content.of_kind.get(dense, 0) for content in found] == [3, 0, 0, 0]
    assert sum(content.of_kind.get(moe, 0) for content in found) == 58


@pytest.mark.parametrize("pp", [4, 5])
def test_where_micro_batches_go_both_ways_half_of_them_pass_each_copy_of_a_stage(pp: int) -> None:
    one, both = (spec(Layout(pp=pp, schedule=name, micro_batch=1), 20) for name in ("1f1b", "dualpipe"))
    alone, twice = contents(one), contents(both)
    for rank, content in enumerate(twice):
        mirror = alone[pp - 1 - rank]
        assert content.share * content.blocks == pytest.approx((alone[rank].blocks + mirror.blocks) / 2)
        assert content.share == (1 if 2 * rank == pp - 1 else 0.5)
    assert (twice[0].embedding, twice[0].head) == (True, True)
    times = [[rank_time(each, content).total for content in contents(each)] for each in (one, both)]
    assert sum(times[0]) == pytest.approx(sum(times[1]), rel=0.02)
    assert times[1] == pytest.approx(times[1][::-1])


@pytest.mark.parametrize("shard", [1, 2])
def test_gradients_of_both_copies_of_a_stage_are_added_up(shard: int) -> None:
    one, both = (
        spec(Layout(pp=4, dp_shard=shard, zero=2, schedule=name, micro_batch=1), 20 * shard)
        for name in ("1f1b", "dualpipe")
    )
    held = max((held_by(both, content) for content in contents(both)), key=lambda held: held.dense)
    more = step_parts(both).exposed["pp"] - step_parts(one).exposed["pp"]
    gradients = RankGroup(2, 3 * shard)  # of four bytes each, between ranks 0 and 3
    assert more == pytest.approx(seconds(both.cluster, "all_reduce", 4 * held.dense / shard, gradients))
    assert more > 0


def test_experts_that_nobody_owns_travel_with_their_block() -> None:
    sharded = spec(Layout(dp_shard=64, micro_batch=1), 64, "mixtral-8x7b")
    apart, together = (10**9, 10**9), (2 * 10**9, 0)
    assert state_seconds(sharded, ParameterCounts(*apart, *apart), 4) == state_seconds(
        sharded, ParameterCounts(*together, *together), 4
    )


def test_solar_at_sixty_nodes_gains_by_groups_of_ten() -> None:
    """Solar Open: 5,500 tokens a second and device at 16 nodes, 4,267 at 60, and 5,400 there with six groups."""
    program = FRAMEWORKS["torchtitan-2025"]

    def rate(nodes: int, groups: int) -> float:
        devices = 8 * nodes
        layout = Layout(dp_replicate=groups, dp_shard=devices // groups, micro_batch=4, recompute="full")
        return predict(
            spec(layout, 4 * devices, "solar-open-100b", f"dgx-b200:{nodes}", program)
        ).tokens_per_s_per_device

    flat = rate(60, 1)
    assert flat / rate(16, 1) == pytest.approx(4267 / 5500, rel=0.05)
    assert rate(60, 6) / flat == pytest.approx(5400 / 4267, rel=0.05)


def on_processor(layout: Layout, batch: int) -> StepSpec:
    """The case where one processor starts operations and does them."""
    one = spec(layout, batch, model="tiny")
    device = replace(one.cluster.accelerator, host_us=20.0)
    return replace(one, cluster=replace(one.cluster, accelerator=device), framework=PHALANX_CPU)


def test_a_processor_starts_each_operation_before_it_does_it() -> None:
    """Twice the time to start adds itself, however long operations are; on an accelerator the longer of both counts."""
    one = on_processor(Layout(micro_batch=4), 4)
    device = one.cluster.accelerator
    slower = replace(one, cluster=replace(one.cluster, accelerator=replace(device, host_us=40.0)))
    slowest = replace(one, cluster=replace(one.cluster, accelerator=replace(device, host_us=60.0)))
    times = [step_parts(each).total for each in (one, slower, slowest)]
    assert times[1] - times[0] == pytest.approx(times[2] - times[1])
    assert times[1] > times[0]
    assert step_parts(one).host == 0


def test_a_processor_pays_for_handling_collectives() -> None:
    for layout, axis in ((Layout(tp=2, micro_batch=4), "tp"), (Layout(cp=2, zero=1, micro_batch=4), "cp")):
        one = on_processor(layout, 4)
        device = replace(one.cluster.accelerator, host_us=40.0)
        slower = replace(one, cluster=replace(one.cluster, accelerator=device))
        assert step_parts(slower).exposed[axis] > step_parts(one).exposed[axis] > 0


def test_more_micro_batches_add_up_gradients() -> None:
    one, four = (on_processor(Layout(micro_batch=4 // n, accumulation=n), 4) for n in (1, 4))
    alone = replace(PHALANX_CPU, sum_passes=0.0)
    assert step_parts(replace(one, framework=alone)) == step_parts(one)
    assert step_parts(replace(four, framework=alone)).total < step_parts(four).total
