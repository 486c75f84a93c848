"""Memory of whole ranks: published formulas, the schedule's program, and how parts answer to the layout."""

import csv
import os
from collections import Counter
from dataclasses import astuple, replace
from operator import le
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost.activation_bytes import activation_bytes
from cost.exact_state import state_bytes
from phalanx.blocks.operator import MemoryProfile
from phalanx.blocks.parameters import count
from phalanx.config.cluster import Cluster
from phalanx.config.clusters import ACCELERATORS
from phalanx.config.layout import Layout
from phalanx.config.model import ModelConfig
from phalanx.config.precision import Products
from phalanx.config.presets import PRESETS
from phalanx.cost.frameworks import PROFILES
from phalanx.cost.in_flight import SENT, WHOLE, flights
from phalanx.cost.prediction import predict
from phalanx.cost.rank_memory import RankMemory, needed_bytes, step_memory
from phalanx.cost.spec import Framework, StepSpec
from phalanx.cost.state_formulas import by_stage
from phalanx.cost.state_formulas import state_bytes as predicted_state
from phalanx.errors import JobError
from phalanx.partition import derived as batch
from phalanx.partition.derived import even
from phalanx.schedule import catalogue
from phalanx.techniques.memory import COMPILED_LOSS_TENSORS

FSDP1, MEGATRON_2021, MEGATRON_CORE, MEGATRON_DEEPSPEED, PHALANX, TORCHTITAN, XLA = (
    PROFILES["fsdp1"],
    PROFILES["megatron-2021"],
    PROFILES["megatron-core"],
    PROFILES["megatron-deepspeed"],
    PROFILES["phalanx"],
    PROFILES["torchtitan"],
    PROFILES["xla"],
)

GPT = ModelConfig(n_layers=8, d_model=512, n_heads=8, vocab_size=1024, seq_len=128, dropout=0.1)
LLAMA = replace(PRESETS["llama3-8b"], seq_len=8192)
DEEPSEEK = replace(PRESETS["deepseek-v3"], n_layers=8, seq_len=4096)


def spec(
    model: ModelConfig,
    layout: Layout,
    global_batch: int = 0,
    memory_profile: MemoryProfile = PHALANX,
    products: Products = "bf16",
    width: int = 2,
) -> StepSpec:
    if not (layout.micro_batch or global_batch):
        layout = replace(layout, micro_batch=1)
    equation = batch.solve(global_batch, layout)
    return StepSpec(model, Cluster(), layout, equation, products, width, Framework(memory_profile=memory_profile))


def rank_memory(case: StepSpec, pp_rank: int) -> RankMemory:
    return step_memory(case)[pp_rank]


@pytest.mark.parametrize("n", [1, 2, 64])
@pytest.mark.parametrize(
    ("zero", "formula"),
    [(0, lambda n: 16), (1, lambda n: 4 + 12 / n), (2, lambda n: 2 + 14 / n), (3, lambda n: 16 / n)],
    ids=["none", "zero 1", "zero 2", "zero 3"],
)
def test_the_four_formulas_of_zero(zero, formula, n):
    """Rajbhandari et al. 2020, figure 1: 16P, 4P + 12P/N, 2P + 14P/N, 16P/N."""
    assert sum(by_stage(zero, n, 2, 2, 12)) == formula(n)
    layout = Layout(dp_shard=n, zero=zero) if zero else Layout(dp_replicate=n)
    memory = rank_memory(spec(LLAMA, replace(layout, accumulation=2)), 0)
    static = memory.parameters + memory.optimizer
    assert static == pytest.approx((formula(n) - by_stage(zero, n, 2, 2, 12)[1]) * count(LLAMA), rel=1e-9)
    if zero in (0, 1):  # gradients of earlier micro-batches are there in the next one's backward pass
        assert memory.gradients == 2 * count(LLAMA)


def test_the_largest_models_on_eight_a100():
    """80 GB with 2 bytes a parameter, 2 a gradient and two moments of 4: 12, 5, 2 + 10/8 and 12/8 bytes a parameter."""
    largest = [80e9 / sum(by_stage(zero, 8, 2, 2, 8)) / 1e9 for zero in range(4)]
    assert largest == pytest.approx([6.66667, 16, 24.61538, 53.33333], abs=1e-5)


@pytest.mark.parametrize(
    "layout",
    [
        Layout(accumulation=2),
        Layout(tp=4, accumulation=2),
        Layout(dp_replicate=4, accumulation=2, bucket_mb=0.01),
        Layout(dp_shard=4, zero=1, accumulation=2),
        Layout(dp_shard=4, zero=2, accumulation=2, accumulate="sharded"),
        Layout(dp_shard=4, accumulation=2, accumulate="sharded"),
        Layout(dp_shard=4, tp=2, dp_replicate=2, accumulation=2, accumulate="sharded"),
        Layout(pp=4, accumulation=8),
        Layout(pp=2, dp_shard=4, zero=1, accumulation=4),
    ],
    ids=Layout.line,
)
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_state_is_that_of_the_runtime(layout, precision):
    """What state_bytes counts parameter by parameter, and tests of the runtime measure."""
    width = 4 if precision == "fp32" else 2
    for rank in range(layout.pp):
        stages = [even(GPT.n_layers, layout.pp)[rank]]
        expected = state_bytes(GPT, layout, precision, stages=stages)
        case = spec(GPT, layout, products="fp32" if width == 4 else "bf16", width=width)
        found = predicted_state(case, stages[0])
        assert found == pytest.approx(astuple(expected), rel=1e-4)


def test_experts_are_sharded_over_fewer_ranks():
    layout = Layout(dp_shard=8, ep=4, zero=1, accumulation=2)
    memory = rank_memory(spec(DEEPSEEK, layout), 0)
    expected = state_bytes(DEEPSEEK, layout, "bf16")
    assert (memory.parameters, memory.optimizer) == pytest.approx((expected.parameters, expected.optimizer), rel=1e-3)


@given(st.sampled_from(sorted(catalogue.SCHEDULES)), st.sampled_from([2, 4]), st.integers(0, 40), st.integers(0, 3))
def test_in_flight_is_what_the_schedule_says_however_many_micro_batches(name, pp, more, rank):
    """Cut short after two rounds, a program has as many in flight as in full."""
    micro_batches = 2 * (pp + more)
    layout = Layout(schedule=name, pp=pp)
    try:
        whole = catalogue.build(name, pp, micro_batches)
    except JobError:
        return
    found = flights(layout, micro_batches)[rank % pp]
    weights = [1 + stage % 3 for stage in range(whole.stages)]
    peak = max(sum(n * weights[stage] for n, stage in zip(most, found.held, strict=True)) for most in found.most)
    assert found.held == tuple(whole.stages_on(rank % pp))
    assert peak == pytest.approx(whole.peak_live_activations(rank % pp, weights) / whole.slices)
    # Every pass, counted anew, has no more of anything than one of the peaks.
    now, waiting, back = dict.fromkeys(found.held, 0), dict.fromkeys(found.held, 0), Counter[int]()
    passes = Counter(stage for kind, stage, _, _ in whole.programs[rank % pp] if kind in ("B", "W"))
    for kind, stage, _, _ in whole.programs[rank % pp]:
        now[stage] += kind == "F"
        counts = tuple(now[each] / whole.slices for each in found.held)
        deferred = tuple(waiting[each] / whole.slices for each in found.held)
        states = tuple(WHOLE if 0 < back[each] < passes[each] else SENT * bool(back[each]) for each in found.held)
        last = kind in ("B", "W") and back[stage] + 1 == passes[stage]
        sizes = *counts, *deferred, *states
        assert any(
            (one.kind, found.held[one.place], one.last) == (kind, stage, last)
            and all(map(le, sizes, (*one.in_flight, *one.deferred, *one.gradients)))
            for one in found.peaks
        )
        now[stage] -= kind in ("B", "I")
        waiting[stage] += (kind == "I") - (kind == "W")
        back[stage] += kind in ("B", "W")


def test_1f1b_keeps_fewer_on_later_ranks_and_gpipe_all():
    model = replace(GPT, n_layers=16)
    layout = Layout(pp=4, micro_batch=16, accumulation=12)
    block = activation_bytes(model, layout, 16)
    ranks = step_memory(spec(model, layout))
    assert [rank.in_flight for rank in ranks] == [4, 3, 2, 1]
    assert ranks[0].activations - ranks[1].activations == 4 * block
    gpipe = step_memory(spec(model, replace(layout, schedule="gpipe")))
    assert [rank.in_flight for rank in gpipe] == [12] * 4
    large = replace(model, vocab_size=50257)
    logits = 16 * large.seq_len * large.vocab_size
    for profile, now, waiting in ((PHALANX, 6, 2), (replace(PHALANX, loss_tensors=COMPILED_LOSS_TENSORS), 4, 2)):
        last = step_memory(spec(large, replace(layout, schedule="gpipe"), memory_profile=profile))[-1]
        assert last.logits == pytest.approx(logits * (now + 11 * waiting), rel=0.03), "the rest is what the head read"
    assert [rank.logits > 0 for rank in step_memory(spec(large, layout))] == [False, False, False, True]


@pytest.mark.parametrize(
    "profile", [PHALANX, MEGATRON_CORE, TORCHTITAN], ids=["phalanx", "megatron-core", "torchtitan"]
)
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_1f1b", "zb_h1", "zb_v", "v_half", "dualpipe", "dualpipe_v"])
def test_ranks_that_hold_the_same_need_together_what_the_fullest_of_them_needs(schedule, profile):
    model = replace(LLAMA, n_layers=18)  # not as many in all stages
    for zero, accumulation, recompute in ((1, 16, "none"), (2, 5, "selective"), (3, 8, "full")):
        layout = Layout(pp=4, dp_shard=2, zero=zero, schedule=schedule, recompute=recompute, micro_batch=1)
        case = spec(model, replace(layout, accumulation=accumulation + accumulation % 2), memory_profile=profile)
        fullest = max(rank.needed for rank in step_memory(case))
        assert needed_bytes(case) == pytest.approx(fullest, abs=1)
        assert needed_bytes(case, fullest + 1) == needed_bytes(case)
        assert needed_bytes(case, fullest / 2) > fullest / 2


def test_stages_may_be_given_even_with_none_of_the_layers():
    """Embedding and head on stages of their own, as Zero Bubble's interleaved runs have them."""
    stages = (range(0), range(2), range(2, 4), range(4, 6), range(6, 8), range(8, 8))
    layout = Layout(pp=3, pp_chunks=2, schedule="interleaved_1f1b", micro_batch=16, accumulation=6)
    ranks = step_memory(replace(spec(GPT, layout), stages=stages))
    assert ranks[0].parameters > ranks[1].parameters - 2 * 2 * 12 * 512**2
    assert ranks[1].activations > ranks[0].activations


def test_recomputation_keeps_one_block_whole():
    # Its state is shared by so many that activations are what counts.
    shared = Layout(dp_shard=512, accumulate="sharded")
    none, full = (rank_memory(spec(LLAMA, replace(shared, recompute=what)), 0) for what in ("none", "full"))
    inputs = LLAMA.n_layers * LLAMA.seq_len * LLAMA.d_model * 2
    whole = activation_bytes(LLAMA, Layout(), 1)
    assert full.activations < none.activations
    backward = rank_memory(spec(LLAMA, replace(shared, recompute="full", loss_chunk=64)), 0)
    assert backward.moment == "backward"
    assert inputs + whole < backward.activations < inputs + 2.5 * whole


def test_the_loss_is_the_fullest_moment_of_a_large_vocabulary():
    shared = Layout(dp_shard=512, recompute="full")

    def logits(memory_profile: MemoryProfile = PHALANX, **more: int) -> tuple[str, int]:
        memory = rank_memory(spec(LLAMA, replace(shared, **more), memory_profile=memory_profile), 0)
        return memory.moment, memory.logits

    assert logits() == ("loss", 8192 * 128256 * 6)
    assert logits(FSDP1) == ("loss", 8192 * 128256 * 2)
    assert logits(tp=2) == ("loss", 8192 * 128256 // 2 * 6)
    assert logits(loss_chunk=64) == ("backward", 0)


def test_sharded_parameters_are_whole_block_by_block():
    few_words = replace(LLAMA, vocab_size=4096)  # the peak is in the backward pass, where there is a block ahead
    few, many, always = (
        rank_memory(spec(few_words, layout), 0).communication
        for layout in (
            Layout(dp_shard=64, prefetch=0),
            Layout(dp_shard=64, prefetch=2),
            Layout(dp_shard=64, reshard=False),
        )
    )
    block = 2 * (count(LLAMA) - 2 * LLAMA.vocab_size * LLAMA.d_model - LLAMA.d_model) // LLAMA.n_layers
    assert many - few == pytest.approx(2 * block, rel=1e-6)
    # In the loss FSDP2 has what it gathered last, too, and not yet the head's gradient.
    assert always - few == pytest.approx(32 * block - 2 * 4096 * LLAMA.d_model, rel=1e-6)
    assert rank_memory(spec(LLAMA, Layout(dp_shard=64), memory_profile=XLA), 0).communication == 2 * 2 * 128256 * 4096
    pipeline = Layout(dp_shard=64, pp=2, micro_batch=1, accumulation=4)
    kept = [
        rank_memory(spec(LLAMA, pipeline, memory_profile=memory_profile), 0).communication
        for memory_profile in (PHALANX, TORCHTITAN)
    ]
    assert kept[1] - kept[0] > 12 * block, "torchtitan's pipelines keep parameters whole"


def test_gradients_wait_for_the_last_micro_batch_or_do_not():
    waits = Layout(dp_shard=8, micro_batch=1, accumulation=4)
    sends = replace(waits, accumulate="sharded")
    whole, shared = (rank_memory(spec(LLAMA, layout), 0).gradients for layout in (waits, sends))
    assert (whole, shared) == pytest.approx((2 * count(LLAMA), 2 * count(LLAMA) / 8), rel=1e-6)
    assert rank_memory(spec(LLAMA, waits, memory_profile=FSDP1), 0).gradients == pytest.approx(
        4 * count(LLAMA) / 8, rel=1e-6
    )


def test_fp16_has_habits_of_its_own():
    layout = Layout(pp=4, dp_shard=8, zero=1, micro_batch=1, accumulation=8, recompute="full")
    bf16, fp16 = (
        rank_memory(spec(GPT, layout, memory_profile=MEGATRON_DEEPSPEED, products=products), 0)
        for products in ("bf16", "fp16")
    )
    assert bf16.gradients == pytest.approx(3 * bf16.parameters)
    assert fp16.gradients == fp16.parameters
    assert fp16.reserved - fp16.context > 0.15 * fp16.allocated, "the optimizer's copy finds no room"


def test_parts_add_up_and_say_so():
    memory = rank_memory(spec(LLAMA, Layout(dp_shard=8, tp=2, sp=True), memory_profile=MEGATRON_CORE), 0)
    assert memory.peak == sum(size for _, size in memory.parts())
    assert [name for name, _ in memory.parts()][-1] == "reserved"
    assert memory.allocated < memory.needed < memory.peak
    assert memory.held + memory.context == memory.peak
    assert f"in the {memory.moment}: parameters" in str(memory)


def test_the_reserve_is_not_cut_to_what_is_left_and_the_verdict_says_tight():
    one = spec(LLAMA, Layout(dp_shard=8), memory_profile=TORCHTITAN)
    free = rank_memory(one, 0)

    def on(gib):
        return predict(replace(one, cluster=Cluster(accelerator=replace(ACCELERATORS["h100-80gb"], memory_gib=gib))))

    wide, tight, small = on(200), on((free.needed + free.peak) / 2 / 2**30), on(40)
    assert wide.fullest.peak == tight.fullest.peak == small.fullest.peak == free.peak
    assert [found.verdict for found in (wide, tight, small)] == ["fits", "tight", "does not fit"]
    assert tight.upper_memory >= free.peak > tight.memory_limit


@given(st.sampled_from([GPT, LLAMA, DEEPSEEK]), st.sampled_from([2, 4, 8]), st.sampled_from([PHALANX, MEGATRON_CORE]))
def test_more_ranks_never_need_more(model, n, memory_profile):
    alone = rank_memory(spec(model, Layout(micro_batch=1, accumulation=8), memory_profile=memory_profile), 0).allocated
    for layout in (Layout(tp=n), Layout(pp=n), Layout(dp_shard=n, zero=1), Layout(dp_shard=n, zero=1, ep=min(n, 4))):
        if layout.ep > 1 and not model.moe.n_experts:
            continue
        fewer = spec(model, replace(layout, micro_batch=1, accumulation=8), memory_profile=memory_profile)
        assert max(rank.allocated for rank in step_memory(fewer)) <= alone * 1.001


def test_a_cut_that_does_not_fit_is_refused():
    with pytest.raises(JobError, match="3 stages, the pipeline has 4"):
        step_memory(spec(GPT, Layout(pp=4, pp_cut="2+3+3", micro_batch=1, accumulation=4)))


def truth(name: str) -> list[dict[str, str]]:
    place = os.environ.get("PHALANX_TRUTH")
    if not place:
        pytest.skip("PHALANX_TRUTH does not say where the published tables are")
    with Path(place, name).open(encoding="utf-8") as lines:
        return list(csv.DictReader(lines))


KORTHIKANTI = {
    "megatron-22B": (
        ModelConfig(n_layers=48, d_model=6144, n_heads=64, vocab_size=51200, seq_len=2048, dropout=0.1),
        1,
        1,
        4,
    ),
    "gpt3-175B": (
        ModelConfig(n_layers=96, d_model=12288, n_heads=96, vocab_size=51200, seq_len=2048, dropout=0.1),
        8,
        3,
        1,
    ),
    "turing-530B": (
        ModelConfig(n_layers=105, d_model=20480, n_heads=128, vocab_size=51200, seq_len=2048, dropout=0.1),
        35,
        3,
        1,
    ),
    "megatron-1T": (
        ModelConfig(n_layers=128, d_model=25600, n_heads=160, vocab_size=51200, seq_len=2048, dropout=0.1),
        64,
        1,
        1,
    ),
}
"""Korthikanti et al. 2022, table 3: shape, pipeline ranks, stages a rank, micro-batch; eight tensor ranks each."""


def test_korthikantis_first_figure():
    """Bytes of activations, and of parameters with optimizer state, of four models; digitised, to 5 %."""
    for row in truth("aux_korthikanti2022_fig1_fig7_memory.csv"):
        if row["figure"] != "fig1":
            continue
        model, pp, chunks, micro_batch = KORTHIKANTI[row["model"]]
        layout = Layout(tp=8, pp=pp, micro_batch=micro_batch, accumulation=4 * pp)
        if chunks > 1:
            layout = replace(layout, schedule="interleaved_1f1b", pp_chunks=chunks)
        if row["mode"] != "none":
            layout = replace(layout, sp=True, recompute="selective")
        memory = rank_memory(spec(model, layout, memory_profile=MEGATRON_2021, products="fp16"), 0)
        each = activation_bytes(model, layout, micro_batch, memory_profile=MEGATRON_2021) * model.n_layers / pp
        activations = each * memory.in_flight / 2**30
        assert activations == pytest.approx(float(row["activation_gib"]), rel=0.05), row


def test_korthikantis_seventh_figure():
    """Of what a block keeps with tensor parallelism alone, in percent."""
    model, *_ = KORTHIKANTI["megatron-22B"]
    layouts = {
        "none": Layout(tp=8),
        "seq": Layout(tp=8, sp=True),
        "sel": Layout(tp=8, recompute="selective"),
        "seqsel": Layout(tp=8, sp=True, recompute="selective"),
        "full": Layout(tp=8, recompute="full"),
    }
    kept = {mode: activation_bytes(model, layout, 4, memory_profile=MEGATRON_2021) for mode, layout in layouts.items()}
    rows = [row for row in truth("aux_korthikanti2022_fig1_fig7_memory.csv") if row["figure"] == "fig7"]
    assert rows
    for row in rows:
        percent = float(row["activation_pct_of_tp_baseline"])
        assert 100 * kept[row["mode"]] / kept["none"] == pytest.approx(percent, rel=0.01), row


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_diloco_keeps_an_anchor_and_a_momentum_of_what_a_rank_updates(zero: Literal[1, 2, 3]):
    layout = Layout(dp_replicate=2, dp_shard=4, zero=zero)
    alone = replace(layout, sync="diloco")
    for both in (
        [rank_memory(spec(GPT, each, 16), 0).optimizer for each in (layout, alone)],
        [state_bytes(GPT, each, "bf16").optimizer for each in (layout, alone)],
    ):
        assert both[1] - both[0] == pytest.approx(2 * 4 * count(GPT) / 4, rel=1e-3)
