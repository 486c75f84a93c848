"""The command of a launcher in the foreground: its exit code, and what signals become."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from phalanx.errors import RunError
from phalanx.launch.start.remote import run_in_foreground

RANKS = """
import signal, sys, time
signal.signal(signal.SIGUSR1, lambda *_: (open("asked", "w").close(), sys.argv[1:] or sys.exit(75)))
signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
signal.signal(signal.SIGINT, lambda *_: sys.exit(4))
open("ready", "w").close()
while True:
    time.sleep(0.05)
"""
RUN = (
    "import os, sys; from phalanx.launch.start.remote import run_in_foreground; "
    "sys.exit(run_in_foreground(sys.argv[1:], os.environ))"
)


def start(folder: Path, *argv: str) -> subprocess.Popen[bytes]:
    """Returns a launch whose command is there."""
    command = [sys.executable, "-c", RUN, sys.executable, "-c", RANKS, *argv]
    launch = subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE)
    wait_for(folder / "ready")
    return launch


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1])
def test_a_signal_is_a_request_to_stop(tmp_path: Path, number: int) -> None:
    with start(tmp_path) as launch:
        launch.send_signal(number)
        assert launch.wait(60) == 75
        assert launch.stderr is not None
        assert b"asked to stop with a checkpoint" in launch.stderr.read()


def test_a_second_signal_ends_the_run(tmp_path: Path) -> None:
    with start(tmp_path, "stays") as launch:
        launch.send_signal(signal.SIGINT)
        wait_for(tmp_path / "asked")
        launch.send_signal(signal.SIGINT)  # the same request
        time.sleep(0.7)
        assert launch.poll() is None
        launch.send_signal(signal.SIGINT)
        assert launch.wait(60) == 3


def test_a_launch_that_is_killed_asks_the_run_to_stop(tmp_path: Path) -> None:
    with start(tmp_path) as launch:
        launch.kill()
        wait_for(tmp_path / "asked")


def test_exit_codes() -> None:
    shell = ["/bin/sh", "-c"]
    assert run_in_foreground([*shell, "exit 7"], os.environ) == 7
    assert run_in_foreground([*shell, "kill -9 $$"], os.environ) == 137
    with pytest.raises(RunError, match="no-such-program cannot be started"):
        run_in_foreground(["no-such-program"], os.environ)
