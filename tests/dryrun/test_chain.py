"""The chain: what is predicted of a rank is what its rehearsed program does, in memory, bytes sent and FLOPs.

`make chain` tries every model in every layout."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from covering import WHOLE, also_whole, covering
from phalanx.blocks.parameters import train_flops_per_step
from phalanx.check.job import problems_of
from phalanx.config.job import Job, Optimizer, Train
from phalanx.config.layout import Layout
from phalanx.config.model import MLA, LoRA, ModelConfig, MoE, QueryGrowth, SparseAttention, WideHeads
from phalanx.cost.job_spec import rank_spec
from phalanx.cost.prediction import hardware_flops_per_step
from phalanx.cost.rank_memory import step_memory
from phalanx.dryrun.rehearse import distinct_ranks, rehearse
from phalanx.launch.watchdog.heartbeat import Phase
from phalanx.partition.derived import stashes
from phalanx.report.figures import rank_traffic

VOCAB = 512
LLAMA = ModelConfig(
    n_layers=4,
    d_model=128,
    n_heads=4,
    n_kv_heads=2,
    seq_len=128,
    vocab_size=VOCAB,
    positions="rope",
    activation="swiglu",
    norm="rmsnorm",
    bias=False,
    tied=False,
)
MODELS = {
    "gpt": ModelConfig(n_layers=4, d_model=128, n_heads=4, seq_len=128, vocab_size=VOCAB),
    "llama": LLAMA,
    "latent": replace(
        LLAMA, n_kv_heads=0, mla=MLA(q_rank=96, kv_rank=64, rope_head_dim=16, nope_head_dim=16, v_head_dim=32)
    ),
    "chosen keys": replace(
        LLAMA,
        n_kv_heads=0,
        mla=MLA(q_rank=96, kv_rank=64, rope_head_dim=16, nope_head_dim=16, v_head_dim=32),
        sparse=SparseAttention(top_k=32, index_heads=4, index_head_dim=32),
    ),
    "warm-up": replace(
        LLAMA,
        n_kv_heads=0,
        mla=MLA(q_rank=96, kv_rank=64, rope_head_dim=16, nope_head_dim=16, v_head_dim=32),
        sparse=SparseAttention(top_k=32, index_heads=4, index_head_dim=32, dense_warmup=True),
    ),
    "experts": replace(LLAMA, moe=MoE(n_experts=8, top_k=2, d_ff=128, n_shared=1)),
    "adapters": replace(LLAMA, lora=LoRA(rank=8)),
    "further tokens": replace(LLAMA, mtp=1),
    "windows": replace(LLAMA, window=32, full_every=2, sinks=True, qk_norm="head"),
    "wide heads": replace(
        LLAMA,
        attention="heads,wide_heads",
        wide=WideHeads(64, 1),
        values_are_keys=True,
        v_norm=True,
        qk_norm="head",
        rotary_pairs=0.25,
        norm_place="both",
        layer_scale=True,
        moe=MoE(n_experts=8, top_k=2, d_ff=64, n_shared=2, own_norms=True),
    ),
    "shared keys": replace(
        LLAMA,
        shared_keys=1,
        double_mlp=True,
        layer_embedding=96,
        qk_norm="head",
        v_norm=True,
        norm_place="both",
        activation="geglu",
    ),
    "chunks": replace(
        LLAMA,
        window=32,
        window_kind="chunks",
        full_every=2,
        nope_every=2,
        qk_norm="unit",
        query_growth=QueryGrowth(rate=0.1, length=32),
        feed_forward="dense,experts",
        moe=MoE(n_experts=8, top_k=1, d_ff=128, n_shared=1, router="sigmoid", renormalise=False, scale_inputs=True),
    ),
}
MICRO_BATCH = 1 if WHOLE else 2
"""Sequences per micro-batch: four micro-batches in `make chain`, otherwise two."""
LAYOUTS = [
    Layout(),
    Layout(micro_batch=2),
    Layout(recompute="full"),
    Layout(recompute="full", micro_batch=2),
    Layout(recompute="products"),
    Layout(recompute="mlp"),
    Layout(recompute_cut="2*full+2*none"),
    Layout(tiles=2),
    Layout(loss_chunk=64),
    Layout(tiles=2, loss_chunk=64, recompute="full"),
    Layout(offload="optimizer"),
    Layout(offload="activations"),
    Layout(dp_replicate=2),
    Layout(dp_replicate=4, micro_batch=MICRO_BATCH),
    Layout(dp_shard=2, zero=1),
    Layout(dp_shard=2, zero=2),
    Layout(dp_shard=2, zero=2, micro_batch=MICRO_BATCH),
    Layout(dp_shard=2, zero=2, recompute="full"),
    Layout(dp_shard=4, zero=2, recompute="full", micro_batch=MICRO_BATCH, bucket_mb=0.1),
    Layout(dp_shard=2, zero=3),
    Layout(dp_shard=8, zero=3, micro_batch=2),
    Layout(dp_shard=2, zero=3, micro_batch=MICRO_BATCH, accumulate="sharded"),
    Layout(dp_shard=2, zero=3, reshard=False),
    Layout(dp_shard=2, zero=3, offload="optimizer"),
    Layout(dp_shard=2, zero=3, recompute="full"),
    Layout(dp_replicate=2, dp_shard=2, zero=3),
    Layout(dp_shard=4, zero=3, hpz=2),
    Layout(tp=2),
    Layout(tp=2, sp=True),
    Layout(tp=2, sp=True, recompute="full"),
    Layout(tp=2, sp=True, dp_shard=2, zero=3),
    Layout(cp=2, zero=1),
    Layout(cp=2, zero=1, recompute="full"),
    Layout(cp=2, cp_ulysses=2, zero=1),
    Layout(cp=2, dp_shard=2, zero=3),
    Layout(pp=2, micro_batch=1),
    Layout(pp=4, micro_batch=1),
    Layout(pp=2, schedule="gpipe", micro_batch=1),
    Layout(pp=2, schedule="interleaved_1f1b", pp_chunks=2, micro_batch=1),
    Layout(pp=2, schedule="zb_h1", micro_batch=1),
    Layout(pp=2, schedule="zb_h1", micro_batch=1, loss_chunk=64),
    Layout(pp=2, schedule="pipedream", micro_batch=1),
    Layout(pp=2, schedule="pipedream_stash", micro_batch=1),
    Layout(pp=2, dp_shard=2, tp=2, sp=True, zero=2, micro_batch=1),
    Layout(pp=2, dp_shard=2, zero=1, micro_batch=1, recompute="full"),
    Layout(pp=2, dp_shard=2, zero=3, micro_batch=1, recompute="full"),
    Layout(dp_shard=2, ep=2, zero=3),
    Layout(dp_shard=2, ep=2, zero=3, dispatch="tokens", recompute="full"),
    Layout(dp_shard=2, ep=2, zero=3, ep_overlap=True),
    Layout(dp_shard=4, ep=4, zero=1, dispatch="tokens", ep_overlap=True),
    Layout(dp_shard=2, ep=2, zero=2, redundant_experts=1),
    Layout(dp_shard=2, ep=2, zero=2, redundant_experts=1, dispatch="tokens"),
    Layout(dp_shard=2, tp=2, sp=True, ep=2, zero=2, ep_overlap=True, micro_batch=2),
    Layout(dp_shard=4, ep=2, zero=3, redundant_experts=2, recompute="full"),
    Layout(dp_shard=4, ep=4, zero=3, redundant_experts=3, micro_batch=MICRO_BATCH),
    Layout(tp=2, sp=True, ep=2, etp=1),
    Layout(tp=2, sp=True, sp_regather=True, ep=2, etp=1),
    Layout(dp_shard=2, tp=2, sp=True, ep=4, etp=1, zero=1),
    Layout(dp_shard=2, tp=2, sp=True, ep=2, etp=1, zero=3),
    Layout(dp_shard=2, tp=2, sp=True, ep=2, etp=1, zero=3, recompute="full"),
    Layout(dp_shard=2, tp=2, sp=True, ep=4, etp=1, zero=3, recompute="mlp"),
    Layout(dp_shard=2, tp=2, sp=True, ep=4, etp=1, zero=3, recompute="products"),
]

BOUND = 0.03


def has_predicted_flops(name: str, layout: Layout) -> bool:
    """Whether ranks together compute exactly what the formula says. The kernel of this device computes also scores
    outside of windows; tensor ranks repeat matrices that they do not split (of latents, routers and adapters); a ring
    skips blocks of scores that the causal mask hides; what full recomputation repeats ends before the block does."""
    repeats = layout.tp > 1 and name not in (("gpt", "llama", "experts") if layout.folds else ("gpt", "llama"))
    rings = layout.cp > layout.cp_ulysses
    again = layout.recompute == "full" or layout.recompute_cut
    return not (
        name in ("windows", "wide heads")
        or repeats
        or rings
        or again
        or (layout.recompute == "mlp" and name == "adapters")
    )


def named(value: Any) -> str:
    return value.line() if isinstance(value, Layout) else str(value)


def model_of(name: str, layout: Layout) -> ModelConfig:
    """Returns the model with the layers that the layout needs: ZeRO-3 gathers weights ahead of blocks in the middle."""
    gathers = layout.zero == 3 and layout.shard_ranks > 1
    deep = layout.pp > 2 or layout.pp_chunks > 1 or layout.recompute_cut or gathers or WHOLE
    return MODELS[name] if deep else replace(MODELS[name], n_layers=2)


def job_of(name, layout):
    clip = 0.0 if stashes(layout) else 1.0
    return Job(
        model=model_of(name, layout),
        layout=layout,
        train=Train(global_batch=4 * layout.data_ranks),
        optimizer=Optimizer(clip=clip),
    )


CELLS = [pair for pair in product(MODELS, LAYOUTS) if not problems_of(job_of(*pair))]


HALF = [
    ("llama", Layout(recompute="products")),
    ("gpt", Layout(cp=2, dp_shard=2, zero=3)),
    ("gpt", Layout(pp=4, micro_batch=1)),
]


@pytest.mark.parametrize(
    ("name", "layout", "device"),
    covering([(*each, device) for device in ("cuda", "cpu") for each in HALF], size=1),
    ids=named,
)
def test_memory_in_half_precision_is_predicted_on_every_device(name, layout, device):
    job = job_of(name, layout)
    job = replace(job, train=replace(job.train, precision="bf16", compile=False))
    predicted = step_memory(rank_spec(job, VOCAB, device))
    for rank in distinct_ranks(job):
        found = rehearse(job, rank, VOCAB, device)
        assert predicted[found.coordinates.get("pp", 0)].allocated == pytest.approx(found.peak, rel=BOUND)


WIDE = [
    *also_whole(("llama", Layout(dp_shard=4, zero=3)), ("llama", Layout(dp_shard=4, zero=3, prefetch=0))),
    ("llama", Layout(dp_shard=4, zero=3, offload="all")),
    ("llama", Layout(dp_shard=4, tp=2, sp=True, zero=3, reshard=False)),
    ("llama", Layout(dp_shard=4, zero=2, micro_batch=1)),
    ("experts", Layout(dp_shard=4, ep=2, zero=3, recompute="full")),
    ("experts", Layout(dp_shard=4, ep=2, zero=3, prefetch=0)),
    ("experts", Layout(dp_shard=4, zero=3, tiles=2)),
    *also_whole(("adapters", Layout(dp_shard=4, zero=3, reshard=False))),
    ("llama", Layout(offload="optimizer+parameters", zero=3)),
    ("adapters", Layout(dp_shard=4, zero=3, recompute="mlp")),
]
"""Cells in which what ZeRO-3 gathers and sends of a block is large beside its activations, with a technique each."""
MORE_WIDE = [
    Layout(dp_shard=4, zero=3, prefetch=2),
    Layout(dp_shard=4, zero=3, micro_batch=1),
    Layout(dp_shard=4, zero=3, micro_batch=1, reshard=False),
    Layout(dp_shard=4, zero=3, micro_batch=1, recompute="full"),
    Layout(dp_shard=4, zero=3, micro_batch=1, accumulate="sharded"),
    Layout(dp_shard=4, zero=3, recompute="mlp"),
    Layout(dp_shard=4, zero=3, loss_chunk=32),
    Layout(dp_shard=4, zero=3, hpz=2),
    Layout(dp_shard=4, zero=3, offload="optimizer"),
    Layout(dp_shard=4, zero=3, offload="optimizer+parameters", micro_batch=1),
    Layout(dp_shard=4, zero=3, quantise_weights="int8"),
    Layout(dp_shard=4, zero=3, quantise_weights="int8", quantise_gradients="int8"),
    Layout(dp_shard=4, zero=3, tiles=4, micro_batch=1, recompute="full"),
    Layout(dp_replicate=2, dp_shard=4, zero=3),
    Layout(dp_replicate=2, dp_shard=4, zero=3, micro_batch=1, accumulate="sharded"),
    Layout(dp_replicate=2, dp_shard=4, ep=2, zero=3),
    Layout(dp_shard=4, ep=2, zero=3),
    Layout(dp_shard=4, ep=4, zero=3),
    Layout(dp_shard=4, ep=2, zero=3, micro_batch=1),
    Layout(dp_shard=4, ep=2, zero=3, recompute="mlp"),
    Layout(dp_shard=4, ep=2, zero=3, offload="all"),
    Layout(dp_shard=4, ep=2, zero=3, reshard=False),
    Layout(dp_shard=4, tp=2, zero=3),
    Layout(dp_shard=4, tp=2, sp=True, zero=3, recompute="full"),
    Layout(dp_shard=2, cp=2, zero=3),
    Layout(dp_shard=4, pp=2, zero=3, micro_batch=1),
    Layout(dp_shard=4, pp=2, zero=3, micro_batch=1, reshard=False),
    Layout(dp_shard=4, pp=2, zero=3, micro_batch=1, schedule="zb_h1"),
    Layout(dp_shard=4, ep=4, zero=3, offload="all"),
    Layout(dp_replicate=2, dp_shard=2, zero=3, offload="all"),
    Layout(dp_shard=2, pp=2, zero=3, micro_batch=1, offload="all"),
    Layout(dp_shard=4, pp=2, zero=3, micro_batch=1, accumulate="sharded", schedule="zb_h1"),
    Layout(dp_shard=4, zero=1, micro_batch=1, recompute="full"),
    Layout(dp_shard=4, zero=2),
]
WIDE_CELLS = [
    *((*each, "cuda") for each in WIDE),
    ("llama", Layout(dp_shard=4, pp=2, zero=3, micro_batch=1, accumulate="sharded"), "cpu"),
    ("experts", Layout(dp_shard=4, ep=2, zero=3, offload="all"), "cpu"),
    ("experts", Layout(dp_shard=4, pp=2, zero=3, micro_batch=1, accumulate="sharded", schedule="zb_h1"), "cuda"),
    ("adapters", Layout(dp_replicate=2, dp_shard=2, pp=2, zero=3, micro_batch=1, offload="all"), "cuda"),
    *also_whole(
        *(
            cell
            for cell in product(("gpt", "llama", "experts", "adapters"), MORE_WIDE, ("cuda", "cpu"))
            # Split backward passes that send every micro-batch are predicted 4 to 5 % too full on a CPU.
            if (cell[1].schedule, cell[1].accumulate, cell[2]) != ("zb_h1", "sharded", "cpu")
        ),
    ),
]


def wide_job(name, layout, **options):
    """Returns a job of few tokens in bf16 for a model whose blocks are wide."""
    job = job_of(name, layout)
    model = replace(job.model, d_model=512, seq_len=64, moe=replace(job.model.moe, d_ff=512))
    return replace(job, model=model, train=replace(job.train, precision="bf16", compile=False, **options))


@pytest.mark.parametrize(
    ("name", "layout", "device"), [each for each in WIDE_CELLS if not problems_of(wide_job(*each[:2]))], ids=named
)
def test_memory_of_wide_blocks_is_predicted(name, layout, device):
    """Of steps: what is drawn to begin a wide model may be more."""
    compare_steps(wide_job(name, layout), device)


CHUNKS = Layout(dp_shard=4, pp=2, zero=3, schedule="interleaved_1f1b", pp_chunks=2, micro_batch=1)


GPIPE = replace(CHUNKS, schedule="gpipe", pp_chunks=0)
FEW = [
    GPIPE,
    replace(GPIPE, reshard=False),
    replace(GPIPE, schedule="zb_h1"),
    CHUNKS,
    replace(CHUNKS, accumulate="sharded"),
    replace(CHUNKS, reshard=False),
    replace(CHUNKS, offload="all"),
    replace(CHUNKS, schedule="zb_v"),
    replace(CHUNKS, schedule="dualpipe_v"),
]
"""Layouts that are compared with four micro-batches."""
MISSED_WITH_CHUNKS = "adapters", replace(CHUNKS, reshard=False)
"""Of adapters whose blocks stay whole in several stages too little is predicted: -6 to -22 %."""


@pytest.mark.parametrize(
    ("name", "layout", "micro_batches", "device"),
    [
        ("adapters", CHUNKS, 8, "cuda"),
        ("llama", GPIPE, 4, "cuda"),
        ("adapters", replace(CHUNKS, schedule="zb_v"), 4, "cpu"),
        *also_whole(
            *(
                cell
                for cell in product(("llama", "experts", "adapters"), FEW, (4,), ("cuda", "cpu"))
                if cell[:2] != MISSED_WITH_CHUNKS
            ),
            ("llama", CHUNKS, 2, "cuda"),
            ("experts", replace(GPIPE, zero=2, schedule="zb_h1"), 4, "cpu"),
            ("llama", replace(CHUNKS, pp_chunks=4), 8, "cuda"),
            *product(
                ("gpt", "llama", "experts", "adapters"),
                (
                    CHUNKS,
                    replace(CHUNKS, prefetch=2, pp_chunks=4),
                    replace(CHUNKS, recompute="full"),
                    replace(CHUNKS, accumulate="sharded"),
                    replace(CHUNKS, schedule="zb_v"),
                    replace(CHUNKS, schedule="dualpipe_v"),
                ),
                (8,),
                ("cuda",),
            ),
            ("experts", replace(CHUNKS, ep=2), 8, "cuda"),
            ("llama", replace(CHUNKS, offload="all"), 8, "cuda"),
        ),
    ],
    ids=named,
)
def test_memory_of_pipelines_is_predicted_with_few_micro_batches_and_many(name, layout, micro_batches, device):
    """While few have come back, not all stages have gradients; blocks are fetched for another stage of the rank."""
    job = wide_job(name, layout)
    job = replace(job, model=replace(job.model, n_layers=2 * max(2, layout.pp_chunks)))
    compare_steps(replace(job, train=replace(job.train, global_batch=micro_batches * layout.data_ranks)), device)


@pytest.mark.parametrize(
    ("name", "layout", "device"),
    [
        ("gpt", Layout(dp_shard=4, zero=2, offload="optimizer", bucket_mb=4), "cpu"),
        *also_whole(
            *product(
                ("gpt", "llama"),
                (
                    Layout(dp_shard=4, zero=2, offload="optimizer"),
                    Layout(dp_shard=4, zero=1, offload="optimizer", micro_batch=1),
                    Layout(dp_shard=4, zero=2, offload="optimizer", bucket_mb=4, micro_batch=1),
                    Layout(dp_shard=4, zero=2, offload="optimizer", bucket_mb=4, micro_batch=1, accumulate="sharded"),
                    Layout(dp_replicate=4, offload="optimizer", bucket_mb=4),
                    Layout(dp_replicate=2, dp_shard=2, zero=2, offload="optimizer", micro_batch=1),
                ),
                ("cuda", "cpu"),
            )
        ),
    ],
    ids=named,
)
def test_memory_of_buckets_that_leave_is_predicted(name, layout, device):
    compare_steps(wide_job(name, layout), device)


@pytest.mark.parametrize(
    ("layout", "device"),
    [
        (Layout(dp_shard=2, dp_replicate=2, zero=3), "cuda"),
        *also_whole(
            *product(
                (
                    Layout(dp_shard=4, zero=3),
                    Layout(dp_shard=2, dp_replicate=2, zero=3),
                    Layout(dp_shard=4, zero=3, micro_batch=1),
                    Layout(dp_shard=4, zero=3, micro_batch=1, accumulate="sharded"),
                ),
                ("cuda", "cpu"),
            )
        ),
    ],
    ids=named,
)
def test_memory_of_wide_blocks_with_gradients_in_fp32_is_predicted(layout, device):
    compare_steps(wide_job("llama", layout, gradients="fp32"), device)


def compare_steps(job: Job, device: str) -> None:
    predicted = step_memory(rank_spec(job, VOCAB, device))
    for rank in distinct_ranks(job):
        found = rehearse(job, rank, VOCAB, device)
        most = max(sum(each.parts.values()) for each in found.timeline if each.phase != Phase.START.label)
        expected = predicted[found.coordinates.get("pp", 0)]
        print(rank, f"{expected.allocated / most - 1:+.1%}", expected, found.peak_bytes)
        assert expected.allocated == pytest.approx(most, rel=BOUND)


@pytest.mark.parametrize("name", ["llama", *also_whole("gpt")])
def test_tiles_send_their_gradients_one_by_one(name):
    layout = Layout(dp_shard=4, zero=3, tiles=4, micro_batch=MICRO_BATCH, recompute="full", loss_chunk=64)
    job = job_of(name, layout)
    expected = step_memory(rank_spec(job, VOCAB, "cpu"))[0]
    assert expected.allocated == pytest.approx(rehearse(job, 0, VOCAB, "cpu").peak, rel=BOUND)


@pytest.mark.parametrize(
    "layout",
    [
        Layout(dp_shard=2, pp=2, tp=2, sp=True, ep=2, zero=1, schedule="zb_h1", ep_overlap=True, micro_batch=2),
        *also_whole(
            Layout(dp_shard=2, pp=2, ep=2, zero=2, schedule="zb_h1", micro_batch=1, redundant_experts=1),
        ),
    ],
    ids=Layout.line,
)
def test_experts_in_split_backward_passes(layout):
    test_what_is_predicted_is_what_the_program_does("experts", layout)


@pytest.mark.parametrize(("name", "layout"), covering(CELLS, size=1), ids=named)
def test_what_is_predicted_is_what_the_program_does(name, layout):
    job, sequences = job_of(name, layout), 4 * layout.data_ranks
    model, spec = job.model, rank_spec(job, VOCAB, "cpu")
    predicted, flops = step_memory(spec), 0.0
    for rank in distinct_ranks(job):
        found = rehearse(job, rank, VOCAB, "cpu")
        expected = predicted[found.coordinates.get("pp", 0)]
        print(rank, f"{expected.allocated / found.peak - 1:+.1%}", expected, found.peak_bytes)
        assert expected.allocated == pytest.approx(found.peak, rel=BOUND)
        if rank == 0:
            assert rank_traffic(job, spec) == found.traffic_bytes
        flops += sum(found.flops.values()) * layout.world / layout.pp
    if has_predicted_flops(name, layout):
        chosen = name in ("chosen keys", "warm-up")
        formula = hardware_flops_per_step if layout.recompute == "mlp" or chosen else None
        assert flops == (formula(model, layout, sequences) if formula else train_flops_per_step(model, sequences))
