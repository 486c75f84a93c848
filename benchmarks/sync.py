"""Synchronization of replicas: loss against steps and time for bsp, asp, local_sgd and diloco, with measured staleness.

    python -m benchmarks.sync [--replicas 2] [--steps 500] [--every 50] [--slow 1.0]

The main job's model and data, the same samples, seed and learning rate for all, one thread per replica. Each technique
trains twice: with replicas of equal speed, and with a straggler: after each gradient the last replica sleeps `--slow`
times as long as that took. Time is training time: validations and checkpoints are excluded.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
import time
from itertools import product
from pathlib import Path
from typing import Any

import torch

from benchmarks.report import machine, save
from benchmarks.sync_picture import EVEN, JOB, SLOW, TECHNIQUES, picture
from phalanx.check.load import load_file
from phalanx.config.job import Job
from phalanx.launch.pool import Pool
from phalanx.launch.ranks import Ranks
from phalanx.train import device as devices
from phalanx.train import loop
from phalanx.train.requests import StopRequest

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs" / "pictures" / "sync.svg"


def train(ranks: Ranks, job: Job, slow: float) -> dict[str, Any]:
    """Trains as one of the ranks; the last sleeps after each gradient, `slow` times as long as it took."""
    devices.keep_freed_memory()
    trainer = loop.Trainer(job, ranks, torch.device("cpu"), StopRequest())
    if slow and ranks.rank == ranks.world - 1:
        forward_backward = trainer.stepper.replica.forward_backward

        def slowed(*args: Any, **kwargs: Any) -> torch.Tensor:
            began = time.perf_counter()
            loss = forward_backward(*args, **kwargs)
            time.sleep(slow * (time.perf_counter() - began))
            return loss

        trainer.stepper.replica.forward_backward = slowed
    return trainer.run()


def measure(pool: Pool, job: Job, replicas: int, slow: float) -> dict[str, Any]:
    """Returns one run's summary, and its validation losses by step and by second of training."""
    with tempfile.TemporaryDirectory() as runs:
        job = dataclasses.replace(job, run=dataclasses.replace(job.run, dir=runs, name="run"))
        summary = pool.run(train, replicas, job, slow, timeout=3600.0)[0]
        rows = [json.loads(line) for line in (Path(runs) / "run" / "metrics.jsonl").read_text().splitlines()]
    curve, away = [], 0.0
    began = rows[0]["time"]
    for row in rows:
        if row["event"] == "validation":
            curve.append((row["step"], row["time"] - row["seconds"] - began - away, row["val_loss"]))
            away += row["seconds"]
    sent = sum(sum(kinds.values()) for kinds in summary["traffic_bytes"].values())
    return {
        "curve": curve,
        "val_loss": summary["val_loss"],
        "seconds": curve[-1][1],
        "tokens_per_s": summary["tokens"] / curve[-1][1],
        "sent_bytes_per_step": sent,
        "staleness": summary.get("staleness"),
        "dropped": next((row.get("dropped", 0.0) for row in rows[::-1] if row["event"] == "experts"), 0.0),
    }


def table(measured: dict[str, dict[str, Any]]) -> list[tuple[str, ...]]:
    found = [
        ("sync, replicas", "validation loss", "seconds", "tokens/s", "rank 0 sends a step", "staleness: mean, max")
    ]
    for name, run in measured.items():
        stale = run["staleness"]
        found.append(
            (
                name,
                f"{run['val_loss']:.4f}",
                f"{run['seconds']:.1f}",
                f"{run['tokens_per_s']:,.0f}",
                f"{run['sent_bytes_per_step'] / 2**20:.2f} MiB",
                f"{stale['mean']:.2f}, {stale['max']}" if stale else "0",
            )
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--every", type=int, default=50, help="steps between validations, a multiple of sync-every")
    parser.add_argument("--sync-every", type=int, default=10)
    parser.add_argument("--slow", type=float, default=1.0, help="the slow replica sleeps this many times its gradient")
    options = parser.parse_args()
    argv = [
        *(f"layout.dp_replicate={options.replicas}", f"layout.sync_every={options.sync_every}", "run.threads=1"),
        *(f"train.steps={options.steps}", f"train.eval_every={options.every}", "train.log_every=1000"),
        *("checkpoint.every=0", "run.sample_tokens=0", "cluster.device=cpu", "cluster.peak_tflops=1"),
    ]
    measured: dict[str, dict[str, Any]] = {}
    with Pool(options.replicas) as pool:
        for speed, sync in product((EVEN, SLOW), TECHNIQUES):
            job = load_file(JOB, [*argv, f"layout.sync={sync}"]).job
            found = measure(pool, job, options.replicas, options.slow if speed == SLOW else 0.0)
            measured[f"{sync}, {speed}"] = found
            said = f"{sync}, {speed}: val_loss {found['val_loss']:.4f} in {found['seconds']:.1f} s"
            print(said, file=sys.stderr, flush=True)
    result = {"benchmark": "sync", "machine": machine(), "options": vars(options), "runs": measured}
    save("sync", result, table(measured), "How replicas agree: bsp, asp, local SGD and DiLoCo on the main job")
    PICTURE.write_text(picture(result), encoding="utf-8")


if __name__ == "__main__":
    main()
