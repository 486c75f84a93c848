"""Redundant experts: rows and CPU-seconds of the fullest rank with and without copies, under skewed routing.

    python -m benchmarks.redundant [--steps 30] [--ranks 4] [FIELD=VALUE ...]

The mixture of examples/experts.yaml with wider experts, on Shakespeare without any balancing, its experts over all
ranks: the same samples, initial weights and learning rate for all. Rows are those that arrive at a rank's experts in
one layer and forward pass of training. All ranks wait for the last one in each: the CPU-seconds of experts are those
of their forward passes with what moves rows and copies, of the slowest rank in each, added up; one thread a rank.
CPU-seconds of a step are whole processes, whose fullest ranks differ between layers. Copies change only
where rows are computed, so that losses differ by rounding alone; a capacity drops rows instead
(benchmarks/capacity.py).
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch

from benchmarks.report import machine, save
from benchmarks.sync import ROOT
from phalanx.check.load import load_file
from phalanx.config.job import Job
from phalanx.launch.pool import Pool
from phalanx.launch.ranks import Ranks
from phalanx.parallel.expert import RowExchange, RowFlight
from phalanx.parallel.redundant import CopiedFlight
from phalanx.train import device as devices
from phalanx.train import loop
from phalanx.train.requests import StopRequest

JOB = ROOT / "examples" / "experts.yaml"
CASES = {
    "none": ("layout.redundant_experts=0",),
    "1 per rank": ("layout.redundant_experts=1",),
    "2 per rank": ("layout.redundant_experts=2",),
}


def train(ranks: Ranks, job: Job) -> dict[str, Any]:
    """Trains as one of the ranks. Returns its CPU-seconds, its loss after the last step, and the rows of the fullest
    rank over the mean, by layer and forward pass."""
    devices.keep_freed_memory()
    trainer = loop.Trainer(job, ranks, torch.device("cpu"), StopRequest())
    fullest, inside, paths = list[float](), list[float](), RowExchange.paths

    def timed(compute: Callable[[Any], None]) -> Callable[[Any], None]:
        def run(flight: Any) -> None:
            began = time.thread_time()
            compute(flight)
            if torch.is_grad_enabled():
                inside.append(time.thread_time() - began)

        return run

    def noted(exchange: RowExchange, rows: Sequence[Sequence[int]]) -> Any:
        if torch.is_grad_enabled():
            arriving = [sum(column) for column in zip(*rows, strict=True)]
            fullest.append(max(arriving) * len(arriving) / sum(arriving))
        return paths(exchange, rows)

    began = time.process_time()
    with ExitStack() as patched:
        patched.enter_context(mock.patch.object(RowExchange, "paths", noted))
        for kind in (RowFlight, CopiedFlight):
            patched.enter_context(mock.patch.object(kind, "compute", timed(kind.compute)))
        summary = trainer.run()
    seconds = time.process_time() - began
    sent = sum(sum(kinds.values()) for kinds in summary["traffic_bytes"].values())
    return {
        "cpu_seconds": seconds,
        "val_loss": summary["val_loss"],
        "fullest": fullest,
        "experts": inside,
        "sent": sent,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("words", nargs="*", help="further fields of the job")
    options = parser.parse_args()
    argv = [
        *("data=shakespeare_char", f"layout.dp_shard={options.ranks}", f"layout.ep={options.ranks}", "run.threads=1"),
        *(f"train.steps={options.steps}", f"train.eval_every={options.steps}", "train.log_every=10000"),
        *(
            "model.moe.aux_loss=0",
            "model.moe.d_ff=1024",
            "train.global_batch=16",
            "train.eval_samples=64",
            "checkpoint.every=0",
        ),
        *("run.sample_tokens=0", "cluster.device=cpu", "cluster.peak_tflops=1", *options.words),
    ]
    measured = {}
    with Pool(options.ranks) as pool:
        for name, words in CASES.items():
            job = load_file(JOB, [*argv, *words]).job
            with tempfile.TemporaryDirectory() as runs:
                job = dataclasses.replace(job, run=dataclasses.replace(job.run, dir=runs, name="run"))
                found = pool.run(train, options.ranks, job, timeout=3600.0)
            seconds = [each["cpu_seconds"] for each in found]
            measured[name] = {
                "fullest": statistics.fmean(found[0]["fullest"]),
                "worst": max(found[0]["fullest"]),
                "expert_seconds": sum(map(max, zip(*(each["experts"] for each in found), strict=True))),
                "cpu_seconds": seconds,
                "val_loss": found[0]["val_loss"],
                "sent_bytes_per_step": statistics.fmean(each["sent"] for each in found),
            }
            print(name, measured[name], file=sys.stderr, flush=True)
    asked = {name: value for name, value in vars(options).items() if name != "words"}
    result = {"benchmark": "redundant", "machine": machine(), "options": asked, "runs": measured}
    rows = [
        (
            *(
                "redundant experts",
                "rows of the fullest rank / mean",
                "at worst",
                "CPU-seconds of experts, slowest rank",
            ),
            *("of steps, fullest rank", "of all ranks", "a rank sends per step", "validation loss"),
        )
    ]
    for name, run in measured.items():
        rows.append(
            (
                *(name, f"{run['fullest']:.2f}", f"{run['worst']:.2f}", f"{run['expert_seconds']:.2f}"),
                f"{max(run['cpu_seconds']):.1f}",
                f"{sum(run['cpu_seconds']):.1f}",
                f"{run['sent_bytes_per_step'] / 2**20:.1f} MiB",
                f"{run['val_loss']:.6f}",
            )
        )
    save("redundant", result, rows, "Redundant experts: rows of the fullest rank under skewed routing on Shakespeare")


if __name__ == "__main__":
    main()
