"""One node of a launch: no rank of whoever started it, and obedient."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from phalanx.cli.node import rank_variables
from phalanx.launch.ranks import detect

SLEEPER = """
import os, sys, time
import phalanx.cli.node as node

def train(argv):
    print(argv, os.environ.get("HF_TOKEN"), sys.argv, sys.stdin.read(), flush=True)
    time.sleep(30)

node.phalanx_main = train
sys.exit(node.main(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    "env",
    [
        {
            "SLURM_PROCID": "1",
            "SLURM_LOCALID": "0",
            "SLURM_STEP_ID": "0",
            "SLURM_STEP_NUM_TASKS": "2",
            "SLURM_NTASKS": "2",
        },
        {"PALS_RANKID": "1", "PMI_SIZE": "2", "PALS_LOCAL_RANKID": "0", "PMI_RANK": "1", "PMI_LOCAL_RANK": "0"},
        {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "0", "PMIX_RANK": "1"},
        {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"},
        {"RANK": "1", "WORLD_SIZE": "2", "PET_NNODES": "2"},
    ],
)
def test_it_is_no_rank_of_what_started_it(env):
    left = {name: value for name, value in env.items() if name not in rank_variables(env)}
    assert detect(left) is None


def test_what_describes_the_job_stays():
    kept = {"SLURM_JOB_ID": "1", "SLURM_JOB_END_TIME": "2", "SLURM_JOB_NODELIST": "a", "NCCL_DEBUG": "INFO"}
    assert rank_variables(kept) == []


def start(*argv: str, **env: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", SLEEPER, *argv],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **env},
    )


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def test_signals_and_secrets_by_standard_input():
    process = start("--controlled=variables", "job.yaml", SLURM_PROCID="3")
    assert process.stdin is not None
    process.stdin.write('{"HF_TOKEN": "x"}\n')
    process.stdin.flush()
    assert line_of(process) == "['train', 'job.yaml'] x ['phalanx', 'train', 'job.yaml'] \n"
    process.stdin.write("SIGKILL\nSIGUSR1\n")
    process.stdin.flush()
    assert process.wait(10) == -signal.SIGUSR1
    process.communicate()


def test_the_end_of_standard_input_stops_it():
    process = start("--controlled", "job.yaml")
    line_of(process)
    process.communicate(timeout=10)
    assert process.returncode == -signal.SIGTERM


def test_it_stops_after_its_time():
    began = time.monotonic()
    process = start("--stop-after=1", "job.yaml")
    assert process.wait(20) == -signal.SIGUSR1
    assert time.monotonic() - began < 15
    process.communicate()


def test_it_stops_with_whoever_started_it(tmp_path):
    quoted = f"{sys.executable} -c '{SLEEPER}' job.yaml & echo $!; sleep 0.3; exec sleep 2"
    shell = subprocess.Popen(["sh", "-c", quoted], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
    pid = int(line_of(shell))
    assert "job.yaml" in line_of(shell)
    shell.kill()
    shell.wait()
    until = time.monotonic() + 10
    while os.path.exists(f"/proc/{pid}") and time.monotonic() < until:
        time.sleep(0.05)
    assert not os.path.exists(f"/proc/{pid}")
    assert shell.stdout is not None
    shell.stdout.close()
