"""`phalanx train` whose ranks fail: it starts them again, and ends with the weights of a run without failures."""

import functools
from pathlib import Path

import torch

from phalanx.check.load import load_file
from phalanx.cli import train
from phalanx.config.job import Job
from phalanx.launch.local import launch_local
from train import runs

JOB = """
model: {n_layers: 1, d_model: 16, n_heads: 2, seq_len: 16}
cluster: {peak_tflops: 1.0}
layout: {dp_replicate: 2}
data: {corpus: text, path: corpus.txt}
train: {steps: 12, global_batch: 4, eval_samples: 4, log_every: 2}
checkpoint: {every: 4}
run: {sample_tokens: 0, threads: 1}
"""


def job(name: str) -> Job:
    return load_file(Path("job.yaml"), [f"run.name={name}"]).job


def test_a_run_that_fails_twice_ends_with_the_same_bits_as_one_that_does_not(ranks, tmp_path, monkeypatch, capfd):
    (tmp_path / "job.yaml").write_text(JOB)
    (tmp_path / "corpus.txt").write_text("the cat sat on the mat. " * 100)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    straight, broken = "straight", "broken"
    ranks(runs.train, 2, job(straight))
    failing = functools.partial(launch_local, module="failing_program")
    monkeypatch.setattr("phalanx.launch.local.launch_local", failing)
    assert train.run(["job.yaml", "run.name=broken"]) == 0

    shown = capfd.readouterr()
    assert "phalanx: Rank 1 of 2 was killed by SIGKILL." in shown.err
    assert "phalanx: Restart 1 of at most 3." in shown.err
    assert "phalanx: Rank 1 of 2 failed: Traceback (most recent call last):" in shown.err
    assert "phalanx: Restart 2 of at most 3." in shown.err
    assert shown.out.count("run directory: runs/broken") == 1
    attempts = sorted(path.name for path in Path("runs/broken/logs").iterdir())
    assert attempts == ["attempt_0", "attempt_1", "attempt_2"]
    assert [(row["attempt"], row["step"]) for row in runs.rows(job(broken), "restart")] == [(1, 4), (2, 8)]
    steps = runs.rows(job(broken), "step")
    assert [row["step"] for row in steps] == [*range(1, 7), *range(5, 9), *range(9, 13)]
    losses = {row["step"]: row["loss"] for row in steps}
    assert [losses[step] for step in range(1, 13)] == runs.losses(job(straight))
    found, expected = runs.weights(job(broken)), runs.weights(job(straight))
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(tensor, found[name]), name
