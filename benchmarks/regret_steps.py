"""Measures steps under one layout after the other, in the same warm processes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.regret_layouts import job_of
from benchmarks.turns import Turns, lasted
from phalanx.config.job import Job
from phalanx.config.layout import Layout
from phalanx.data.loader import MicroBatch
from phalanx.launch.pool import Pool
from phalanx.launch.ranks import Ranks
from phalanx.parallel import mesh as meshes
from phalanx.train.device import keep_freed_memory
from phalanx.train.step import StepInputs, Stepper

WARM_UP = 1
TIMEOUT_S = 60.0


def threads(processes: int) -> int:
    """Returns the CPU threads per process, as `phalanx train` divides the cores (launch.ranks.threads_for; a pool sets
    OMP_NUM_THREADS for its own purposes)."""
    return max(1, len(os.sched_getaffinity(0)) // processes)


def step_of(job: Job) -> Callable[[], object]:
    """Returns a step of the training loop on this rank: its data rank's micro-batches of random tokens."""
    mesh = meshes.build(job.layout, "cpu")
    stepper = Stepper(job, mesh, torch.device("cpu"), job.model.vocab_size)
    layout, seq_len = job.layout, job.model.seq_len
    shape = (layout.accumulation, layout.micro_batch, seq_len + 1)
    tokens = np.random.default_rng(mesh.data_rank).integers(job.model.vocab_size, size=shape)
    ids = np.arange(layout.micro_batch)
    micros = [MicroBatch(t[:, :-1].copy(), t[:, 1:].copy(), ids + len(ids) * i) for i, t in enumerate(tokens)]
    return lambda: stepper.step(StepInputs(micros, 0, job.train.global_batch * seq_len, job.optimizer.lr))


def measure(ranks: Ranks, name: str, layout: Layout, steps: int) -> Turns:
    """Returns the begin and end of `steps` steps on this rank, after warm-up steps."""
    keep_freed_memory()
    torch.set_num_threads(threads(ranks.world))
    step = step_of(job_of(name, layout))
    turns = []
    for _ in range(WARM_UP + steps):
        dist.barrier()
        began = time.perf_counter()
        step()
        turns.append((began, time.perf_counter()))
    return {layout.line(): turns[WARM_UP:]}


def seconds_of(pool: Pool, name: str, layout: Layout, steps: int) -> list[float]:
    """Returns the seconds of each step, from the first rank's beginning to the last one's end. Every call has its own
    process groups: those of one layout would outlive it beside those of the next."""
    return lasted(pool.run(measure, layout.world, name, layout, steps, timeout=TIMEOUT_S))[layout.line()]
