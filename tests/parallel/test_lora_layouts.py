"""Adapters under every layout: gradients and parameters of one process, frozen weights bit for bit, every byte sent.

`make lora` compares the traffic of every layout of test_predicted_traffic.py, with two choices of targets.
"""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

from covering import also_whole
from parallel.steps import steps, worst
from parallel.test_predicted_traffic import CASES, DEEP, GPT, LLAMA, ONE_KEY, SWITCH, check, job_of
from phalanx.blocks.parameters import parameter_shapes, trained_shapes
from phalanx.config import layout_line
from phalanx.config.job import Job, Optimizer, Train
from phalanx.config.layout import Layout
from phalanx.config.model import LoRA, ModelConfig
from phalanx.model.seeding import initial_value

VOCAB = 29
SEED = Train().seed


def adapted(model: ModelConfig, targets: str = "all") -> ModelConfig:
    return replace(model, lora=LoRA(rank=3, targets=targets))


FOLDED = replace(SWITCH, moe=replace(SWITCH.moe, capacity=0.0))


def run(ranks, model: ModelConfig, line: str, optimizer: Optimizer):
    job = Job(
        model=adapted(model),
        layout=layout_line.parse(line),
        train=Train(global_batch=8, precision="fp64"),
        optimizer=optimizer,
    )
    return ranks(steps, job.layout.processes, job, VOCAB)[0]


@pytest.mark.parametrize(
    ("model", "line"),
    [
        (LLAMA, "dp_replicate=2,dp_shard=2,zero=2"),
        (LLAMA, "dp_shard=2,tp=2,sp=true,sp_regather=true,zero=3,recompute=selective"),
        (ONE_KEY, "tp=4"),
        (DEEP, "pp=2,dp_shard=2,zero=1,schedule=zb_h1,accumulation=4"),
        (LLAMA, "cp=2,tp=2"),
        (SWITCH, "dp_shard=2,ep=2,tp=2,sp=true,recompute=full"),
        *also_whole(
            (SWITCH, "dp_shard=2,ep=2,tp=2,tiles=2,tile=all"),
            (FOLDED, "dp_shard=2,tp=2,sp=true,ep=4,etp=1,recompute=full"),
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_every_layout_trains_the_adapters_as_one_process(ranks, model, line):
    optimizer = Optimizer(eps=1e-6)
    (shown, gradients, parameters), (expected, reference, after) = (
        run(ranks, model, layout, optimizer) for layout in (line, "tp=1")
    )
    assert torch.tensor(shown).sub(torch.tensor(expected)).abs().max() < 1e-9
    trained = trained_shapes(adapted(model), VOCAB)
    assert set(gradients) == set(trained)
    assert worst(gradients, reference, 1e-4) < 1e-9
    assert worst(parameters, after, 1e-4) < 1e-9
    for name, shape in parameter_shapes(adapted(model), VOCAB).items():
        if name not in trained:
            initial = initial_value(name, shape, adapted(model), SEED)
            assert torch.equal(parameters[name], initial.double()), name
    assert all(parameters[name].any() for name in trained if ".lora_b." in name)


def test_8_bit_moments_of_adapters_do_not_depend_on_the_layout(ranks):
    model = replace(LLAMA, d_model=128, d_ff=256, head_dim=32)
    model, optimizer = replace(model, lora=LoRA(rank=32)), Optimizer(state="8bit", eps=1e-6)
    train = Train(global_batch=4, precision="fp64")
    results = [
        ranks(steps, layout.world, Job(model, layout=layout, train=train, optimizer=optimizer), VOCAB)[0]
        for layout in (Layout(), Layout(dp_shard=2, zero=2), Layout(tp=2))
    ]
    for _, _, parameters in results[1:]:
        assert worst(parameters, results[0][2], 1e-4) < 1e-9


FEW = [
    (GPT, "dp_shard=3,zero=1,accumulation=2"),
    (GPT, "tp=2,sp=true,sp_regather=true,recompute=full"),
    (FOLDED, "dp_shard=2,tp=2,sp=true,ep=2,etp=1,recompute=full"),
    (LLAMA, "dp_shard=2,tiles=3,recompute=full"),
    *also_whole((DEEP, "pp=2,accumulation=4,dp_shard=2,schedule=zb_h1"), (SWITCH, "dp_replicate=2,dp_shard=2,ep=2")),
]
EVERY = bool(os.environ.get("PHALANX_LORA"))
REFUSED = ("sync", "pipedream", "redundant_experts")
COMPARED = [case for case in CASES if not any(word in case[1] for word in REFUSED)] if EVERY else FEW


@pytest.mark.parametrize("targets", ["all", "attention"] if EVERY else ["all"])
@pytest.mark.parametrize(("model", "line"), COMPARED, ids=[line for _, line in COMPARED])
def test_every_byte(ranks, model, line, targets):
    check(ranks, job_of(adapted(model, targets), layout_line.parse(line)))


def test_targets_of_attention_alone_send_less(ranks):
    """The gathered input of a frozen MLP is not gathered again for weight gradients."""
    check(ranks, job_of(adapted(GPT, "attention"), layout_line.parse("tp=2,sp=true,sp_regather=true")))
