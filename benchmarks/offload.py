"""Times steps with parts on the device and on the host, in turns, and counts the tensors of both beside the prediction.

    python -m benchmarks.offload [ROUNDS]

On a CPU the host is the same memory: what it shows is the cost of the copies and of the update's parts, not of a link.
"""

from __future__ import annotations

import statistics
import sys
import time

import numpy as np
import torch
import torch.distributed as dist

from phalanx.blocks.parameters import count
from phalanx.config.job import Job, Train
from phalanx.config.layout import Layout, Recompute
from phalanx.config.model import ModelConfig
from phalanx.cost.job_spec import rank_spec
from phalanx.cost.rank_memory import step_memory
from phalanx.data.loader import MicroBatch
from phalanx.parallel import mesh as meshes
from phalanx.parallel.offload import DeviceBudget
from phalanx.train.step import StepInputs, Stepper
from phalanx.units import MIB

MODEL = ModelConfig(n_layers=6, d_model=192, n_heads=6, seq_len=256, vocab_size=256)
SEQUENCES = 4
RECOMPUTED: tuple[Recompute, ...] = ("full", "none")
KINDS = ("none", "optimizer", "activations", "optimizer+activations", "optimizer+parameters", "all")


def main(rounds: int) -> None:
    """Prints the measured and predicted MiB of device and host, the MiB copied, and the median seconds of a step."""
    torch.set_num_threads(2)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    print(f"{count(MODEL, MODEL.vocab_size):,} parameters in fp32, {SEQUENCES} × {MODEL.seq_len} tokens, 2 threads")
    for recompute in RECOMPUTED:
        jobs = {offload: _job(offload, recompute) for offload in KINDS}
        print(f"recompute={recompute}")
        print(f"  {'offload':<22} {'device':>8} {'predicted':>9} {'host':>8} {'predicted':>9} {'copied':>8}")
        for offload, job in jobs.items():
            with DeviceBudget().counting() as budget:
                stepper = _stepper(job)
                for step in range(2):
                    take_step(stepper, step)
            predicted = step_memory(rank_spec(job, MODEL.vocab_size))[0]
            sizes = budget.device_peak, predicted.allocated, budget.host_peak, predicted.host
            mib = [f"{size / MIB:.1f}" for size in (*sizes, sum(stepper.offloaded.values()) / 2)]
            print(f"  {offload:<22} {{:>8}} {{:>9}} {{:>8}} {{:>9}} {{:>8}}".format(*mib), flush=True)
        for offload, seconds in _times(jobs, rounds).items():
            print(f"  {offload:<22} {statistics.median(seconds):.3f} s ({min(seconds):.3f} to {max(seconds):.3f})")
    dist.destroy_process_group()


def _times(jobs: dict[str, Job], rounds: int) -> dict[str, list[float]]:
    """Returns the seconds of `rounds` steps of every job, which take turns; empty without rounds."""
    if not rounds:
        return {}
    steppers = {offload: _stepper(job) for offload, job in jobs.items()}
    found: dict[str, list[float]] = {offload: [] for offload in jobs}
    for step in range(rounds + 1):
        for offload, stepper in steppers.items():
            began = time.perf_counter()
            take_step(stepper, step)
            if step:  # the first one makes the state
                found[offload].append(time.perf_counter() - began)
    return found


def _job(offload: str, recompute: Recompute) -> Job:
    layout = Layout(offload=offload, recompute=recompute, micro_batch=SEQUENCES)
    return Job(model=MODEL, layout=layout, train=Train(precision="fp32", global_batch=SEQUENCES))


def _stepper(job: Job) -> Stepper:
    return Stepper(job, meshes.build(job.layout, "cpu"), torch.device("cpu"), MODEL.vocab_size)


def take_step(stepper: Stepper, step: int) -> None:
    """Takes one step on random tokens."""
    shape = SEQUENCES, stepper.job.model.seq_len + 1
    tokens = np.random.default_rng(step).integers(stepper.vocab_size, size=shape)
    micro = MicroBatch(tokens[:, :-1].copy(), tokens[:, 1:].copy(), np.arange(SEQUENCES))
    stepper.step(StepInputs([micro], step, tokens[:, 1:].size, 1e-3))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 10)
