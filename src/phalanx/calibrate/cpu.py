"""Measures what only CPU processes have: the dispatch time of an operation, and one process's gain from all cores."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import geometric_mean, mean
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from phalanx.calibrate.clock import Timings
from phalanx.config.cluster import Sharing
from phalanx.config.job import Job, Train
from phalanx.config.layout import Layout
from phalanx.config.model import ModelConfig
from phalanx.cost.fit import Precision
from phalanx.data.loader import MicroBatch
from phalanx.parallel import mesh as meshes
from phalanx.train.step import Stepper

TINY_MODEL = ModelConfig(
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
"""A launch-bound model: nearly all of its time is dispatching operations."""
SMALL_MODEL = replace(TINY_MODEL, d_model=128, d_ff=384, seq_len=128)
"""A model with enough work per operation that several threads share it."""
SEQUENCES = 8
"""Micro-batch of SMALL_MODEL."""
DEEP_LAYERS = 8
"""Blocks of the deep variant of a model: its time less that of the shallow one is the time of blocks alone."""

Call = Callable[[], Any]
TimeCalls = Callable[[str, Sequence[Call]], Timings]
"""Measures calls as a part of ComputeCalibration."""


def block_calls(precision: Precision, model: ModelConfig = TINY_MODEL, sequences: int = 1) -> tuple[Call, Call]:
    """Returns forward and backward passes of `sequences` sequences, as training runs them, through the model's own
    blocks and through DEEP_LAYERS of them."""
    shallow, deep = (
        _gradients(replace(model, n_layers=layers), sequences, precision)
        for layers in (TINY_MODEL.n_layers, DEEP_LAYERS)
    )
    return shallow, deep


def block_seconds(shallow: float, deep: float) -> float:
    """Returns the seconds of one block, from those of both models of `block_calls`."""
    return (deep - shallow) / (DEEP_LAYERS - TINY_MODEL.n_layers)


def _gradients(model: ModelConfig, sequences: int, precision: Precision) -> Call:
    job = Job(model=model, layout=Layout(micro_batch=sequences), train=Train(precision=precision))
    stepper = Stepper(job, meshes.alone(), torch.device("cpu"), model.vocab_size)
    tokens = np.arange(sequences * (model.seq_len + 1)).reshape(sequences, -1) % model.vocab_size
    micro_batch = MicroBatch(tokens[:, :-1].copy(), tokens[:, 1:].copy(), np.arange(sequences))

    def call() -> None:
        stepper.replica.clear()
        stepper.gradients([micro_batch], 0, sequences * model.seq_len)

    return call


def sharing(
    timed: TimeCalls, processes: int, products: Sequence[Call], streams: Sequence[Call], blocks: tuple[Call, Call]
) -> tuple[Sharing, tuple[float, float]]:
    """Measures the gain of one process with all cores, while the others wait, over all processes together with a share
    of the cores each.

    Returns the gains, and the seconds of a block of SMALL_MODEL (`blocks`, from block_calls) in one of the processes
    together, and in one alone; (0, 0) where there is one process."""
    cores = len(os.sched_getaffinity(0))
    if not dist.is_initialized():
        return Sharing(cores, processes, 0, 1.0, 1.0), (0.0, 0.0)
    product_gains, stream_gains = (
        [together / alone for together, alone in _together_and_alone(timed, part, calls, cores)]
        for part, calls in (("products", products), ("streams", streams))
    )
    # Measured apart from the streams, which would leave cold caches.
    shallow, deep = _together_and_alone(timed, "blocks", blocks, cores)
    together, alone = map(block_seconds, shallow, deep)
    return Sharing(cores, processes, 0, geometric_mean(product_gains), geometric_mean(stream_gains)), (together, alone)


def _together_and_alone(timed: TimeCalls, part: str, calls: Sequence[Call], cores: int) -> list[tuple[float, float]]:
    """Returns the seconds of each call on all processes together, and on the first with all cores while the others
    wait."""
    together = [mean(seconds) for seconds in timed(part, calls).seconds]
    threads, is_first = torch.get_num_threads(), dist.get_rank() == 0
    torch.set_num_threads(cores if is_first else threads)
    try:
        alone = [seconds[0] for seconds in timed(part, [call if is_first else _wait for call in calls]).seconds]
    finally:
        torch.set_num_threads(threads)
    return list(zip(together, alone, strict=True))


def _wait() -> None:
    """Stands for the call on processes that leave their cores to the first."""
