"""Memory, measured: what ranks hold next to the tables and the predictions."""

from __future__ import annotations

import os
import resource
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cost.activation_bytes import activation_bytes
from cost.exact_state import StateBytes, state_bytes
from covering import also_whole, covering
from parallel.steps import micro_batches
from phalanx.blocks.parameters import count
from phalanx.config import layout_line
from phalanx.config.cluster import Cluster
from phalanx.config.job import Data, Job, Train
from phalanx.config.layout import Layout
from phalanx.config.model import MLA, LoRA, ModelConfig, MoE
from phalanx.errors import RunError
from phalanx.parallel import mesh as meshes
from phalanx.partition.derived import PARAMETER_BYTES
from phalanx.train.step import Memory, StepInputs, Stepper
from train.measured_memory import activation_memory, state_memory
from train.test_predicted_memory import BLOCKS, DEEP, WORDS, compare
from train.test_predicted_memory import kept as saved_by

# Memory, measured: what ranks hold next to the tables, and what is said where something does not fit.


VOCAB = 64
GPT = ModelConfig(n_layers=2, d_model=64, n_heads=4, seq_len=16)
PARAMETERS = count(GPT, VOCAB)
EXPERTS = replace(GPT, moe=MoE(n_experts=4, top_k=2, d_ff=32, n_shared=1, n_dense_layers=1), vocab_size=VOCAB)
ONE = ModelConfig(n_layers=1, d_model=128, n_heads=8, seq_len=64, dropout=0.1)


def held(ranks, job: Job) -> tuple[StateBytes, StateBytes]:
    """What this rank holds when the optimizer begins its second step, and while it updates."""
    mesh = meshes.build(job.layout, "cpu")
    stepper = Stepper(job, mesh, torch.device("cpu"), VOCAB)
    real, found = stepper.optimizer.square_norm, []

    def square_norm(scale):
        found.append(state_memory(stepper.replica, stepper.optimizer))
        return real(scale)

    stepper.optimizer.square_norm = square_norm
    stepper.optimizer.rule.register_step_pre_hook(
        lambda *_: found.append(state_memory(stepper.replica, stepper.optimizer))
    )
    for step in range(2):
        batches, valid = micro_batches(job, step, mesh.data_rank, VOCAB)
        stepper.step(StepInputs(batches, step, valid, 1e-3))
    return found[-2], found[-1]


@pytest.mark.parametrize("n", [2, *also_whole(4)])
@pytest.mark.parametrize(
    ("layout", "per_parameter"),
    [
        (lambda n: Layout(dp_replicate=n), lambda n: 16),
        (lambda n: Layout(dp_shard=n, zero=1), lambda n: 4 + 12 / n),
        (lambda n: Layout(dp_shard=n, zero=2), lambda n: 2 + 14 / n),
        (lambda n: Layout(dp_shard=n, zero=3), lambda n: 16 / n),
    ],
    ids=["ddp", "zero 1", "zero 2", "zero 3"],
)
def test_bf16_state_is_the_table_of_zero(ranks, layout, per_parameter, n):
    assert PARAMETERS > 100_000
    job = Job(model=GPT, layout=layout(n), train=Train(global_batch=4, precision="bf16"))
    found, during = max(ranks(held, n, job), key=lambda states: states[0].total)
    table = per_parameter(n) * PARAMETERS
    row = [*vars(found).values(), found.total]
    print(layout(n).line(), f"{per_parameter(n):.1f} {table:,.0f}", *(f"{size:,}" for size in row), sep="  ")
    assert found.total == pytest.approx(table, rel=0.02)
    assert found == state_bytes(GPT, layout(n), "bf16", vocab=VOCAB)
    assert during == found, "it reads gradients in their own type"


@pytest.mark.parametrize(
    ("layout", "train"),
    [
        (Layout(), {}),
        (Layout(tp=2, sp=True), {"precision": "bf16"}),
        (Layout(dp_replicate=2, bucket_mb=0.1), {"precision": "bf16", "gradients": "fp32"}),
        (Layout(dp_shard=3, zero=2, bucket_mb=0.1, micro_batch=1), {"global_batch": 3}),
        (Layout(dp_shard=2, tp=2, zero=2), {"precision": "fp64"}),
        (Layout(dp_shard=3, zero=3), {"global_batch": 3}),
        (Layout(dp_replicate=2, data_parallel="threads"), {"precision": "fp64"}),
        (Layout(cp=2, dp_shard=2, zero=2), {"precision": "bf16"}),
        (Layout(cp=2), {}),
        *also_whole(
            (Layout(dp_shard=2, tp=2), {"precision": "bf16"}),
            (Layout(dp_shard=2, dp_replicate=2, tiles=2), {"precision": "bf16", "gradients": "fp32"}),
        ),
    ],
    ids=lambda value: value.line() if isinstance(value, Layout) else " ".join(map(str, value.values())),
)
def test_state_is_what_the_formula_says(ranks, layout, train):
    job = Job(model=GPT, layout=layout, train=Train(**{"global_batch": 4, **train}))
    found = max((before for before, _ in ranks(held, layout.processes, job)), key=lambda state: state.total)
    assert found == state_bytes(GPT, layout, job.train.precision, job.train.gradients, VOCAB)


@pytest.mark.parametrize(
    "layout",
    [
        Layout(),
        Layout(dp_shard=4, ep=2, zero=1, bucket_mb=0.1),
        Layout(dp_shard=4, ep=2),
        Layout(dp_shard=2, tp=2, ep=2, zero=2),
        *also_whole(Layout(dp_shard=8, ep=1), Layout(cp=2, dp_replicate=2, ep=2)),
    ],
    ids=Layout.line,
)
def test_state_of_experts_is_what_the_formula_says(ranks, layout):
    """Experts are dealt out over ep, and sharded over what is left of dp_shard × cp."""
    job = Job(model=EXPERTS, layout=layout, train=Train(global_batch=8, precision="fp64"))
    found = max((before for before, _ in ranks(held, layout.processes, job)), key=lambda state: state.total)
    assert found == state_bytes(EXPERTS, layout, "fp64", vocab=VOCAB)


def kept(ranks, layout: Layout, model: ModelConfig = ONE) -> int:
    """What the one block keeps of a micro-batch of 2 sequences in bf16."""
    job = Job(model=model, layout=layout, train=Train(precision="bf16", global_batch=2 * layout.data_ranks))
    mesh = meshes.build(layout, "cpu")
    stepper = Stepper(job, mesh, torch.device("cpu"), VOCAB)
    transformer = stepper.replica.objective.model
    (block,) = transformer.blocks.values()
    batches, _ = micro_batches(job, 0, mesh.data_rank, VOCAB)
    micro = stepper.tensors(batches[0], 0)
    positions = micro.positions
    x = transformer.embed_tokens(micro.tokens, positions, micro.noise).detach().clone().requires_grad_()
    found, y = activation_memory(block, x, transformer.rotary(positions, x.dtype), micro.noise, None)
    y.sum().backward()
    return found


@pytest.mark.parametrize(
    "layout",
    [Layout(cp=size, cp_ulysses=ulysses, zero=1) for size, ulysses in ((2, 1), (4, 1), (2, 2), (4, 2))],
    ids=Layout.line,
)
def test_a_context_parallel_rank_keeps_its_share(ranks, layout):
    model = replace(ONE, dropout=0.0)
    (whole,), found = ranks(kept, 1, Layout(), model), ranks(kept, layout.cp, layout, model)
    twice = 2 * 2 * model.seq_len * model.d_model if layout.cp_ulysses > 1 else 0  # the output, in both its forms
    assert found == pytest.approx([(whole + twice) / layout.cp] * layout.cp, rel=0.002)
    assert found[0] == pytest.approx(activation_bytes(model, layout, 2), rel=0.05)


@pytest.mark.parametrize("more", [{"sinks": True}, {"attention_softcap": 20.0}, {"sinks": True, "window": 9}], ids=str)
def test_dropout_keeps_scores_with_sinks_and_caps_too(ranks, more):
    model = replace(ONE, **more)
    (found,) = ranks(kept, 1, Layout(), model)
    assert found == pytest.approx(activation_bytes(model, Layout(), 2), rel=0.03)


S, B, H, A = ONE.seq_len, 2, ONE.d_model, ONE.n_heads
SP = {"sp": True, "sp_regather": True}
ROWS = {
    "none": (Layout(), 34 + 5 * A * S / H),
    "selective": (Layout(recompute="selective"), 34),
    "full": (Layout(recompute="full"), 2),
    **{f"tp {t}": (Layout(tp=t), 10 + 24 / t + 5 * A * S / (H * t)) for t in (2, 4)},
    **{f"tp {t} sp": (Layout(tp=t, **SP), (34 + 5 * A * S / H) / t) for t in (2, 4)},
    **{f"tp {t} selective": (Layout(tp=t, recompute="selective"), 10 + 24 / t) for t in (2, 4)},
    **{f"tp {t} sp selective": (Layout(tp=t, recompute="selective", **SP), 34 / t) for t in (2, 4)},
    **{f"tp {t} full": (Layout(tp=t, recompute="full"), 2) for t in (2, 4)},
    **{f"tp {t} sp full": (Layout(tp=t, recompute="full", sp=True), 2 / t) for t in (2, 4)},
    "tp 2 sp whole inputs": (Layout(tp=2, sp=True), 4 + (30 + 5 * A * S / H) / 2),
}


@pytest.mark.parametrize(("layout", "row"), ROWS.values(), ids=ROWS.keys())
def test_a_block_keeps_what_the_paper_says(ranks, layout, row):
    expected = S * B * H * row
    assert activation_bytes(ONE, layout, B) == expected
    found = ranks(kept, layout.tp, layout)
    print(layout.line(), f"{row:.1f}  {expected:,.0f}  {max(found):,}  {max(found) / expected - 1:.2%}", sep="  ")
    assert found == pytest.approx([expected] * layout.tp, rel=0.03)


WIDE = ModelConfig(
    n_layers=1, d_model=1024, n_heads=2, d_ff=64, seq_len=2, vocab_size=9000
)  # its embedding takes 35 MiB
WIDER = replace(WIDE, vocab_size=72000)  # 281 MiB: more than what is freed meanwhile of what others have left
LONG = ModelConfig(n_layers=1, d_model=16, n_heads=8, seq_len=512, dropout=0.1)  # its scores take 64 MiB
SPARE = 30 * 2**20
"""Of address space: one tensor of more than the 32 MiB that the C library may have at hand is then refused."""


def limited(ranks, model: ModelConfig, phase: str, layout: Layout) -> str:
    """What a rank says whose address space is limited when `phase` begins."""
    vocab = model.vocab_size or VOCAB
    job = Job(model=model, layout=layout, train=Train(global_batch=8))
    before = resource.getrlimit(resource.RLIMIT_AS)
    mesh = meshes.build(layout, "cpu")
    batches, valid = micro_batches(job, 0, mesh.data_rank, vocab)

    def limit(now: str) -> None:
        if now == phase:
            pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
            resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + SPARE, before[1]))

    try:
        limit("build")
        stepper = Stepper(job, mesh, torch.device("cpu"), vocab)
        stepper.optimizer.rule.register_step_pre_hook(lambda *_: limit("update"))
        limit("step")
        stepper.step(StepInputs(batches, 0, valid, 1e-3))
    except RunError as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    return "it fits"


@pytest.mark.parametrize(
    ("model", "phase", "layout", "said"),
    [
        (WIDER, "build", Layout(), "parameters: it is predicted to need parameters 297.8MiB"),
        (WIDER, "update", Layout(), "optimizer: it is predicted to need parameters 297.8MiB"),
        (LONG, "step", Layout(), "nearest remedy for its activations: layout.recompute=selective"),
        (LONG, "step", Layout(recompute="selective"), "nearest remedy for its activations: layout.recompute=full"),
        (WIDE, "step", Layout(dp_shard=2, zero=1), "nearest remedy for its gradients: layout.zero=2"),
        (WIDER, "build", Layout(dp_replicate=2), "parameters: layout.dp_replicate=1 layout.dp_shard=2 layout.zero=3"),
        (LONG, "never", Layout(), "it fits"),
    ],
)
def test_a_rank_without_room_says_which_part_did_not_fit(ranks, model, phase, layout, said):
    for answer in ranks(limited, layout.world, model, phase, layout):
        print(answer)
        assert said in answer


def test_other_errors_stay_as_they_are():
    memory = Memory(Job(model=GPT), torch.device("cpu"), VOCAB)
    with pytest.raises(RuntimeError, match="shapes"), memory.allocating("parameters"):
        raise RuntimeError("shapes do not match")


@pytest.mark.parametrize(
    ("part", "layout", "remedy"),
    [
        ("logits", Layout(loss_chunk=64), "layout.loss_chunk=16"),
        ("activations", Layout(recompute="full", tp=2), "layout.sp=true"),
        ("activations", Layout(recompute="full", micro_batch=4), "layout.micro_batch=2"),
        ("activations", Layout(recompute="full", micro_batch=1), "layout.offload=activations"),
        (
            "activations",
            Layout(recompute="full", micro_batch=1, offload="activations"),
            "twice the devices with layout.tp=2, or ",
        ),
        ("optimizer", Layout(dp_replicate=4), "layout.dp_replicate=1 layout.dp_shard=4 layout.zero=1"),
        ("gradients", Layout(dp_replicate=2, dp_shard=2), "layout.dp_replicate=1 layout.dp_shard=4 layout.zero=3"),
        ("parameters", Layout(tp=4), r"layout.offload=optimizer\+parameters"),
        (
            "parameters",
            Layout(tp=4, offload="optimizer+parameters"),
            "twice the devices with layout.dp_shard=2 and layout.zero=3",
        ),
    ],
)
def test_the_nearest_remedy(part, layout, remedy):
    memory = Memory(Job(model=GPT, layout=layout), torch.device("cpu"), VOCAB)
    with pytest.raises(RunError, match=f"{part}: {remedy}"), memory.allocating(part):
        raise torch.OutOfMemoryError("tried to allocate 2 GiB")


def test_a_pipeline_rank_counts_its_stages_and_what_it_has_in_flight():
    model = replace(ONE, n_layers=8)
    job = Job(model=model, layout=Layout(pp=4, pp_cut="1+2+3+2"), train=Train(global_batch=8))
    first, *_, last = (Memory(job, torch.device("cpu"), VOCAB, rank).table() for rank in range(4))
    one = Memory(replace(job, layout=Layout()), torch.device("cpu"), VOCAB).table()
    assert first["parameters"] + 4 * VOCAB * model.d_model < one["parameters"] / 4
    block = activation_bytes(model, job.layout, 1, 4)
    # Besides those in flight, four of one block and one of two, either rank has what one backward pass makes.
    assert first["activations"] - last["activations"] == (4 * 1 - 1 * 2) * block
    assert 2 * block < last["activations"] < 3 * block
    assert 0 == first["logits"] < last["logits"] < one["logits"]
    gpipe = replace(job, layout=replace(job.layout, schedule="gpipe"))
    # Of the micro-batches that wait only the log-probabilities are there, in fp32, and what the head read.
    waiting = 7 * model.seq_len * 4 * (VOCAB + 2 * model.d_model)
    assert Memory(gpipe, torch.device("cpu"), VOCAB, 3).table()["logits"] == last["logits"] + waiting
    chunked = replace(job, layout=replace(gpipe.layout, loss_chunk=model.seq_len))
    waiting = 7 * model.seq_len * 4 * 2 * model.d_model
    assert Memory(chunked, torch.device("cpu"), VOCAB, 3).table()["logits"] == 4 * model.seq_len * VOCAB + waiting


def test_a_pipeline_without_room_for_activations_says_so():
    job = Job(model=replace(GPT, n_layers=4), layout=Layout(pp=2, recompute="full"), train=Train(global_batch=16))
    memory = Memory(job, torch.device("cpu"), VOCAB)
    with pytest.raises(RunError, match=r"activations: layout.micro_batch=2"), memory.allocating("activations"):
        raise torch.OutOfMemoryError("tried to allocate 2 GiB")


# The predicted memory of a step for models of every kind, next to what ranks take: norms, biases, dropout, heads of
# two widths, experts and documents, on the layouts that save different tensors of them. On CPU ranks, to BOUND.

RMS = replace(DEEP, norm="rmsnorm")
BIASED = replace(DEEP, bias=True, activation="gelu")
DROPPED = replace(DEEP, dropout=0.1)
SCORES = replace(BIASED, dropout=0.1, positions="learned", seq_len=256, d_model=64, n_heads=4)
"""Of whose memory the probabilities of attention take most."""
LATENT = replace(DEEP, mla=MLA(q_rank=48, kv_rank=32, rope_head_dim=8, nope_head_dim=16, v_head_dim=16))
ROUTED = replace(DEEP, moe=MoE(n_experts=4, top_k=2, d_ff=128, n_shared=1))
SLICED = "pp=2,schedule=terapipe,micro_batch=1,pp_slices=4"
RING, SPLIT = "cp=2,zero=1", "pp=2,schedule=zb_h1,micro_batch=1"
CASES = {
    "rmsnorm": (RMS, ["recompute=full", "tp=2", "tp=2,sp=true", RING, SPLIT, SLICED]),
    "biases": (BIASED, ["tp=1", "tp=2", RING, SPLIT, SLICED]),
    "dropout": (DROPPED, ["recompute=selective", RING, SPLIT, SLICED]),
    "scores": (
        SCORES,
        ["tp=1", "recompute=full", "recompute=selective", "tp=2", RING, SPLIT, SPLIT.replace("h1", "h2")],
    ),
    "long scores": (replace(SCORES, seq_len=512), [SLICED]),
    "latent": (LATENT, ["tp=1", "tp=2", "recompute=full", RING, SPLIT, SLICED]),
    "latent, rmsnorm": (replace(LATENT, norm="rmsnorm"), ["tp=1", "recompute=selective"]),
    "experts": (ROUTED, ["tp=1", "recompute=full", "tp=2", SPLIT, SLICED]),
}
BOUND = 0.05


def job_of(model, line: str, precision: str, *, documents: bool = False) -> Job:
    layout = layout_line.parse(line)
    train = Train(global_batch=2 if layout.pp_slices else 8 if layout.pp > 1 else 4, precision=precision)
    data = Data(document_mask=documents)
    return Job(model=model, layout=layout, train=train, data=data, cluster=Cluster(device="cpu"))


MATRIX = bool(os.environ.get("PHALANX_MEMORY"))
"""Whether every kind meets every layout, also in half precision: minutes, `make memory`. What a block keeps is held by
kind, and the fullest moment of a step by layout, in test_predicted_memory.py; schedules that split the backward pass
keep other tensors of each kind."""
MET = [(name, line) for name, (_, lines) in CASES.items() for line in lines]
FEW_MET = covering(MET, lambda case: {*case} | ({case} if case[1] == SPLIT else set()), size=1)


@pytest.mark.parametrize("precision", ["fp32", *(["bf16"] if MATRIX else [])])
@pytest.mark.parametrize(("name", "line"), MET if MATRIX else FEW_MET, ids=str)
def test_every_kind_of_model_takes_what_is_predicted(ranks, name, line, precision):
    compare(ranks, job_of(CASES[name][0], line, precision), BOUND)


@pytest.mark.parametrize("line", ["tp=1", RING, SLICED, *also_whole("recompute=full", "pp=2,micro_batch=1")])
def test_so_it_does_with_documents(ranks, line):
    compare(ranks, job_of(DEEP, line, "fp32", documents=True), BOUND)


# The memory of adapters beside frozen weights: what blocks keep, the state, and the fullest moment of a step. `make
# lora` compares every kind of block and more layouts.

EVERY = bool(os.environ.get("PHALANX_LORA"))
TARGETS = ["all", "attention", "feed_forward", "wo", "down"]
FEW_BLOCKS = [("llama", "attention"), ("latent", "feed_forward"), ("experts", "all")]
COMPARED = [(name, targets) for name in BLOCKS for targets in TARGETS] if EVERY else FEW_BLOCKS


@pytest.mark.parametrize("precision", ["bf16", "fp32"] if EVERY else ["bf16"])
@pytest.mark.parametrize(("name", "targets"), COMPARED)
def test_a_block_keeps_what_its_operators_say(ranks, name, targets, precision):
    """To the byte but for norms' means and deviations, attention's log-sum-exp and the rotary table: these are as large
    as without adapters, and at most 2 % of what the block keeps then."""
    plain = BLOCKS[name]
    uncounted = []
    for model in (replace(plain, lora=LoRA(rank=8, targets=targets)), plain):
        (found,) = ranks(saved_by, 1, Layout(), model, precision)
        expected = activation_bytes(model, Layout(), 2, PARAMETER_BYTES[precision])
        print(f"{expected:,} {found:,}")
        uncounted.append(found - expected)
    assert uncounted[0] == uncounted[1]
    assert 0 <= uncounted[0] <= 0.02 * expected


LAYOUTS = [
    ("tp=1", "fp32"),
    ("tp=1", "bf16"),
    ("tp=2", "fp32"),
    ("tp=2,sp=true", "bf16"),
    ("dp_shard=2", "bf16"),
    ("dp_shard=2,zero=1", "fp32"),
    ("dp_shard=2,zero=2,accumulation=2", "bf16"),
    ("dp_replicate=2", "bf16"),
    ("cp=2,zero=1", "fp32"),
    ("recompute=full", "fp32"),
    ("loss_chunk=128", "fp32"),
    ("pp=2", "fp32"),
]
FEW = [("tp=2,sp=true", "bf16"), ("dp_shard=2,zero=1", "fp32")]
FEW += also_whole(("tp=1", "bf16"), ("dp_shard=2", "bf16"))


ADAPTERS = {"none": LoRA(), "all": LoRA(rank=8), "attention": LoRA(rank=8, targets="attention")}


@pytest.mark.parametrize("targets", ADAPTERS if EVERY else ["attention"])
@pytest.mark.parametrize(("line", "precision"), LAYOUTS if EVERY else FEW)
def test_the_fullest_moment_of_a_step_is_the_predicted_one(ranks, line, precision, targets):
    for plain in (DEEP, WORDS) if EVERY and "pp" not in line else (DEEP,):
        model, layout = replace(plain, lora=ADAPTERS[targets]), layout_line.parse(line)
        batch = 8 if EVERY else 4 * layout.data_ranks
        compare(ranks, Job(model=model, layout=layout, train=Train(global_batch=batch, precision=precision)))


STATES = [
    ("tp=2,sp=true", "bf16"),
    ("dp_replicate=2,bucket_mb=0.1", "bf16"),
    ("dp_shard=3,zero=2,bucket_mb=0.1,micro_batch=1", "fp32"),
    ("dp_shard=2,zero=1", "bf16"),
    ("dp_shard=2", "bf16"),
    ("dp_replicate=2,data_parallel=threads", "fp64"),
]


@pytest.mark.parametrize(("line", "precision"), STATES if EVERY else STATES[-3:-1])
def test_the_state_of_ranks_is_that_of_the_formula(ranks, line, precision):
    """Frozen weights have neither gradients nor optimizer state."""
    layout, model = layout_line.parse(line), replace(GPT, lora=LoRA(rank=8))
    job = Job(model=model, layout=layout, train=Train(global_batch=4 if "3" not in line else 3, precision=precision))
    found = max((before for before, _ in ranks(held, layout.processes, job)), key=lambda state: state.total)
    assert found == state_bytes(model, layout, precision, vocab=VOCAB)
    plain = state_bytes(GPT, layout, precision, vocab=VOCAB)
    assert found.gradients < plain.gradients / 4
    assert found.optimizer < plain.optimizer / 4


# The memory of what families change around attention: norms after the halves, parallel blocks, clamped gates, soft
# caps.

PARALLEL = replace(DEEP, parallel_block=True, activation="gelu", bias=True)
CLAMPED = replace(DEEP, activation="swiglu_clamped")
NORMS = replace(DEEP, norm_place="both", activation="geglu")
CAPPED = replace(WORDS, logit_softcap=30.0, scaled_embedding=True)
STRUCTURES = {
    "norms after": (replace(DEEP, norm_place="after"), "tp=2,sp=true", "bf16"),
    "norms before and after": (NORMS, "tp=1", "fp32"),
    "parallel, in parts": (PARALLEL, "tp=2,sp=true,sp_regather=true", "fp32"),
    "clamped": (CLAMPED, "tp=1", "fp32"),
    "capped, cut vocabulary": (CAPPED, "tp=2", "fp32"),
    "capped, in chunks": (CAPPED, "loss_chunk=256", "fp32"),
}
STRUCTURES |= also_whole(
    ("norms before and after, in bf16", (NORMS, "tp=1", "bf16")),
    ("clamped, in bf16", (CLAMPED, "tp=1", "bf16")),
    ("norms before and after, in parts", (NORMS, "tp=2,sp=true,recompute=full", "fp32")),
    ("parallel", (PARALLEL, "tp=2", "fp32")),
    ("parallel, recomputed", (PARALLEL, "tp=2,sp=true,recompute=full", "bf16")),
    ("clamped, recomputed", (CLAMPED, "recompute=full", "fp32")),
    ("capped", (CAPPED, "tp=1", "bf16")),
)


@pytest.mark.parametrize(("model", "line", "precision"), STRUCTURES.values(), ids=STRUCTURES.keys())
def test_the_fullest_moment_with_the_parts_around_attention(ranks, model, line, precision):
    job = Job(model=model, layout=layout_line.parse(line), train=Train(global_batch=4, precision=precision))
    compare(ranks, job)
