"""The newest state in the memory of nodes: what ranks keep there, and what they resume from."""

import json
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from checkpoint.contents import require_same_bits
from phalanx.check.load import load_file
from phalanx.checkpoint.in_memory import KeptStep, whole_steps
from phalanx.config.layout import Layout
from phalanx.launch.hosts import free_port
from phalanx.launch.ranks import MEMORY
from phalanx.train import loop
from phalanx.train.requests import StopRequest
from train import runs
from train.runs import change
from warm import as_file

HYBRID = Layout(dp_replicate=2, dp_shard=2, zero=3)


@pytest.fixture
def folder() -> Iterator[Path]:
    """One node's memory, without a launcher."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="phalanx_test_") as name:
        for place in ("own", "copies"):
            (Path(name) / place).mkdir()
        yield Path(name)


def train(ranks, job, folder: str, stop_at: int = 0):
    os.environ[MEMORY] = json.dumps({"folder": folder, "nodes": [], "place": 0})
    return runs.stopped(ranks, job, stop_at) if stop_at else runs.train(ranks, job)


def test_the_newest_state_is_resumed_from_memory_in_any_layout_and_a_damaged_one_gives_way(ranks, job, folder):
    straight = change(job, "run", name="straight")
    ranks(runs.train, 1, straight)
    job = change(change(job, "checkpoint", memory_every=1), "run", name="kept")
    hybrid, sharded = replace(job, layout=HYBRID), replace(job, layout=Layout(dp_shard=2, zero=2))
    ranks(train, 4, hybrid, str(folder), 5)
    names = sorted(path.name for path in (folder / "own").iterdir())
    step = int(names[-1].split("-")[1])
    assert (len(names), step) in [(2, 4), (2, 3)], "a step for which the one before was still being kept is left out"
    assert ranks(resumed, 2, sharded, str(folder)) == [(5, "")] * 2, "storage is newer"
    shutil.rmtree(Path(job.run.dir) / "kept/checkpoints")
    assert ranks(resumed, 2, sharded, str(folder)) == [(step, "this node's memory")] * 2
    for shard in (folder / "own" / names[-1]).glob("*.safetensors"):
        shard.write_bytes(shard.read_bytes()[:-1] + b"\0")
    older = int(names[0].split("-")[1])
    assert ranks(resumed, 2, sharded, str(folder)) == [(older, "this node's memory")] * 2
    shutil.rmtree(folder / "own" / names[0])
    assert ranks(resumed, 2, sharded, str(folder)) == [(0, "")] * 2, "from the beginning, with the first weights"
    ranks(train, 4, hybrid, str(folder))
    require_close(runs.weights(job), runs.weights(straight))


def require_close(found, expected) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-7, atol=1e-10)


def resumed(ranks, job, folder: str) -> tuple[int, str]:
    """Returns the step that a run would resume from, and where it is."""
    os.environ[MEMORY] = json.dumps({"folder": folder, "nodes": [], "place": 0})
    trainer = loop.Trainer(job, ranks, torch.device("cpu"), StopRequest())
    assert trainer.resume.memory is not None
    return trainer.state.step, trainer.resume.memory.line if trainer.saving.kept else ""


def test_only_steps_of_which_every_part_is_somewhere_are_whole():
    token = "0123456789abcdef"
    parts = [f"step-{step:06d}-2-{token}/rank-{rank:05d}" for step in (5, 6) for rank in (0, 1)]
    both, half = KeptStep(f"step-000005-2-{token}", 5, {0: 0, 1: 1}), [*parts[:2], parts[2]]
    assert whole_steps([(0, [parts[0], parts[2]]), (0, []), (1, [parts[1]])]) == [both]
    assert [kept.step for kept in whole_steps([(3, parts)])] == [6, 5]
    assert [kept.step for kept in whole_steps([(3, half)])] == [5]
    assert whole_steps([(0, parts[:1])]) == []


# Two nodes on this machine, each with a launcher.

PROGRAM = """
import sys
from phalanx.launch.hosts import is_this_machine as real
role, *words = sys.argv[1:]
for module in [*sys.modules.values()]:  # of a warm process
    if getattr(module, "is_this_machine", None) is real:
        module.is_this_machine = lambda _: role == "host"  # both nodes have the host's address
from phalanx.cli import train
sys.exit(train.run(words))
"""
JOB = """
model: {n_layers: 1, d_model: 16, n_heads: 2, seq_len: 16}
cluster: {peak_tflops: 1.0}
layout: {dp_shard: 2, zero: 3}
data: {corpus: random, random_tokens: 20000, random_vocab: 13}
train: {steps: 120, global_batch: 4, eval_samples: 0, log_every: 1000}
checkpoint: {memory_every: 1, every_minutes: 0}
run: {sample_tokens: 0, threads: 1}
"""


def test_a_spare_takes_the_place_of_a_lost_node_and_resumes_from_its_neighbours_memory(ranks, tmp_path):
    (tmp_path / "job.yaml").write_text(JOB)
    words = [str(tmp_path / "job.yaml"), f"run.dir={tmp_path}", f"data.dir={tmp_path}/data"]
    nodes = [
        "run.nnodes=2",
        "cluster.nodes=2",
        f"run.rdzv_endpoint=127.0.0.1:{free_port('127.0.0.1')}",
        "run.name=nodes",
    ]
    program = as_file(tmp_path, PROGRAM)
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}

    def start(role: str) -> subprocess.Popen[str]:
        command = [*program, role, *words, *nodes]
        with (tmp_path / f"{role}.log").open("a") as log:
            return subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT, text=True)

    def said(role: str) -> str:
        return (tmp_path / f"{role}.log").read_text()

    nodes_of, end = {}, time.monotonic() + 90

    def wait_for(condition) -> None:
        while not condition():
            assert time.monotonic() < end, said("host")
            assert all(node.poll() is None for node in nodes_of.values()), said("host")
            time.sleep(0.02)

    def has_children(node: subprocess.Popen[str]) -> bool:
        return bool(Path(f"/proc/{node.pid}/task/{node.pid}/children").read_text())

    try:
        nodes_of = {role: start(role) for role in ("one", "two")}
        wait_for(lambda: all(map(has_children, nodes_of.values())))  # it imports for its ranks, and looks for the host
        nodes_of["host"] = start("host")
        wait_for(lambda: "this one is a spare" in said("one") + said("two"))
        wait_for(lambda: "kept in the memory of 2 nodes" in said("host"))
        member, spare = sorted(("one", "two"), key=lambda role: "this one is a spare" in said(role))
        nodes_of[member].kill()
        assert nodes_of["host"].wait(90) == nodes_of[spare].wait(30) == 0, said("host")
    finally:
        for node in nodes_of.values():
            node.kill()
            node.wait()
    found = re.search(r"resumed at step (\d+) from the memory of 2 nodes", said("host"))
    assert found, said("host")
    assert int(found[1]) > 0, "there is no checkpoint on storage"
    job = load_file(tmp_path / "job.yaml", [*words[1:], "run.name=straight", "checkpoint.memory_every=0"]).job
    ranks(runs.train, 2, job)
    require_same_bits(runs.weights(change(job, "run", name="nodes")), runs.weights(job))
