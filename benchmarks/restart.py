"""Seconds from SIGKILL of a rank to the next step: a tiny model on two ranks, so that they are all overhead.

Once with the standby process that has imported what ranks import, and once with ranks that start Python anew.

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


def seconds_down(standby: bool) -> float:
    """Trains, kills rank 1 with SIGKILL, and stops the run when it trains again. Returns the seconds in between."""
    path = Path("job.yaml")
    path.write_text(JOB)
    loaded = load_file(path, [f"run.name={'standby' if standby else 'anew'}-{time.monotonic_ns()}"])
    prepare(loaded.job.data)
    directory = RunDirectory.of(loaded.job)
    directory.start(loaded)
    found: list[float] = []

    def disturb() -> None:
        while newest_step(directory.metrics) is None:
            time.sleep(0.1)
        time.sleep(SETTLED_S)
        killed = time.time()
        os.kill(_process_of_rank(1), signal.SIGKILL)
        rows: list[dict[str, float]] = []
        while not rows:
            time.sleep(0.1)
            lines = directory.metrics.read_text(encoding="utf-8").splitlines()
            rows = [row for row in map(json.loads, lines) if row["event"] == "restart"]
        found.append(rows[0]["time"] - killed)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=disturb)
    thread.start()
    preload = PRELOAD if standby else ()
    restarts = Restarts(1, 3600.0, lambda: newest_step(directory.metrics), directory.path, preload)
    argv = ["train", str(directory.config)]
    code = launch_local(argv, processes=2, log_dir=directory.logs, threads=1, all_ranks=False, restarts=restarts)
    thread.join()
    assert code == 75, f"the run ended with {code}"
    return found[0]


def _process_of_rank(rank: int) -> int:
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
    variable = f"RANK={rank}".encode()
    return next(int(pid) for pid in children if variable in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    options, _ = parser.parse_known_args()
    contenders = {"standby process": True, "Python anew": False}
    with tempfile.TemporaryDirectory() as directory:
        os.chdir(directory)
        rounds = [{name: seconds_down(standby) for name, standby in contenders.items()} for _ in range(options.rounds)]
        os.chdir("/")
    median = {name: statistics.median(r[name] for r in rounds) for name in contenders}
    result = {"benchmark": "restart", "machine": machine(), "seconds": median, "rounds": rounds}
    table = [("ranks from", "seconds from SIGKILL to the next step"), *((k, f"{v:.1f}") for k, v in median.items())]
    note = f"Other work shared the machine: load average {max(os.getloadavg()):.0f}."
    save("restart", result, table, "How long a restart takes", note)


if __name__ == "__main__":
    main()
