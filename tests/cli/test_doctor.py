"""`phalanx doctor` and `phalanx test-dist` as a user runs them."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from phalanx.cli.main import main
from phalanx.launch.ranks import Ranks

# `phalanx doctor` as a user runs it.


JOB = """
model: {n_layers: 1, d_model: 16, n_heads: 2, seq_len: 16}
data: {corpus: random, random_tokens: 5000, random_vocab: 13}
layout: {dp_replicate: 2}
train: {steps: 4, global_batch: 4}
"""
LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")


@pytest.fixture
def here(tmp_path, monkeypatch):
    (tmp_path / "job.yaml").write_text(JOB)
    monkeypatch.chdir(tmp_path)
    for name in LAUNCHERS:
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def doctor(*argv, launcher=(), **env):
    command = [sys.executable, *launcher, "-m", "phalanx", "doctor", *argv]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, env={**os.environ, **env})


@pytest.mark.cold  # a warm process has imported every check, whatever doctor imports
def test_a_machine_with_a_job(here):
    done = doctor("job.yaml", "--json", "--timeout", "40")  # the machine may be busy with other tests
    document = json.loads(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    assert document["status"] in ("OK", "WARN")
    assert document["seconds"] < 100
    assert {finding["group"] for finding in document["findings"]} == {
        *("launch", "software", "accelerator", "limits", "storage", "network", "environment", "job")
    }
    assert all(bool(finding["remedy"]) == (finding["status"] != "OK") for finding in document["findings"])
    assert os.listdir(here) == ["job.yaml"]  # nothing is left behind


def test_what_is_wrong_is_an_error_and_hides_nothing(here):
    env = {"RANK": "1", "WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "nosuch0", "API_TOKEN": "secret-value"}
    done = doctor("job.yaml", "train.global_batch=3", **env)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    errors = [line for line in done.stdout.splitlines() if line.startswith("ERROR")]
    assert any("MASTER_ADDR, MASTER_PORT" in line and "not set" in line for line in errors)
    assert any("GLOO_SOCKET_IFNAME=nosuch0" in line for line in errors)
    assert any(line.startswith("ERROR  job: job file: command line: train.global_batch=3") for line in errors)
    assert "secret-value" not in done.stdout + done.stderr
    assert "\x1b" not in done.stdout


@pytest.mark.parametrize("argv", [["--jsn"], ["no-such-file"], ["--timeout", "soon"]])
def test_words_that_mean_nothing(here, argv, capsys):
    assert main(["doctor", *argv]) == 2
    assert capsys.readouterr().err.startswith("phalanx: ")


def test_a_word_that_means_nothing_is_said_by_one_rank(here, capsys, monkeypatch):
    for name, value in {"PMI_SIZE": "2", "PMI_RANK": "1", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}.items():
        monkeypatch.setenv(name, value)
    assert main(["doctor", "no-such-file"]) == 2
    assert capsys.readouterr().err == ""


def test_ranks_of_torchrun_are_compared(here):
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
    done = doctor("job.yaml", "--json", "--timeout", "40", launcher=launcher, OMP_NUM_THREADS="1")
    document = json.loads(done.stdout)
    assert done.returncode == 0, done.stdout
    assert (document["launcher"], document["world"]) == ("torchrun", 2)
    nodes = {finding["check"]: finding for finding in document["findings"] if finding["group"] == "nodes"}
    assert set(nodes) == {"process group", "same program", "clocks"}  # one node has nobody to reach
    assert nodes["same program"]["status"] == "OK"


def test_a_rank_whose_rendezvous_fails_explains_itself(here):
    env = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    done = doctor("job.yaml", "--json", "--timeout", "0.4", **env, MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    assert done.returncode == 1
    assert done.stdout == ""  # which is rank 0's
    assert re.search(r"ERROR  nodes: rendezvous: After \d+ s, rank 0 of 2 did not come: 127\.0\.0\.1:1", done.stderr)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("job.yaml --hosts a,b c --json", "job.yaml"),
        ("--hosts a b c job.yaml tp=2", "job.yaml tp=2"),
        ("--hosts a b c tp=2 --json", "tp=2"),
        ("--hosts=a,b,c job.yaml --timeout 3 --tp 2", "job.yaml --tp 2 --timeout=3"),
    ],
)
def test_hosts_are_asked_through_a_shell(here, capsys, argv, words):
    answer = json.dumps({"time": time.time(), "findings": [], "facts": {}})
    (here / "rsh").write_text(f"#!/bin/sh\nprintf '%s\\n' \"$@\" >> asked.$3\necho '{answer}'\n")
    (here / "rsh").chmod(0o755)
    shell = f"{here / 'rsh'} -o BatchMode=yes"  # whose options are no words of the job
    assert main(["doctor", "--remote-shell", shell, *argv.split()]) == 0
    printed = capsys.readouterr().out
    if "--json" in argv:
        assert json.loads(printed)["hosts"] == ["a", "b", "c"]
    command = f"cd {here} && exec {sys.executable} -P -m phalanx doctor {words} --json"
    assert (here / "asked.b").read_text() == f"-o\nBatchMode=yes\nb\n{command}\n"


# `phalanx test-dist`: starts the ranks or is one of them, and says what it found by text, JSON and exit code.

PHALANX = [sys.executable, "-m", "phalanx", "test-dist", "--quick"]
FAULT = """
import os
if os.environ["FAULT"]:  # in what forks the ranks, too: each knows its rank only when it runs
    import time
    from phalanx.comm.axis import Axis
    broadcast, all_gather, calls = Axis.broadcast, Axis.all_gather, []

    class After:
        def __init__(self, pending, whole):
            self.pending, self.whole = pending, whole

        def wait(self):
            self.pending.wait()
            if os.environ["RANK"] == "1" and self.whole.numel() == 1032:
                self.whole[9] += 1

    def hang(self, x, source=0):
        calls.append(x)
        if os.environ["RANK"] == "1" and len(calls) == 3:
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
    from phalanx.cli.machine import _test_words

    words = _test_words(["--quick", "cluster.device=cpu"], Ranks(1, 3, 1, 3, 0, "torchrun"))
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


def test_ranks_of_another_launcher_say_once_what_is_wrong(tmp_path):
    """Two processes as torchrun would start them; an all-gather of rank 1 gives a wrong element."""
    program = tmp_path / "faulty.py"
    program.write_text(f"{FAULT}\nimport sys\nfrom phalanx.cli.main import main\nsys.exit(main(sys.argv[1:]))\n")
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port = listening.getsockname()[1]
    processes = []
    for rank in range(2):
        variables = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": 2, "GROUP_RANK": 0}
        variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        environ = {**os.environ, "TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1", "FAULT": "wrong"}
        environ |= {name: str(value) for name, value in variables.items()}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        command = [sys.executable, str(program), "test-dist", "--quick", "cluster.device=cpu"]
        processes.append(subprocess.Popen(command, cwd=tmp_path, env=environ, **pipes))
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
