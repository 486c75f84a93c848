"""Restarts: the policy, the generation that fences off earlier attempts, and real ranks that are started again."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.errors import RunError
from phalanx.launch import logs
from phalanx.launch.local import launch_local
from phalanx.launch.ranks import GENERATION, RESTARTED
from phalanx.launch.verdict import End, Failure, Outcome, RestartPolicy, Restarts, memory_kills

HERE = Path(__file__).parent
LOST = "RuntimeError: Connection closed by peer [127.0.0.1]:3"


def failure(code: int, message: str = "", trace: str | None = None, step: int | None = 7, **more) -> Failure:
    """A rank's end: with a message it reported it, with a trace it is a bug; code 124 is the watchdog's."""
    outcome = Outcome(1, code, message, trace, 100.0) if message else None
    return Failure(code, None if code == 124 else End(1, code, 100.0, False, outcome), step, **more)


KILL, SEGV = failure(137), failure(139)
BUG = failure(1, "ValueError: bad", "Traceback ...")


@pytest.mark.parametrize(
    ("found", "restarts"),
    [
        (KILL, True),
        (SEGV, True),
        (failure(134), True),
        (BUG, True),
        (failure(124), True),
        (failure(1, LOST, "Traceback ..."), True),
        (failure(1, "the disk is full"), True),
        (failure(3), True),  # os._exit(3) of some library: it reported nothing
        (failure(1, "has 0 CUDA devices", step=None), False),
        (failure(1, "ValueError: bad", "Traceback ...", step=None), True),
        (failure(2, "wrong job"), False),
        (failure(3, "does not fit"), False),
        (failure(4, "shard x is corrupt"), False),
        (failure(5, "loss nan"), False),
        (failure(75, "stopped"), False),
        (failure(143), False),  # somebody asked one rank to end, before its first step
    ],
    ids=lambda value: "" if isinstance(value, bool) else f"{value.code}-{value.signature[1]}-{value.step}",
)
def test_what_is_met_by_a_restart(found: Failure, restarts: bool) -> None:
    assert RestartPolicy(Restarts(3)).decide(found).restart == restarts
    assert not RestartPolicy(Restarts(0)).decide(found).restart


@pytest.mark.parametrize(
    ("failures", "last"),
    [
        ([BUG, BUG], "Not restarted: the same failure came at step 8 before"),
        ([BUG, KILL, BUG], "Not restarted: the same failure came at step 8 before"),
        ([BUG, failure(1, "ValueError: bad", "Traceback ...", step=8)], "Restart 2 of at most 3."),
        ([SEGV, SEGV], "Not restarted: the same failure"),
        ([failure(1, f"{free} are free") for free in ("0B", "3.5KiB")], "Not restarted: the same failure"),
        ([failure(124, step=None)] * 2, "Not restarted: the same failure came before the first step before"),
        ([KILL, KILL, KILL], "Restart 3 of at most 3."),
        ([KILL] * 4, "Not restarted: 3 restarts within 3600 s"),
        ([failure(1, LOST, "Traceback ...")] * 3, "Restart 3 of at most 3."),
        ([failure(137, out_of_memory=True)], "Restart 1 of at most 3 in the same layout, although memory ran out"),
        ([failure(137, out_of_memory=True, step=n) for n in (3, 9)], "Not restarted: memory ran out twice."),
    ],
)
def test_what_comes_back_is_not_met_again(failures: list[Failure], last: str) -> None:
    policy = RestartPolicy(Restarts(3))
    decisions = [policy.decide(each) for each in failures]
    assert decisions[-1].sentence.startswith(last)
    assert [each.restart for each in decisions] == [True] * (len(failures) - 1) + [last.startswith("Restart")]


@given(st.lists(st.floats(0, 100), min_size=1, max_size=40), st.integers(1, 4))
def test_no_window_has_more_restarts_than_allowed(pauses: list[float], most: int) -> None:
    now, restarted = 0.0, []
    policy = RestartPolicy(Restarts(most, window_s=100), lambda: now)
    for pause in pauses:
        now += pause
        if policy.decide(KILL).restart:
            restarted.append(now)
        else:
            assert sum(now - 100 < time <= now for time in restarted) >= most, "refused too early"
    assert all(later - first >= 100 for first, later in zip(restarted, restarted[most:], strict=False))


def test_kills_for_lack_of_memory_are_counted_on_the_machine_and_in_the_control_group() -> None:
    files = {
        "/proc/vmstat": "nr_free_pages 5\noom_kill 2\n",
        "/proc/self/cgroup": "0::/job\n",
        "/sys/fs/cgroup/job/memory.events": "max 7\noom_kill 3\n",
    }
    assert memory_kills(lambda path: files[str(path)]) == 5

    def denied(path: Path) -> str:
        raise PermissionError(path)

    assert memory_kills(denied) == 0


def test_only_the_newest_generation_may_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tmp_path / "run"
    directory.mkdir()
    logs.check(directory)  # a process without a launcher
    first = logs.claim(directory)
    monkeypatch.setenv(GENERATION, first)
    logs.check(directory)
    second = logs.claim(directory)
    assert (int(first.split()[0]), int(second.split()[0])) == (1, 2)
    with pytest.raises(RunError, match=r"generation 1 of .*, which is now at generation 2: a later attempt has taken"):
        logs.check(directory)
    directory.rename(tmp_path / "run.1")
    with pytest.raises(RunError, match="now at generation none"):
        logs.check(directory)
    directory.mkdir()
    logs.claim(directory)  # number 1 again, of another directory
    with pytest.raises(RunError, match="now at generation 1:"):
        logs.check(directory)
    (directory / logs.FILE).write_bytes(b"\xff\x00 x" * 1000)
    assert logs.claim(directory).startswith("1 ")


@pytest.fixture
def launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    monkeypatch.setattr("phalanx.launch.local._PEER_GRACE_S", 0.3)

    def launch(scenario: str, restarts: Restarts) -> int:
        options = {"processes": 2, "log_dir": tmp_path / "logs", "threads": 1, "all_ranks": False}
        return launch_local([scenario, str(tmp_path)], **options, module="rank_program", restarts=restarts)

    return launch


def children() -> set[str]:
    """The processes of this one, among them those that other tests have left to it."""
    return set(Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split())


@pytest.mark.cold
def test_a_killed_rank_is_started_again_by_the_standby_process(
    launch: Callable[..., int], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def progress() -> tuple[int, float] | None:
        """Tells the launcher that step 1 is done."""
        return (1, 0.0) if (tmp_path / "rank_1.json").exists() else None

    (tmp_path / "go").touch()
    earlier = children()
    assert launch("flaky", Restarts(2, 60.0, progress, tmp_path, ("colorsys",))) == 0
    shown = capfd.readouterr()
    assert "phalanx: Rank 1 of 2 was killed by SIGKILL." in shown.err
    assert "phalanx: Restart 1 of at most 2." in shown.err
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == ["attempt_0", "attempt_1"]
    assert shown.out == "out of 0\n"
    assert (tmp_path / "logs/attempt_1/rank_1/stdout.log").read_text() == "out of 1\n"
    for rank in (0, 1):
        found = json.loads((tmp_path / f"rank_{rank}.json").read_text())
        assert "colorsys" in found["modules"], "it was not forked by the standby process"
        assert found["parent"] == os.getpid()
        assert found["argv"] == ["flaky", str(tmp_path)]
        environment = found["environment"]
        assert environment["RANK"] == str(rank)
        assert environment[GENERATION].startswith("2 ")
        assert json.loads(environment[RESTARTED])["attempt"] == 1
    commands = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in children() - earlier]
    assert not any(b"phalanx.launch.fork_server" in command for command in commands)


def test_a_failure_that_comes_back_is_not_met_again(
    launch: Callable[..., int], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert launch("bug", Restarts(3)) == 1
    shown = capfd.readouterr().err
    assert shown.count("ZeroDivisionError: a bug") == 2
    assert shown.index("Restart 1 of at most 3.") < shown.index("Not restarted: the same failure came before the first")
    assert len(list((tmp_path / "logs").iterdir())) == 2


def test_a_run_that_another_launcher_has_taken_over_is_not_taken_back(
    launch: Callable[..., int], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def progress() -> None:
        if logs.newest_of(tmp_path).startswith("1 "):
            logs.claim(tmp_path)

    assert launch("bug", Restarts(3, 60.0, progress, tmp_path, ("colorsys",))) == 1
    assert "Restart" not in capfd.readouterr().err
    assert logs.newest_of(tmp_path).startswith("2 ")


def test_a_request_to_stop_is_not_met_by_a_restart(launch: Callable[..., int], tmp_path: Path) -> None:
    def ask() -> None:
        end = time.monotonic() + 60
        while not all((tmp_path / f"rank_{rank}.json").exists() for rank in (0, 1)) and time.monotonic() < end:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    asking = threading.Thread(target=ask)
    asking.start()
    assert launch("until_stopped", Restarts(3, preload=("colorsys",))) == 75
    asking.join()
    assert len(list((tmp_path / "logs").iterdir())) == 1
