"""Runs whose replicas come and go compute what one process computes."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from phalanx.check.job import problems_of
from phalanx.check.load import load_file
from phalanx.config.layout import Layout
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


class Launched:
    """A run of our launcher, whose ranks can be killed."""

    def __init__(self, folder: Path):
        (folder / "job.yaml").write_text(JOB)
        words = [str(folder / "job.yaml"), f"run.dir={folder}", f"data.dir={folder}/data"]
        self.job, self.log = load_file(Path(words[0]), words[1:]).job, folder / "launch.log"
        environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
        with self.log.open("w") as log:
            command = [sys.executable, "-m", "phalanx", "train", *words, "--oversubscribe"]
            self.process = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)

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

    def kill(self, replica: int, rank: int) -> None:
        wanted = {f'"replica": {replica}}}'.encode(), f"\0RANK={rank}\0".encode()}
        children = Path(f"/proc/{self.process.pid}/task").glob("*/children")
        for pid in " ".join(path.read_text() for path in children).split():
            environment = Path(f"/proc/{pid}/environ").read_bytes()
            if all(each in environment for each in wanted):
                os.kill(int(pid), signal.SIGKILL)
                return
        raise AssertionError(f"no rank {rank} of replica {replica}")

    def rows(self, event: str) -> list[dict]:
        return (
            runs.rows(self.job, event)
            if (Path(self.job.run.dir) / self.job.run.name / "metrics.jsonl").exists()
            else []
        )


def test_a_run_whose_replicas_die_and_come_back_equals_one_process(ranks, tmp_path):
    launched = Launched(tmp_path)
    job = launched.job
    try:
        for replica, rank, changes in ((1, 1, 3), (0, 0, 5)):  # the second one leads
            launched.further_steps(2)
            launched.kill(replica, rank)
            launched.until(partial(launched.has, "replicas", changes))
        launched.further_steps(2)
        launched.process.send_signal(signal.SIGTERM)
        assert launched.process.wait(PATIENCE_S) == 75, launched.log.read_text()
    finally:
        launched.process.kill()
        launched.process.wait()
    members = [(row["members"], row["lost"]) for row in launched.rows("replicas")]
    assert members == [([0, 1], []), ([0], [1]), ([0, 1], []), ([1], [0]), ([1, 0], [])]
    told = [sentence for *_, kind, sentence in history(read_run(tmp_path / "elastic")) if kind == "replicas"]
    assert told[1:3] == ["lost 1; there are 0", "joined 1; there are 0, 1"]
    steps = launched.rows("step")
    assert [row["step"] for row in steps] == list(range(1, len(steps) + 1)), "none is missing, none is there twice"
    straight = change(change(job, "train", steps=len(steps)), "run", name="straight", min_replicas=0)
    straight = replace(straight, layout=Layout(micro_batch=1))
    ranks(runs.train, 1, straight)
    assert [row["loss"] for row in steps] == pytest.approx(runs.losses(straight), rel=1e-12)
    assert [row["grad_norm"] for row in steps] == pytest.approx(
        [row["grad_norm"] for row in runs.rows(straight, "step")], rel=1e-10
    )
    found, expected = runs.weights(job), runs.weights(straight)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("section", "values", "field"),
    [
        ("run", {"min_replicas": 3}, "run.min_replicas"),
        ("layout", {"dp_replicate": 1}, "run.min_replicas"),
        ("layout", {"pp": 2}, "layout.pp"),
        ("layout", {"sync": "local_sgd"}, "layout.sync"),
        ("layout", {"compression": "int8"}, "layout.compression"),
        ("layout", {"offload": "optimizer"}, "layout.offload"),
        ("data", {"readers": 1}, "data.readers"),
        ("checkpoint", {"memory_every": 2}, "checkpoint.memory_every"),
        ("run", {"max_restarts": 0}, "run.max_restarts"),
        ("guard", {"on_spike": "skip"}, "guard.on_spike"),
    ],
)
def test_what_replicas_that_come_and_go_cannot_do_yet_is_refused_by_name(section, values, field, job):
    job = change(replace(job, layout=Layout(dp_replicate=2)), "run", min_replicas=1)
    assert not problems_of(job)
    problems = dict(problems_of(change(job, section, **values)))
    assert field in problems
    assert "nearest legal" in problems[field]
    assert "min_replicas" in f"{field}{problems[field]}"
