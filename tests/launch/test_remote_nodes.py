"""Nodes behind remote shells. A shell script stands in for ssh: it runs the command on this host."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from phalanx.errors import RunError
from phalanx.launch.start.choose import HostCommand
from phalanx.launch.start.remote import RemoteNodes

PROGRAM = """
import sys
from phalanx.launch.start.choose import HostCommand
from phalanx.launch.start.remote import RemoteNodes
commands = [HostCommand((sys.argv[1], host, text), (host,)) for host, text in zip("ab", sys.argv[2:])]
sys.exit(RemoteNodes(commands, least=2, secrets={}, grace_s=5, bare_stdout=False).run())
"""


@pytest.fixture
def remote_shell(tmp_path: Path) -> str:
    """A program that takes HOST and a command for the shell."""
    path = tmp_path / "remote"
    path.write_text('#!/bin/sh\nshift\nexec sh -c "$*"\n')
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def run(remote_shell, capfd) -> Callable[..., tuple[int, str, str]]:
    def run(*texts: str, least: int = 2, secrets=None, bare: bool = False) -> tuple[int, str, str]:
        commands = [HostCommand((remote_shell, host, text), (host,)) for host, text in zip("ab", texts, strict=False)]
        nodes = RemoteNodes(commands, least=least, secrets=secrets or {}, grace_s=1, bare_stdout=bare)
        return nodes.run(), *capfd.readouterr()

    return run


def test_lines_have_their_host_in_front(run):
    code, out, err = run("echo one", "echo two >&2; printf three")
    assert code == 0
    assert sorted(out.splitlines()) == ["[a] one", "[b] three"]
    assert err == "[b] two\n"


def test_one_host_has_no_prefix_and_a_document_neither(run):
    assert run("echo one", least=1)[1] == "one\n"
    assert run("echo '{}'", "true", bare=True)[1] == "{}\n"


def test_what_is_no_text_and_what_a_terminal_obeys_is_shown(run):
    assert run(r"printf '\377 \033[1m\n'", least=1)[1] == "\ufffd \\x1b[1m\n"


def test_the_exit_code_is_that_of_the_rendezvous_host(run):
    assert run("exit 75", "exit 75")[0] == 75
    assert run("sleep 0.5; exit 4", "exit 1")[0] == 4
    assert run("kill -9 $$", "true")[0] == 137


def test_a_host_that_cannot_be_reached_stops_the_others(run):
    began = time.monotonic()
    wait = "read line; [ $line = SIGTERM ] && exit 143"
    code, _, err = run(wait, "exit 255")
    assert code == 1
    assert "b: the remote shell ended with 255: the host cannot be reached" in err
    assert "too few; they are stopped" in err
    assert time.monotonic() - began < 5


def test_others_do_not_wait_for_a_node_that_failed(run):
    code, _, err = run("read line; [ $line = SIGTERM ] && exit 143", "exit 2")
    assert code == 2
    assert "too few; they are stopped" in err


def test_a_program_that_is_not_there(run):
    code, _, err = run("/no/such/python", least=1)
    assert code == 1
    assert "127: the program was not found there" in err


def test_a_run_that_shrinks_goes_on_without_a_host(run):
    code, _, err = run("sleep 0.5", "exit 255", least=1)
    assert code == 0
    assert "too few" not in err


def test_secrets_come_by_standard_input(run):
    out = run("read line; echo $line", least=1, secrets={"HF_TOKEN": "x"})[1]
    assert json.loads(out) == {"HF_TOKEN": "x"}


def test_a_remote_shell_that_cannot_be_started():
    nodes = RemoteNodes([HostCommand(("/no/ssh", "a", "x"), ("a",))], least=1, secrets={}, grace_s=1, bare_stdout=False)
    with pytest.raises(RunError, match="give --remote-shell"):
        nodes.run()


def start(remote_shell: str, *texts: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, remote_shell, *texts],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_a_signal_reaches_every_node(remote_shell):
    process = start(remote_shell, *["echo ready; read line; echo got $line; exit 75"] * 2)
    assert process.stdout is not None
    ready = [process.stdout.readline(), process.stdout.readline()]
    process.send_signal(signal.SIGUSR1)
    shown = process.communicate(timeout=20)[0]
    assert sorted(ready) == ["[a] ready\n", "[b] ready\n"]
    assert sorted(shown.splitlines()) == ["[a] got SIGUSR1", "[b] got SIGUSR1"]
    assert process.returncode == 75


def test_nodes_learn_that_the_launcher_was_killed(remote_shell, tmp_path):
    end = f"echo ready; read line || echo ended > {tmp_path}/$0"
    process = start(remote_shell, end, end)
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.readline()
    process.kill()
    process.wait()
    process.stdout.close()
    told, until = tmp_path / "sh", time.monotonic() + 60
    while not (told.exists() and "ended" in told.read_text()):  # the shell creates it before it writes
        assert time.monotonic() < until, "no node has learnt it"
        time.sleep(0.05)
