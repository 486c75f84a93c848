"""`phalanx generate --pp` as a user runs it: processes, what is printed, exit codes, Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from generate.written import write_run
from model.kinds import KINDS
from phalanx.cli.main import main


@pytest.fixture
def run(tmp_path, monkeypatch) -> Path:
    """A run of two layers, a temporary directory of our own, and no trace of another launcher."""
    write_run(tmp_path / "run", KINDS["llama"])
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "run"


def test_a_pipeline_prints_the_text_of_one_process(run, capsys):
    argv = ["generate", str(run), "--prompt", "5 0 17", "--max-new-tokens", "12", "--json"]
    assert main(argv) == 0
    alone = json.loads(capsys.readouterr().out)
    done = subprocess.run(
        [sys.executable, "-m", "phalanx", *argv, "--pp", "2"], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {**alone, "pp": 2}
    assert len(alone["text"].split()) == 15
    assert not list(Path(os.environ["TMPDIR"]).iterdir())


def test_more_ranks_than_layers_are_refused_before_any_starts(run, capsys):
    assert main(["generate", str(run), "--pp", "3"]) == 2
    assert "1 ≤ pp 3 ≤ n_layers 2 does not hold" in capsys.readouterr().err
    assert not list(Path(os.environ["TMPDIR"]).iterdir())


def test_ctrl_c_ends_every_rank(run):
    argv = ["generate", str(run), "--prompt", "5", "--max-new-tokens", "100000000", "--pp", "2"]
    with subprocess.Popen([sys.executable, "-m", "phalanx", *argv], stderr=subprocess.PIPE, text=True) as process:
        try:
            end = time.monotonic() + 60
            while len(ranks := _children(process.pid)) < 2:
                assert time.monotonic() < end, "no ranks were started"
                time.sleep(0.1)
            process.send_signal(signal.SIGINT)
            _, error = process.communicate(timeout=30)
        finally:
            process.kill()
    assert process.returncode == 130, error
    assert not any(Path(f"/proc/{rank}").exists() for rank in ranks)


def _children(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
