"""Measures the cost of a rehearsal: 70B on 16,384 ranks, 8B on 8, and one rank of every stage of 405B in 16 stages.
Goals on two quiet cores: 60 s and 1.5 GiB, 10 s, 180 s. CPU seconds are those to compare: others may use the machine.

python -m benchmarks.dryrun [--only 8b]
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time

from benchmarks.report import machine, save

EAGER = ["precision=bf16", "train.compile=false"]
JOBS = {
    "8b": (["model=llama3-8b", "cluster=dgx-h100:1", "layout=dp_shard=8,micro_batch=1"], 10),
    "70b": (
        ["model=llama3-70b", "cluster=dgx-h100:2048", "layout=dp_shard=1024,tp=8,cp=2,sp=true,micro_batch=1"],
        60,
    ),
    "405b": (
        [
            "model=llama3-405b",
            "cluster=dgx-h100:2048",
            "layout=dp_shard=128,tp=8,pp=16,zero=1,sp=true,micro_batch=1,accumulation=16,recompute=selective",
        ],
        180,
    ),
}


def measured(name: str) -> dict[str, object]:
    """Rehearses one of JOBS in this process: the first rank of every pipeline stage."""
    began = time.perf_counter()
    from phalanx.api import load_job
    from phalanx.dryrun.check import rehearse_ranks
    from phalanx.dryrun.rehearse import distinct_ranks

    job = load_job(*JOBS[name][0], *EAGER)
    found = rehearse_ranks(job, job.model.vocab_size, distinct_ranks(job))
    return {
        "layout": job.layout.line(),
        "world": job.layout.world,
        "ranks": len(found.ranks),
        "peak_bytes": found.fullest.peak,
        "wall_s": time.perf_counter() - began,
        "cpu_s": time.process_time(),
        "rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=JOBS, action="append", default=[])
    parser.add_argument("--measure", choices=JOBS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measured(options.measure)))
        return
    found = {}
    for name in options.only or JOBS:
        command = [sys.executable, "-m", "benchmarks.dryrun", "--measure", name]  # a process of its own: its memory
        load = os.getloadavg()[0]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        found[name] = {**json.loads(done.stdout), "load_before": load}
    table = [("model", "layout", "ranks", "rehearsed", "CPU seconds", "mark", "wall seconds", "peak RSS")]
    table += [
        (
            name,
            f"`{each['layout']}`",
            f"{each['world']:,}",
            f"{each['ranks']}",
            f"{each['cpu_s']:.1f}",
            f"{JOBS[name][1]}",
            f"{each['wall_s']:.1f}",
            f"{each['rss_bytes'] / 2**20:.0f} MiB",
        )
        for name, each in found.items()
    ]
    loads = ", ".join(f"{each['load_before']:.1f}" for each in found.values())
    seen = (
        f"Load of the machine before each: {loads}; where it exceeds the cores, wall seconds are those of others, too."
    )
    save(
        "dryrun",
        {"benchmark": "dryrun", "machine": machine(), "rehearsals": found},
        table,
        "What a rehearsal costs",
        seen,
    )


if __name__ == "__main__":
    main()
