"""FSDP with tensor parallelism of degree 1, 2 and 4 on four processes, in turn in the same processes.

    phalanx bench compute && phalanx bench comm
    python -m benchmarks.tensor_parallel [--rounds 15] [--seconds 180] [--quick] [--json]

The comparison of ezpz's example fsdp_tp: examples/fsdp_tp.yaml, whose mesh is dp_shard × tp, with --tp 1, 2 and 4. The
global batch is the same, so that a data rank has 4, 8 or 16 sequences. Every contender makes one optimizer step per
round; time is from the first rank's beginning to the last one's end, and medians count. Memory is the peak of a rank's
tensors in its second step: bytes of storages that are alive. The contenders must agree on loss and gradient norm before
anything is measured. Beside them stand the predictions on `cluster=local`, if `phalanx bench` has measured this
machine.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace as with_fields
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks.contenders import ROOT
from benchmarks.context import Alive
from benchmarks.report import machine, save
from benchmarks.turns import MIN_ROUNDS, Turns, agree, lasted, prepare, ratio, take_turns
from phalanx.check.load import load_file
from phalanx.config import clusters
from phalanx.config.calibration import assess
from phalanx.config.fields import replace
from phalanx.config.job import Job
from phalanx.cost.job_spec import step_spec
from phalanx.cost.prediction import predict
from phalanx.data.loader import MicroBatch
from phalanx.errors import JobError
from phalanx.launch.pool import Pool
from phalanx.launch.ranks import Ranks
from phalanx.parallel import mesh as meshes
from phalanx.train.step import StepInputs, Stepper

JOB = "examples/fsdp_tp.yaml"
RANKS = 4
DEGREES = (1, 2, 4)
BATCH = ("train.global_batch=16", "layout.micro_batch=0", "model.vocab_size=256", "data=random")
QUICK = ("model.n_layers=2", "model.seq_len=32")
TOLERANCE = 1e-4
"""Allowed relative difference of losses and gradient norms of the same step."""


def load(tp: int, words: Sequence[str]) -> Job:
    return load_file(ROOT / JOB, [*BATCH, f"layout.tp={tp}", *words]).job


def name_of(tp: int) -> str:
    return f"tp {tp}"


def measure(ranks: Ranks, rounds: int, seconds: float, words: Sequence[str]) -> tuple[Turns, dict[str, int]]:
    """Returns this rank's turns, and the peak bytes of its tensors by contender. Raises AssertionError if they differ
    in loss or gradient norm."""
    prepare()
    steps: dict[str, Callable[[], object]] = {}
    shown: dict[str, tuple[float, float] | None] = {}
    peaks: dict[str, int] = {}
    for tp in DEGREES:
        job = load(tp, words)
        with Alive() as alive:
            stepper = Stepper(job, meshes.build(job.layout, "cpu"), torch.device("cpu"), job.model.vocab_size)
            inputs = StepInputs([batch(job, stepper.mesh.data_rank)], 0, tokens(job), lr=0.0)  # which changes nothing
            first = stepper.step(inputs)
            alive.peak = 0
            stepper.step(inputs)
        shown[name_of(tp)] = first.loss, first.grad_norm
        peaks[name_of(tp)] = alive.peak
        steps[name_of(tp)] = partial(stepper.step, with_fields(inputs, lr=job.optimizer.lr))
    agree(shown, TOLERANCE)
    return take_turns(steps, rounds, seconds), peaks


def batch(job: Job, data_rank: int) -> MicroBatch:
    """Returns a data rank's part of the global batch of random tokens, the same for all contenders."""
    size = job.train.global_batch // job.layout.data_ranks
    drawn = np.random.default_rng(0).integers(
        job.model.vocab_size, size=(job.train.global_batch, job.model.seq_len + 1)
    )
    mine = slice(size * data_rank, size * (data_rank + 1))
    part = drawn[mine]
    return MicroBatch(part[:, :-1].copy(), part[:, 1:].copy(), np.arange(job.train.global_batch)[mine])


def tokens(job: Job) -> int:
    return job.train.global_batch * job.model.seq_len


def predicted(words: Sequence[str]) -> tuple[dict[str, dict[str, float]], str]:
    """Returns seconds of a step and peak bytes of a rank's tensors by contender, and the reliability of the machine's
    measurements in words; none on a machine that was not measured."""
    try:
        cluster = clusters.read_local(nodes=1)
    except JobError as error:
        print(f"no predictions: {error}", file=sys.stderr)
        return {}, "this machine was not measured"
    found: dict[str, dict[str, float]] = {}
    for tp in DEGREES:
        job = load(tp, words)
        job = replace(job, "cluster", replace(cluster, "devices_per_node", RANKS))
        step = predict(step_spec(job, job.model.vocab_size))
        found[name_of(tp)] = {"step_s": step.step_time_s, "bytes": step.fullest.peak - step.fullest.reserved}
    assessment = assess(cluster.calibration, ("compute", "comm"), here=True)
    return found, f"{assessment.status}: {assessment.problem}" if assessment.problem else assessment.status


def table(result: dict[str, Any]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [
        ("mesh", "step, measured", "predicted", "tokens/s", "time / tp 1", "memory per rank, measured", "predicted")
    ]
    for tp in DEGREES:
        name, expected = name_of(tp), result["predicted"].get(name_of(tp))
        seconds = result["median_s"][name]
        mib = [value / 2**20 for value in (result["peak_bytes"][name], expected["bytes"] if expected else 0)]
        rows.append(
            (
                f"dp_shard {RANKS // tp} × tp {tp}",
                f"{1000 * seconds:,.0f} ms",
                f"{1000 * expected['step_s']:,.0f} ms" if expected else "",
                f"{result['tokens'] / seconds:,.0f}",
                f"**{result['ratios'][name]:.3f} ×**",
                f"{mib[0]:,.1f} MiB",
                f"{mib[1]:,.1f} MiB" if expected else "",
            )
        )
    return rows


def seen(result: dict[str, Any]) -> str:
    """Returns the circumstances in words."""
    before, after = result["load_average"]
    return (
        f"{RANKS} processes × 1 thread on {result['machine']['cores']} cores, fp32, {result['rounds']} rounds, "
        f"{result['tokens']:,} tokens per step. Load average when it began: {before:.1f}; when it ended: {after:.1f}, "
        f"with about {RANKS} of this benchmark. Measurements that the predictions rest on: {result['calibration']}."
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="at most")
    parser.add_argument("--seconds", type=float, default=180, help=f"in which rounds begin, after {MIN_ROUNDS}")
    parser.add_argument("--quick", action="store_true", help="2 rounds of a tiny model; prints JSON, writes nothing")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    options = parser.parse_args(argv)
    words, rounds = (QUICK, 2) if options.quick else ((), options.rounds)
    began = os.getloadavg()[0]
    with Pool(RANKS, ["torch.distributed.tensor", "torch.distributed.fsdp"]) as pool:
        answers = pool.run(measure, RANKS, rounds, options.seconds, words, timeout=1200)
    seconds = lasted([turns for turns, _ in answers])
    result: dict[str, Any] = {
        "benchmark": "tensor_parallel",
        "machine": machine(),
        "job": JOB,
        "words": [*BATCH, *words],
    }
    result |= {"load_average": [began, os.getloadavg()[0]], "tokens": tokens(load(1, words))}
    expected, calibration = predicted(words)
    result |= {"rounds": len(seconds[name_of(1)]), "predicted": expected, "calibration": calibration}
    result |= {"median_s": {name: statistics.median(values) for name, values in seconds.items()}}
    result |= {"ratios": {name: ratio(seconds, name, name_of(1)) for name in seconds}}
    result |= {"peak_bytes": {name: max(peaks[name] for _, peaks in answers) for name in seconds}, "seconds": seconds}
    if not options.quick:
        with contextlib.redirect_stdout(sys.stderr) if options.json else contextlib.nullcontext():
            title = "FSDP with tensor parallelism of degree 1, 2 and 4"
            save("tensor_parallel", result, table(result), title, seen(result))
    if options.quick or options.json:
        print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
