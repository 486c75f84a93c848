"""Modules that lie in the current directory do not run, whatever verb is used and whatever processes it starts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import phalanx
from phalanx.safe_path import drop_current_directory

PLANTED = [
    *("yaml", "numpy", "torch", "safetensors", "tokenizers", "rich", "sitecustomize", "usercustomize"),
    *("multiprocessing", "socket", "json", "random", "signal", "subprocess", "tempfile", "csv"),
]
"""Libraries and modules of the standard library that Phalanx, or a process that it starts, imports."""
JOB = """
model: {n_layers: 1, d_model: 16, n_heads: 2, seq_len: 16, vocab_size: 64}
cluster: {peak_tflops: 1.0}
data: {corpus: random, random_tokens: 5000, random_vocab: 64}
layout: {dp_replicate: 2}
train: {steps: 2, global_batch: 4, eval_samples: 4, precision: fp32}
run: {sample_tokens: 0}
"""


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    """A current directory with a job, in which every planted module would leave a file with its name."""
    folder = tmp_path / "shared"
    folder.mkdir()
    for name in PLANTED:
        leaves_a_trace = f"open({str(tmp_path / 'ran')!r}, 'a').write('{name} '); raise SystemExit(99)"
        (folder / f"{name}.py").write_text(leaves_a_trace)
    (folder / "job.yaml").write_text(JOB)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PYTHONPATH", str(Path(phalanx.__file__).parents[1]))
    monkeypatch.setenv("PHALANX_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    return folder


def run(*argv: str, command: tuple[str, ...] = ("-m", "phalanx")) -> subprocess.CompletedProcess[str]:
    argv = (sys.executable, *command, *argv)
    return subprocess.run(argv, capture_output=True, text=True, check=False, timeout=200)


@pytest.mark.cold
def test_no_planted_module_runs(here):
    ran = here.parent / "ran"
    for argv in (
        ["plan", "job.yaml", "cluster=dgx-h100:1", "train.precision=bf16", "train.global_batch=8"],
        ["train", "job.yaml"],
        ["verify", "job.yaml", "--layouts", "tp=2", "--steps", "1"],
    ):
        done = run(*argv)
        assert not ran.exists(), f"phalanx {argv[0]} ran {ran.read_text()}"
        assert done.returncode == 0, done.stderr


@pytest.mark.cold
def test_no_planted_module_runs_in_the_measurement_of_a_planner(here, tmp_path):
    """The command as it is installed: a script outside the current directory."""
    script = tmp_path / "phalanx-command"
    script.write_text("import sys\nfrom phalanx.cli.main import main\nsys.exit(main())\n")
    (here / "phalanx.py").write_text((here / "yaml.py").read_text())
    # Where there is no GPU, the measurement ends at once: it has imported everything by then.
    done = run("train", "job.yaml", "layout=auto", "cluster.device=cuda", command=(str(script),))
    assert "measuring this machine" in done.stderr
    assert not (tmp_path / "ran").exists(), (tmp_path / "ran").read_text()


def test_only_the_entry_of_the_current_directory_is_dropped(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for first, left in ((str(tmp_path), ["/a", str(tmp_path)]), ("", ["/a", str(tmp_path)]), ("/b", None)):
        path = [first, "/a", str(tmp_path)]
        monkeypatch.setattr(sys, "path", path)
        drop_current_directory()
        assert path == (left or ["/b", "/a", str(tmp_path)])
