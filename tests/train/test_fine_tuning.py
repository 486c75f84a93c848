"""Fine-tuning on conversations: any layout makes the curve of one process, and a run goes on bit for bit."""

import dataclasses
import json
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from phalanx.config.cluster import Cluster
from phalanx.config.job import IGNORE, Checkpoint, Data, Job, Optimizer, RunOptions, Train
from phalanx.config.layout_line import parse
from phalanx.config.model import ModelConfig, MoE
from phalanx.cost.traffic import step_traffic
from phalanx.data.mixture import open_split
from phalanx.data.prepare import prepare
from phalanx.errors import JobError, StoppedError
from phalanx.parallel import mesh as meshes
from phalanx.partition import derived as batch
from phalanx.partition.cut import stages_of
from phalanx.partition.derived import schedule_of
from phalanx.train.step import Stepper
from train.runs import change, losses, rows, train, weights

CHAT = ModelConfig(n_layers=2, d_model=16, n_heads=4, n_kv_heads=2, seq_len=64, positions="rope")
VOCAB = 28
"""Distinct characters of the sums in template alpaca."""
LAYOUTS = [
    "dp_replicate=2",
    "dp_shard=2,zero=3",
    "tp=2,sp=true",
    "pp=2,micro_batch=2",
    "cp=2",
    "cp=2,cp_ulysses=2",
    "dp_shard=2,tp=2,loss_chunk=5",
    "pp=2,cp=2,micro_batch=1",
]


def numbers(path, rows: int = 60) -> None:
    """Sums to answer: some prompts are long and have answers of one digit, so that steps differ in answers."""
    draw = random.Random(5)
    with path.open("w") as file:
        for _ in range(rows):
            terms = [draw.randrange(10) for _ in range(draw.choice([2, 2, 3, 9]))]
            row = {"prompt": "+".join(map(str, terms)) + "=", "completion": str(sum(terms)) * draw.choice([1, 1, 4])}
            file.write(json.dumps(row) + "\n")


def fine_tuning(folder) -> Job:
    """Sums, several to a sample, with the loss on their results."""
    numbers(folder / "sums.jsonl")
    return Job(
        model=CHAT,
        cluster=Cluster(peak_tflops=1.0),
        data=Data(
            corpus="chat",
            path=str(folder / "sums.jsonl"),
            template="alpaca",
            document_mask=True,
            packing=True,
            val_fraction=0.2,
            dir=str(folder / "data"),
        ),
        optimizer=Optimizer(lr=1e-2, warmup_steps=2),
        train=Train(steps=4, global_batch=8, precision="fp64", eval_samples=10),
        checkpoint=Checkpoint(keep=0),
        run=RunOptions(name="run", dir=str(folder / "runs"), sample_tokens=0),
    )


@pytest.fixture(scope="module")
def chat(ranks, tmp_path_factory) -> Job:
    """The job after a run on one process."""
    job = fine_tuning(tmp_path_factory.mktemp("chat"))
    ranks(train, 1, job, timeout=120)
    return job


@pytest.mark.parametrize("line", LAYOUTS)
def test_any_layout_makes_the_curve_of_one_process(ranks, chat, line):
    trained_like(ranks, chat, line)


def trained_like(ranks, one: Job, line: str) -> Job:
    """Returns a job after a run in a layout that is as that of `one` process, and sends what is predicted."""
    layout = parse(line)
    other = change(dataclasses.replace(one, layout=layout), "run", name=f"run-{line}")
    sent = ranks(train, layout.processes, other, timeout=200)[0]["traffic_bytes"]
    most = rows(other, "start")[0]["conversations"]
    assert {axis: by for axis, by in sent.items() if any(by.values())} == predicted_traffic(other, most)
    assert curve(other) == pytest.approx(curve(one), rel=1e-9)
    found = weights(other)
    for name, tensor in weights(one).items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-7, atol=1e-10, msg=name)
    return other


def predicted_traffic(job, conversations: int) -> dict:
    """Returns the bytes per step that the cost model predicts for rank 0; it knows nothing of answers."""
    equation = batch.solve(job.train.global_batch, job.layout)
    stages = None
    if job.layout.pp > 1:
        count = schedule_of(job.layout, equation.accumulation).stages
        stages = stages_of(job.model, job.layout, count, VOCAB)
    of_job = {"precision": job.train.precision, "vocab": VOCAB, "stages": stages, "optimizer": job.optimizer}
    found = step_traffic(job.model, job.layout, equation, conversations=conversations, **of_job)
    return {axis: {name: pytest.approx(sent, 1e-13) for name, sent in by.items()} for axis, by in found.items()}


def curve(job) -> list[float]:
    """Loss and gradient norm of every step, then the validation losses."""
    steps = [value for row in rows(job, "step") for value in (row["loss"], row["grad_norm"])]
    return [*steps, *(row["val_loss"] for row in rows(job, "validation"))]


def test_a_run_goes_on_bit_for_bit_and_not_with_other_packing(ranks, chat):
    resumed = change(chat, "run", name="resumed")
    with pytest.raises(StoppedError):
        ranks(train, 1, resumed, 2)
    with pytest.raises(JobError, match=r"data.packing: True there, False here"):
        ranks(train, 1, change(resumed, "data", packing=False))
    ranks(train, 1, resumed)
    assert curve(resumed) == curve(chat)
    straight, found = weights(chat), weights(resumed)
    assert all(torch.equal(found[name], tensor) for name, tensor in straight.items())


def test_the_loss_is_the_mean_over_the_answers_of_the_step(ranks, chat):
    """Steps differ in their answers; a step's loss is that of the untrained model on exactly its answers."""
    data = open_split(prepare(chat.data), "train", chat.model.seq_len, chat.data)
    counts = [data.valid_tokens(8 * step, 8, chat.train.seed) for step in range(4)]
    assert len(set(counts)) > 1
    frozen = change(change(chat, "optimizer", lr=1e-30, weight_decay=0.0), "run", name="frozen")
    ranks(train, 1, frozen)
    [found] = ranks(answer_losses, 1, frozen)
    assert losses(frozen) == pytest.approx(found, rel=1e-12)


def answer_losses(ranks, job) -> list[float]:
    """The loss of each step from the initial model's logits of each conversation alone, without padding."""
    data = open_split(prepare(job.data), "train", job.model.seq_len, job.data)
    stepper = Stepper(job, meshes.build(job.layout, "cpu"), torch.device("cpu"), data.vocab_size)
    model, found = stepper.replica.objective.model, []
    for step in range(job.train.steps):
        micro = data.micro_batch(data.order(8 * step, 8, job.train.seed), np.arange(8))
        total = count = 0
        for tokens, targets, documents in zip(micro.tokens, micro.targets, micro.documents, strict=True):
            for number in range(documents.max() + 1):
                own = torch.from_numpy(documents == number)
                logits = model(torch.from_numpy(tokens)[own][None])[0].detach()
                answers = torch.from_numpy(targets)[own]
                counted = answers != IGNORE  # nowhere in padding
                total += F.cross_entropy(logits[counted], answers[counted], reduction="sum").item()
                count += int(counted.sum())
        found.append(total / count)
    return found


EXPERTS = MoE(n_experts=4, top_k=2, d_ff=16, aux_loss=0.1, z_loss=0.01, capacity=1.25, bias_balanced=True)
WITH_EXPERTS = [
    "dp_replicate=2",
    "dp_shard=2,ep=2,zero=3",
    "tp=2,sp=true,recompute=full",
    "dp_shard=2,tp=2,ep=2,zero=2",
    "pp=2,micro_batch=2,schedule=zb_h1",
    "cp=2",
    "cp=2,cp_ulysses=2,ep=2",
]


@pytest.fixture(scope="module")
def chat_with_experts(ranks, tmp_path_factory) -> Job:
    """The job of a mixture with penalties, balancing and a capacity, after a run on one process."""
    job = fine_tuning(tmp_path_factory.mktemp("experts"))
    job = dataclasses.replace(job, model=dataclasses.replace(CHAT, moe=EXPERTS))
    ranks(train, 1, job, timeout=120)
    return job


@pytest.mark.parametrize("line", WITH_EXPERTS)
def test_experts_count_no_padding_under_any_layout(ranks, chat_with_experts, line):
    other = trained_like(ranks, chat_with_experts, line)
    assert balance(other) == pytest.approx(balance(chat_with_experts), rel=1e-9)


def balance(job) -> list[float]:
    """The loads and penalties of the run."""
    return [
        value
        for row in rows(job, "experts")
        for value in (*(load for loads in row["loads"].values() for load in loads), row["aux_loss"], row["z_loss"])
    ]


def test_experts_learn_the_same_from_conversations_padded_and_packed(ranks, chat_with_experts):
    """One step of all conversations, in samples of several lengths, one each or several."""
    found = []
    for seq_len, packing in ((128, False), (320, False), (192, True)):
        job = change(change(chat_with_experts, "model", seq_len=seq_len), "data", packing=packing)
        data = open_split(prepare(job.data), "train", seq_len, job.data)
        whole = change(job, "train", global_batch=data.sample_count, steps=1)
        whole = change(whole, "run", name=f"whole-{seq_len}-{packing}")
        [summary] = ranks(train, 1, whole, timeout=120)
        [step] = rows(whole, "step")
        assert step["padding"] == pytest.approx(1 - summary["tokens"] / summary["positions"])
        assert sum(rows(whole, "experts")[0]["loads"]["0"]) == EXPERTS.top_k * summary["tokens"]
        found.append([step["loss"], step["grad_norm"], *balance(whole)])
    assert found[0] == pytest.approx(found[1], rel=1e-9)
    assert found[0] == pytest.approx(found[2], rel=1e-9)
