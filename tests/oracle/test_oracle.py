"""The project's runs equal those of a plain program that shares no code with it."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch

from oracle import plain
from oracle.runs import VOCAB, batches, differences, expected, start, stepped, trained
from phalanx.config.cluster import Cluster
from phalanx.config.job import Data, Job, Optimizer, RunOptions, Train
from phalanx.config.layout import Layout
from phalanx.config.model import ModelConfig, MoE
from phalanx.parallel.data import Replica
from phalanx.parallel.parameter_shards import ParameterShard
from phalanx.train import learning_rate
from phalanx.train.step import Stepper

BOUND = 1e-12
"""Largest relative difference of what is equal."""

GPT = ModelConfig(n_layers=2, d_model=24, n_heads=4, vocab_size=VOCAB, seq_len=12)
LLAMA = replace(
    GPT,
    n_kv_heads=2,
    head_dim=8,
    norm="rmsnorm",
    positions="rope",
    rope_theta=500.0,
    activation="swiglu",
    bias=False,
    tied=False,
)
# A key bias has no gradient but rounding noise, near 1e-17; at eps=1e-8 Adam would make of it a difference of 1e-11.
OPTIMIZER = Optimizer(lr=1e-2, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.3, clip=0.5, warmup_steps=2)
JOB = Job(model=GPT, optimizer=OPTIMIZER, train=Train(steps=5, global_batch=6, precision="fp64"))

JOBS = {
    "gpt": JOB,
    "llama": replace(JOB, model=LLAMA, data=Data(document_mask=True), optimizer=replace(OPTIMIZER, schedule="linear")),
    "windows": replace(JOB, model=replace(LLAMA, window=5), data=Data(document_mask=True)),
    "mixture": replace(
        JOB,
        model=replace(LLAMA, moe=MoE(n_experts=4, top_k=2, d_ff=16, n_shared=1, aux_loss=0.2, z_loss=0.1)),
        optimizer=replace(OPTIMIZER, schedule="wsd", decay_fraction=0.4),
    ),
    "gpt with experts": replace(
        JOB,
        model=replace(
            GPT, activation="gelu_tanh", moe=MoE(n_experts=5, top_k=2, d_ff=16, renormalise=False, n_dense_layers=1)
        ),
    ),
    "mixture with sigmoid router": replace(
        JOB,
        model=replace(
            LLAMA,
            moe=MoE(
                n_experts=8,
                top_k=3,
                d_ff=16,
                n_shared=2,
                router="sigmoid",
                route_scale=2.5,
                aux_loss=0.2,
                bias_balanced=True,
                bias_rate=0.05,
            ),
        ),
    ),
}


def compared(ranks, job: Job, layout: Layout, run=stepped) -> dict[str, float]:
    """By how much a run under a layout differs from the oracle's."""
    job = replace(job, layout=layout)
    weights, made = start(job), batches(job)
    oracle = expected(job, weights, made)
    assert min(oracle.norms) > 2 * job.optimizer.clip, "every gradient is clipped"
    return differences(ranks(run, layout.processes, job, weights, made)[0], oracle, job.optimizer.lr)


def equal(found: dict[str, float]) -> bool:
    return all(difference < BOUND for difference in found.values())


def test_the_oracle_shares_no_code():
    tree = ast.parse(Path(plain.__file__).read_text(encoding="utf-8"))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {node.module if isinstance(node, ast.ImportFrom) else node.names[0].name for node in imports}
    assert names == {"__future__", "collections.abc", "dataclasses", "math", "torch", "torch.nn.functional"}


@pytest.mark.parametrize("kind", JOBS)
def test_steps_of_one_process_equal_the_oracle(ranks, kind):
    assert equal(compared(ranks, JOBS[kind], Layout(accumulation=3)))


@pytest.mark.parametrize("kind", JOBS)
def test_a_run_of_one_process_equals_the_oracle(ranks, kind, tmp_path):
    """From initial weights and token shards to the rows of metrics.jsonl."""
    job = replace(
        JOBS[kind],
        layout=Layout(accumulation=3),
        data=Data(corpus="random", random_tokens=5000, random_vocab=VOCAB, dir=str(tmp_path / "data")),
        optimizer=replace(JOBS[kind].optimizer, clip=0.1),
        cluster=Cluster(peak_tflops=1.0),
        run=RunOptions(name="run", dir=str(tmp_path / "runs")),
    )
    ((weights, read, found),) = ranks(trained, 1, job)
    assert len(read) == job.train.steps
    assert all(torch.equal(tokens[:, 1:], targets[:, :-1]) for tokens, targets, _ in read)
    oracle = expected(job, weights, read)
    assert min(oracle.norms) > 2 * job.optimizer.clip, "every gradient is clipped"
    assert equal(differences(found, oracle, job.optimizer.lr))


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        ("gpt", Layout(tp=2, sp=True, accumulation=3)),
        ("llama", Layout(dp_shard=2, accumulation=3)),
        ("llama", Layout(cp=2, accumulation=2)),
        ("windows", Layout(cp=2, accumulation=2)),
        ("mixture", Layout(pp=2, accumulation=6)),
        ("mixture with sigmoid router", Layout(dp_shard=2, ep=2, zero=1)),
    ],
    ids=lambda value: value if isinstance(value, str) else value.line(),
)
def test_two_ranks_equal_the_oracle(ranks, kind, layout):
    assert equal(compared(ranks, JOBS[kind], layout))


def gradient_times_two(*args):
    real = Stepper.factor
    with mock.patch.object(Stepper, "factor", lambda *args: 2 * real(*args)):
        return stepped(*args)


def decay_of_norms(*args):
    with mock.patch.object(ParameterShard, "decays", property(lambda shard: not shard.name.endswith(".bias"))):
        return stepped(*args)


def rate_of_the_next_step(*args):
    real = learning_rate.at_step
    with mock.patch.object(learning_rate, "at_step", lambda step, *args: real(step + 1, *args)):
        return stepped(*args)


def mean_of_means(*args):
    """Makes the gradient the mean of the micro-batches' mean gradients, a mistake."""
    real = Replica.forward_backward

    def forward_backward(self, micro, factor, *, last):
        return real(self, micro, 1 / int((micro.targets != -100).sum()) / 3, last=last)

    with mock.patch.object(Replica, "forward_backward", forward_backward):
        return stepped(*args)


@pytest.mark.parametrize(
    ("sabotage", "differs"),
    [
        (gradient_times_two, {"gradient norm"}),
        (decay_of_norms, {"loss", "gradient norm", "weights"}),
        (rate_of_the_next_step, {"loss", "gradient norm", "learning rate", "weights"}),
        (mean_of_means, {"loss", "gradient norm", "weights"}),
    ],
)
def test_a_mistake_that_all_layouts_share_is_seen(ranks, sabotage, differs):
    """A layout's comparison with one process cannot see these. AdamW and clipping hide a gradient's scale from losses
    and weights, not from the norm."""
    found = compared(ranks, JOBS["llama"], Layout(accumulation=3), sabotage)
    assert {quantity for quantity, difference in found.items() if difference > 1e-6} == differs
