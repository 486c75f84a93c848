"""An offloaded optimizer beside DeepSpeed's: ZeRO-Offload, and ZeRO-3 with CPU offload, in one run.

    python -m benchmarks.offload_peers [--rounds 3] [--steps 14] [--only REGEX]

The job is that of benchmarks/sharding.py, a GPT of 10.7 million parameters in fp32, on two processes of one thread;
everything is measured in the same way (benchmarks/contenders.py), every contender once per round, in turn. Round 0 is
the warm-up. Peak memory is the resident set of a rank: on a CPU the device and its host are the same memory, so that an
offloaded optimizer adds its buffers there. At the end the update alone: torch's fused AdamW, which ours runs, beside
DeepSpeed's CPUAdam. DeepSpeed's environment is made by `make bench-peers`. With `--only`, contenders whose name does
not match are skipped, and nothing is written to benchmarks/results.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import contenders as c
from benchmarks.contenders import Contender, NotRunError
from benchmarks.report import machine, save
from benchmarks.sharding import Ratio, first_round, judged, say
from phalanx.check.load import load_file
from phalanx.data.prepare import prepare


def _deepspeed(name: str, stage: int, offload: str) -> Contender:
    words = (f"--stage={stage}", f"--offload={offload}")
    return c.peer(f"DeepSpeed, {name}", "deepspeed_peer", *words, own_environment=True)


def _ours(name: str, stage: int, *more: str) -> Contender:
    return c.ours(name, "layout.dp_shard=2", f"layout.zero={stage}", *more)


OFFLOADED = {stage: _ours(f"ZeRO-{stage}, offload", stage, "layout.offload=optimizer") for stage in (2, 3)}
MKL = _ours("ZeRO-2, offload, MKL", 2, "layout.offload=optimizer", "train.cpu_linear=mkl")
"""With the peers' matrix library: what remains is the framework."""
ZERO_OFFLOAD = _deepspeed("ZeRO-Offload (stage 2)", 2, "optimizer")
ZERO_3_OFFLOAD = _deepspeed("ZeRO-3, optimizer on the host", 3, "optimizer")
ZERO_3_ALL = _deepspeed("ZeRO-3, optimizer and parameters on the host", 3, "all")
ALL = [c.ZERO[2], *OFFLOADED.values(), MKL, ZERO_OFFLOAD, ZERO_3_OFFLOAD, ZERO_3_ALL]
RATIOS = [
    Ratio("ZeRO-2, offload / DeepSpeed ZeRO-Offload", OFFLOADED[2], [ZERO_OFFLOAD], 1.0),
    Ratio("ZeRO-3, offload / DeepSpeed ZeRO-3, optimizer on the host", OFFLOADED[3], [ZERO_3_OFFLOAD], 1.0),
    Ratio("ZeRO-2, offload, MKL / DeepSpeed ZeRO-Offload", MKL, [ZERO_OFFLOAD]),
    Ratio("ZeRO-2, offload / without", OFFLOADED[2], [c.ZERO[2]]),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--only", default="", metavar="REGEX")
    options = parser.parse_args()
    if options.rounds < 1 or options.steps <= c.WARM_UP:
        parser.error(f"it takes a round at least, and more steps than the {c.WARM_UP} of the warm-up")
    job = load_file(c.ROOT / c.JOB).job
    prepare(job.data)
    chosen = [contender for contender in ALL if re.search(options.only, contender.name)]
    warm_ups, not_run = first_round(chosen)
    rounds: dict[Contender, list[c.Run]] = {contender: [] for contender in warm_ups}
    for number in range(1, options.rounds + 1):
        for contender in list(rounds) if number % 2 else list(reversed(rounds)):
            rounds[contender].append(c.run(contender, options.steps))
            say(f"round {number}: {contender.name}: {rounds[contender][-1].step_s:.3f} s")
    result: dict[str, Any] = {
        "benchmark": "offload_peers",
        "machine": machine(),
        "contenders": {
            contender.name: {
                "step_s": statistics.median(run.step_s for run in runs),
                "peak_mib": statistics.median(run.peak_bytes for run in runs) / 2**20,
                "step_s_by_round": [run.step_s for run in runs],
            }
            for contender, runs in rounds.items()
        },
        "not_run": {contender.name: why for contender, why in not_run.items()},
        "marks": [judged(job, ratio, rounds) for ratio in RATIOS],
        "update": update_alone(),
    }
    table = table_of(result, chosen)
    if options.only:
        print("\n".join(" | ".join(row) for row in table))
    else:
        save("offload_peers", result, table, "An offloaded optimizer, against DeepSpeed")


def update_alone() -> dict[str, Any]:
    """Returns the median seconds of an update of 10 million numbers, by who makes it; or why it could not be run."""
    argv = [str(c.PEERS_PYTHON), "-m", "benchmarks.peers.deepspeed_adam"]
    try:
        with tempfile.TemporaryDirectory() as folder:
            seconds = json.loads(c.launch(argv, Path(folder)).stdout.strip().splitlines()[-1])
    except NotRunError as error:
        return {"not_run": str(error)}
    return {name: statistics.median(each) for name, each in seconds.items()}


def table_of(result: dict[str, Any], chosen: Sequence[Contender]) -> list[tuple[str, ...]]:
    """Returns the rows of the table: contenders, ratios of tokens/s, and the update alone."""
    table = [("contender", "step, s", "peak MiB a rank")]
    for contender in chosen:
        if why := result["not_run"].get(contender.name):
            table.append((contender.name, f"not run: {why.replace('|', '/')}", ""))
        else:
            found = result["contenders"][contender.name]
            table.append((contender.name, f"{found['step_s']:.3f}", f"{found['peak_mib']:,.0f}"))
    table.append(("**ratio of tokens/s, round by round**", "**median**", "**asked**"))
    for mark in result["marks"]:
        value = "not run" if mark["value"] is None else f"{mark['value']:.3f}"
        table.append((mark["name"], value, mark["mark"] or ""))
    table.append(("**update of 10 million fp32 numbers alone**", "**ms**", ""))
    for name, value in result["update"].items():
        table.append((name, value if isinstance(value, str) else f"{1e3 * value:.1f}", ""))
    return table


if __name__ == "__main__":
    main()
