"""The cost of heartbeats: steps with and without them, in turn, in the same processes.

    python -m benchmarks.heartbeat [--rounds 60]

The job is examples/main.yaml, the smallest one with real steps, on 2 processes × 1 thread: a larger model makes as many
records in longer steps. Two figures per layout: the ratio of step times, whose noise on a shared machine is above 1 %,
and the records of a step times the time of a record, relative to the step. Mark: the second is under 1 %.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
import timeit
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import turns
from benchmarks.report import machine, save
from benchmarks.sharding_steps import ours
from phalanx.check.load import load_file
from phalanx.launch.pool import Pool
from phalanx.launch.ranks import Ranks
from phalanx.launch.watchdog import heartbeat
from phalanx.launch.watchdog.diagnosis import Limits
from phalanx.launch.watchdog.heartbeat import Phase
from phalanx.launch.watchdog.watchdog import Watchdog
from phalanx.parallel import mesh as meshes

JOB = Path(__file__).parent.parent / "examples" / "main.yaml"
ONE = "layout.dp_replicate=1"
LAYOUTS = {
    "dp_replicate=2": [],
    "dp_shard=2, ZeRO-3": [ONE, "layout.dp_shard=2", "layout.zero=3"],
    "tp=2, sequence-parallel": [ONE, "layout.tp=2", "layout.sp=true"],
    "cp=2, ring": [ONE, "layout.cp=2"],
}
MARK = 0.01
PHASES_PER_STEP = 7
REPEATS, CALLS = 7, 5000


def measure(ranks: Ranks, words: list[str], rounds: int, directory: str) -> dict[str, Any]:
    """Returns this rank's turns, the records per step, and the seconds of a call's and of a phase's record."""
    turns.prepare()
    beat = heartbeat.Heartbeat(Path(directory), ranks.rank, ranks.world)
    common = ["model.vocab_size=128", "layout.micro_batch=16", "train.global_batch=0", *words]
    job = load_file(JOB, common).job
    step = ours(job, meshes.build(job.layout, "cpu"))

    def with_heartbeat() -> None:
        heartbeat.adopt(beat)
        with heartbeat.within(Phase.DATA):
            pass
        step()
        heartbeat.steps_done(1)
        heartbeat.adopt(None)

    steps: dict[str, Callable[[], object]] = {"with": with_heartbeat, "without": step}
    for warm in (*steps.values(), *steps.values()):
        warm()
    before = beat.words[heartbeat.CALL_COUNT]
    taken = turns.take_turns(steps, rounds, 600)
    calls = (beat.words[heartbeat.CALL_COUNT] - before) / len(taken["with"])
    return {"turns": taken, "calls": calls, "call_s": _call_s(beat), "phase_s": _phase_s(beat)}


def _call_s(beat: heartbeat.Heartbeat) -> float:
    channel = beat.channel("benchmark", "all", [0, 1])

    def record() -> None:
        call = beat.begin(
            *(channel, "all_reduce", "tp", "float32", (16, 128, 128), 2**20),
            waits=False,
            on_device=False,
            hidden="/nowhere/",
        )
        call.waits()
        call.done()

    return min(timeit.repeat(record, number=CALLS, repeat=REPEATS)) / CALLS


def _phase_s(beat: heartbeat.Heartbeat) -> float:
    enter = min(timeit.repeat(lambda: beat.enter(Phase.OPTIMIZER), number=CALLS, repeat=REPEATS))
    return enter / CALLS


def poll_s(directory: str) -> float:
    """Returns the seconds of computing that the watchdog takes for one look at the ranks, once a second."""
    watchdog = Watchdog(Path(directory), Limits(60.0, 60.0), print)
    pids = {0: 1, 1: 1}
    watchdog.views(pids, {}, 32)
    began = time.process_time()
    for _ in range(20):
        watchdog.views(pids, {}, 32)
    return (time.process_time() - began) / 20


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60)
    options = parser.parse_args(argv)
    rows: list[dict[str, Any]] = []
    poll = 0.0
    for name, words in LAYOUTS.items():
        with tempfile.TemporaryDirectory() as directory, Pool(2, ["torch.distributed.fsdp"]) as pool:
            found = pool.run(measure, 2, words, options.rounds, directory, timeout=900)
            poll = poll_s(directory)
        seconds = turns.lasted([rank["turns"] for rank in found])
        step = statistics.median(seconds["without"])
        records = found[0]["calls"] * found[0]["call_s"] + PHASES_PER_STEP * found[0]["phase_s"]
        rows.append(
            {
                "layout": name,
                "step_s": step,
                "ratio": turns.ratio(seconds, "with", "without"),
                "calls_per_step": found[0]["calls"],
                "call_us": found[0]["call_s"] * 1e6,
                "overhead": records / step,
                "passed": records / step < MARK,
            }
        )
    table = [("layout", "step", "calls per step", "per call", "overhead", "asked", "", "ratio of step times")]
    for row in rows:
        cells = f"{row['step_s'] * 1e3:.0f} ms", f"{row['calls_per_step']:.0f}", f"{row['call_us']:.1f} µs"
        verdict = "pass" if row["passed"] else "FAIL"
        cost = f"**{row['overhead']:.3%}**", f"< {MARK:.0%}", verdict, f"{row['ratio']:.3f}"
        table.append((row["layout"], *cells, *cost))
    result = {"benchmark": "heartbeat", "machine": machine(), "layouts": rows, "poll_s": poll}
    seen = f"The watchdog's look at both ranks, once a second, takes {poll * 1e3:.1f} ms of one core: {poll:.2%}."
    save("heartbeat", result, table, "The cost of heartbeats", seen)


if __name__ == "__main__":
    sys.exit(main())
