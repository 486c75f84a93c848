"""The cost of the guard: steps with and without it, and comparisons of replicas, in turn in the same processes.

    python -m benchmarks.guard [--rounds 40] [--seconds 200] [--json]

The main job on two ranks, and one with sixteen times the parameters for the same tokens, where digests cost most
relative to a step; fp32, 1 thread per process. Each round takes a step without the guard, one with it in which nothing
is compared (it sums this rank's own gradients bit by bit, and waits for the sums over all ranks before the optimizer
writes), and a comparison of all parameters, moments and gradients by itself. Ratios are taken round by round, and their
medians count: of the time on the clock, and of the processor time of both ranks, which other programs on the machine
change less. The cost per step at the default interval is (guarded - plain + comparison / guard.every) / plain.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from benchmarks.report import machine, save
from benchmarks.turns import Turns, lasted, prepare, ratio, take_turns
from phalanx.config.guard import GuardOptions
from phalanx.config.job import Job
from phalanx.config.layout import Layout
from phalanx.config.model import ModelConfig
from phalanx.config.train import Train
from phalanx.data.loader import MicroBatch
from phalanx.launch.pool import Pool
from phalanx.launch.ranks import Ranks
from phalanx.parallel import mesh as meshes
from phalanx.train.guard.guard import Guard
from phalanx.train.guard.history import History
from phalanx.train.step import Stepper

RANKS = 2
VOCAB = 100
SEQUENCES = 16
"""Sequences per rank and step, as in the main job."""
COMMON: dict[str, Any] = {"seq_len": 128, "norm": "rmsnorm", "positions": "rope", "activation": "swiglu", "bias": False}
SMALL = ModelConfig(n_layers=4, d_model=128, n_heads=4, d_ff=384, **COMMON)
LARGE = ModelConfig(n_layers=4, d_model=512, n_heads=8, d_ff=1536, **COMMON)
JOBS = {
    "main job, DDP": Job(SMALL, layout=Layout(dp_replicate=2)),
    "main job, ZeRO-1": Job(SMALL, layout=Layout(dp_shard=2, zero=1)),
    "main job, ZeRO-3": Job(SMALL, layout=Layout(dp_shard=2)),
    "16 × parameters, DDP": Job(LARGE, layout=Layout(dp_replicate=2)),
}
PLAIN, GUARDED, COMPARISON = "step", "guarded step", "comparison"
EVERY = GuardOptions().every


Seconds = dict[str, list[float]]


def measure(ranks: Ranks, name: str, rounds: int, seconds: float) -> tuple[Turns, Seconds, int, float]:
    """Returns this rank's turns, their processor time, its parameters' elements, and the share of its state that has a
    replica."""
    prepare()
    job = Job(JOBS[name].model, layout=JOBS[name].layout, train=Train(global_batch=SEQUENCES * RANKS, precision="fp32"))
    mesh = meshes.build(job.layout, "cpu")
    plain, guarded = (Stepper(job, mesh, torch.device("cpu"), VOCAB) for _ in range(2))
    guard = Guard(guarded, History(job.guard), lambda *_: None)
    tokens = np.random.default_rng(ranks.rank).integers(VOCAB, size=(SEQUENCES, job.model.seq_len + 1))
    batch = [MicroBatch(tokens[:, :-1], tokens[:, 1:], np.arange(SEQUENCES))]
    total = SEQUENCES * RANKS * job.model.seq_len
    samples = range(SEQUENCES * RANKS)

    masters = {shard.name: guarded.optimizer.masters[shard.name] for shard in guarded.optimizer.shards}
    gradients = {name: torch.zeros_like(master) for name, master in masters.items()}

    def compare() -> None:
        for key, master in masters.items():
            master.grad = gradients[key]
        assert not guard.replicas.differing(gradients=True), "nothing is corrupt"
        guarded.optimizer.clear()

    # Step 0 is not a multiple of the interval, so a guarded step compares nothing.
    steps: dict[str, Callable[[], Any]] = {
        PLAIN: lambda: plain.step(batch, 0, total, 1e-4),
        GUARDED: lambda: guard.step(batch, 0, total, 1e-4, stop=False, samples=samples),
        COMPARISON: compare,
    }
    for _ in range(2):
        steps[PLAIN]()
        steps[GUARDED]()
    busy: Seconds = {kind: [] for kind in steps}

    def timed(kind: str) -> Callable[[], None]:
        def turn() -> None:
            began = time.process_time()
            steps[kind]()
            busy[kind].append(time.process_time() - began)

        return turn

    turns = take_turns({kind: timed(kind) for kind in steps}, rounds, seconds)
    return turns, busy, sum(shard.value.numel() for shard in guarded.replica.local_parameters()), guard.replicas.share


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--seconds", type=float, default=200.0, help="for all rounds of all jobs")
    parser.add_argument("--json", action="store_true")
    options, _ = parser.parse_known_args()
    found: dict[str, Any] = {}
    head = (
        "job",
        "parameters",
        "step",
        "guarded / plain",
        "comparison / plain",
        f"per step, every {EVERY}",
        "on clock",
    )
    table = [(*head, "has a replica")]
    with Pool(RANKS) as pool:
        for name in JOBS:
            each = options.seconds / len(JOBS)
            answers = pool.run(measure, RANKS, name, options.rounds, each, timeout=each + 300)
            clock = lasted([turns for turns, *_ in answers])
            ranks = [busy for _, busy, *_ in answers]
            busy = {kind: [sum(turn) for turn in zip(*(b[kind] for b in ranks), strict=True)] for kind in ranks[0]}
            found[name] = {"parameters": answers[0][2], "replicated": answers[0][3]}
            for kind, seconds in (("clock", clock), ("processor", busy)):
                guarded, comparison = ratio(seconds, GUARDED, PLAIN), ratio(seconds, COMPARISON, PLAIN)
                found[name][kind] = {
                    "step_s": statistics.median(seconds[PLAIN]),
                    "guarded": guarded,
                    "comparison": comparison,
                    "cost": guarded - 1 + comparison / EVERY,
                    "seconds": seconds,
                }
            one = found[name]["processor"]
            costs = f"{one['guarded']:.4f}", f"{one['comparison']:.4f}", f"{one['cost']:+.2%}"
            shape = f"{answers[0][2] / 1e6:.2f} M", f"{found[name]['clock']['step_s']:.2f} s"
            table.append((name, *shape, *costs, f"{found[name]['clock']['cost']:+.2%}", f"{answers[0][3]:.0%}"))
            print(" | ".join(table[-1]), file=sys.stderr, flush=True)
    result = {"benchmark": "guard", "machine": machine(), "ranks": RANKS, "every": EVERY, "jobs": found}
    save("guard", result, table, "The cost of the guard")
    if options.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
