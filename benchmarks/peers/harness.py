"""The common parts of every peer: the job, the model, the optimizer, the batches, and the timing of each step.

A peer is started by torchrun as `python -m torch.distributed.run --nproc-per-node 2 -m benchmarks.peers.NAME JOB
--steps N` and prints one line of JSON on rank 0. The process that starts it measures processor time and memory.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from phalanx.check.load import load_file
from phalanx.config.job import Job
from phalanx.model.seeding import initialise
from phalanx.model.transformer import Transformer

LLAMA = (
    "model.norm=rmsnorm",
    "model.positions=rope",
    "model.activation=swiglu",
    "model.tied=false",
)
"""Overrides that make the job's model a Llama with as many parameters in its blocks."""

Step = Callable[[Tensor, Tensor], Tensor]
"""Takes an optimizer step over a batch: (tokens, targets), each (batch, seq), to the loss."""


def parser(description: str | None) -> argparse.ArgumentParser:
    """Returns the arguments that every peer takes."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("job", type=Path)
    parser.add_argument("--steps", type=int, required=True)
    return parser


def load(path: Path, *overrides: str) -> Job:
    """Returns the job in a file; sets the threads of this process to the job's."""
    job = load_file(path, overrides).job
    torch.set_num_threads(job.run.threads)
    return job


def build(job: Job) -> Transformer:
    """Returns the job's model with its initial weights."""
    model = Transformer(job.model)
    initialise(model, job.model, job.train.seed)
    return model


def adamw(model: nn.Module, job: Job) -> torch.optim.AdamW:
    """Returns fused AdamW with the job's settings. DTensors and plain tensors cannot be in one fused call, so each kind
    has groups of its own."""
    kinds: dict[tuple[bool, bool], list[nn.Parameter]] = {}
    for parameter in model.parameters():
        kinds.setdefault((parameter.ndim >= 2, isinstance(parameter, DTensor)), []).append(parameter)
    decay = job.optimizer.weight_decay
    groups = [{"params": members, "weight_decay": decay if wide else 0.0} for (wide, _), members in kinds.items()]
    return torch.optim.AdamW(groups, lr=job.optimizer.lr, betas=job.optimizer.betas, eps=job.optimizer.eps, fused=True)


def require_present(missing: str) -> None:
    """Raises RuntimeError with `missing`, why a peer cannot be measured, unless it is empty."""
    if missing:
        raise RuntimeError(missing)


def require(model: nn.Module, form: type) -> None:
    """Raises RuntimeError unless a library has made `model` the parallel module that the peer is named after."""
    if not isinstance(model, form):
        raise RuntimeError(f"asked for {form.__name__}, the library made {type(model).__name__}: not measured")


def loss_of(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    """Returns the mean loss over the batch's tokens."""
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def plain_step(model: nn.Module, optimizer: torch.optim.Optimizer, clip: Callable[[], object]) -> Step:
    """Returns the step one would write by hand. `clip` limits the gradients."""

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of(model, tokens, targets)
        loss.backward()
        clip()
        optimizer.step()
        return loss

    return step


def measure(step: Step, job: Job, steps: int, data_rank: int | None = None) -> None:
    """Runs `steps` steps on random tokens and prints, on rank 0, the seconds of each, the end of the first one (seconds
    since the epoch), and the last loss. Ranks with the same `data_rank` (default: their rank) read the same tokens."""
    rank = int(os.environ["RANK"])
    batches = _batches(job, rank if data_rank is None else data_rank)
    seconds: list[float] = []
    first, loss = 0.0, 0.0
    for number in range(steps):
        began = time.perf_counter()
        loss = step(*next(batches)).item()
        seconds.append(time.perf_counter() - began)
        first = first if number else time.time()
    if rank == 0:
        print(json.dumps({"seconds": seconds, "first_step_at": first, "loss": loss}))


def _batches(job: Job, data_rank: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields tokens and targets, each (micro_batch, seq_len) int64, without end."""
    generator = torch.Generator().manual_seed(data_rank)
    shape = (job.layout.micro_batch, job.model.seq_len + 1)
    while True:
        batch = torch.randint(job.model.vocab_size, shape, generator=generator)
        yield batch[:, :-1], batch[:, 1:]
