"""What CPU processes show besides: how long a program takes to start operations, and what one does with all cores."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import geometric_mean, mean
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from phalanx.bench.clock import Clock
from phalanx.cost.fit import Precision
from phalanx.data.loader import MicroBatch
from phalanx.job.cluster import Sharing
from phalanx.job.job import Job
from phalanx.job.layout import Layout
from phalanx.job.model import Model
from phalanx.job.train import Train
from phalanx.parallel import mesh as meshes
from phalanx.train.step import Stepper

FEW = Model(
    n_layers=2,
    d_model=32,
    d_ff=64,
    seq_len=16,
    vocab_size=64,
    norm="rmsnorm",
    positions="rope",
    activation="swiglu",
    bias=False,
)
"""Of so little work that what it takes is starting operations."""
MORE = 8
"""Blocks of the same model with more of them: the difference is blocks alone."""

Call = Callable[[], Any]


def block_calls(precision: Precision) -> tuple[Call, Call]:
    """Gradients of one sequence through FEW's blocks, and through MORE of them, as training takes them."""
    return _gradients(FEW.n_layers, precision), _gradients(MORE, precision)


def block_seconds(few: float, more: float) -> float:
    """Of one block, from the times of both."""
    return (more - few) / (MORE - FEW.n_layers)


def _gradients(layers: int, precision: Precision) -> Call:
    model = replace(FEW, n_layers=layers)
    job = Job(model=model, layout=Layout(micro_batch=1), train=Train(precision=precision))
    stepper = Stepper(job, meshes.alone(), torch.device("cpu"), model.vocab_size)
    tokens = np.arange(FEW.seq_len + 1)[None] % FEW.vocab_size
    micro = MicroBatch(tokens[:, :-1].copy(), tokens[:, 1:].copy(), np.arange(1))

    def call() -> None:
        stepper.replica.clear()
        stepper.gradients([micro], 0, FEW.seq_len)

    return call


def sharing(
    clock: Clock, processes: int, products: Sequence[Call], streams: Sequence[Call], tick: Callable[[], None]
) -> Sharing:
    """What one process with all cores, while the others wait, gains on all of them together, each with its share."""
    cores = len(os.sched_getaffinity(0))
    if not dist.is_initialized():
        return Sharing(cores, processes, 0, 1.0, 1.0)
    calls = [*products, *streams]
    together = [mean(seconds) for seconds in clock.turns(calls, tick)]
    before, first = torch.get_num_threads(), dist.get_rank() == 0
    torch.set_num_threads(cores if first else before)
    try:
        alone = [seconds[0] for seconds in clock.turns([call if first else _nothing for call in calls], tick)]
    finally:
        torch.set_num_threads(before)
    gains = [long / short for long, short in zip(together, alone, strict=True)]
    of_products, of_streams = gains[: len(products)], gains[len(products) :]
    return Sharing(cores, processes, 0, geometric_mean(of_products), geometric_mean(of_streams))


def _nothing() -> None:
    """What the others do meanwhile."""
