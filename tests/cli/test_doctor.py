"""`phalanx doctor` as a user runs it."""

import json
import os
import re
import subprocess
import sys
import time

import pytest

from phalanx.cli.main import main

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


def test_hosts_are_asked_through_a_shell(here, capsys):
    answer = json.dumps({"time": time.time(), "findings": [], "facts": {}})
    (here / "rsh").write_text(f"#!/bin/sh\nprintf '%s\\n' \"$@\" >> asked.$1\necho '{answer}'\n")
    (here / "rsh").chmod(0o755)
    assert main(["doctor", "job.yaml", "--hosts", "a,b", "c", "--remote-shell", f"{here / 'rsh'}", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["hosts"] == ["a", "b", "c"]
    command = f"cd {here} && exec {sys.executable} -P -m phalanx doctor job.yaml --json"
    assert (here / "asked.b").read_text() == f"b\n{command}\n"
