"""Real launchers start a small job: it trains as without one, and a mistake is printed once.

Skipped where a launcher is not installed; for Slurm a cluster has to run."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

JOB = """
model: {n_layers: 2, d_model: 32, n_heads: 2, seq_len: 16}
cluster: {peak_tflops: 1.0}
layout: {dp_replicate: 2}
data: {corpus: random, random_tokens: 2000, random_vocab: 13}
train: {steps: 3, global_batch: 4, eval_samples: 4, log_every: 1}
run: {sample_tokens: 0, timeout_s: 60, threads: 1}
"""
LAUNCHERS = {
    "openmpi": ["mpiexec.openmpi", "--allow-run-as-root", "--oversubscribe", "-n", "2"],
    "mpich": ["mpiexec.mpich", "-n", "2"],
    "slurm": ["srun", "-n", "2"],
    "slurm, two nodes": ["srun", "-N", "2", "-n", "2"],
}
PHALANX = [sys.executable, "-m", "phalanx"]


def require(launcher: list[str]) -> None:
    if shutil.which(launcher[0]) is None:
        pytest.skip(f"{launcher[0]} is not installed")
    if launcher[0] == "srun":
        nodes = subprocess.run(["sinfo", "--noheader", "--states=idle"], capture_output=True, text=True, check=False)
        if nodes.returncode or not nodes.stdout.strip():
            pytest.skip("no Slurm cluster with idle nodes")


def phalanx(here: Path, launcher: list[str], *argv: str, verb: str = "train") -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "XDG_STATE_HOME": str(here / "state")}
    return subprocess.run(
        [*launcher, *PHALANX, verb, *argv],
        cwd=here,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )


def losses(here: Path, name: str) -> list[float]:
    rows = map(json.loads, (here / "runs" / name / "metrics.jsonl").read_text().splitlines())
    return [row["loss"] for row in rows if row["event"] == "step"]


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a job, and its run without another launcher."""
    if all(shutil.which(launcher[0]) is None for launcher in LAUNCHERS.values()):
        pytest.skip("neither mpiexec.openmpi nor mpiexec.mpich nor srun is installed")
    folder = tmp_path_factory.mktemp("launchers")
    (folder / "job.yaml").write_text(JOB)
    done = phalanx(folder, [], "job.yaml", "run.name=plain")
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize("name", LAUNCHERS)
def test_a_launcher_trains_as_phalanx_does(here: Path, name: str) -> None:
    require(LAUNCHERS[name])
    done = phalanx(here, LAUNCHERS[name], "job.yaml", f"run.name={name}")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("run directory: ") == 1
    assert losses(here, name) == losses(here, "plain")
    logs = here / "runs" / name / "logs" / "attempt_0"
    assert all("step: 3  loss" in (logs / f"rank_{rank}" / "stderr.log").read_text() for rank in (0, 1))
    assert not [path for path in (here / "state").rglob("*") if path.is_file()]


MISTAKES = {
    "openmpi": ("train", "job.yaml", "train.global_batch=5"),
    "mpich": ("bench", "comm", "--collectives", "all_recude"),
    "slurm, two nodes": ("generate", "runs/plain", "--prompt", "5"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_printed_once(here: Path, name: str) -> None:
    require(LAUNCHERS[name])
    verb, *argv = MISTAKES[name]
    done = phalanx(here, LAUNCHERS[name], *argv, verb=verb)
    assert done.returncode == 2
    assert done.stderr.count("phalanx: ") == 1, done.stderr
    assert any(
        remedy in done.stderr for remedy in ("nearest legal global_batch: 4 or 6", "did you mean all_reduce", "--pp 2")
    )


@pytest.mark.parametrize("name", ["mpich", "slurm, two nodes"])
def test_a_pipeline_of_another_launcher_generates_the_text_of_one_process(here: Path, name: str) -> None:
    require(LAUNCHERS[name])
    argv = ("runs/plain", "--prompt", "5", "--max-new-tokens", "8")
    texts = [
        phalanx(here, launcher, *argv, *more, verb="generate").stdout
        for launcher, more in (([], ()), (LAUNCHERS[name], ("--pp", "2")))
    ]
    assert texts[0].split()[0] == "5"
    assert texts[0] == texts[1]


@pytest.mark.parametrize("name", ["openmpi", "slurm, two nodes"])
def test_the_work_of_one_process_is_done_once(here: Path, name: str) -> None:
    require(LAUNCHERS[name])
    done = phalanx(here, LAUNCHERS[name], "list", "runs/plain", verb="checkpoint")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("1 checkpoint, 1 whole") == 1
    assert "phalanx checkpoint runs once: rank 0 of 2 does it" in done.stderr
