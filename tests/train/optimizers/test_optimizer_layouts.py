"""Every optimizer in every kind of layout: equal to one process, and resumed in another layout."""

from __future__ import annotations

import dataclasses
from functools import cache
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from cost.exact_state import checkpoint_bytes, state_bytes
from covering import also_whole
from parallel.steps import steps
from parallel.test_composition import VOCAB, compare_and_check_bytes
from phalanx.check.job import problems_of
from phalanx.config import layout_line
from phalanx.config.job import Job, Optimizer, Train
from phalanx.config.layout import Layout
from phalanx.config.model import MLA, ModelConfig, MoE
from phalanx.parallel.parameter_shards import ParameterShard
from phalanx.partition.tensor_slices import TensorSlice
from phalanx.train.optimizer import ShardedOptimizer
from phalanx.train.optimizers.muon import orthogonal
from train.runs import change, moves_between, train, weights
from train.test_memory import held

# Every optimizer in every kind of layout: equal to one process, resumed in another layout, with the state that the
# formula says. Muon has a file of its own.


SGD = Optimizer(name="sgd", lr=1e-2, momentum=0.9, nesterov=True, clip=0.5, weight_decay=0.01)
LION = Optimizer(name="lion", lr=1e-2, betas=(0.9, 0.99), clip=0.5)
ADAMW8BIT = Optimizer(state="8bit", lr=1e-2, clip=0.5)
BF16 = Optimizer(state="bf16", master="none", lr=1e-2, clip=0.5)
KAHAN = Optimizer(name="lion", state="8bit", master="none", rounding="kahan", lr=1e-2, clip=0.5)
GPT = ModelConfig(n_layers=2, d_model=128, n_heads=4, seq_len=8)
LLAMA = ModelConfig(
    n_layers=2, d_model=128, n_heads=4, n_kv_heads=2, d_ff=384, seq_len=8,
    norm="rmsnorm", positions="rope", activation="swiglu", bias=False, tied=False,
)  # fmt: skip
EXPERTS = dataclasses.replace(LLAMA, moe=MoE(n_experts=4, top_k=2, d_ff=128))
CASES = [
    (SGD, GPT, "dp_shard=2,zero=2,bucket_mb=0.2"),
    (LION, LLAMA, "tp=2,pp=2,accumulation=2"),
    (ADAMW8BIT, GPT, "dp_shard=3,zero=1,bucket_mb=0.3"),
    (ADAMW8BIT, LLAMA, "dp_shard=3"),
    (ADAMW8BIT, GPT, "dp_shard=2,tiles=2"),
    (ADAMW8BIT, EXPERTS, "dp_shard=4,ep=2,zero=1"),
    (BF16, GPT, "dp_replicate=2,bucket_mb=0.3,offload=optimizer"),
    (BF16, EXPERTS, "dp_shard=2,ep=2"),
    (KAHAN, LLAMA, "dp_shard=2,tp=2,zero=2,bucket_mb=0.3"),
    *also_whole(
        (SGD, GPT, "dp_shard=2,tp=2"),
        (LION, GPT, "dp_shard=3,zero=1"),
        (LION, EXPERTS, "dp_shard=2,ep=2"),
        (ADAMW8BIT, GPT, "dp_replicate=2,bucket_mb=0.3"),
        (ADAMW8BIT, LLAMA, "dp_shard=2,tp=2,zero=2,bucket_mb=0.3"),
        (BF16, GPT, "dp_shard=3,zero=1,bucket_mb=0.3"),
        (BF16, GPT, "dp_shard=2,tiles=2"),
        (BF16, LLAMA, "tp=2,pp=2,accumulation=2"),
    ),
]


def case_id(value) -> str:
    return (
        f"{value.name} {value.state} {value.master}"
        if isinstance(value, Optimizer)
        else value
        if isinstance(value, str)
        else ""
    )


@pytest.fixture(scope="module")
def alone(ranks):
    """One process, by optimizer and model."""
    return cache(lambda optimizer, model: ranks(steps, 1, job_of(optimizer, model, Layout()), VOCAB)[0])


def job_of(optimizer: Optimizer, model: ModelConfig, layout: Layout) -> Job:
    return Job(model=model, layout=layout, train=Train(global_batch=12, precision="fp64"), optimizer=optimizer)


@pytest.mark.parametrize(("optimizer", "model", "line"), CASES, ids=case_id)
def test_a_layout_equals_one_process(ranks, alone, optimizer, model, line):
    job = job_of(optimizer, model, layout_line.parse(line))
    assert not problems_of(job)
    compare_and_check_bytes(ranks, job, alone(optimizer, model))


@pytest.mark.parametrize(
    ("optimizer", "layouts"),
    [
        (ADAMW8BIT, (Layout(dp_shard=2, zero=2, bucket_mb=0.2), Layout(tp=2, sp=True), Layout(dp_shard=3))),
        *also_whole(
            (SGD, (Layout(dp_shard=2), Layout(tp=2))),
            (LION, (Layout(tp=2), Layout(dp_shard=3, zero=1))),
        ),
    ],
    ids=case_id,
)
def test_resuming_on_another_layout_continues_the_same_curve(ranks, job, optimizer, layouts):
    job = dataclasses.replace(change(job, "model", d_model=128, n_heads=4), optimizer=optimizer)
    moves_between(ranks, job, layouts)


def test_a_checkpoint_has_codes_with_scales_of_matrices_and_moments_of_the_rest(ranks, job):
    job = dataclasses.replace(change(job, "model", d_model=128, n_heads=4), optimizer=ADAMW8BIT)
    ranks(train, 1, change(job, "train", steps=2))
    found = weights(job)
    codes, scales = (found[f"{kind}/blocks.0.mlp.down.weight"] for kind in ("exp_avg", "exp_avg_scale"))
    assert (codes.dtype, codes.shape) == (torch.uint8, (128, 512))
    assert (scales.dtype, scales.shape) == (torch.float64, (128, 8)), "blocks of 64: an eighth of a row"
    assert found["exp_avg_sq/final_norm.weight"].dtype == torch.float64
    assert "exp_avg_scale/final_norm.weight" not in found
    assert sum(tensor.nbytes for tensor in found.values()) == checkpoint_bytes(job.model, "fp64", VOCAB, ADAMW8BIT)


@pytest.mark.parametrize(
    ("optimizer", "line"),
    [
        (SGD, "dp_shard=2,zero=1"),
        (dataclasses.replace(SGD, momentum=0.0, nesterov=False), ""),
        (ADAMW8BIT, "dp_shard=3,zero=2,bucket_mb=0.3,micro_batch=1"),
        (ADAMW8BIT, "dp_shard=2,tp=2"),
        (ADAMW8BIT, ""),
        (BF16, "dp_shard=3,zero=1"),
        (KAHAN, "dp_shard=2,zero=2,bucket_mb=0.3"),
        *also_whole((LION, "dp_shard=2,tp=2"), (BF16, "dp_shard=2,tp=2")),
    ],
    ids=case_id,
)
def test_state_is_what_the_formula_says(ranks, optimizer, line):
    layout = layout_line.parse(line) if line else Layout()
    job = Job(model=GPT, layout=layout, train=Train(global_batch=12, precision="bf16"), optimizer=optimizer)
    every = [before for before, _ in ranks(held, layout.processes, job)]
    found = max(every, key=lambda state: state.total)
    assert found == state_bytes(GPT, layout, "bf16", vocab=64, optimizer=optimizer)


# Muon: equal to torch's, AdamW for the rest, and in every layout equal to one process.

CONFIG = Optimizer(name="muon", lr=2e-2, momentum=0.95, nesterov=True, clip=0)
SHAPES = {
    "embed.weight": (7, 6),
    "blocks.0.attn_norm.weight": (6,),
    "blocks.0.attn.wq.weight": (8, 6),
    "blocks.0.mlp.down.weight": (6, 10),
}
SMALL_GPT = ModelConfig(n_layers=2, d_model=24, n_heads=4, seq_len=8, bias=True, qkv_bias=True)
SMALL_LLAMA = ModelConfig(
    n_layers=3, d_model=24, n_heads=4, n_kv_heads=2, head_dim=8, d_ff=40, seq_len=8,
    norm="rmsnorm", positions="rope", activation="swiglu", bias=False, tied=False,
)  # fmt: skip
DEEPSEEK = dataclasses.replace(
    SMALL_LLAMA,
    n_kv_heads=4,
    head_dim=0,
    moe=MoE(n_experts=4, top_k=2, d_ff=12, n_dense_layers=1, n_shared=1, bias_balanced=True),
    mla=MLA(q_rank=12, kv_rank=10, rope_head_dim=4, nope_head_dim=6, v_head_dim=5),
)


def parameters(dtype: torch.dtype = torch.float64) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    drawn = {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in SHAPES.items()}
    return {name: nn.Parameter(tensor.to(dtype)) for name, tensor in drawn.items()}


def gradients(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step + 1)
    return {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in SHAPES.items()}


def trained(config: Optimizer, dtype: torch.dtype = torch.float64, count: int = 3) -> dict[str, Tensor]:
    held = parameters(dtype)
    shards = [ParameterShard(name, (TensorSlice(SHAPES[name]),), 0, 0, p) for name, p in held.items()]
    optimizer = ShardedOptimizer(shards, config)
    for step in range(count):
        for shard in shards:
            shard.gradient = gradients(step)[shard.name].to(dtype)
        optimizer.step(config.lr, optimizer.square_norm().sqrt())
    return {name: p.detach() for name, p in held.items()}


@pytest.mark.parametrize("nesterov", [True, False])
def test_matrices_move_as_by_torchs_muon(nesterov):
    config = dataclasses.replace(CONFIG, nesterov=nesterov)
    held = {name: p for name, p in parameters().items() if name.startswith("blocks") and p.ndim == 2}
    reference = torch.optim.Muon(
        held.values(), config.lr, config.weight_decay, config.momentum, nesterov, adjust_lr_fn="match_rms_adamw"
    )
    # torch's computes in bf16 whatever the parameters are.
    with mock.patch.object(Tensor, "bfloat16", Tensor.clone):
        for step in range(3):
            for name, parameter in held.items():
                parameter.grad = gradients(step)[name]
            reference.step()
    found = trained(config)
    for name, parameter in held.items():
        torch.testing.assert_close(found[name], parameter.detach(), rtol=1e-12, atol=1e-12)


def test_the_rest_moves_as_by_adamw():
    found, expected = trained(CONFIG), trained(dataclasses.replace(CONFIG, name="adamw"))
    assert torch.equal(found["embed.weight"], expected["embed.weight"])
    assert torch.equal(found["blocks.0.attn_norm.weight"], expected["blocks.0.attn_norm.weight"])
    assert not torch.equal(found["blocks.0.attn.wq.weight"], expected["blocks.0.attn.wq.weight"])


def test_in_bf16_it_orthogonalises_nearly_the_same():
    found, expected = trained(dataclasses.replace(CONFIG, newton_schulz="bf16")), trained(CONFIG)
    for name in SHAPES:
        torch.testing.assert_close(found[name], expected[name], rtol=0, atol=0.05)


@pytest.mark.parametrize("shape", [(3, 5, 9), (2, 9, 5), (1, 6, 6)])
def test_singular_values_come_near_one(shape):
    generator = torch.Generator().manual_seed(0)
    found = orthogonal(torch.randn(shape, generator=generator, dtype=torch.float64))
    assert found.shape == shape
    values = torch.linalg.svdvals(found)
    assert values.min() > 0.3
    assert values.max() < 1.3


def test_a_momentum_of_nothing_moves_nothing():
    assert not orthogonal(torch.zeros(1, 4, 6)).any()


MUON_LAYOUTS = [
    (SMALL_GPT, "dp_replicate=2"),
    (SMALL_LLAMA, "dp_shard=3,zero=1,accumulation=2"),
    (SMALL_LLAMA, "dp_shard=2,zero=2,bucket_mb=0.004"),
    (SMALL_GPT, "dp_shard=3"),
    (SMALL_GPT, "dp_shard=2,tiles=2"),
    (SMALL_LLAMA, "tp=4,sp=true"),
    (SMALL_LLAMA, "dp_shard=2,tp=2,zero=1,pp=2,accumulation=2,schedule=zb_h1"),
    (DEEPSEEK, "dp_shard=4,ep=2"),
    *also_whole(
        (SMALL_LLAMA, "dp_replicate=2,dp_shard=2,tp=2"),
        (SMALL_LLAMA, "cp=2,dp_shard=2,tp=2"),
        (DEEPSEEK, "dp_shard=2,ep=2,tp=2,zero=2,cp=2"),
    ),
]


@pytest.fixture(scope="module")
def muon_alone(ranks):
    """One process, by model."""
    return cache(lambda model: ranks(steps, 1, muon_job(model, Layout()), VOCAB)[0])


def muon_job(model: ModelConfig, layout: Layout) -> Job:
    train = Train(global_batch=12, precision="fp64")
    return Job(model=model, layout=layout, train=train, optimizer=dataclasses.replace(CONFIG, clip=0.5))


@pytest.mark.parametrize(("model", "line"), MUON_LAYOUTS, ids=[line for _, line in MUON_LAYOUTS])
def test_muon_in_a_layout_equals_one_process(ranks, muon_alone, model, line):
    job = muon_job(model, layout_line.parse(line))
    assert not problems_of(job)
    compare_and_check_bytes(ranks, job, muon_alone(model))


@pytest.mark.parametrize(
    "layouts",
    [
        (Layout(dp_shard=2, zero=2, bucket_mb=0.01), Layout(pp=2, accumulation=4), Layout(dp_shard=2, tp=2)),
        *also_whole((Layout(dp_shard=2), Layout(tp=2, sp=True), Layout(dp_shard=3, zero=1))),
    ],
    ids=lambda layouts: " then ".join(each.line() for each in layouts),
)
def test_muon_resumes_on_another_layout(ranks, job, layouts):
    moves_between(ranks, dataclasses.replace(job, optimizer=dataclasses.replace(CONFIG, lr=1e-2)), layouts)


def test_a_checkpoint_has_a_momentum_for_matrices_and_moments_for_the_rest(ranks, job):
    job = dataclasses.replace(job, optimizer=CONFIG)
    ranks(train, 1, change(job, "train", steps=2))
    names = weights(job)
    assert "momentum_buffer/blocks.0.attn.wq.weight" in names
    assert "exp_avg/blocks.0.attn.wq.weight" not in names
    assert "exp_avg/embed.weight" in names
    assert "exp_avg_sq/blocks.0.attn_norm.weight" in names
    assert "momentum_buffer/embed.weight" not in names


@pytest.mark.parametrize(
    ("model", "line"),
    [
        (SMALL_LLAMA, "dp_shard=3,zero=1"),
        (SMALL_LLAMA, "dp_shard=3,zero=2,bucket_mb=0.004"),
        (SMALL_LLAMA, "dp_shard=2,tp=2"),
        (DEEPSEEK, "dp_shard=4,ep=2,zero=1"),
        *also_whole((SMALL_GPT, "dp_replicate=2"), (DEEPSEEK, "dp_shard=4,ep=2")),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_state_of_muon_is_what_the_formula_says(ranks, model, line):
    """Uneven shares, padding included."""
    layout = layout_line.parse(line)
    train = Train(global_batch=12, precision="bf16")
    every = ranks(held, layout.processes, Job(model=model, layout=layout, train=train, optimizer=CONFIG))
    found = max((before for before, _ in every), key=lambda state: state.total)
    assert found == state_bytes(model, layout, "bf16", vocab=64, optimizer=CONFIG)


def test_servers_that_update_by_themselves_are_refused():
    layout = layout_line.parse("dp_replicate=2,tp=2,sync=asp")
    job = Job(model=SMALL_GPT, layout=layout, train=Train(global_batch=8), optimizer=CONFIG)
    (problem,) = problems_of(job)
    assert problem == (
        "layout.sync",
        "with asp each rank's server updates by itself, but muon needs whole matrices of all 2 ranks that share them; "
        "nearest legal: sync=bsp, or tp=1 and dp_shard=1",
    )
    muon_alone = dataclasses.replace(job, layout=layout_line.parse("dp_replicate=2,sync=asp"))
    assert not problems_of(muon_alone)
