"""Seconds from SIGKILL to the next step: a tiny model on two ranks, so that they are all overhead.

Rank 1 is killed, and the ranks are forked from the process that has imported what ranks import, with the state from
storage or from memory (checkpoint.memory_every=1), or start Python anew; also where blocks are compiled, which the
restart finds in the user's cache folder. Then the launcher of one of two nodes is killed: a spare takes its place, or
another launcher that starts at this moment. Also the steps that are done again. Replicas that come and go
(run.min_replicas) do not restart: the other one goes on.

python -m benchmarks.restart [--rounds 3]
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from benchmarks.report import machine, save
from phalanx.check.load import load_file
from phalanx.cli.train import preload
from phalanx.data.prepare import prepare
from phalanx.launch.hosts import free_port
from phalanx.launch.local import launch_local
from phalanx.launch.replicas import ReplicaTerms
from phalanx.launch.verdict import Restarts
from phalanx.train.run_directory import RunDirectory, newest_step

JOB = """
model: {n_layers: 2, d_model: 64, n_heads: 2, seq_len: 64}
cluster: {peak_tflops: 1.0}
layout: {dp_replicate: 2}
data: {corpus: random, random_tokens: 100000, random_vocab: 256}
train: {steps: 1000000, global_batch: 8, eval_samples: 0, log_every: 1000000}
checkpoint: {every: 50}
run: {sample_tokens: 0, log_level: warning, threads: 1}
"""
NODE = """
import sys
import phalanx.launch.hosts as hosts
role, *words = sys.argv[1:]
hosts.is_this_machine = lambda _: role == "host"  # all nodes have the host's address
from phalanx.cli import train
sys.exit(train.run(words))
"""
TRAINED_S = 5.0
"""Seconds of training before the kill."""
IDLE_S = 3.0
"""Seconds without work after which a spare has imported everything."""


class Down(NamedTuple):
    """The cost of one failure."""

    next_s: float
    """Seconds to the next step."""
    again: int
    """Steps that are done again."""
    caught_up_s: float
    """Seconds until the run is as far as it was."""


def down(metrics: Path, killed: float, elastic: bool = False) -> Down:
    """Waits until a run is as far as it was when something was killed, at `killed` in seconds since the epoch."""
    while True:
        time.sleep(0.1)
        rows = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
        if elastic:  # the step after the loss is the first one that follows
            lost = [row["step"] for row in rows if row["event"] == "replicas" and row["lost"]]
            again = [row for row in rows if lost and row["event"] == "step" and row["step"] == lost[0] + 1]
            if again:
                return Down(again[0]["time"] - killed, 1, again[0]["time"] - killed)
            continue
        if not (restarts := [row for row in rows if row["event"] == "restart"]):
            continue
        steps, restarted = [row for row in rows if row["event"] == "step"], restarts[0]["time"] - 0.1
        before = max(row["step"] for row in steps if row["time"] < restarted)
        if further := [row for row in steps if row["time"] > restarted and row["step"] > before]:
            again = int(before - restarts[0]["step"])
            return Down(restarts[0]["time"] - killed, again, further[0]["time"] - killed)


def after_a_rank(forked: bool, memory_every: int, elastic: bool = False, compile: bool = False) -> Down:
    """Trains, kills rank 1, or the rank of replica 1, with SIGKILL, and stops the run when it is as far as before."""
    path = Path("job.yaml")
    path.write_text(JOB)
    words = [f"run.name=run-{time.monotonic_ns()}", f"checkpoint.memory_every={memory_every}"]
    words += [f"run.min_replicas={int(elastic)}", f"train.compile={str(compile).lower()}"]
    loaded = load_file(path, words)
    prepare(loaded.job.data)
    directory = RunDirectory.of(loaded.job)
    directory.start(loaded)
    found: list[Down] = []

    def disturb() -> None:
        while newest_step(directory.metrics) is None:
            time.sleep(0.1)
        time.sleep(TRAINED_S)
        killed = time.time()
        os.kill(_process_with(b'"replica": 1}' if elastic else b"\0RANK=1\0"), signal.SIGKILL)
        found.append(down(directory.metrics, killed, elastic))
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=disturb)
    thread.start()
    modules = preload(loaded.job) if forked else ()
    restarts = Restarts(1, 3600.0, lambda: newest_step(directory.metrics), directory.path, modules)
    argv, how = ["train", str(directory.config)], {"log_dir": directory.logs, "threads": 1, "all_ranks": False}
    how |= {"processes": 1, "replicas": ReplicaTerms(2, 1)} if elastic else {"processes": 2}
    code = launch_local(argv, restarts=restarts, memory=memory_every > 0, **how)
    thread.join()
    assert code == 75, f"the run ended with {code}"
    return found[0]


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _process_with(variable: bytes) -> int:
    children = Path(f"/proc/{os.getpid()}/task").glob("*/children")
    pids = " ".join(path.read_text() for path in children).split()
    return next(int(pid) for pid in pids if variable in Path(f"/proc/{pid}/environ").read_bytes())


def after_a_node(spare: bool, elastic: bool = False) -> Down:
    """Trains on two nodes with a rank each, and kills the launcher of the second. Its place takes one that waits, or
    one that starts now; or the first goes on alone."""
    Path("job.yaml").write_text(JOB)
    name, port = f"run-{time.monotonic_ns()}", free_port("127.0.0.1")
    words = ["job.yaml", f"run.name={name}", "run.nnodes=2", "cluster.nodes=2", f"run.rdzv_endpoint=127.0.0.1:{port}"]
    words += ["run.min_replicas=1"] if elastic else ["checkpoint.memory_every=1"]
    nodes: list[subprocess.Popen[bytes]] = []
    log = Path(f"{name}.log")

    def start(role: str) -> subprocess.Popen[bytes]:
        with log.open("ab") as file:
            nodes.append(subprocess.Popen([sys.executable, "-c", NODE, role, *words], stdout=file, stderr=file))
        return nodes[-1]

    def wait_for(condition: Callable[[], bool]) -> None:
        while not condition():
            assert nodes[0].poll() is None, log.read_text()
            time.sleep(0.1)

    try:
        start("host")
        guest = start("guest")
        metrics = Path("runs", name, "metrics.jsonl")
        wait_for(lambda: newest_step(metrics) is not None)
        if spare:
            waiting = start("guest")
            wait_for(lambda: "this one is a spare" in log.read_text())
            (server,) = _children(waiting.pid)
            used, since = _cpu_ticks(server), time.monotonic()
            while time.monotonic() < since + IDLE_S:
                time.sleep(0.1)
                if _cpu_ticks(server) != used:
                    used, since = _cpu_ticks(server), time.monotonic()
        time.sleep(TRAINED_S)
        killed = time.time()
        guest.kill()
        if not spare and not elastic:
            start("guest")
        return down(metrics, killed, elastic)
    finally:
        for node in nodes:
            node.terminate()
        for node in nodes:
            node.wait()


def _cpu_ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


CONTENDERS: dict[tuple[str, str, str], Callable[[], Down]] = {
    ("a rank of a replica", "the other replica goes on", "min_replicas"): lambda: after_a_rank(True, 0, True),
    ("a node of a replica", "the other node goes on", "min_replicas"): lambda: after_a_node(False, True),
    ("a rank", "forked", "memory, every step"): lambda: after_a_rank(True, 1),
    ("a rank", "forked", "storage, every 50 steps"): lambda: after_a_rank(True, 0),
    ("a rank", "Python anew", "storage, every 50 steps"): lambda: after_a_rank(False, 0),
    ("a rank", "forked, with compiled blocks", "memory, every step"): lambda: after_a_rank(True, 1, compile=True),
    ("a node", "forked; of a spare node, too", "memory, every step"): lambda: after_a_node(True),
    ("a node", "forked; another launcher starts", "memory, every step"): lambda: after_a_node(False),
}
"""By what is killed, where ranks come from, and where the state comes from."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    options, _ = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as directory:
        os.chdir(directory)
        rounds = [{", ".join(name): run() for name, run in CONTENDERS.items()} for _ in range(options.rounds)]
        os.chdir("/")
    median = {
        name: [statistics.median(values) for values in zip(*(r[name] for r in rounds), strict=True)]
        for name in rounds[0]
    }
    result = {"benchmark": "restart", "machine": machine(), "median": median, "rounds": rounds}
    head = ("killed", "ranks", "state from", "seconds to the next step", "steps done again", "seconds until then")
    rows = zip(CONTENDERS, median.values(), strict=True)
    table = [head, *((*names, f"{v[0]:.1f}", f"{v[1]:.0f}", f"{v[2]:.1f}") for names, v in rows)]
    note = f"Other work shared the machine: load average {max(os.getloadavg()):.0f}."
    save("restart", result, table, "How long a restart takes", note)


if __name__ == "__main__":
    main()
