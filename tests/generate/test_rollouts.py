"""GRPO: one process equals any layout, from generation to the weights; what it refuses, resumes and rewards."""

from __future__ import annotations

import dataclasses
import json
import random

import pytest
import torch

from phalanx.config.cluster import Cluster
from phalanx.config.job import Checkpoint, Data, GrpoOptions, Job, Optimizer, RunOptions, Train
from phalanx.config.layout_line import parse
from phalanx.config.model import ModelConfig
from train.runs import change, rows, train, weights


def ones(prompt: str, completion: str, answer: str) -> float:
    """A reward that a model without training gets, too: a share of ones, and a little for the answer's length."""
    return completion.count("1") / 4 + (len(completion) == len(answer)) / 8


@pytest.fixture(scope="module")
def job(tmp_path_factory) -> Job:
    folder, draw = tmp_path_factory.mktemp("grpo"), random.Random(3)
    with (folder / "sums.jsonl").open("w") as file:
        for _ in range(40):
            terms = [draw.randrange(10) for _ in range(draw.choice([2, 2, 3, 5]))]
            file.write(json.dumps({"prompt": "+".join(map(str, terms)) + "=", "answer": sum(terms)}) + "\n")
    return Job(
        model=ModelConfig(n_layers=2, d_model=16, n_heads=4, n_kv_heads=2, seq_len=16, positions="rope"),
        cluster=Cluster(peak_tflops=1.0),
        data=Data(
            *("prompts", str(folder / "sums.jsonl")),
            template="raw",
            val_fraction=0.2,
            dir=str(folder / "data"),
        ),
        optimizer=Optimizer(lr=1e-2, warmup_steps=1),
        train=Train(
            steps=4,
            global_batch=16,
            precision="fp64",
            eval_samples=6,
            grpo=GrpoOptions(group=4, reward=f"{__name__}:ones", max_new_tokens=5, updates=2, clip=0.05, beta=0.1),
        ),
        checkpoint=Checkpoint(keep=0),
        run=RunOptions(name="run", dir=str(folder / "runs"), sample_tokens=0),
    )


@pytest.fixture(scope="module")
def alone(ranks, job) -> Job:
    """The job after a run on one process."""
    ranks(train, 1, job, timeout=120)
    return job


def curve(job: Job) -> list[float]:
    names = ("loss", "grad_norm", "reward", "reward_std", "zero_variance", "kl", "clip_fraction", "entropy", "length")
    steps = [row[name] for row in rows(job, "step") for name in names]
    return [*steps, *(row[name] for row in rows(job, "validation") for name in ("val_reward", "val_length"))]


def test_completions_are_learned_from(alone):
    first, *_, last = rows(alone, "step")
    assert 0 < first["reward"] < 1
    assert first["zero_variance"] < 1
    assert first["kl"] == pytest.approx(0, abs=1e-15)
    assert last["kl"] > 0
    assert first["clip_fraction"] == 0  # the policy that generated the batch
    assert last["clip_fraction"] > 0
    assert all(row["gap"] < 1e-12 for row in rows(alone, "step"))


@pytest.mark.parametrize(
    "line",
    [
        "dp_replicate=2",
        "dp_shard=2,zero=3",
        "tp=2,sp=true",
        "pp=2,micro_batch=2",
        "cp=2",
        "dp_shard=2,tp=2,loss_chunk=5",
        "pp=2,cp=2,micro_batch=4",
    ],
)
def test_any_layout_generates_and_trains_as_one_process(ranks, alone, line):
    layout = parse(line)
    other = change(dataclasses.replace(alone, layout=layout), "run", name=f"run-{line}")
    ranks(train, layout.processes, other, timeout=200)
    assert curve(other) == pytest.approx(curve(alone), rel=1e-9, abs=1e-12)
    found = weights(other)
    for name, tensor in weights(alone).items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-7, atol=1e-10, msg=name)
