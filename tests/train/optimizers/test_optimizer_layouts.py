"""Every optimizer in every kind of layout: equal to one process, resumed in another layout, with the state that the
formula says. Muon has a file of its own."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from cost.exact_state import checkpoint_bytes, state_bytes
from parallel.steps import steps, worst
from phalanx.check.job import problems_of
from phalanx.config import layout_line
from phalanx.config.job import Job, Optimizer, Train
from phalanx.config.layout import Layout
from phalanx.config.model import ModelConfig, MoE
from train.runs import change, moves_between, train, weights
from train.test_memory import held

VOCAB = 13
SGD = Optimizer(name="sgd", lr=1e-2, momentum=0.9, nesterov=True, clip=0.5, weight_decay=0.01)
LION = Optimizer(name="lion", lr=1e-2, betas=(0.9, 0.99), clip=0.5)
ADAMW8BIT = Optimizer(name="adamw8bit", lr=1e-2, clip=0.5)
GPT = ModelConfig(n_layers=2, d_model=128, n_heads=4, seq_len=8)
LLAMA = ModelConfig(
    n_layers=2, d_model=128, n_heads=4, n_kv_heads=2, d_ff=384, seq_len=8,
    norm="rmsnorm", positions="rope", activation="swiglu", bias=False, tied=False,
)  # fmt: skip
EXPERTS = dataclasses.replace(LLAMA, moe=MoE(n_experts=4, top_k=2, d_ff=128))
CASES = [
    (SGD, GPT, "dp_shard=2,zero=2,bucket_mb=0.2"),
    (SGD, GPT, "dp_shard=2,tp=2"),
    (LION, GPT, "dp_shard=3,zero=1"),
    (LION, LLAMA, "tp=2,pp=2,accumulation=2"),
    (LION, EXPERTS, "dp_shard=2,ep=2"),
    (ADAMW8BIT, GPT, "dp_replicate=2,bucket_mb=0.3"),
    (ADAMW8BIT, GPT, "dp_shard=3,zero=1,bucket_mb=0.3"),
    (ADAMW8BIT, LLAMA, "dp_shard=2,tp=2,zero=2,bucket_mb=0.3"),
    (ADAMW8BIT, LLAMA, "dp_shard=3"),
    (ADAMW8BIT, GPT, "dp_shard=2,tiles=2"),
    (ADAMW8BIT, EXPERTS, "dp_shard=4,ep=2,zero=1"),
]


def case_id(value) -> str:
    return value.name if isinstance(value, Optimizer) else value if isinstance(value, str) else ""


@pytest.fixture(scope="module")
def alone(ranks):
    """One process, by optimizer and model."""
    known = {}

    def result(optimizer: Optimizer, model: ModelConfig):
        if (optimizer, model) not in known:
            known[optimizer, model] = ranks(steps, 1, job_of(optimizer, model, Layout()), VOCAB)[0]
        return known[optimizer, model]

    return result


def job_of(optimizer: Optimizer, model: ModelConfig, layout: Layout) -> Job:
    return Job(model=model, layout=layout, train=Train(global_batch=12, precision="fp64"), optimizer=optimizer)


@pytest.mark.parametrize(("optimizer", "model", "line"), CASES, ids=case_id)
def test_a_layout_equals_one_process(ranks, alone, optimizer, model, line):
    job = job_of(optimizer, model, layout_line.parse(line))
    assert not problems_of(job)
    (shown, gradients, found), *others = ranks(steps, job.layout.processes, job, VOCAB)
    assert all(other[0] == shown for other in others)
    expected = alone(optimizer, model)
    for pair, wanted in zip(shown, expected[0], strict=True):
        assert pair == pytest.approx(wanted, rel=1e-9)
    assert worst(gradients, expected[1], 1e-6 * max(float(g.abs().max()) for g in expected[1].values())) < 1e-9
    assert worst(found, expected[2], 1e-2) < 1e-9


@pytest.mark.parametrize(
    ("optimizer", "layouts"),
    [
        (SGD, (Layout(dp_shard=2), Layout(tp=2))),
        (LION, (Layout(tp=2), Layout(dp_shard=3, zero=1))),
        (ADAMW8BIT, (Layout(dp_shard=2, zero=2, bucket_mb=0.2), Layout(tp=2, sp=True), Layout(dp_shard=3))),
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
        (LION, "dp_shard=2,tp=2"),
        (ADAMW8BIT, "dp_shard=3,zero=2,bucket_mb=0.3,micro_batch=1"),
        (ADAMW8BIT, "dp_shard=2,tp=2"),
        (ADAMW8BIT, ""),
    ],
    ids=case_id,
)
def test_state_is_what_the_formula_says(ranks, optimizer, line):
    layout = layout_line.parse(line) if line else Layout()
    job = Job(model=GPT, layout=layout, train=Train(global_batch=12, precision="bf16"), optimizer=optimizer)
    every = [before for before, _ in ranks(held, layout.processes, job)]
    found = max(every, key=lambda state: state.total)
    assert found == state_bytes(GPT, layout, "bf16", vocab=64, optimizer=optimizer)
