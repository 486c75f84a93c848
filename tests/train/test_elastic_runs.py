"""Runs whose replicas come and go compute what one process computes."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Self

import pytest
import torch

from phalanx.check.job import problems_of
from phalanx.check.load import load_file
from phalanx.config.layout import Layout
from phalanx.launch.hosts import free_port
from phalanx.report.run import history, read_run
from train import runs
from train.runs import change

JOB = """
model: {n_layers: 2, d_model: 16, n_heads: 2, seq_len: 16}
cluster: {peak_tflops: 1.0}
layout: {dp_replicate: 2, dp_shard: 2, zero: 3, micro_batch: 1}
data: {corpus: random, random_tokens: 5000, random_vocab: 13}
optimizer: {lr: 1.0e-4, schedule: constant, warmup_steps: 0}
train: {steps: 100000, global_batch: 12, precision: fp64, eval_samples: 0, log_every: 1000}
run: {name: elastic, min_replicas: 1, sample_tokens: 0, threads: 1, report: false}
"""
PATIENCE_S = 90.0
SLOW = pytest.mark.skipif("PHALANX_FAULTS" not in os.environ, reason="half a minute; set PHALANX_FAULTS=1 to run it")
NODE = """
import sys
import phalanx.launch.hosts as hosts
role, *words = sys.argv[1:]
hosts.is_this_machine = lambda _: role == "host"  # all nodes have the host's address
from phalanx.cli import train
sys.exit(train.run(words))
"""


class Launched:
    """A run of our launchers, whose ranks can be killed."""

    def __init__(self, folder: Path, *more: str):
        (folder / "job.yaml").write_text(JOB)
        self.words = [str(folder / "job.yaml"), f"run.dir={folder}", f"data.dir={folder}/data", *more]
        self.job, self.log = load_file(Path(self.words[0]), self.words[1:]).job, folder / "launch.log"
        self.process = self.start("host")

    def start(self, role: str) -> subprocess.Popen[bytes]:
        environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
        with self.log.open("a") as log:
            command = [sys.executable, "-c", NODE, role, *self.words, "--oversubscribe"]
            return subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        """Stops the run, which must end as one that can go on."""
        try:
            if kind is None:
                self.process.send_signal(signal.SIGTERM)
                assert self.process.wait(PATIENCE_S) == 75, self.log.read_text()
        finally:
            self.process.kill()
            self.process.wait()

    def until(self, happened: Callable[[], bool]) -> None:
        end = time.monotonic() + PATIENCE_S
        while not happened():
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < end, self.log.read_text()
            time.sleep(0.01)

    def has(self, event: str, count: int) -> bool:
        return len(self.rows(event)) >= count

    def further_steps(self, count: int) -> None:
        self.until(partial(self.has, "step", len(self.rows("step")) + count))

    @staticmethod
    def ranks(launcher: subprocess.Popen[bytes], replica: int, rank: int = 0) -> list[int]:
        """Returns the process id of a rank that a launcher has started; none if it has not."""
        wanted = {f'"replica": {replica}}}'.encode(), f"\0RANK={rank}\0".encode()}
        children = Path(f"/proc/{launcher.pid}/task").glob("*/children")
        pids = " ".join(path.read_text() for path in children).split()
        found = {int(pid): Path(f"/proc/{pid}/environ").read_bytes() for pid in pids}
        return [pid for pid, environment in found.items() if all(each in environment for each in wanted)]

    def kill(self, replica: int, rank: int, number: signal.Signals = signal.SIGKILL) -> None:
        (pid,) = self.ranks(self.process, replica, rank)
        os.kill(pid, number)

    def rows(self, event: str) -> list[dict]:
        path = Path(self.job.run.dir) / self.job.run.name / "metrics.jsonl"
        lines = path.read_text().split("\n")[:-1] if path.exists() else []  # the last one may still be written
        return [row for row in map(json.loads, lines) if row["event"] == event]


def require_one_process(ranks, launched: Launched) -> None:
    """Compares a run with that of one process over its steps."""
    job, steps = launched.job, launched.rows("step")
    assert [row["step"] for row in steps] == list(range(1, len(steps) + 1)), "none is missing, none is there twice"
    straight = change(job, "train", steps=len(steps))
    straight = change(straight, "run", name="straight", min_replicas=0, nnodes="", rdzv_endpoint="")
    straight = replace(straight, layout=Layout(micro_batch=1), cluster=replace(job.cluster, nodes=1))
    ranks(runs.train, 1, straight)
    assert [row["loss"] for row in steps] == pytest.approx(runs.losses(straight), rel=1e-12)
    assert [row["grad_norm"] for row in steps] == pytest.approx(
        [row["grad_norm"] for row in runs.rows(straight, "step")], rel=1e-10
    )
    found, expected = runs.weights(job), runs.weights(straight)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("both", [False, pytest.param(True, marks=SLOW)], ids=["the leader", "one after the other"])
def test_a_run_whose_replicas_die_and_come_back_equals_one_process(ranks, tmp_path, both):
    """Replica 0 leads."""
    deaths = [(1, 1), (0, 0)] if both else [(0, 0)]
    with Launched(tmp_path) as launched:
        for number, (replica, rank) in enumerate(deaths):
            launched.further_steps(2)
            launched.kill(replica, rank)
            launched.until(partial(launched.has, "replicas", 3 + 2 * number))
        launched.further_steps(2)
    members = [(row["members"], row["lost"]) for row in launched.rows("replicas")]
    first = [([0], [1]), ([0, 1], [])] if both else []
    assert members == [([0, 1], []), *first, ([1], [0]), ([1, 0], [])]
    told = [sentence for *_, kind, sentence in history(read_run(tmp_path / "elastic")) if kind == "replicas"]
    assert told[-2:] == ["lost 0; there are 1", "joined 0; there are 1, 0"]
    require_one_process(ranks, launched)


def require_bits_of_one_replica(ranks, launched: Launched) -> None:
    """Compares the steps that one replica took alone with a run of one that begins with its checkpoint before them."""
    first, end = (int(row["step"]) for row in launched.rows("replicas")[1:3])
    every = launched.job.checkpoint.every
    first = -(-first // every) * every
    layout = replace(launched.job.layout, dp_replicate=1)
    job = change(change(launched.job, "train", steps=end), "run", name="alone", min_replicas=0)
    job = replace(change(job, "run", nnodes="", rdzv_endpoint=""), layout=layout, cluster=replace(job.cluster, nodes=1))
    folder = Path(job.run.dir)
    step = f"checkpoints/step-{first:06}"
    shutil.copytree(folder / "elastic" / step, folder / "alone" / step)
    ranks(runs.train, layout.processes, job)
    alone = [row["loss"] for row in launched.rows("step")[first:end]]
    assert alone
    assert alone == runs.losses(job)


@SLOW
def test_a_spare_takes_the_place_of_a_lost_node_without_a_restart_of_the_others(ranks, tmp_path):
    """Pipelines, of which every third step is computed twice."""
    endpoint = f"127.0.0.1:{free_port('127.0.0.1')}"
    launched = Launched(
        tmp_path,
        *(
            "run.nnodes=2",
            "cluster.nodes=2",
            f"run.rdzv_endpoint={endpoint}",
            "checkpoint.every=4",
            "checkpoint.keep=0",
        ),
        *("layout.dp_shard=1", "layout.pp=2", "guard.repeat_every=3", "guard.on_spike=skip"),
    )
    guests = [launched.start("guest"), launched.start("guest")]
    try:
        launched.until(lambda: "this one is a spare" in launched.log.read_text())
        launched.further_steps(2)
        placed = next(each for each in guests if launched.ranks(each, 1))
        placed.kill()
        launched.until(partial(launched.has, "replicas", 3))
        launched.further_steps(2)
        spare = next(each for each in guests if each is not placed)
        spare.send_signal(signal.SIGTERM)
        codes = [process.wait(PATIENCE_S) for process in (spare, launched.process)]
        assert codes == [75, 75], launched.log.read_text()
    finally:
        for process in (*guests, launched.process):
            process.kill()
            process.wait()
    members = [(row["members"], row["lost"], row["joined"]) for row in launched.rows("replicas")]
    assert members == [([0, 1], [], [0, 1]), ([0], [1], []), ([0, 1], [], [1])]
    assert re.search(r"node .* is lost: its launcher has ended", launched.log.read_text())
    require_one_process(ranks, launched)
    require_bits_of_one_replica(ranks, launched)


@SLOW
def test_a_run_ends_when_too_few_replicas_are_left_to_wait_for(tmp_path):
    launched = Launched(tmp_path, "layout.dp_shard=1", "run.min_replicas=2", "run.max_restarts=1")
    try:
        for changes in (1, 2):
            launched.until(partial(launched.has, "replicas", changes))
            launched.further_steps(2)
            launched.kill(1, 0)
        assert launched.process.wait(PATIENCE_S) == 137
    finally:
        launched.process.kill()
        launched.process.wait()
    assert "the run ends: 1 of 2 replicas are left, run.min_replicas is 2" in launched.log.read_text()


@SLOW
def test_an_outer_step_of_diloco_takes_the_replicas_that_are_there(ranks, tmp_path):
    launched = Launched(
        tmp_path,
        "layout.dp_shard=1",
        "layout.sync=diloco",
        "layout.sync_every=4",
        "checkpoint.every=4",
        "checkpoint.keep=0",
    )
    with launched:
        launched.further_steps(6)
        launched.kill(1, 0)
        launched.until(partial(launched.has, "replicas", 3))
        launched.further_steps(4)
    rows = launched.rows("replicas")
    assert [(row["members"], row["lost"]) for row in rows] == [([0, 1], []), ([0], [1]), ([0, 1], [])]
    steps = launched.rows("step")
    assert [row["step"] for row in steps] == list(range(1, len(steps) + 1))
    require_bits_of_one_replica(ranks, launched)
    together = change(change(launched.job, "train", steps=int(rows[1]["step"])), "run", name="together", min_replicas=0)
    ranks(runs.train, 2, change(together, "checkpoint", every=0))
    assert [row["loss"] for row in steps][: together.train.steps] == runs.losses(together)


@SLOW
def test_a_replica_that_is_late_copies_the_state_after_the_outer_step_that_it_missed(tmp_path):
    seldom = "layout.sync_every=40"  # so that the signal comes between outer steps
    with Launched(tmp_path, "layout.dp_shard=1", "layout.sync=diloco", seldom, "run.sync_grace_s=0.5") as launched:
        launched.further_steps(6)
        for number, changes in ((signal.SIGSTOP, 2), (signal.SIGCONT, 3)):
            launched.kill(1, 0, number)
            launched.until(partial(launched.has, "replicas", changes))
            launched.further_steps(6)
    assert [row["members"] for row in launched.rows("replicas")] == [[0, 1], [0], [0, 1]]
    assert "Restart" not in launched.log.read_text()
    steps = launched.rows("step")
    assert [row["step"] for row in steps] == list(range(1, len(steps) + 1))


@SLOW
@pytest.mark.parametrize("words", ["layout.dp_shard=1 layout.compression=int8", "layout.compression=int4"])
def test_replicas_that_come_and_go_send_the_codes_that_others_send(words, ranks, tmp_path):
    with Launched(tmp_path, *words.split()) as launched:
        launched.further_steps(4)
        launched.kill(0, 0)
        launched.until(partial(launched.has, "replicas", 3))
        launched.further_steps(2)
    steps = launched.rows("step")
    assert [row["step"] for row in steps] == list(range(1, len(steps) + 1))
    first = int(launched.rows("replicas")[1]["step"])
    together = change(change(launched.job, "train", steps=first), "run", name="together", min_replicas=0)
    ranks(runs.train, together.layout.world, together)
    assert [row["loss"] for row in steps][:first] == pytest.approx(runs.losses(together), rel=1e-12)


@SLOW
@pytest.mark.parametrize(
    "words",
    [
        "layout.dp_shard=1 layout.tp=2",
        "layout.dp_shard=1 layout.cp=2",
        "layout.zero=2 layout.offload=optimizer",
        "layout.zero=1 layout.ep=2 model.moe.n_experts=4 model.moe.top_k=2 model.moe.bias_balanced=true",
        "layout.zero=2 model.mtp=1",
        "layout.zero=1 model.positions=rope model.mla.kv_rank=8 model.sparse.top_k=4",
        "layout.pp=2 layout.schedule=interleaved_1f1b model.n_layers=4 guard.on_nan=skip",
    ],
)
def test_replicas_that_come_and_go_compose_with(words, ranks, tmp_path):
    with Launched(tmp_path, *words.split()) as launched:
        launched.further_steps(2)
        launched.kill(0, 0)
        launched.until(partial(launched.has, "replicas", 3))
        launched.further_steps(2)
    require_one_process(ranks, launched)


@pytest.mark.parametrize(
    ("section", "values", "field"),
    [
        ("run", {"min_replicas": 3}, "run.min_replicas"),
        ("layout", {"dp_replicate": 1}, "run.min_replicas"),
        ("layout", {"pp": 2, "schedule": "pipedream"}, "layout.schedule"),
        ("layout", {"sync": "local_sgd"}, "layout.sync"),
        ("layout", {"compression": "powersgd"}, "layout.compression"),
        ("layout", {"dp_shard": 2, "zero": 3, "offload": "optimizer"}, "layout.offload"),
        ("data", {"readers": 1}, "data.readers"),
        ("checkpoint", {"memory_every": 2}, "checkpoint.memory_every"),
        ("run", {"max_restarts": 0}, "run.max_restarts"),
        ("run", {"nnodes": "1:2", "rdzv_endpoint": "a:1"}, "run.nnodes"),
        ("guard", {"on_spike": "rewind"}, "guard.on_spike"),
    ],
)
def test_what_replicas_that_come_and_go_cannot_do_yet_is_refused_by_name(section, values, field, job):
    job = change(replace(job, layout=Layout(dp_replicate=2)), "run", min_replicas=1)
    assert not problems_of(job)
    problems = dict(problems_of(change(job, section, **values)))
    assert field in problems
    assert "nearest legal" in problems[field]
    assert "min_replicas" in f"{field}{problems[field]}"


def test_a_batch_that_replicas_cannot_share_has_the_message_of_the_batch_equation(job):
    job = change(replace(job, layout=Layout(dp_replicate=2)), "run", min_replicas=1)
    assert [path for path, _ in problems_of(change(job, "train", global_batch=7))] == ["train.global_batch"]
