"""Runs the same training in the project, in two ways, and in the oracle, and compares the results."""

from __future__ import annotations

import json
from collections.abc import Sequence
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from oracle import plain
from phalanx.blocks.parameters import parameter_shapes
from phalanx.config.job import Job
from phalanx.data.loader import MicroBatch
from phalanx.parallel import mesh as meshes
from phalanx.parallel.parameter_shards import wholes
from phalanx.partition import derived as batch_equation
from phalanx.train import learning_rate
from phalanx.train.learning_rate import end_of
from phalanx.train.loop import Trainer
from phalanx.train.requests import StopRequest
from phalanx.train.step import StepInputs, Stepper

VOCAB = 37


def start(job: Job) -> plain.Weights:
    """Weights by the project's names, none of them 0 or 1, where a mistake might not show."""
    generator = torch.Generator().manual_seed(1)
    values = {
        name: torch.randn(shape, generator=generator, dtype=torch.float64) * 0.2
        for name, shape in parameter_shapes(job.model, VOCAB).items()
    }
    return {name: value + name.endswith("norm.weight") for name, value in values.items()}


def batches(job: Job) -> list[plain.Batch]:
    """A batch per step whose sequences have very different numbers of valid tokens, one of them none at all, and
    documents of uneven length where the job masks them."""
    generator = torch.Generator().manual_seed(2)
    rows, seq_len = job.train.global_batch, job.model.seq_len
    made = []
    for step in range(job.train.steps):
        tokens = torch.randint(VOCAB, (rows, seq_len + 1), generator=generator)
        targets = tokens[:, 1:].clone()
        valid = torch.tensor([seq_len, 0, 1, seq_len - 2, 2, 1 + step])
        targets[torch.arange(seq_len) >= valid[:, None]] = -100
        documents = (tokens[:, :-1] % 4 == 0).cumsum(1) if job.data.document_mask else None
        made.append((tokens[:, :-1], targets, documents))
    return made


def expected(job: Job, weights: plain.Weights, made: Sequence[plain.Batch]) -> plain.Result:
    """The oracle's result for a job."""
    model, optimizer, moe = job.model, job.optimizer, job.model.moe
    shape = plain.Shape(
        layers=model.n_layers,
        heads=model.n_heads,
        rms_norm=model.norm == "rmsnorm",
        gelu="tanh" if model.activation == "gelu_tanh" else "none",
        eps=model.norm_eps,
        theta=model.rope_theta,
        window=model.window,
        top_k=moe.top_k,
        sigmoid_router=moe.router == "sigmoid",
        renormalise=moe.renormalise,
        route_scale=moe.route_scale,
        aux_loss=moe.aux_loss,
        z_loss=moe.z_loss,
        bias_rate=moe.bias_rate,
    )
    recipe = plain.Recipe(
        steps=job.train.steps,
        lr=optimizer.lr,
        warmup=optimizer.warmup_steps,
        decay=optimizer.schedule,
        decay_fraction=optimizer.decay_fraction,
        min_ratio=optimizer.min_lr_ratio,
        betas=optimizer.betas,
        eps=optimizer.eps,
        weight_decay=optimizer.weight_decay,
        clip=optimizer.clip,
    )
    return plain.train(weights, shape, recipe, made)


def stepped(ranks, job: Job, weights: plain.Weights, made: Sequence[plain.Batch]) -> plain.Result:
    """The result of the project's steps on the ranks of a layout. Only rank 0 has the weights."""
    mesh = meshes.build(job.layout, "cpu")
    stepper = Stepper(job, mesh, torch.device("cpu"), VOCAB)
    shards = stepper.replica.shards
    for shard in shards:
        shard.assign(weights[shard.whole_name])
    stepper.reload()
    equation = batch_equation.solve(job.train.global_batch, job.layout)
    losses, norms, rates = [], [], []
    for step, batch in enumerate(made):
        share = equation.micro_batch * equation.accumulation
        starts = range(mesh.data_rank * share, (mesh.data_rank + 1) * share, equation.micro_batch)
        micro_batches = [_micro_batch(batch, range(first, first + equation.micro_batch)) for first in starts]
        valid = int((batch[1] != -100).sum())
        lr = learning_rate.at_step(step, job.optimizer, end_of(job), job.train.global_batch)
        found = stepper.step(StepInputs(micro_batches, step, valid, lr))
        losses.append(found.loss)
        norms.append(found.grad_norm)
        rates.append(lr)
    values = {shard.name: shard.value for shard in shards}
    return plain.Result(losses, norms, rates, dict(wholes(shards, values, mesh, ranks.rank == 0)))


def trained(ranks, job: Job) -> tuple[plain.Weights, list[plain.Batch], plain.Result]:
    """A whole run of the project in one process, from initial weights to metrics: the weights it started with, the
    batches it read, and its result."""
    read: list[Sequence[MicroBatch]] = []
    real = Stepper.compute

    def compute(self, inputs):
        read.append(inputs.micro_batches)
        return real(self, inputs)

    trainer = Trainer(job, ranks, torch.device("cpu"), StopRequest())
    parameters = {shard.name: shard.value.detach() for shard in trainer.stepper.replica.shards}
    weights = {name: value.clone() for name, value in parameters.items()}
    with mock.patch.object(Stepper, "compute", compute):
        trainer.run()
    rows = [json.loads(line) for line in trainer.directory.metrics.read_text().splitlines()]
    losses, norms, rates = ([row[key] for row in rows if row["event"] == "step"] for key in ("loss", "grad_norm", "lr"))
    return weights, [_batch(micro_batches) for micro_batches in read], plain.Result(losses, norms, rates, parameters)


def _batch(micro_batches: Sequence[MicroBatch]) -> plain.Batch:
    tokens = np.concatenate([micro.tokens for micro in micro_batches])
    targets = np.concatenate([micro.targets for micro in micro_batches])
    return torch.from_numpy(tokens), torch.from_numpy(targets), None


def _micro_batch(batch: plain.Batch, rows: range) -> MicroBatch:
    tokens, targets, documents = (None if part is None else part[rows.start : rows.stop].numpy() for part in batch)
    assert tokens is not None
    assert targets is not None
    return MicroBatch(tokens, targets, np.array(rows), documents)


def differences(found: plain.Result, oracle: plain.Result, lr: float) -> dict[str, float]:
    """The largest relative difference of each quantity. A tensor's is relative to its largest element, but at least to
    one step of Adam, which turns the rounding noise of a gradient that should be zero (of a key's bias) into a part of
    a step."""
    assert found.weights.keys() == oracle.weights.keys()
    return {
        "loss": _worst(found.losses, oracle.losses),
        "gradient norm": _worst(found.norms, oracle.norms),
        "learning rate": _worst(found.rates, oracle.rates),
        "weights": _largest([_apart(found.weights[name], value, lr) for name, value in oracle.weights.items()]),
    }


def _worst(found: Sequence[float], oracle: Sequence[float]) -> float:
    return _largest([abs(a - b) / abs(b) for a, b in zip(found, oracle, strict=True)])


def _largest(differences: list[float]) -> float:
    """NaN where one of them is, which Python's max might pass over."""
    return float(torch.tensor(differences, dtype=torch.float64).max())


def _apart(found: Tensor, oracle: Tensor, least: float) -> float:
    return float((found - oracle).abs().max() / max(float(oracle.abs().max()), least))
