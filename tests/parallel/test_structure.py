"""Techniques that change how a model computes but not what: one process's results in float64."""

from __future__ import annotations

import dataclasses
import logging
from dataclasses import replace
from typing import Literal

import pytest
import torch

from covering import also_whole
from parallel.steps import steps
from parallel.structures import NEOX, STRUCTURES
from parallel.test_composition import LLAMA, VOCAB, compare_and_check_bytes, job_of
from parallel.test_predicted_traffic import check
from parallel.test_predicted_traffic import job_of as sending_job
from phalanx.blocks.kinds import block, block_kinds, model_for
from phalanx.blocks.operator import place_of
from phalanx.blocks.parameters import weight_of
from phalanx.check.job import problems_of
from phalanx.comm.axis import Axis
from phalanx.config import layout_line
from phalanx.config.job import Data, Job, Optimizer, Train
from phalanx.config.layout import Layout
from phalanx.config.model import MLA, ModelConfig, RopeScaling
from phalanx.errors import JobError
from phalanx.launch.ranks import Ranks
from phalanx.model.seeding import Noise, initialise
from phalanx.model.transformer import Transformer
from phalanx.parallel.apply import Construction, apply, apply_compile
from phalanx.parallel.mesh import alone, build
from phalanx.parallel.objective import MicroTensors, Objective
from phalanx.parallel.offload import Host
from phalanx.parallel.recompute import recompute
from phalanx.parallel.vocabulary import CrossEntropy
from phalanx.partition.derived import MODES, modes, written
from phalanx.techniques.memory import refusal

# The parts of a model around attention, under every technique: norms after the halves, parallel blocks, gates of
# other kinds, soft caps, scaled embeddings, biases of routers and experts. Steps equal those of one process in
# float64 to 1e-9, and the bytes that ranks send are the predicted ones.


LAYOUTS = {
    "olmo2": [
        "tp=2,sp=true,sp_regather=true,recompute=full",
        "dp_shard=2,zero=3,recompute=full",
    ],
    "gemma2": [
        "tp=4,loss_chunk=7",
        "pp=2,accumulation=3,schedule=zb_h1,recompute=selective",
        "cp=2,tp=2,sp=true,loss_chunk=5",
        *also_whole("tp=2,sp=true,recompute=full"),
    ],
    "neox": [
        "tp=4,sp=true,sp_regather=true",
        "tp=2,pp=2,accumulation=3,schedule=zb_h1",
        *also_whole("tp=2,dp_shard=2,zero=3,recompute=full", "cp=4,cp_ulysses=2"),
    ],
    "gpt-oss": [
        "dp_shard=2,ep=2,tp=2,zero=2",
        "cp=2,ep=2,zero=1,recompute=full",
        *also_whole("pp=2,accumulation=3,schedule=zb_h1"),
    ],
    "neox with experts": ["dp_shard=2,ep=2,tp=2,zero=3,recompute=full"],
    "gemma2 with experts": ["tp=2,sp=true,recompute=full"],
    "further tokens": [
        "tp=2,pp=2,accumulation=3,loss_chunk=5",
        "cp=2,tp=2,sp=true,zero=1,recompute=full",
        *also_whole("dp_replicate=2,tp=2,recompute=mlp"),
    ],
    "further tokens with experts": [
        "dp_shard=2,ep=2,tp=2,sp=true,zero=3,recompute=full",
        "pp=2,accumulation=4,schedule=dualpipe,cp=2,zero=1",
        *also_whole("pp=2,accumulation=3,dp_shard=2,zero=3"),
    ],
}
SENT = {
    "parallel with dropout": (replace(NEOX, dropout=0.1), "tp=2,sp=true,recompute=full"),
    "parallel in stages": (NEOX, "tp=2,sp=true,pp=2,schedule=zb_h1,accumulation=2"),
    "parallel on a ring": (NEOX, "cp=2,tp=2,sp=true,recompute=selective"),
}


def steps_of(model: ModelConfig) -> int:
    """Two where one step leaves the next more than parameters, which are compared: the bias of a balanced router."""
    return 2 if model.moe.bias_balanced else 1


@pytest.fixture(scope="module")
def reference(ranks):
    """One process, by kind of model."""
    models = STRUCTURES.items()
    return {kind: ranks(steps, 1, job_of(model, Layout()), VOCAB, steps_of(model))[0] for kind, model in models}


@pytest.mark.parametrize(("kind", "line"), [(kind, line) for kind, lines in LAYOUTS.items() for line in lines])
def test_equals_one_process(ranks, reference, kind, line):
    layout = layout_line.parse(line)
    job = job_of(STRUCTURES[kind], layout)
    assert not problems_of(job)
    compare_and_check_bytes(ranks, job, reference[kind], steps_of(job.model))


@pytest.mark.parametrize(("model", "line"), SENT.values(), ids=SENT.keys())
def test_every_byte(ranks, model, line):
    check(ranks, sending_job(model, layout_line.parse(line)))


@pytest.mark.parametrize("sp", [False, True])
def test_a_parallel_block_sends_half_as_much(sp):
    """One exchange off the residual stream and one onto it, each forward and backward, instead of two of each."""

    def sent(model):
        place = place_of(model, Layout(tp=2, sp=sp), 2)
        messages = [m for operator in block(place, block_kinds(model)[0]) for m in operator.messages]
        return sum(m.elements * m.times("none") for m in messages)

    assert sent(NEOX) == sent(replace(NEOX, parallel_block=False)) / 2


@pytest.mark.parametrize("sp", [False, True])
def test_in_a_parallel_block_ranks_sum_what_each_has_of_norms_and_biases(sp):
    for name in ("attn_norm.weight", "mlp_norm.bias", "attn.wo.bias", "mlp.down.bias"):
        assert weight_of(NEOX, f"blocks.0.{name}").is_summed(sp)
        assert weight_of(replace(NEOX, parallel_block=False), f"blocks.0.{name}").is_summed(sp) == sp


# What model families change inside attention, under every layout: as one process computes it, in float64 to 1e-9, and
# every byte that a rank sends as predicted.

BATCH = 4
PLAIN = dataclasses.replace(LLAMA, seq_len=16, dropout=0.0)
MIXED = dataclasses.replace(
    PLAIN,
    d_model=48,
    n_heads=4,
    n_kv_heads=2,
    attention="latent,heads",
    mla=MLA(q_rank=16, kv_rank=8, rope_head_dim=4, nope_head_dim=8, v_head_dim=10),
)
"""Layers of latent attention and of plain heads, each with the head sizes of its kind."""
YARN = RopeScaling(kind="yarn", factor=4.0, original_seq_len=16, beta_fast=2.0, truncate=False)
MODELS = {
    # Gemma's and Qwen 3's parts together.
    "capped": dataclasses.replace(
        PLAIN,
        window=5,
        full_every=2,
        qk_norm="head",
        attention_softcap=2.0,
        attention_scale=0.5,
        rope_scaling=YARN,
        window_rope_theta=100.0,
        rotary_fraction=0.5,
    ),
    # OLMo 2's norms, and gpt-oss's sinks and windows.
    "sinks": dataclasses.replace(PLAIN, window=6, full_every=2, qk_norm="width", sinks=True, qkv_bias=True),
    "dropout": dataclasses.replace(
        PLAIN, window=3, full_every=2, dropout=0.2, qk_norm="width", sinks=True, attention_softcap=2.0
    ),
    "layernorm": dataclasses.replace(
        PLAIN, norm="layernorm", bias=True, qk_norm="head", sinks=True, attention_softcap=2.0, n_kv_heads=1
    ),
    "mixed": MIXED,
}
CASES = [
    ("capped", "tp=2,sp=true,recompute=full,accumulation=2"),
    ("capped", "cp=2,cp_ulysses=2,tp=2,sp=true,sp_regather=true"),
    ("capped", "pp=2,schedule=terapipe,pp_slices=2,cp=2,accumulation=2"),
    ("sinks", "tp=4,recompute=full"),
    ("sinks", "cp=4,cp_ulysses=2,cp_inner=ring,recompute=full"),
    ("dropout", "tp=2,sp=true,cp=2"),
    ("layernorm", "tp=4,accumulation=2"),
    ("mixed", "tp=2,sp=true,pp=2,accumulation=2,schedule=zb_h1"),
    ("mixed", "cp=4,cp_ulysses=2,zero=3"),
    *also_whole(
        ("capped", "cp=4,recompute=selective"),
        ("sinks", "cp=2,tp=2,pp=2,schedule=zb_h1,accumulation=2"),
        ("dropout", "cp=4,cp_ulysses=2,zero=1"),
        ("layernorm", "cp=4,cp_ulysses=2,zero=2"),
        ("mixed", "dp_shard=2,tp=2,zero=1,recompute=full"),
    ),
]
DOCUMENTS = {"sinks": 2, "dropout": 2}
"""Kinds whose attention does not cross documents, with their steps: those of the second are short."""


def features_job(kind: str, layout: Layout) -> Job:
    return Job(
        model=MODELS[kind],
        layout=layout,
        data=Data(document_mask=kind in DOCUMENTS),
        train=Train(global_batch=BATCH, precision="fp64"),
        optimizer=Optimizer(clip=0.5),
    )


@pytest.fixture(scope="module")
def features_reference(ranks):
    """One process, by kind of model."""
    counts = {kind: DOCUMENTS.get(kind, 1) for kind in MODELS}
    return {kind: ranks(steps, 1, features_job(kind, Layout()), VOCAB, counts[kind])[0] for kind in MODELS}


@pytest.mark.parametrize(("kind", "line"), CASES)
def test_equals_one_process_and_sends_what_is_predicted(ranks, features_reference, kind, line):
    job = features_job(kind, layout_line.parse(line))
    assert problems_of(job) == []
    compare_and_check_bytes(ranks, job, features_reference[kind], DOCUMENTS.get(kind, 1))


def test_head_sizes_belong_to_the_kind_of_a_layer():
    of_kinds = [model_for(MIXED, kind.attention) for kind in block_kinds(MIXED)]
    sizes = [(own.head_size, own.v_head_size, own.rotary_size) for own in of_kinds]
    assert sizes[:2] == [(12, 10, 4), (8, 8, 8)]
    shapes = {name: tuple(weight.shape) for name, weight in Transformer(MIXED, VOCAB).named_parameters()}
    assert (shapes["blocks.0.attn.wo.weight"], shapes["blocks.1.attn.wo.weight"]) == ((48, 40), (48, 32))


# What apply makes of a model: the techniques that change how it computes, but not what.

SHAPE = ModelConfig(n_layers=1, d_model=16, n_heads=2, seq_len=8)


def lines_and_changed_forwards(ranks: Ranks, layout: Layout) -> tuple[list[str], list[str]]:
    """The log lines of one rank, and the modules whose `forward` is not that of their class."""
    lines: list[str] = []
    logger, handler = logging.getLogger("phalanx"), logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger.addHandler(handler)
    before = logger.level
    logger.setLevel(logging.INFO)
    try:
        with torch.device("meta"):
            model = Transformer(SHAPE, 11)
        job = Job(model=SHAPE, layout=layout, train=Train(global_batch=4, cpu_linear="mkl"))
        apply(model, job, build(layout, "cpu"), torch.device("cpu"))
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
    return lines, [name for name, module in model.named_modules() if "forward" in vars(module)]


def test_each_technique_is_one_line_of_rank_zero_in_the_order_in_which_they_compose(ranks):
    layout = Layout(dp_shard=2, tp=2, sp=True, cp=2, zero=1, recompute="selective", loss_chunk=8)
    results = ranks(lines_and_changed_forwards, 8, layout)
    assert [line.split(":")[0] for line in results[0][0]] == [
        "mesh",
        "tensor parallel",
        "context parallel",
        "recompute",
        "loss",
        "data parallel",
    ]
    assert results[0][0][1] == (
        "tensor parallel: 2 ranks, vocabulary 11 + 1 padding, sequence parallel with 4 tokens of each sequence per rank"
    )
    assert all(lines == [] for lines, _ in results[1:])
    assert all(changed == [] for _, changed in results), "layers are exchanged by name or by declared hooks"


def test_auto_compiles_on_gpus_alone_and_says_why_it_does_not(caplog, monkeypatch):
    def compiled(device, layout, *, triton=True, asked: bool | Literal["auto"] = "auto"):
        caplog.clear()
        caplog.set_level(logging.INFO, "phalanx")
        monkeypatch.setattr("phalanx.parallel.compiled.has_triton", lambda: triton)
        with torch.device("meta"):
            model = Transformer(SHAPE, 11)
        job = Job(SHAPE, layout=layout, train=Train(compile=asked))
        parts = Construction(model, job, alone(), torch.device(device), Host(torch.device("cpu")))
        apply_compile(parts)
        return parts.compiled, "run" in vars(model.blocks["0"]), [each.getMessage() for each in caplog.records]

    assert compiled("cpu", Layout()) == (False, False, [])
    threads = Layout(dp_replicate=2, data_parallel="threads")
    assert compiled("cuda", threads) == (False, False, [f"compile: off, {refusal(Job(layout=threads))}"])
    assert compiled("cuda", Layout())[:2] == (True, True)
    off = "compile: off, torch finds no Triton for this GPU"
    assert compiled("cuda", Layout(), triton=False) == (False, False, [off])
    with pytest.raises(JobError, match="no Triton for this GPU; nearest legal: train.compile=auto"):
        compiled("cuda", Layout(), triton=False, asked=True)


# Recomputation changes what is kept, not what is computed.

RECOMPUTE_VOCAB, SEQ, SAMPLES, WIDTH, LAYERS = 11, 32, 2, 16, 3
NONE, PRODUCTS, MLP, SELECTIVE, FULL = (Layout(recompute=mode) for mode in MODES)
MIXED_RUNS = Layout(recompute_cut="1*full+1*selective+1*none")


def step(layout: Layout, dropout: float) -> tuple[torch.Tensor, dict[str, torch.Tensor], int]:
    """Loss, gradients, and the bytes kept for the backward pass."""
    shape = ModelConfig(n_layers=LAYERS, d_model=WIDTH, n_heads=4, seq_len=SEQ, dropout=dropout)
    model = Transformer(shape, RECOMPUTE_VOCAB).double()
    initialise(model, shape, 3)
    assert recompute(model, layout) == sum(mode != "none" for mode in modes(written(layout), LAYERS))
    tokens = torch.arange(SAMPLES * SEQ).reshape(SAMPLES, SEQ) % RECOMPUTE_VOCAB
    noise = Noise(1, 2, [4, 5]) if dropout else None
    kept: dict[int, int] = {}
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = Objective(model, CrossEntropy(Axis("tp"), RECOMPUTE_VOCAB))(MicroTensors(tokens, tokens, noise))
    total = sum(kept.values())
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, total


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("layout", [PRODUCTS, MLP, SELECTIVE, FULL, MIXED_RUNS], ids=Layout.line)
def test_same_bits_with_less_kept(layout, dropout):
    expected_loss, expected, all_kept = step(NONE, dropout)
    loss, gradients, kept = step(layout, dropout)
    assert torch.equal(loss, expected_loss)
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        assert torch.equal(gradient, expected[name]), name
    assert kept < all_kept


def test_selective_leaves_out_the_attention_probabilities():
    with_dropout = step(NONE, 0.3)[2] - step(SELECTIVE, 0.3)[2]
    probabilities = LAYERS * SAMPLES * 4 * SEQ * SEQ * 8
    assert with_dropout >= 2 * probabilities  # softmax's output and the dropped one, in float64


def test_full_keeps_little_more_than_the_blocks_inputs():
    block_input = SAMPLES * SEQ * WIDTH * 8
    one_layer_less = step(FULL, 0.0)[2] - LAYERS * block_input
    assert one_layer_less < step(NONE, 0.0)[2] / LAYERS


def test_each_layer_does_as_it_is_told():
    """Dropout makes all three differ: of each layer what its mode keeps is kept."""
    none, selective, full, mixed = (step(layout, 0.3)[2] for layout in (NONE, SELECTIVE, FULL, MIXED_RUNS))
    around = 0.03 * none  # rotary tables and the like, which are kept once
    assert mixed == pytest.approx((none + selective + full) / 3, abs=around)


def test_a_stage_goes_by_the_layers_of_the_whole_model():
    shape = ModelConfig(n_layers=LAYERS, d_model=WIDTH, n_heads=4, seq_len=SEQ)
    model = Transformer(shape, RECOMPUTE_VOCAB)
    del model.blocks["0"], model.blocks["1"]
    assert recompute(model, Layout(recompute_cut="2*none+1*full")) == 1
    assert recompute(model, Layout(recompute_cut="2*full+1*none")) == 0


def test_layouts_name_it():
    assert Layout(recompute="full").line() == "recompute=full"
