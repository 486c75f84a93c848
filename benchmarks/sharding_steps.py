"""Single steps of sharded training and of torch's own systems, in turn, in the same two processes.

    python -m benchmarks.sharding_steps [--rounds 30]

benchmarks/sharding.py measures whole runs, and this machine's speed varies by a quarter from one run to the next. Here
every contender makes one step per round, so that compared steps are measured within seconds: ratios are taken round by
round, and their medians count. Same job (benchmarks/sharding.yaml), 2 processes × 1 thread. All contenders share the
processes' settings, also the allocator's (`train.device.keep_freed_memory`), which peers lack by default.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.contenders import JOB, ROOT
from benchmarks.peers import harness, torch_ddp, torch_fsdp2, torch_tp
from benchmarks.report import machine, save
from phalanx.check.load import load_file
from phalanx.config.job import Job
from phalanx.data.loader import MicroBatch
from phalanx.launch.pool import Pool
from phalanx.launch.ranks import Ranks
from phalanx.parallel import mesh as meshes
from phalanx.train.device import keep_freed_memory
from phalanx.train.step import StepInputs, Stepper

WARM_UP = 3
OURS = {
    "phalanx, DDP": ["layout.dp_replicate=2"],
    "phalanx, ZeRO-1": ["layout.dp_shard=2", "layout.zero=1"],
    "phalanx, ZeRO-2": ["layout.dp_shard=2", "layout.zero=2"],
    "phalanx, ZeRO-3": ["layout.dp_shard=2", "layout.zero=3"],
    "phalanx, TP": ["layout.tp=2"],
    "phalanx, TP + SP": ["layout.tp=2", "layout.sp=true"],
}
PEERS: dict[str, Callable[[Job], harness.Step]] = {
    "torch DDP": torch_ddp.step_of,
    "torch FSDP2": torch_fsdp2.step_of,
    "torch parallelize_module, TP": lambda job: torch_tp.step_of(job, sequence=False),
    "torch parallelize_module, TP + SP": lambda job: torch_tp.step_of(job, sequence=True),
}
ONE = "phalanx, 1 process"
MARKS = [
    ("phalanx, DDP", "torch DDP", 1.05),
    ("phalanx, ZeRO-1", "torch DDP", 1.05),
    ("phalanx, ZeRO-2", "torch DDP", None),
    ("phalanx, ZeRO-3", "torch FSDP2", 1.1),
    ("phalanx, TP", "torch parallelize_module, TP", 1.4),
    ("phalanx, TP + SP", "torch parallelize_module, TP + SP", None),
    ("phalanx, TP", ONE, 1.2),
]
"""A contender, the one it is compared with, and the required minimum ratio of tokens/s."""


def ours(job: Job, mesh: meshes.Mesh) -> Callable[[], object]:
    """Returns a step of the training loop, on one micro-batch per rank."""
    stepper = Stepper(job, mesh, torch.device("cpu"), job.model.vocab_size)
    size = job.layout.micro_batch
    tokens = np.random.default_rng(mesh.data_rank).integers(job.model.vocab_size, size=(size, job.model.seq_len + 1))
    micro = MicroBatch(tokens[:, :-1].copy(), tokens[:, 1:].copy(), np.arange(size))
    total = mesh.data_ranks * size * job.model.seq_len
    return lambda: stepper.step(StepInputs([micro], 0, total, job.optimizer.lr))


def theirs(job: Job, step: harness.Step, data_rank: int) -> Callable[[], object]:
    """Returns a peer's step on one batch, with the loss read as ours reads it."""
    batch = torch.Generator().manual_seed(data_rank)
    shape = (job.layout.micro_batch, job.model.seq_len + 1)
    tokens = torch.randint(job.model.vocab_size, shape, generator=batch)
    return lambda: step(tokens[:, :-1], tokens[:, 1:]).item()


def measure(ranks: Ranks, rounds: int) -> dict[str, list[float]]:
    """Returns the seconds of each contender's step, round by round."""
    keep_freed_memory()
    torch.set_num_threads(1)
    path = ROOT / JOB
    steps: dict[str, Callable[[], object]] = {}
    for name, words in OURS.items():
        job = load_file(path, words).job
        steps[name] = ours(job, meshes.build(job.layout, "cpu"))
    job = load_file(path).job
    for name, build in PEERS.items():
        steps[name] = theirs(job, build(job), 0 if "parallelize" in name else ranks.rank)
    alone = ours(job, meshes.alone())
    steps[ONE] = alone if ranks.rank == 0 else lambda: None
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(WARM_UP + rounds):
        names = list(steps) if number % 2 else list(reversed(steps))
        for name in names:
            dist.barrier()
            began = time.perf_counter()
            steps[name]()
            if number >= WARM_UP:
                seconds[name].append(time.perf_counter() - began)
    return seconds


def tokens_of(name: str, job: Job) -> int:
    """Returns the tokens of one step, over both ranks."""
    alone = "TP" in name or name == ONE
    return (1 if alone else 2) * job.layout.micro_batch * job.model.seq_len


def ratio(seconds: dict[str, list[float]], name: str, other: str, job: Job) -> float:
    scale = tokens_of(name, job) / tokens_of(other, job)
    return statistics.median(scale * b / a for a, b in zip(seconds[name], seconds[other], strict=True))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    options = parser.parse_args(argv)
    job = load_file(ROOT / JOB).job
    with Pool(2, ["torch.distributed.tensor", "torch.distributed.fsdp"]) as pool:
        seconds = pool.run(measure, 2, options.rounds, timeout=3600)[0]
    rates = {name: tokens_of(name, job) / statistics.median(values) for name, values in seconds.items()}
    marks: list[dict[str, Any]] = []
    for name, other, mark in MARKS:
        value = ratio(seconds, name, other, job)
        marks.append({"ratio": f"{name} / {other}", "value": value, "mark": mark, "passed": mark and value >= mark})
    table = [("contender", "tokens/s (median)", "asked", "")]
    table += [(name, f"{rate:,.0f}", "", "") for name, rate in rates.items()]
    for mark in marks:
        asked = f"≥ {mark['mark']}" if mark["mark"] else ""
        verdict = {True: "pass", False: "FAIL", None: ""}[mark["passed"]]
        table.append((f"**{mark['ratio']}**", f"**{mark['value']:.3f} ×**", asked, verdict))
    result = {"benchmark": "sharding_steps", "machine": machine(), "tokens_per_s": rates, "marks": marks}
    save("sharding_steps", result | {"seconds": seconds}, table, "Steps of sharded training, in turn with torch's own")


if __name__ == "__main__":
    sys.exit(main())
