"""`phalanx test-dist`: starts the ranks or is one of them, and says what it found by text, JSON and exit code."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from phalanx.cli.main import main
from phalanx.launch.ranks import Ranks

PHALANX = [sys.executable, "-m", "phalanx", "test-dist", "--quick"]
FAULT = """
import os
if os.environ.get("RANK") == "1":
    import time
    from phalanx.comm.axis import Axis
    broadcast, all_gather, calls = Axis.broadcast, Axis.all_gather, []

    class After:
        def __init__(self, pending, whole):
            self.pending, self.whole = pending, whole

        def wait(self):
            self.pending.wait()
            if self.whole.numel() == 1032:
                self.whole[9] += 1

    def hang(self, x, source=0):
        calls.append(x)
        if len(calls) == 3:
            time.sleep(1000)
        return broadcast(self, x, source)

    if os.environ["FAULT"] == "hang":
        Axis.broadcast = hang
    if os.environ["FAULT"] == "wrong":
        Axis.all_gather = lambda self, whole, part: After(all_gather(self, whole, part), whole)
"""


@pytest.fixture
def alone(monkeypatch):
    """Nobody has launched this process."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


def environment(folder: Path, fault: str = "") -> dict[str, str]:
    (folder / "sitecustomize.py").write_text(FAULT if fault else "")
    return {**os.environ, "PYTHONPATH": str(folder), "TMPDIR": str(folder), "OMP_NUM_THREADS": "1", "FAULT": fault}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--nproc-per-node", "3", "tp=2"], "layout tp=2 needs 2 processes, but there are 3: start 2, or leave out"),
        (["--nproc-per-node", "0"], "--nproc-per-node: must be at least 1, is 0"),
        (["--quik"], "unknown option --quik; did you mean --quick?"),
        (["--html", "/no/where.html"], "--html /no/where.html: folder /no does not exist"),
        (["cluster.nodes=2", "dp_replicate=2"], "starts processes on this machine only: for several nodes run it with"),
        (["examples/nothing.yaml"], "examples/nothing.yaml"),
    ],
)
def test_mistakes_are_one_message_and_code_2(words, message, capsys, alone):
    assert main(["test-dist", *words]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""


def test_without_a_layout_all_processes_are_replicas(capsys, alone):
    assert main(["test-dist", "--print-config", "--json", "tp=2"]) == 0
    assert json.loads(capsys.readouterr().out)["job"]["layout"]["tp"] == 2
    from phalanx.cli.test_dist import _parse

    words = _parse(["--quick", "cluster.device=cpu"], Ranks(1, 3, 1, 3, 0, "torchrun"))
    assert words is not None
    assert words.job.layout.line() == "dp_replicate=3,micro_batch=8"
    assert words.job.model.preset == "tiny"


def test_two_processes_on_this_machine(tmp_path):
    command = [*PHALANX, "--json", "--html", "page.html", "--svg", "pictures", "cluster.device=cpu"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment(tmp_path), capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["ok"] is True
    assert found["failures"] == []
    assert found["world"] == 2
    assert [axis["axis"] for axis in found["axes"]] == ["dp_replicate"]
    assert len(found["training"]["step_s"]) == 2
    assert set(found["training"]["phases"]) == {"forward/backward", "exchange", "optimizer"}
    assert "training: 100%" in done.stderr, "plain lines where there is no terminal"
    assert "USDT" not in done.stderr
    assert (tmp_path / "page.html").read_text().startswith("<!doctype html>")
    assert sorted(path.name for path in (tmp_path / "pictures").iterdir()) == [
        f"{name}.svg" for name in ("bandwidth", "latency", "speed", "steps")
    ]
    assert sorted(path.name for path in (tmp_path / "traces").iterdir()) == [
        f"test-dist-rank_{rank}.json" for rank in (0, 1)
    ]
    assert not list(tmp_path.glob("phalanx_test_dist_*")), "the logs of ranks that did well"


@pytest.mark.cold
def test_a_rank_that_hangs_is_named_and_the_exit_code_is_1(tmp_path):
    command = [*PHALANX, "--json", "--timeout", "6", "cluster.device=cpu"]
    environ = environment(tmp_path, "hang")
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1, done.stderr
    assert f"Rank 1 ({socket.gethostname()}) has been silent for" in done.stderr
    assert "It has not called broadcast" in done.stderr
    found = json.loads(done.stdout)
    assert found["ok"] is False
    assert found["hang"]["culprits"] == [1]


@pytest.mark.cold
def test_ranks_of_another_launcher_say_once_what_is_wrong(tmp_path):
    """Two processes as torchrun would start them; an all-gather of rank 1 gives a wrong element."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port = listening.getsockname()[1]
    processes = []
    for rank in range(2):
        variables = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": 2, "GROUP_RANK": 0}
        variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        environ = environment(tmp_path, "wrong") | {name: str(value) for name, value in variables.items()}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        processes.append(subprocess.Popen([*PHALANX, "cluster.device=cpu"], cwd=tmp_path, env=environ, **pipes))
    (first, errors), (second, others) = (process.communicate(timeout=120) for process in processes)
    assert [process.returncode for process in processes] == [1, 1], errors
    host = socket.gethostname()
    assert f"rank 1 ({host}): all-gather of 516 × fp32 per rank on dp_replicate: element 9 is" in first
    assert "phalanx: the test found" in errors
    assert second == ""
    assert "the test found" not in others


def test_folders_that_cannot_be_made_are_said_before_any_rank_starts(capsys):
    assert main(["test-dist", "--quick", "--traces", "/proc/no/traces", "--svg", "/dev/null/svg"]) == 2
    error = capsys.readouterr().err
    assert "--traces /proc/no/traces: the folder cannot be created" in error
    assert "--svg /dev/null/svg: the folder cannot be created" in error
