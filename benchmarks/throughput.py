"""The cost of the training system: the main job against a plain loop around the same model, in one run.

    python -m benchmarks.throughput [--rounds 5] [--steps 40]

Rounds are interleaved (every contender once per round, in turn), each contender in fresh processes; a round's figure is
the median step after a warm-up, the result is the median over rounds, and ratios are taken round by round. Marks: one
process at least 1.0 × the plain loop; two processes at least 0.95 × the best one-process figure. The line "both on MKL"
excludes the gain of oneDNN's kernels, so that it shows the loop alone.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.report import machine, save
from phalanx.check.load import load_file

ROOT = Path(__file__).parents[1]
WARM_UP = 8
"""Steps excluded at the start of every round."""


def tokens_per_second(seconds: list[float], tokens: int) -> float:
    return tokens / statistics.median(seconds[WARM_UP:])


def plain(job: Path, steps: int, threads: int) -> list[float]:
    """Returns the seconds of each step of the plain loop."""
    argv = [sys.executable, "-m", "benchmarks.plain_loop", str(job), "--steps", str(steps), "--threads", str(threads)]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def phalanx(job: Path, steps: int, processes: int, threads: int, *overrides: str) -> list[float]:
    """Returns the seconds of each step of `phalanx train`, from its metrics.jsonl."""
    with tempfile.TemporaryDirectory() as runs:
        argv = [
            *(sys.executable, "-m", "phalanx", "train", str(job)),
            *(f"train.steps={steps}", f"layout.dp_replicate={processes}", f"run.threads={threads}"),
            *(f"run.dir={runs}", "run.sample_tokens=0", "train.eval_every=0", "train.eval_samples=0"),
            *("checkpoint.every=0", "train.log_every=1000", "optimizer.warmup_steps=0", *overrides),
        ]
        subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=True)
        rows = [json.loads(line) for line in next(Path(runs).glob("*/metrics.jsonl")).read_text().splitlines()]
    return [row["step_time_s"] for row in rows if row["event"] == "step"]


def gemm_flops(threads: int) -> float:
    """Returns FLOP/s of a large fp32 matrix product on this machine, with `threads` threads."""
    torch.set_num_threads(threads)
    a = torch.ones(2048, 2048)
    times = []
    for _ in range(6):
        began = time.perf_counter()
        a @ a
        times.append(time.perf_counter() - began)
    return 2 * 2048**3 / min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    path = ROOT / "examples" / "main.yaml"
    job = load_file(path).job
    cores = len(os.sched_getaffinity(0))
    contenders = {
        f"plain loop, 1 process × {cores} threads": lambda: plain(path, options.steps, cores),
        f"phalanx, 1 process × {cores} threads": lambda: phalanx(path, options.steps, 1, cores),
        f"phalanx, 1 process × {cores} threads, MKL": lambda: phalanx(
            path, options.steps, 1, cores, "train.cpu_linear=mkl"
        ),
        "plain loop, 1 process × 1 thread": lambda: plain(path, options.steps, 1),
        f"phalanx, {cores} processes × 1 thread": lambda: phalanx(path, options.steps, cores, 1),
    }
    rounds: list[dict[str, float]] = []
    for number in range(options.rounds):
        names = list(contenders) if number % 2 == 0 else list(reversed(contenders))
        measured = {}
        for name in names:
            measured[name] = tokens_per_second(contenders[name](), job.train.global_batch * job.model.seq_len)
            print(f"round {number + 1}: {name}: {measured[name]:,.0f} tokens/s", file=sys.stderr, flush=True)
        rounds.append(measured)
    plain_many, ours_one, ours_mkl, _, ours_many = contenders
    one_process = [name for name in contenders if "1 process ×" in name]
    ratios = {
        "1 process / plain loop": [r[ours_one] / r[plain_many] for r in rounds],
        "1 process / plain loop, both on MKL": [r[ours_mkl] / r[plain_many] for r in rounds],
        f"{cores} processes / best 1 process": [r[ours_many] / max(r[name] for name in one_process) for r in rounds],
    }
    result = {
        "benchmark": "throughput",
        "machine": machine(),
        "gemm_gflops": {f"{threads} threads": gemm_flops(threads) / 1e9 for threads in (1, cores)},
        "tokens_per_s": {name: statistics.median(r[name] for r in rounds) for name in contenders},
        "ratios": {name: statistics.median(values) for name, values in ratios.items()},
        "ratios_by_round": ratios,
        "rounds": rounds,
    }
    table = [("contender", "tokens/s (median)")]
    table += [(name, f"{value:,.0f}") for name, value in result["tokens_per_s"].items()]
    table += [(f"**{name}**", f"**{value:.3f} ×**") for name, value in result["ratios"].items()]
    table += [(f"matrix product, {name}", f"{value:,.0f} GFLOP/s") for name, value in result["gemm_gflops"].items()]
    save("throughput", result, table, "What the training system costs, on the main job's model")


if __name__ == "__main__":
    main()
