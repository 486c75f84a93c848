"""The memory of adapters beside frozen weights: what blocks keep, the state, and the fullest moment of a step.

`make lora` compares every kind of block and more layouts.
"""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from cost.activation_bytes import activation_bytes
from cost.exact_state import state_bytes
from phalanx.config import layout_line
from phalanx.config.job import Job, Train
from phalanx.config.layout import Layout
from phalanx.config.model import LoRA
from phalanx.partition.derived import PARAMETER_BYTES
from train.test_memory import GPT, VOCAB, held
from train.test_predicted_memory import BLOCKS, DEEP, WORDS, compare, kept

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
        (found,) = ranks(kept, 1, Layout(), model, precision)
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
FEW = [("tp=1", "bf16"), ("tp=2,sp=true", "bf16"), ("dp_shard=2,zero=1", "fp32"), ("dp_shard=2", "bf16")]


ADAPTERS = {"none": LoRA(), "all": LoRA(rank=8), "attention": LoRA(rank=8, targets="attention")}


@pytest.mark.parametrize("targets", ADAPTERS if EVERY else ["attention"])
@pytest.mark.parametrize(("line", "precision"), LAYOUTS if EVERY else FEW)
def test_the_fullest_moment_of_a_step_is_the_predicted_one(ranks, line, precision, targets):
    for plain in (DEEP, WORDS) if EVERY and "pp" not in line else (DEEP,):
        model = replace(plain, lora=ADAPTERS[targets])
        job = Job(model=model, layout=layout_line.parse(line), train=Train(global_batch=8, precision=precision))
        compare(ranks, job)


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
