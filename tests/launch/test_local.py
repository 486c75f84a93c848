"""The local launcher, with real processes."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from phalanx.errors import RunError
from phalanx.launch.local import launch_local
from phalanx.launch.verdict import End, Outcome

HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def _ranks_find_their_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("phalanx.launch.supervisor._PEER_GRACE_S", 0.3)


@pytest.fixture
def launch(tmp_path: Path) -> Callable[..., int]:
    def launch(scenario: str, processes: int = 2, all_ranks: bool = False, grace_s: float = 20.0) -> int:
        return launch_local(
            [scenario, str(tmp_path), "$$ ${local_rank}"],
            processes=processes,
            log_dir=tmp_path / "logs",
            threads=3,
            all_ranks=all_ranks,
            grace_s=grace_s,
            module="rank_program",
        )

    return launch


def facts(directory: Path, rank: int, key: str = "pid", timeout_s: float = 20.0) -> dict[str, Any]:
    """What a rank said in `ready`, as soon as it holds `key`."""
    deadline = time.monotonic() + timeout_s
    path = directory / f"rank_{rank}.json"
    while time.monotonic() < deadline:
        if path.exists() and key in (found := json.loads(path.read_text())):
            return found
        time.sleep(0.01)
    raise TimeoutError(f"{path} with {key}")


@contextmanager
def meanwhile(action: Callable[[], None]) -> Iterator[None]:
    """Runs `action` beside the block, and raises what it raised."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            action()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        thread.join()
    assert not errors, errors


def send(directory: Path, processes: int, *signals: signal.Signals, pause_s: float = 0.0) -> Callable[[], None]:
    """Signals this process, the launcher, once all ranks are ready."""

    def action() -> None:
        for rank in range(processes):
            facts(directory, rank)
        for number in signals:
            os.kill(os.getpid(), number)
            time.sleep(pause_s)

    return action


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_logs_and_environment(
    launch: Callable[..., int], tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    assert launch("say") == 0
    shown = capfd.readouterr()
    assert (shown.out, shown.err) == ("out of 0\n", "err of 0\n")
    attempt = tmp_path / "logs" / "attempt_0"
    assert (attempt / "rank_1" / "stdout.log").read_text() == "out of 1\n"
    assert (attempt / "rank_1" / "stderr.log").read_text() == "err of 1\n"
    assert Outcome.read(attempt / "rank_0") is not None
    for rank in (0, 1):
        said = facts(tmp_path, rank)
        assert said["argv"] == ["say", str(tmp_path), "$$ ${local_rank}"]
        environment = said["environment"]
        assert environment["OMP_NUM_THREADS"] == environment["MKL_NUM_THREADS"] == "3"
        assert environment["GLOO_SOCKET_IFNAME"] == "lo"
        assert environment["PHALANX_LOG_DIR"] == str(attempt / f"rank_{rank}")
        assert not Path(environment["PHALANX_STORE"]).parent.exists()  # private, and removed at the end


def test_a_second_run_keeps_the_first_one_s_logs(
    launch: Callable[..., int], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert launch("say") == launch("say", all_ranks=True) == 0
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == ["attempt_0", "attempt_1"]
    shown = capfd.readouterr()
    assert "[rank 1] out of 1\n" in shown.out
    assert "[rank 1] err of 1\n" in shown.err


def test_standard_output_that_nobody_reads(
    launch: Callable[..., int], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    reader, writer = os.pipe()
    monkeypatch.setattr(sys, "stdout", os.fdopen(writer, "w"))
    monkeypatch.setattr("phalanx.launch.output.LINGER_S", 0.1)
    assert launch("chatty", all_ranks=True) == 0
    assert b"[rank 1] 0 of 1\n" in os.read(reader, 1000)
    os.close(reader)


def test_the_user_s_threads_stay(
    launch: Callable[..., int], tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert launch("say", processes=1) == 0
    assert facts(tmp_path, 0)["environment"]["OMP_NUM_THREADS"] == "5"
    assert "OMP_NUM_THREADS=5 is set and overrides 3 threads per rank" in capfd.readouterr().err


def test_a_bug_is_shown_once_and_peers_do_not_wait(
    launch: Callable[..., int], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    began = time.monotonic()
    assert launch("bug", processes=3) == 1
    assert time.monotonic() - began < 10
    shown = capfd.readouterr().err
    assert shown.count("Traceback") == shown.count("ZeroDivisionError: a bug") == 1
    assert "Rank 1 of 3 failed: Traceback" in shown
    assert "2 other ranks were stopped because of it." in shown
    assert str(tmp_path / "logs" / "attempt_0") in shown
    assert "torch" not in shown  # nothing of the agent's own report
    assert "ZeroDivisionError: a bug" in (tmp_path / "logs/attempt_0/rank_1/stderr.log").read_text()


def test_a_mistake_is_a_message(launch: Callable[..., int], capfd: pytest.CaptureFixture[str]) -> None:
    assert launch("mistake") == 4
    assert capfd.readouterr().err.startswith("phalanx: no shard x\n")


def test_the_command_line_itself(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    options = {"processes": 2, "log_dir": tmp_path, "threads": 1, "all_ranks": False}
    assert launch_local(["no-such-verb"], **options) == 2
    shown = capfd.readouterr().err
    assert shown.count("no verb 'no-such-verb'") == 1
    assert "Rank" not in shown
    assert launch_local(["--version"], **options) == 0
    assert capfd.readouterr().out.startswith("phalanx ")


def test_logs_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "logs").touch()
    with pytest.raises(RunError, match=r"Cannot start 2 ranks with logs in .*/logs: .*(File exists|Not a directory)"):
        launch_local(["say"], processes=2, log_dir=tmp_path / "logs", threads=1, all_ranks=False)


def test_death_by_signal(launch: Callable[..., int], capfd: pytest.CaptureFixture[str]) -> None:
    assert launch("killed") == 128 + signal.SIGKILL
    assert "Rank 1 of 2 was killed by SIGKILL." in capfd.readouterr().err


def test_an_end_without_a_word(launch: Callable[..., int], capfd: pytest.CaptureFixture[str]) -> None:
    assert launch("abrupt") == 3
    assert "exit code 3 and no message. Its standard error ends:\nthe last thing it said" in capfd.readouterr().err


def test_a_planned_stop_leaves_slower_ranks_alone(launch: Callable[..., int], tmp_path: Path) -> None:
    assert launch("late") == 75
    facts(tmp_path, 0, timeout_s=0.1)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_reaches_every_rank_once(
    launch: Callable[..., int], tmp_path: Path, capfd: pytest.CaptureFixture[str], number: signal.Signals
) -> None:
    handler = signal.getsignal(number)
    with meanwhile(send(tmp_path, 2, number, number)):  # twice at once, as `timeout` does, is one request
        assert launch("until_stopped") == 75
    assert [facts(tmp_path, rank)["signals"] for rank in (0, 1)] == [[number], [number]]
    assert capfd.readouterr().err == "phalanx: Stopped at step 7.\n"
    assert signal.getsignal(number) is handler


def test_a_second_signal_kills(launch: Callable[..., int], tmp_path: Path) -> None:
    began = time.monotonic()
    with meanwhile(send(tmp_path, 2, signal.SIGINT, signal.SIGINT, pause_s=0.8)):
        assert launch("deaf") == 128 + signal.SIGINT
    assert time.monotonic() - began < 10


def test_ranks_that_do_not_stop_in_time_are_killed(
    launch: Callable[..., int], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with meanwhile(send(tmp_path, 2, signal.SIGTERM)):
        assert launch("deaf", grace_s=0.5) == 128 + signal.SIGTERM
    assert "Stopped by SIGTERM before 2 of 2 ranks could write a checkpoint" in capfd.readouterr().err


def listening(pid: int | str) -> list[str]:
    """Local addresses, in /proc's hexadecimal, of the TCP sockets on which a process listens."""
    inodes = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            inodes.add(os.readlink(link))
        except FileNotFoundError:
            continue
    rows = [
        line.split()
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]
    ]
    return [row[1] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in inodes]


def test_ports_stay_on_loopback_and_a_failure_in_a_collective_ends_all(
    launch: Callable[..., int], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    addresses: dict[int | str, set[str]] = {}

    def look() -> None:
        for rank in (0, 1):
            assert facts(tmp_path, rank)["total"] == 2
        for pid in ("self", facts(tmp_path, 0)["pid"], facts(tmp_path, 1)["pid"]):
            addresses[pid] = {address.split(":")[0] for address in listening(pid)}
        (tmp_path / "go").touch()

    with meanwhile(look):
        assert launch("collective") == 1
    assert addresses.pop("self") == set()
    assert all(found == {"0100007F"} for found in addresses.values())  # 127.0.0.1; gloo does listen there
    shown = capfd.readouterr().err
    assert "Rank 1 of 2 failed" in shown
    assert shown.count("Traceback") == 1
    lost = Outcome.read(tmp_path / "logs/attempt_0/rank_0")
    assert lost is not None
    assert End(0, 1, 0.0, False, lost).lost_peer  # it noticed by itself, and was not taken for the cause


def launcher_command(tmp_path: Path, scenario: str) -> list[str]:
    return [sys.executable, str(HERE / "launch_program.py"), "2", str(tmp_path / "logs"), scenario, str(tmp_path)]


def test_ranks_die_with_their_launcher(tmp_path: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path)}  # a killed launcher leaves its temporary directory
    launcher = subprocess.Popen(launcher_command(tmp_path, "deaf"), env=environment)
    pids = [facts(tmp_path, rank)["pid"] for rank in (0, 1)]
    launcher.kill()
    launcher.wait()
    deadline = time.monotonic() + 5
    while not all(map(gone, pids)):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_ctrl_c_on_a_terminal(tmp_path: Path) -> None:
    """Rank 0 has the terminal, and one Ctrl-C is one signal."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(sys.executable, launcher_command(tmp_path, "until_stopped"))
    assert [facts(tmp_path, rank, "terminal")["terminal"] for rank in (0, 1)] == [True, False]
    os.write(terminal, b"\x03")
    shown = b""
    try:
        while chunk := os.read(terminal, 1000):
            shown += chunk
    except OSError:  # how Linux says that nobody has the other side open
        pass
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 75
    assert [facts(tmp_path, rank)["signals"] for rank in (0, 1)] == [[signal.SIGINT]] * 2
    assert b"Stopped at step 7." in shown
