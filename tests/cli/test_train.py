"""`phalanx train` as a user runs it: processes, signals, resuming, exit codes, what is printed and what is left."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

JOB = """
model: {n_layers: 1, d_model: 16, n_heads: 2, seq_len: 16}
cluster: {peak_tflops: 1.0}
layout: {dp_replicate: 2}
data: {corpus: text, path: corpus.txt}
train: {steps: 4, global_batch: 4, eval_samples: 4, log_every: 2}
run: {sample_tokens: 5, sample_prompt: "the"}
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with a job and a corpus, and no trace of another launcher."""
    (tmp_path / "job.yaml").write_text(JOB)
    (tmp_path / "corpus.txt").write_text("the cat sat on the mat. " * 100)
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def phalanx(*argv: str, **kwargs) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "phalanx", *argv], capture_output=True, text=True, check=False, timeout=120, **kwargs
    )


def steps(run: Path) -> list[int]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row["step"] for row in rows if row["event"] == "step"]


def test_a_run_from_start_to_finish_and_again(here):
    done = phalanx("train", "job.yaml")
    assert done.returncode == 0, done.stderr
    assert "validation loss: " in done.stdout
    assert "sample:\nthe" in done.stdout
    assert done.stdout.splitlines()[-1] == "run directory: runs/job"
    assert "step: 4  loss: " in done.stderr
    assert "Warning" not in done.stderr
    run = here / "runs" / "job"
    assert steps(run) == [1, 2, 3, 4]
    config = (run / "config.yaml").read_text()
    assert "steps: 4  # job.yaml:6" in config
    assert yaml.safe_load(config)["layout"]["dp_replicate"] == 2
    assert "phalanx train job.yaml" in (run / "command.txt").read_text()
    assert json.loads((run / "env.json").read_text())["packages"]["torch"]
    assert (run / (run / "latest").read_text().strip() / "manifest.json").is_file()
    assert "step: 4  loss" in (run / "logs/attempt_0/rank_0/stderr.log").read_text()
    assert (run / "logs/attempt_0/rank_1/stderr.log").is_file()

    again = phalanx("train", "job.yaml")
    assert again.returncode == 0
    assert again.stdout.startswith("runs/job is finished: step 4 of 4, validation loss ")
    assert steps(run) == [1, 2, 3, 4]

    longer = phalanx("train", "job.yaml", "train.steps=6", "--json", "--dp-replicate", "1")
    assert longer.returncode == 0, longer.stderr
    assert json.loads(longer.stdout)["step"] == 6
    assert steps(run) == [1, 2, 3, 4, 5, 6]
    assert "resuming with a change: train.steps: 4 -> 6" in longer.stderr
    assert "learning rate: 1.00e-04 at step 5: its schedule still ends at step 4, not at train.steps=6" in longer.stderr
    shorter = phalanx("train", "job.yaml")
    assert shorter.stdout.startswith("runs/job is 2 steps past train.steps=4: step 6, validation loss ")
    assert "optimizer.decay_steps=12 stretches it" in shorter.stdout

    fresh = phalanx("train", "job.yaml", "--fresh", "--dp-replicate", "1")
    assert fresh.returncode == 0
    assert "runs/job was renamed to runs/job.1" in fresh.stderr
    assert steps(run) == [1, 2, 3, 4]
    assert steps(here / "runs" / "job.1") == [1, 2, 3, 4, 5, 6]

    text = phalanx("generate", "runs/job", "--prompt", "the", "--max-new-tokens", "7", "--temperature", "0", "--json")
    assert text.returncode == 0, text.stderr
    assert len(json.loads(text.stdout)["text"]) == 10


@pytest.mark.parametrize(
    ("processes", "number", "rank"),
    [("1", signal.SIGINT, None), ("1", signal.SIGHUP, None), ("2", signal.SIGTERM, None), ("2", signal.SIGUSR1, 1)],
)
def test_a_signal_stops_with_a_checkpoint_and_the_same_command_goes_on(here, processes, number, rank):
    """A signal to the command, or to one rank alone."""
    argv = [sys.executable, "-m", "phalanx", "train", "job.yaml", "train.steps=100000", "--dp-replicate", processes]
    run = here / "runs" / "job"
    with subprocess.Popen(argv, stderr=subprocess.PIPE, text=True) as process:
        wait_for(lambda: (run / "metrics.jsonl").exists() and len(steps(run)) > 3)
        os.kill(process.pid if rank is None else rank_processes(process.pid)[rank], number)
        _, error = process.communicate(timeout=60)
    assert process.returncode == 75, error
    assert "stopped by a signal at step" in error
    assert error.count("run the same command again to resume") == 1
    done = steps(run)
    again = phalanx("train", "job.yaml", f"train.steps={done[-1] + 2}", "--dp-replicate", processes)
    assert again.returncode == 0, again.stderr
    assert steps(run) == list(range(1, done[-1] + 3))


def rank_processes(launcher: int) -> dict[int, int]:
    """The process of each rank."""
    pids = map(int, Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split())
    variables = {pid: Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") for pid in pids}
    return {int(v[5:]): pid for pid, found in variables.items() for v in found if v.startswith(b"RANK=")}


def wait_for(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.1)


def test_ranks_of_torchrun_train_together(here):
    argv = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", "-m", "phalanx"]
    done = subprocess.run([*argv, "train", "job.yaml"], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("run directory: runs/job") == 1
    assert steps(here / "runs" / "job") == [1, 2, 3, 4]


def test_ranks_with_different_jobs_stop_at_once_with_exit_code_2(here):
    """As srun and mpiexec start them, each with a command line of its own."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(listener.getsockname()[1])}
    argv = [sys.executable, "-m", "phalanx", "train", "job.yaml"]
    ranks = [
        subprocess.Popen(
            [*argv, f"lr={lr}"],
            env={**os.environ, **place, "RANK": rank, "LOCAL_RANK": rank},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, lr in (("0", "0.1"), ("1", "0.2"))
    ]
    messages = [rank.communicate(timeout=120)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [2, 2]
    assert "has optimizer.lr 0.2, the other rank 0.1" in messages[0]
    assert "Traceback" not in messages[0]
    assert messages[1] == "", "rank 0 alone prints it"


def test_a_corrupt_shard_is_found_before_training(here):
    assert phalanx("data", "prepare", "job.yaml").returncode == 0
    shard = next((here / "data").glob("*/train-00000.bin"))
    content = bytearray(shard.read_bytes())
    content[7] ^= 1
    shard.write_bytes(content)
    done = phalanx("train", "job.yaml")
    assert done.returncode == 4
    assert "train-00000.bin" in done.stderr
    assert "phalanx data prepare --force" in done.stderr
    assert "Traceback" not in done.stderr


def test_two_trainers_in_one_directory(here):
    from phalanx.check.load import load_file
    from phalanx.train.run_directory import RunDirectory

    with RunDirectory.of(load_file(here / "job.yaml").job).lock():
        second = phalanx("train", "job.yaml")
    assert second.returncode == 1
    assert f"runs/job is in use by process {os.getpid()}" in second.stderr


@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        (["data.path=none.txt"], 2, "none.txt"),
        (["train.global_batch=5"], 2, "nearest legal global_batch: 4 or 6"),
        (["cluster.device=cuda"], 2, "has 0 CUDA devices"),
        (["optimizer.lr=1e12", "optimizer.clip=0", "train.steps=50"], 5, "The optimizer did not apply it"),
    ],
)
def test_what_goes_wrong_has_a_message_and_a_code_but_no_traceback(here, argv, code, message):
    done = phalanx("train", "job.yaml", *argv)
    assert done.returncode == code, done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.count(message) == 1
