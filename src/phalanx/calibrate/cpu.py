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

from phalanx.calibrate.clock import Clock
from phalanx.config.cluster import Sharing
from phalanx.config.job import Job
from phalanx.config.layout import Layout
from phalanx.config.model import ModelConfig
from phalanx.config.train import Train
from phalanx.cost.fit import Precision
from phalanx.data.loader import MicroBatch
from phalanx.parallel import mesh as meshes
from phalanx.train.step import Stepper

FEW = ModelConfig(
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
MIDDLING = replace(FEW, d_model=128, d_ff=384, seq_len=128)
"""Of work that several threads share."""
SEQUENCES = 8
"""Of MIDDLING, at a time."""
MORE = 8
"""Blocks of the same model with more of them: the difference is blocks alone."""

Call = Callable[[], Any]


def block_calls(precision: Precision, model: ModelConfig = FEW, sequences: int = 1) -> tuple[Call, Call]:
    """Gradients of so many sequences through a model's blocks, and through MORE of them, as training takes them."""
    few, more = (_gradients(replace(model, n_layers=layers), sequences, precision) for layers in (FEW.n_layers, MORE))
    return few, more


def block_seconds(few: float, more: float) -> float:
    """Of one block, from the times of both."""
    return (more - few) / (MORE - FEW.n_layers)


def _gradients(model: ModelConfig, sequences: int, precision: Precision) -> Call:
    job = Job(model=model, layout=Layout(micro_batch=sequences), train=Train(precision=precision))
    stepper = Stepper(job, meshes.alone(), torch.device("cpu"), model.vocab_size)
    tokens = np.arange(sequences * (model.seq_len + 1)).reshape(sequences, -1) % model.vocab_size
    micro = MicroBatch(tokens[:, :-1].copy(), tokens[:, 1:].copy(), np.arange(sequences))

    def call() -> None:
        stepper.replica.clear()
        stepper.gradients([micro], 0, sequences * model.seq_len)

    return call


def sharing(
    clock: Clock,
    processes: int,
    products: Sequence[Call],
    streams: Sequence[Call],
    blocks: tuple[Call, Call],
    tick: Callable[[], None],
) -> tuple[Sharing, tuple[float, float]]:
    """What one process with all cores, while the others wait, gains on all of them together, each with its share; and
    the seconds of a block of MIDDLING (block_calls) in one of them together, and in one alone."""
    cores = len(os.sched_getaffinity(0))
    if not dist.is_initialized():
        return Sharing(cores, processes, 0, 1.0, 1.0), (0.0, 0.0)
    of_products, of_streams = (
        [long / short for long, short in _both(clock, calls, cores, tick)] for calls in (products, streams)
    )
    # By themselves: streams would leave them cold caches.
    few, more = _both(clock, blocks, cores, tick)
    together, alone = map(block_seconds, few, more)
    return Sharing(cores, processes, 0, geometric_mean(of_products), geometric_mean(of_streams)), (together, alone)


def _both(clock: Clock, calls: Sequence[Call], cores: int, tick: Callable[[], None]) -> list[tuple[float, float]]:
    """Seconds of each call on all processes together, and on the first with all cores while the others wait."""
    together = [mean(seconds) for seconds in clock.turns(calls, tick)]
    before, first = torch.get_num_threads(), dist.get_rank() == 0
    torch.set_num_threads(cores if first else before)
    try:
        alone = [seconds[0] for seconds in clock.turns([call if first else _nothing for call in calls], tick)]
    finally:
        torch.set_num_threads(before)
    return list(zip(together, alone, strict=True))


def _nothing() -> None:
    """What the others do meanwhile."""
