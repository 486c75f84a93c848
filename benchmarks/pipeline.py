"""Single steps of pipelines and of torch.distributed.pipelining's, schedule by schedule, in turn in the same processes.

    python -m benchmarks.pipeline [--rounds 15] [--ranks 2 4] [--quick] [--json] [key=value ...]

As in benchmarks/sharding_steps.py every contender makes one step per round, ratios are taken round by round, and their
medians count. Both sides compute the gradients of a step, forward and backward, without an optimizer: the same layers
with the same cut and placement, the same micro-batches, fp32, 1 thread per process, the same library for products. They
must agree on loss and gradient norm before anything is measured. A step lasts from the first process's beginning to the
last one's end. With more processes than cores, a waiting process leaves its core to another: the cost of a schedule's
bubble is then hidden, the framework's is not.

Also measured: generating and validating a large schedule.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.contenders import JOB, ROOT
from benchmarks.peers.torch_pipeline import SCHEDULES, TorchPipeline
from benchmarks.report import machine, save
from phalanx.check.load import load_file
from phalanx.config.job import Job
from phalanx.data.loader import MicroBatch
from phalanx.launch.pool import Pool
from phalanx.launch.ranks import Ranks
from phalanx.parallel import mesh as meshes
from phalanx.schedule import catalogue, check
from phalanx.train.device import keep_freed_memory
from phalanx.train.step import Stepper

WARM_UP = 2
MICRO_BATCHES = 8
MODEL = ("model.n_layers=8", "model.d_model=256", "model.n_heads=4", "model.tied=false", "train.cpu_linear=mkl")
"""Four processes with two stages each need eight layers. Where the head is tied, torch leaves it to its user to add up
the two gradients of the embedding."""
QUICK = ("++model.d_model=64", "++model.seq_len=64")
TOLERANCE = 1e-5
"""Allowed relative difference of losses and gradient norms of the same step."""
LARGE = {"ranks": 64, "micro_batches": 512, "chunks": 4}
REPEATS = 5


@dataclass(frozen=True)
class Contender:
    """One system with one schedule, on one rank."""

    step: Callable[[], float]
    """Computes the gradients of a step; returns the mean loss, or zero if another rank has it."""
    gradients: Callable[[], list[Tensor]]
    """Returns the gradients left on this rank."""


@dataclass(frozen=True)
class Turn:
    """One rank's part of a step."""

    began: float
    ended: float
    """The end on the clock that all processes of a machine share."""
    cpu_s: float


def load(schedule: str, ranks: int, words: Sequence[str]) -> Job:
    layout = (f"layout.pp={ranks}", f"layout.schedule={schedule}", "layout.micro_batch=2")
    return load_file(ROOT / JOB, [*MODEL, *layout, f"layout.accumulation={MICRO_BATCHES}", *words]).job


def batches(job: Job) -> list[MicroBatch]:
    """Returns a step's micro-batches of random tokens, the same for all contenders."""
    size = job.layout.micro_batch
    shape = (job.layout.accumulation, size, job.model.seq_len + 1)
    tokens = np.random.default_rng(0).integers(job.model.vocab_size, size=shape)
    return [MicroBatch(t[:, :-1].copy(), t[:, 1:].copy(), np.arange(size) + size * i) for i, t in enumerate(tokens)]


def ours(job: Job) -> Contender:
    """Returns the gradients of a step as the training loop computes them."""
    stepper = Stepper(job, meshes.build(job.layout, "cpu"), torch.device("cpu"), job.model.vocab_size)
    micros = batches(job)
    total = sum(micro.targets.size for micro in micros)

    def step() -> float:
        stepper.replica.clear()
        return stepper.gradients(micros, 0, total).item() / total

    def gradients() -> list[Tensor]:
        return [f.gradient for f in stepper.replica.shards if f.gradient is not None and not f.copy]

    return Contender(step, gradients)


def theirs(job: Job) -> Contender:
    pipeline = TorchPipeline(job, dist.get_rank(), job.model.vocab_size)
    micros = batches(job)
    tokens = torch.from_numpy(np.concatenate([micro.tokens for micro in micros]))
    targets = torch.from_numpy(np.concatenate([micro.targets for micro in micros]))
    return Contender(lambda: pipeline.step(tokens, targets), pipeline.gradients)


def shown(contender: Contender) -> tuple[float, float]:
    """Returns a step's loss and gradient norm over all ranks."""
    loss = contender.step()
    square = sum(gradient.double().square().sum().item() for gradient in contender.gradients())
    both = torch.tensor([loss, square], dtype=torch.float64)
    dist.all_reduce(both)
    return both[0].item(), math.sqrt(both[1].item())


def measure(
    ranks: Ranks, rounds: int, words: Sequence[str]
) -> tuple[dict[str, tuple[float, float]], dict[str, list[Turn]]]:
    """Returns loss and gradient norm of each contender, and its turns on this rank; AssertionError if they differ."""
    keep_freed_memory()
    torch.set_num_threads(1)
    contenders: dict[str, Contender] = {}
    for schedule in SCHEDULES:
        job = load(schedule, ranks.world, words)
        contenders[f"phalanx, {schedule}"] = ours(job)
        contenders[f"torch, {schedule}"] = theirs(job)
    found = {name: shown(contender) for name, contender in contenders.items()}
    expected = next(iter(found.values()))
    for name, values in found.items():
        for value, other in zip(values, expected, strict=True):
            assert math.isclose(value, other, rel_tol=TOLERANCE), (
                f"{name}: loss and gradient norm {values}, not {expected}"
            )
    turns: dict[str, list[Turn]] = {name: [] for name in contenders}
    for number in range(WARM_UP + rounds):
        if ranks.rank == 0:
            print(f"{ranks.world} processes, round {number + 1} of {WARM_UP + rounds}", file=sys.stderr, flush=True)
        for name in list(contenders) if number % 2 else list(reversed(contenders)):
            dist.barrier()
            began, cpu = time.perf_counter(), time.process_time()
            contenders[name].step()
            turn = Turn(began, time.perf_counter(), time.process_time() - cpu)
            if number >= WARM_UP:
                turns[name].append(turn)
    return found, turns


def compare(pool: Pool, ranks: int, rounds: int, words: Sequence[str]) -> dict[str, Any]:
    """Runs all schedules on `ranks` processes: returns the seconds of every step, and torch's time and processor time
    relative to ours."""
    answers = pool.run(measure, ranks, rounds, words, timeout=3600)
    seconds: dict[str, list[float]] = {}
    cpu: dict[str, list[float]] = {}
    for name in answers[0][1]:
        together = list(zip(*(turns[name] for _, turns in answers), strict=True))
        seconds[name] = [max(turn.ended for turn in turns) - min(turn.began for turn in turns) for turns in together]
        cpu[name] = [sum(turn.cpu_s for turn in turns) for turns in together]
    return {
        "loss_and_norm": answers[0][0],
        "median_s": {name: statistics.median(values) for name, values in seconds.items()},
        "median_cpu_s": {name: statistics.median(values) for name, values in cpu.items()},
        "torch_over_phalanx": {schedule: ratio(seconds, schedule) for schedule in SCHEDULES},
        "torch_over_phalanx_cpu": {schedule: ratio(cpu, schedule) for schedule in SCHEDULES},
        "seconds": seconds,
        "cpu_s": cpu,
    }


def ratio(values: dict[str, list[float]], schedule: str) -> float:
    pairs = zip(values[f"torch, {schedule}"], values[f"phalanx, {schedule}"], strict=True)
    return statistics.median(theirs / ours for theirs, ours in pairs)


def large_schedule() -> dict[str, float]:
    """Returns median seconds of generating and validating a large interleaved schedule, and its number of actions."""
    generated, validated, actions = [], [], 0
    for _ in range(REPEATS):
        began = time.perf_counter()
        schedule = catalogue.build("interleaved_1f1b", **LARGE)
        built = time.perf_counter()
        check.check(schedule)
        validated.append(time.perf_counter() - built)
        generated.append(built - began)
        actions = sum(map(len, schedule.programs))
    return {
        "actions": actions,
        "generate_s": statistics.median(generated),
        "validate_s": statistics.median(validated),
    }


def table(result: dict[str, Any]) -> list[tuple[str, ...]]:
    rows = [("processes, schedule", "phalanx", "torch", "torch / phalanx", "the same, processor time")]
    for ranks, found in result["worlds"].items():
        for schedule, times in found["torch_over_phalanx"].items():
            ours, theirs = (1000 * found["median_s"][f"{side}, {schedule}"] for side in ("phalanx", "torch"))
            cpu = found["torch_over_phalanx_cpu"][schedule]
            name = f"{ranks}, {schedule}"
            rows.append((name, f"{ours:,.0f} ms", f"{theirs:,.0f} ms", f"**{times:.3f} ×**", f"{cpu:.3f} ×"))
    large = result["large_schedule"]
    size = "{ranks} ranks, {micro_batches} micro-batches, {chunks} stages a rank".format(**LARGE)
    name = f"interleaved_1f1b, {size}: {large['actions']:,} actions"
    both = ("generate", "validate")
    return rows + [(f"{name}, {verb}", f"{1000 * large[f'{verb}_s']:,.0f} ms", "", "", "") for verb in both]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="numbers of processes")
    parser.add_argument("--quick", action="store_true", help="2 rounds of a tiny model; prints JSON, writes nothing")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    parser.add_argument("words", nargs="*", metavar="key=value", help="overrides of the job")
    options = parser.parse_intermixed_args(argv)
    words = [*(QUICK if options.quick else ()), *options.words]
    rounds = 2 if options.quick else options.rounds
    result: dict[str, Any] = {"benchmark": "pipeline", "machine": machine(), "rounds": rounds}
    result |= {"model": [*MODEL, *words], "large_schedule": large_schedule(), "worlds": {}}
    with Pool(max(options.ranks), ["torch.distributed.pipelining"]) as pool:
        for ranks in options.ranks:
            result["worlds"][ranks] = compare(pool, ranks, rounds, words)
    if not options.quick:
        quiet = contextlib.redirect_stdout(sys.stderr) if options.json else contextlib.nullcontext()
        with quiet:
            save("pipeline", result, table(result), "Steps of pipelines, in turn with torch.distributed.pipelining's")
    if options.quick or options.json:
        print(json.dumps(result, indent=1))


if __name__ == "__main__":
    sys.exit(main())
