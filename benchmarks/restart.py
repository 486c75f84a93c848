"""Seconds from SIGKILL of a rank to the next step: a tiny model on two ranks, so that they are all overhead.

With the standby process that has imported what ranks import, from storage and from memory
(checkpoint.memory_every=1), and with ranks that start Python anew. Also the steps that are done again. Replicas that
come and go (run.min_replicas) do not restart: the other one goes on.

python -m benchmarks.restart [--rounds 3]
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import tempfile
import threading
import time
from pathlib import Path

from benchmarks.report import machine, save
from phalanx.check.load import load_file
from phalanx.data.prepare import prepare
from phalanx.launch.local import launch_local
from phalanx.launch.verdict import Restarts
from phalanx.train.run_directory import RunDirectory, newest_step
from phalanx.verify.cases import PRELOAD

JOB = """
model: {n_layers: 2, d_model: 64, n_heads: 2, seq_len: 64}
cluster: {peak_tflops: 1.0}
layout: {dp_replicate: 2}
data: {corpus: random, random_tokens: 100000, random_vocab: 256}
train: {steps: 1000000, global_batch: 8, eval_samples: 0, log_every: 1000000}
checkpoint: {every: 50}
run: {sample_tokens: 0, log_level: warning}
"""
SETTLED_S = 20.0
"""Seconds of training before the kill: the standby process has imported everything by then."""


def seconds_down(standby: bool, memory_every: int, elastic: bool = False) -> tuple[float, int, float]:
    """Trains, kills rank 1, or the rank of replica 1, with SIGKILL, and stops the run when it is as far as before.
    Returns the seconds to the next step, the steps done again, and the seconds until then."""
    path = Path("job.yaml")
    path.write_text(JOB)
    memory = f"checkpoint.memory_every={memory_every}"
    words = [f"run.name={'standby' if standby else 'anew'}-{time.monotonic_ns()}", memory]
    loaded = load_file(path, [*words, f"run.min_replicas={int(elastic)}"])
    prepare(loaded.job.data)
    directory = RunDirectory.of(loaded.job)
    directory.start(loaded)
    found: list[tuple[float, int, float]] = []

    def disturb() -> None:
        while newest_step(directory.metrics) is None:
            time.sleep(0.1)
        time.sleep(SETTLED_S)
        killed = time.time()
        os.kill(_process_with(b'"replica": 1}' if elastic else b"\0RANK=1\0"), signal.SIGKILL)
        restarts: list[dict[str, float]] = []
        again: list[dict[str, float]] = []
        before = 0
        while not again:
            time.sleep(0.1)
            lines = directory.metrics.read_text(encoding="utf-8").splitlines()
            rows = [json.loads(line) for line in lines]
            steps = [row for row in rows if row["event"] == "step"]
            restarts = [row for row in rows if row["event"] == "restart"]
            if elastic:  # the step after the loss is the first one that follows
                lost = [row["step"] for row in rows if row["event"] == "replicas" and row["lost"]]
                again = [row for row in steps if lost and row["step"] == lost[0] + 1]
                restarts, before = [{**row, "step": lost[0]} for row in again], again[0]["step"] if again else 0
            elif restarts:
                before = max(row["step"] for row in steps if row["time"] < restarts[0]["time"] - 0.1)
                again = [row for row in steps if row["time"] > restarts[0]["time"] - 0.1 and row["step"] > before]
        done_again = before - restarts[0]["step"]
        found.append((restarts[0]["time"] - killed, int(done_again), again[0]["time"] - killed))
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=disturb)
    thread.start()
    preload = PRELOAD if standby else ()
    restarts = Restarts(1, 3600.0, lambda: newest_step(directory.metrics), directory.path, preload)
    argv, how = ["train", str(directory.config)], {"log_dir": directory.logs, "threads": 1, "all_ranks": False}
    how |= {"processes": 1, "replicas": (2, 1)} if elastic else {"processes": 2}
    code = launch_local(argv, restarts=restarts, memory=memory_every > 0, **how)
    thread.join()
    assert code == 75, f"the run ended with {code}"
    return found[0]


def _process_with(variable: bytes) -> int:
    children = Path(f"/proc/{os.getpid()}/task").glob("*/children")
    pids = " ".join(path.read_text() for path in children).split()
    return next(int(pid) for pid in pids if variable in Path(f"/proc/{pid}/environ").read_bytes())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    options, _ = parser.parse_known_args()
    contenders = {
        "the other replica goes on (min_replicas)": (True, 0, True),
        "standby process, memory (every step)": (True, 1),
        "standby process, storage (every 50 steps)": (True, 0),
        "Python anew, storage (every 50 steps)": (False, 0),
    }
    with tempfile.TemporaryDirectory() as directory:
        os.chdir(directory)
        rounds = [{name: seconds_down(*how) for name, how in contenders.items()} for _ in range(options.rounds)]
        os.chdir("/")
    median = {
        name: [statistics.median(values) for values in zip(*(r[name] for r in rounds), strict=True)]
        for name in contenders
    }
    result = {"benchmark": "restart", "machine": machine(), "median": median, "rounds": rounds}
    head = ("ranks from, state from", "seconds from SIGKILL to the next step", "steps done again", "seconds until then")
    table = [head, *((k, f"{v[0]:.1f}", f"{v[1]:.0f}", f"{v[2]:.1f}") for k, v in median.items())]
    note = f"Other work shared the machine: load average {max(os.getloadavg()):.0f}."
    save("restart", result, table, "How long a restart takes", note)


if __name__ == "__main__":
    main()
