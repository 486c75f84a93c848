"""The cost of the guard: steps with and without it, and each part of its work, in turn in the same processes.

    python -m benchmarks.guard [--rounds 60] [--seconds 240] [--json]

The main job on two ranks, and one with sixteen times the parameters for the same tokens, where digests cost most
relative to a step; fp32, 1 thread per process. Each round takes a step without the guard and one with it, in which
nothing is compared, and each part of the guard's work by itself: summing the bits of this rank's own gradients, waiting
for the sums of loss and norm (which overlaps with the update without the guard, unless state is sharded: then a step
waits anyway, and it does not count), and a comparison of all replicas. Ratios to a step are taken round by round, and
their medians count. The cost is that of the parts, the comparison's divided by the default of `guard.every`; the whole
step with the guard, beside it, is the check.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from benchmarks.report import machine, save
from benchmarks.turns import Turns, lasted, prepare, ratio, take_turns
from phalanx.blocks.parameters import count
from phalanx.config.job import GuardOptions, Job, Train
from phalanx.config.layout import Layout
from phalanx.config.model import ModelConfig
from phalanx.data.loader import MicroBatch
from phalanx.launch.pool import Pool
from phalanx.launch.ranks import Ranks
from phalanx.parallel import mesh as meshes
from phalanx.train.guard import Guard, History
from phalanx.train.requests import NO_REQUESTS
from phalanx.train.step import StepInputs, Stepper

RANKS = 2
VOCAB = 100
SEQUENCES = 16
"""Sequences per rank and step, as in the main job."""
COMMON: dict[str, Any] = {"seq_len": 128, "norm": "rmsnorm", "positions": "rope", "activation": "swiglu", "bias": False}
SMALL = ModelConfig(n_layers=4, d_model=128, n_heads=4, d_ff=384, **COMMON)
LARGE = ModelConfig(n_layers=4, d_model=512, n_heads=8, d_ff=1536, **COMMON)
JOBS = {
    "main job, DDP": (SMALL, Layout(dp_replicate=2)),
    "main job, ZeRO-1": (SMALL, Layout(dp_shard=2, zero=1)),
    "main job, ZeRO-3": (SMALL, Layout(dp_shard=2)),
    "16 × parameters, DDP": (LARGE, Layout(dp_replicate=2)),
}
PLAIN, GUARDED, OWN, SUMS, COMPARISON = "step", "guarded step", "own gradients", "sums", "comparison"
EVERY = GuardOptions().every


def measure(ranks: Ranks, name: str, rounds: int, seconds: float) -> tuple[Turns, float]:
    """Returns this rank's turns, and the share of its state that has a replica."""
    prepare()
    model, layout = JOBS[name]
    job = Job(model, layout=layout, train=Train(global_batch=SEQUENCES * RANKS))
    mesh = meshes.build(layout, "cpu")
    plain, guarded = (Stepper(job, mesh, torch.device("cpu"), VOCAB) for _ in range(2))
    guard = Guard(guarded, History(job.guard), lambda *_: None)
    tokens = np.random.default_rng(ranks.rank).integers(VOCAB, size=(SEQUENCES, model.seq_len + 1))
    batch = [MicroBatch(tokens[:, :-1], tokens[:, 1:], np.arange(SEQUENCES))]
    total = SEQUENCES * RANKS * model.seq_len
    status = torch.zeros(3, dtype=torch.float64)
    masters = {shard.name: guarded.optimizer.masters[shard.name] for shard in guarded.optimizer.shards}
    gradients = {name: torch.zeros_like(master) for name, master in masters.items()}
    whole = torch.zeros(count(model, VOCAB))  # as before they are summed, in every layout

    def compare() -> None:
        for key, master in masters.items():
            master.grad = gradients[key]
        assert not guard.replicas.differing(gradients=True), "nothing is corrupt"
        guarded.optimizer.clear()

    # Step 0 is not a multiple of the interval, so a guarded step compares nothing.
    steps: dict[str, Callable[[], Any]] = {
        PLAIN: lambda: plain.step(StepInputs(batch, 0, total, 1e-4)),
        GUARDED: lambda: guard.step(StepInputs(batch, 0, total, 1e-4, NO_REQUESTS, samples=range(SEQUENCES * RANKS))),
        OWN: lambda: guard.own_gradients(whole),
        SUMS: lambda: mesh.axis("world").all_reduce(status).wait(),
        COMPARISON: compare,
    }
    for _ in range(2):
        for step in steps.values():
            step()
    return take_turns(steps, rounds, seconds), guard.replicas.share


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--seconds", type=float, default=240.0, help="for all rounds of all jobs")
    parser.add_argument("--json", action="store_true")
    options, _ = parser.parse_known_args()
    found: dict[str, Any] = {}
    head = ("job", "parameters", "step", "own gradients", "sums", "comparison", f"cost per step, every {EVERY}")
    table = [(*head, "guarded / plain step", "has a replica")]
    with Pool(RANKS) as pool:
        for name in JOBS:
            each = options.seconds / len(JOBS)
            answers = pool.run(measure, RANKS, name, options.rounds, each, timeout=each + 300)
            elements, share = count(JOBS[name][0], VOCAB), answers[0][1]
            seconds = lasted([turns for turns, _ in answers])
            parts = {part: ratio(seconds, part, PLAIN) for part in (OWN, SUMS, COMPARISON)}
            waits = parts[SUMS] if JOBS[name][1].shard_ranks == 1 else 0.0
            cost = parts[OWN] + waits + parts[COMPARISON] / EVERY
            found[name] = {"parameters": elements, "replicated": share, "parts": parts, "cost": cost}
            found[name] |= {"guarded": ratio(seconds, GUARDED, PLAIN), "seconds": seconds}
            shown = [f"{1000 * statistics.median(seconds[part]):.2f} ms" for part in (PLAIN, *parts)]
            table.append(
                (
                    name,
                    f"{elements / 1e6:.2f} M",
                    *shown,
                    f"{cost:.2%}",
                    f"{found[name]['guarded']:.3f}",
                    f"{share:.0%}",
                )
            )
            print(" | ".join(table[-1]), file=sys.stderr, flush=True)
    load = os.getloadavg()[0]
    result = {"benchmark": "guard", "machine": machine(), "load": load, "ranks": RANKS, "every": EVERY, "jobs": found}
    save(
        "guard",
        result,
        table,
        "The cost of the guard",
        f"The machine's load was {load:.1f} at the end, {RANKS} of it ours.",
    )
    if options.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
