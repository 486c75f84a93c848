"""The local launcher: real processes, their output, their signals and what they leave behind."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from disks import fill, mounted
from phalanx.check.load import load_words
from phalanx.cli.train import _require_room
from phalanx.config.job import Job, RunOptions
from phalanx.config.overrides import parse
from phalanx.errors import JobError, NotFiniteError, RunError, StoppedError
from phalanx.launch.fork_server import ForkServer
from phalanx.launch.grid import Machine, problems, tasks_per_node
from phalanx.launch.local import launch_local
from phalanx.launch.output import Outlet, UnblockedStream, unblocked
from phalanx.launch.ranks import LAUNCHER_PID, Ranks
from phalanx.launch.start import run_in_foreground
from phalanx.launch.verdict import End, Outcome
from phalanx.launch.worker import report
from phalanx.train.terminal import Terminal

# The local launcher, with real processes.


HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def _ranks_find_their_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("phalanx.launch.local._PEER_GRACE_S", 0.3)


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


@pytest.mark.cold
def test_an_interrupt_may_meet_ranks_whose_python_is_starting(
    launch: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Python imports sitecustomize before it runs any module: an error there is a fatal one."""
    (tmp_path / "sitecustomize.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGINT)")
    monkeypatch.setenv("PYTHONPATH", f"{HERE}:{tmp_path}")
    assert launch("deaf") == 128 + signal.SIGINT
    assert "killed by SIGINT" in capfd.readouterr().err


ENDED = """
import os, signal
from phalanx.launch.local import StopSignals
from phalanx.train.requests import StopRequest
for run in (StopSignals().handled, StopRequest, StopSignals().handled):
    with run():
        assert signal.getsignal(signal.SIGUSR1) is not signal.SIG_IGN
    os.kill(os.getpid(), signal.SIGUSR1)
"""


def test_a_request_to_stop_that_comes_when_all_is_done_changes_nothing() -> None:
    assert subprocess.run([sys.executable, "-c", ENDED], check=False).returncode == 0


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


# The command of a launcher in the foreground: its exit code, and what signals become.

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
    "import os, sys; from phalanx.launch.start import run_in_foreground; "
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


# Output that nobody reads: the program goes on, and what is dropped is counted.

LINES = [b"line %d\n" % number for number in range(20_000)]


def test_a_pipe_that_nobody_reads_drops_lines_and_counts_them() -> None:
    reader, writer = os.pipe()
    outlet = Outlet(writer, limit=1000)
    outlet.put(b"")
    for line in LINES:
        outlet.put(line[:4])  # as print does: a line in pieces
        outlet.put(line[4:])
    found = b""

    def read() -> None:
        nonlocal found
        while chunk := os.read(reader, 1 << 16):
            found += chunk

    thread = threading.Thread(target=read)
    thread.start()
    outlet.close(60)
    outlet.put(b"too late\n")
    os.close(writer)
    thread.join()
    os.close(reader)
    written = found.splitlines(keepends=True)
    notes = [line for line in written if line.startswith(b"phalanx: ")]
    dropped = sum(int(note.split()[1].replace(b",", b"")) for note in notes)
    assert dropped > 0
    lines = set(LINES)
    assert sum(line in lines for line in written) + dropped == len(LINES)
    assert set(written) - lines - set(notes) <= {b"line\n"}, "torn lines end"


def test_a_reader_that_has_gone_is_forgotten() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    outlet = Outlet(writer)
    outlet.put(b"x\n")
    outlet.close(60)  # returns, because nothing can be waited for
    os.close(writer)


def test_closing_waits_only_so_long_for_a_reader_that_does_not_read() -> None:
    reader, writer = os.pipe()
    outlet = Outlet(writer)
    outlet.put(b"x" * (1 << 17))
    outlet.close(0.1)
    os.set_blocking(reader, False)
    assert os.read(reader, 10) == b"x" * 10
    os.close(reader)


@pytest.mark.parametrize("path", ["/dev/full", "file"])
def test_a_full_disk_does_not_end_the_program(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open(tmp_path / path, "w", buffering=1) as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        monkeypatch.setattr(sys, "stderr", stream)
        with unblocked():
            outer = sys.stdout
            assert isinstance(outer, UnblockedStream)
            with unblocked():
                assert sys.stdout is outer
            print("on one")
            print("on the other", file=sys.stderr)
        assert sys.stdout is stream
    if path == "file":
        assert (tmp_path / path).read_text() == "on one\non the other\n"


def test_the_live_view_on_a_terminal_that_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "metrics.jsonl").write_text("")
    monkeypatch.setenv("TERM", "xterm")
    terminal, theirs = pty.openpty()
    termios.tcflow(theirs, termios.TCOOFF)  # what Ctrl-S does
    monkeypatch.setattr(sys, "stderr", os.fdopen(theirs, "w", buffering=1))
    monkeypatch.setattr("phalanx.launch.output.LINGER_S", 60.0)
    with unblocked():
        with Terminal(Job()) as shown, shown.live(tmp_path):
            for step in (1, 2, 3):
                shown.print(f"line {step}")
        termios.tcflow(theirs, termios.TCOON)  # Ctrl-Q: what waited is shown
    seen = os.read(terminal, 1 << 16)
    while b"line 3" not in seen:
        seen += os.read(terminal, 1 << 16)
    os.close(terminal)


@pytest.mark.parametrize(
    ("term", "live", "shown"), [("xterm", True, True), ("dumb", True, False), ("xterm", False, False)]
)
def test_where_the_live_view_is_shown(term: str, live: bool, shown: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal, theirs = pty.openpty()
    monkeypatch.setenv("TERM", term)
    with os.fdopen(theirs, "w") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        found = Terminal(Job(run=RunOptions(live=live)))
        assert found.has_screen == shown
        assert not Terminal().has_screen, "another rank than the first"
        found.print("step: 10  loss: 2.0000  " + "x" * 300)
    seen = os.read(terminal, 1 << 16)
    assert (b"\x1b[" in seen) == shown
    os.close(terminal)


# What a rank leaves behind when it ends, and that it ends with its launcher.


@pytest.fixture(autouse=True)
def _a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (StoppedError("Stopped at step 7."), 75, "Stopped at step 7."),
        (NotFiniteError("The loss is NaN."), 5, "The loss is NaN."),
        (JobError(["one", "two"]), 2, "one\ntwo"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (SystemExit(2), 2, ""),
        (SystemExit(), 0, ""),
        (SystemExit(-1), 255, ""),
        (SystemExit("no such option"), 1, "no such option"),
    ],
)
def test_errors_without_a_traceback(tmp_path: Path, error: BaseException, code: int, message: str) -> None:
    def run() -> int:
        raise error

    assert report(tmp_path, run) == code
    outcome = Outcome.read(tmp_path)
    assert outcome is not None
    assert (outcome.rank, outcome.code, outcome.message, outcome.traceback) == (3, code, message, None)


def test_a_bug_keeps_its_traceback(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert report(tmp_path, lambda: 1 // 0) == 1
    outcome = json.loads((tmp_path / "outcome.json").read_text())
    assert outcome["message"] == "ZeroDivisionError: integer division or modulo by zero"
    assert outcome["traceback"].startswith("Traceback (most recent call last):\n")
    assert "1 // 0" in outcome["traceback"]
    assert capsys.readouterr() == ("", "")  # the launcher shows it, once for all ranks


def test_nothing_but_the_outcome_is_left(tmp_path: Path) -> None:
    assert report(tmp_path, lambda: 0) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["outcome.json"]


def test_a_full_disk_has_room_for_the_outcome(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "size=64k") as disk:

        def run() -> int:
            fill(disk)
            raise RunError("the disk is full")

        assert report(disk, run) == 1
        outcome = Outcome.read(disk)
        assert outcome is not None
        assert outcome.message == "the disk is full"


def test_a_disk_that_was_full_before_leaves_the_outcome_elsewhere(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "size=64k") as disk:
        fill(disk)
        assert report(disk, lambda: 4, tmp_path / "spare") == 4
        assert Outcome.read(disk) is None
    outcome = Outcome.read(tmp_path / "spare")
    assert outcome is not None
    assert outcome.code == 4


def test_no_outcome(tmp_path: Path) -> None:
    assert Outcome.read(tmp_path) is None


def test_a_rank_whose_launcher_is_gone_already_ends_at_once() -> None:
    program = "from phalanx.launch.lifeline import die_with_parent; die_with_parent(1); print('still here')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, b"")


LEAVES = """
import atexit, sys, threading
from phalanx.launch.lifeline import leave

atexit.register(print, "at exit")
threading.Thread(target=lambda: (threading.main_thread().join(), print("thread"))).start()
"""


def test_a_process_leaves_once_threads_and_exit_functions_are_done_unless_it_is_profiled() -> None:
    for more, code, printed in (("", 3, b""), ("sys.setprofile(lambda *_: None)", 0, b"goes on\n")):
        program = f"{LEAVES}{more}\nleave(3)\nprint('goes on')"
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
        assert (done.returncode, done.stdout, done.stderr) == (code, printed + b"thread\nat exit\n", b"")


def test_a_fork_server_calls_functions_before_it_serves() -> None:
    for function, serves in (("os:getpid", True), ("sys:exit", False)):
        server = ForkServer([function], {})
        assert server.wait(lambda: False) == serves
        server.close()


def test_a_fork_server_that_does_not_get_ready_shows_where_it_stands() -> None:
    server = ForkServer(["signal:pause"], {})
    assert not server.wait(lambda: "in _main" in server.stacks())
    assert f"process {server._pid}: sleeping" in server.stacks()
    server.close()


def test_a_fork_server_that_leaves_a_request_unanswered_serves_no_other() -> None:
    """Which would get the answer to that one. What a rank leads is there once its process id is."""
    server = ForkServer(["os:getpid"], {}, patience=0.4)
    for stopped in (False, True):
        assert server.wait(lambda: False)
        if stopped:
            os.kill(server._pid, signal.SIGSTOP)
            with pytest.raises(TimeoutError):
                server.start(["this"], {LAUNCHER_PID: str(os.getpid())})
        else:
            pid = server.start(["signal:pause"], {LAUNCHER_PID: str(os.getpid())})
            os.killpg(pid, signal.SIGKILL)
            assert os.waitpid(pid, 0)[1] == signal.SIGKILL
    assert not server.wait(lambda: False)
    server.close()


# Ranks beyond a machine's resources are refused before any of them starts.

LAPTOP = Machine(cores=8, free_bytes=12 * 2**30, devices=0)
SERVER = Machine(cores=64, free_bytes=400 * 2**30, devices=8)


def said(ranks: int, device: str, machine: Machine, oversubscribe: bool = False) -> str:
    return "\n".join(problems(ranks, device, machine, oversubscribe=oversubscribe))


@pytest.mark.parametrize("ranks", [1, 2, 8, 16, 40])
def test_a_laptop_bears_some_ranks(ranks: int) -> None:
    assert not said(ranks, "auto", LAPTOP)


@pytest.mark.parametrize("ranks", [200, 5000])
def test_too_many_ranks_are_refused_unless_the_user_insists(ranks: int) -> None:
    text = said(ranks, "auto", LAPTOP)
    assert f"{ranks} ranks" in text
    assert "8 cores bear 64" in text
    assert "--oversubscribe" in text
    assert not said(ranks, "cpu", LAPTOP, oversubscribe=True)


def test_training_in_fp8_needs_an_accelerator() -> None:
    (text,) = problems(1, "auto", LAPTOP, oversubscribe=True, precision="fp8")
    assert "only emulated" in text
    assert text.endswith("nearest legal: bf16")
    assert [*problems(1, "cpu", SERVER, oversubscribe=False, precision="fp8")] == [text]
    assert not [*problems(1, "auto", SERVER, oversubscribe=False, precision="fp8")]


def test_memory_counts_as_well_as_cores() -> None:
    assert "0.5 GiB are free" in said(8, "cpu", Machine(8, 2**29, 0))
    assert not said(2, "cpu", Machine(8, 2**29, 0))


def test_the_ranks_that_other_launchers_started_on_a_host_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    assert tasks_per_node({"SLURM_STEP_TASKS_PER_NODE": "64(x2)", "SLURM_TASKS_PER_NODE": "1"}) == 64
    assert tasks_per_node({"SLURM_TASKS_PER_NODE": "4,3"}) == tasks_per_node({}) == 0
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    job = load_words(parse(["cluster.device=cpu", "dp_shard=64", "global_batch=64"])).job
    torchrun = Ranks(rank=3, world=64, local_rank=3, local_world=64, node_rank=0, source="torchrun")
    with pytest.raises(JobError, match="64 ranks on this machine, whose 2 cores bear 16"):
        _require_room(job, torchrun, oversubscribe=False)
    _require_room(job, torchrun, oversubscribe=True)
    slurm = replace(torchrun, local_world=None, source="slurm")
    _require_room(job, slurm, oversubscribe=False)  # unknown: they may be on 64 nodes
    monkeypatch.setenv("SLURM_STEP_TASKS_PER_NODE", "64")
    with pytest.raises(JobError, match="insist with --oversubscribe"):
        _require_room(job, slurm, oversubscribe=False)


def test_an_accelerator_has_one_rank_and_cuda_needs_one() -> None:
    assert not said(8, "auto", SERVER)
    assert "9 ranks on this machine, which has 8 devices" in said(9, "cuda", SERVER, oversubscribe=True)
    assert not said(64, "cpu", SERVER)
    assert "0 CUDA devices" in said(1, "cuda", LAPTOP)
