"""The watchdog with real processes, and what it says of slow ranks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from phalanx.launch.local import StopSignals, Supervisor, launch_local
from phalanx.launch.watchdog import diagnosis, heartbeat, watchdog
from phalanx.launch.watchdog.diagnosis import Limits, SlowRanks
from phalanx.launch.watchdog.heartbeat import Heartbeat, Phase
from phalanx.launch.watchdog.watchdog import PREFIX, NodeWatch, Watchdog, main, private_folder

HERE = Path(__file__).parent


@pytest.fixture
def launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], int]:
    monkeypatch.setenv("PYTHONPATH", f"{HERE}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)

    def launch(fault: str) -> int:
        options = {"processes": 2, "log_dir": tmp_path / "logs", "threads": 1, "all_ranks": False}
        return launch_local([fault, str(tmp_path)], module="watched_program", limits=Limits(4.0, 120.0), **options)

    return launch


def test_a_stopped_rank_is_named_and_all_are_killed(
    launch: Callable[[str], int], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert launch("stopped") == 124
    shown = capfd.readouterr().err
    assert (
        "in step 4, phase forward/backward: its process is stopped by a signal (state T). It has not called " in shown
    )
    assert "rank 0 has waited" in shown
    attempt = tmp_path / "logs/attempt_0"
    found = json.loads((attempt / "hang.json").read_text())
    assert (found["kind"], found["culprits"]) == ("silent", [1])
    assert found["message"] in (attempt / "hang.txt").read_text()
    (wait,) = found["ranks"][0]["waits"]
    assert (wait["call"]["operation"], wait["call"]["sequence"], wait["missing"]) == ("all_reduce", 4, [1])
    assert "watched_program.py" in (attempt / "rank_0/stacks.log").read_text()
    assert (attempt / "rank_1/stacks.log").read_text() == ""  # a stopped process cannot answer


def test_signals_for_the_ranks_do_not_end_the_watchdog_of_a_node(tmp_path: Path) -> None:
    """srun passes Ctrl-C to every process of a step, also to this one."""
    NodeWatch((), Limits(4.0, 4.0), str(tmp_path), "").write(tmp_path)
    command = [sys.executable, "-P", "-m", "phalanx.launch.watchdog.watchdog", str(tmp_path)]
    with subprocess.Popen(command, stderr=subprocess.PIPE) as watchdog:
        status = Path(f"/proc/{watchdog.pid}/status")
        ignored, deadline = 0, time.monotonic() + 60
        while not ignored >> (signal.SIGHUP - 1) & 1 and time.monotonic() < deadline:
            time.sleep(0.05)
            (line,) = [line for line in status.read_text().splitlines() if line.startswith("SigIgn:")]
            ignored = int(line.split()[1], 16)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
            watchdog.send_signal(number)
        time.sleep(0.5)
        assert watchdog.poll() is None
        watchdog.kill()
        assert watchdog.stderr is not None
        assert watchdog.stderr.read() == b""


def test_collectives_that_do_not_match_are_named(
    launch: Callable[[str], int], capfd: pytest.CaptureFixture[str]
) -> None:
    assert launch("other_operation") == 124
    shown = capfd.readouterr().err
    assert "Mismatched collectives" in shown
    assert "rank 1 called broadcast #4 of world from rank 0 (float32, 2; tests/launch/watched_program.py:" in shown
    assert "where rank 0 called all-reduce #4 of world (float32, 2; tests/launch/watched_program.py:" in shown


def test_a_rank_that_leaves_is_blamed_and_not_its_peers(
    launch: Callable[[str], int], capfd: pytest.CaptureFixture[str]
) -> None:
    assert launch("leaves") == 1
    shown = capfd.readouterr().err
    assert "Rank 1 of 2 exited with code 0 in step 4, phase forward/backward, while the others still trained." in shown
    assert "Traceback" not in shown


def test_an_abort_is_explained_by_the_records(launch: Callable[[str], int], capfd: pytest.CaptureFixture[str]) -> None:
    assert launch("other_shape") in (124, 128 + signal.SIGABRT)  # gloo aborts a rank that gets more than it expects
    shown = capfd.readouterr().err
    assert "all-reduce #4 of world (float32, 2;" in shown
    assert "all-reduce #4 of world (float32, 4;" in shown


ALL_FAULTS = {
    "stopped": "its process is stopped by a signal (state T)",
    "holds_gil": "native code holds Python's global interpreter lock",
    "storage": "phase data: its storage or data source does not answer",
    "absent": "sleeping in hrtimer_nanosleep (state S). It has not called all-reduce #4 of world",
    "other_type": "all-reduce #4 of world (int32, 2;",
    "deadlock": "wait for each other, in different calls",
}


@pytest.mark.skipif("PHALANX_FAULTS" not in os.environ, reason="a minute; set PHALANX_FAULTS=1 to run it")
@pytest.mark.parametrize("fault", ALL_FAULTS)
def test_every_fault(launch: Callable[[str], int], capfd: pytest.CaptureFixture[str], fault: str) -> None:
    assert launch(fault) == 124
    assert ALL_FAULTS[fault] in capfd.readouterr().err


def test_the_watchdog_of_a_node_ends_its_ranks(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    beats, reports = tmp_path / "beats", tmp_path / "reports"
    beats.mkdir()
    environment = {**os.environ, "PYTHONPATH": f"{HERE}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    command = [sys.executable, "-m", "beating_program", str(beats)]
    ranks = [subprocess.Popen([*command, str(rank)], env=environment) for rank in (0, 1)]
    NodeWatch(("h", "h"), Limits(4.0, 60.0), str(reports), "").write(beats)
    main(beats)
    assert [rank.wait() for rank in ranks] == [-signal.SIGKILL, -signal.SIGKILL]
    assert "native code holds Python's global interpreter lock" in capfd.readouterr().err
    (report,) = reports.glob("hang.*.json")
    found = json.loads(report.read_text())
    assert found["culprits"] == [1]
    assert "in hold_gil" in found["ranks"][1]["stacks"]
    assert not beats.exists()


@pytest.mark.parametrize(
    ("rank_0", "named", "innocent"),
    [
        ("has trained", "Rank 1 (", "Rank 0"),
        ("goes later", "Rank 1 (", "Rank 0"),  # MPICH kills it because rank 1 was killed
        ("goes with it", "All ranks on ", "Rank"),
    ],
)
def test_the_watchdog_of_a_node_names_the_rank_that_went_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], rank_0: str, named, innocent
) -> None:
    beats = [Heartbeat(tmp_path, rank, 2) for rank in (0, 1)]
    looks = []

    def end(beat: Heartbeat) -> None:
        beat.words[heartbeat.STARTED] += 1  # not this process any more

    def sleep(seconds: float) -> None:
        looks.append(seconds)
        if rank_0 == "goes later" and len(looks) == 2:
            end(beats[0])

    for beat in beats:
        beat.words[heartbeat.FIRST_STEP] = 1
    end(beats[1])
    if rank_0 != "goes later":
        end(beats[0])
    if rank_0 == "has trained":
        beats[0].enter(Phase.END)
    monkeypatch.setattr(watchdog.time, "sleep", sleep)
    NodeWatch(("h", "h"), Limits(5.0, 60.0), str(tmp_path), "").write(tmp_path)
    main(tmp_path)
    shown = capfd.readouterr().err
    assert named in shown
    assert ("is gone in step 1" in shown) == (named == "Rank 1 (")
    assert innocent not in shown


def test_a_process_that_cannot_be_killed_does_not_keep_the_launcher(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr("phalanx.launch.local._UNKILLABLE_S", 0.0)
    monkeypatch.setattr(os, "killpg", lambda pid, number: None)  # as in uninterruptible wait
    monkeypatch.setattr(os, "_exit", sys.exit)
    watchdog = Watchdog(tmp_path, Limits(0.0, 0.0), print)
    supervisor = Supervisor(lambda rank: None, 0.0, StopSignals(), watchdog)
    supervisor._allow(0.0)
    process = subprocess.Popen(["sleep", "60"])
    with pytest.raises(SystemExit, match="124"):
        supervisor.watch({0: process.pid})
    process.kill()
    process.wait()
    assert f"rank 0 (process {process.pid}) cannot be killed" in capfd.readouterr().err


def test_a_watchdog_that_fails_does_not_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(Watchdog, "poll", lambda *_: 1 // 0)
    supervisor = Supervisor(lambda rank: None, 0.0, StopSignals(), Watchdog(tmp_path, Limits(0.0, 0.0), said.append))
    with subprocess.Popen(["sleep", "60"]) as process:
        assert supervisor.watch({0: process.pid})
        assert supervisor.watch({0: process.pid})
        process.kill()
    assert said == ["the watchdog is off, since it failed: ZeroDivisionError: integer division or modulo by zero"]


def test_the_folder_of_a_killed_launcher_is_removed_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("phalanx.launch.watchdog.watchdog._IN_MEMORY", tmp_path)
    with private_folder() as mine:
        (mine / "file").touch()
        left, young, others = (tmp_path / f"{PREFIX}{name}" for name in ("left", "young", "others.txt"))
        left.mkdir()
        (left / "lock").touch()
        young.mkdir()  # its owner has not come to lock it
        others.mkdir()
        os.utime(others, (0, 0))
        with private_folder() as second:
            assert set(tmp_path.iterdir()) == {mine, young, second}
            assert second.stat().st_mode & 0o777 == 0o700
    assert set(tmp_path.iterdir()) == {young}


@pytest.fixture
def two(tmp_path: Path) -> list[Heartbeat]:
    beats = [Heartbeat(tmp_path, rank, 2) for rank in (0, 1)]
    for beat in beats:
        beat.words[heartbeat.FIRST_STEP] = 1
        beat.words[heartbeat.STEP] = 1
    return beats


def make_steps(beats: list[Heartbeat], steps: int, own_s: list[float]) -> None:
    for beat, seconds in zip(beats, own_s, strict=True):
        beat.words[heartbeat.STEP] += steps
        beat.words[heartbeat.OWN_NS] += int(steps * seconds * 1e9)


def test_a_slow_rank_gets_a_line_and_a_row(
    two: list[Heartbeat], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("phalanx.launch.watchdog.watchdog._POLL_S", 0.0)
    monkeypatch.setattr("phalanx.launch.watchdog.diagnosis.WINDOW_S", 0.0)
    said: list[str] = []
    watchdog = Watchdog(tmp_path, Limits(0.0, 60.0), said.append, tmp_path / "metrics.jsonl")
    pids = dict.fromkeys((0, 1), os.getpid())
    for _ in range(5):
        assert watchdog.poll(pids, {}) is None
        make_steps(two, 20, [0.1, 0.15])
    deadline = time.monotonic() + 20
    rows = tmp_path / "metrics.jsonl"
    while not (rows.exists() and rows.read_text().endswith("\n")):  # a thread of its own writes it
        assert time.monotonic() < deadline
        time.sleep(0.01)
    (row,) = map(json.loads, rows.read_text().splitlines())
    assert (row["event"], row["rank"], row["step"], row["factor"]) == ("slow_rank", 1, 41, 1.5)
    (line,) = said
    assert "is slow: 0.15 s of its own per step at step 41, 1.50 × the median" in line


@pytest.mark.parametrize(
    ("own_s", "work", "named"),
    [
        ([0.1, 0.1, 0.1, 0.14], 0, [3]),
        ([0.1, 0.1, 0.1, 0.12], 0, []),
        ([0.2, 0.2, 0.1, 0.1], 1, []),  # two stages of a pipeline
    ],
)
def test_only_ranks_with_the_same_work_are_compared(tmp_path: Path, own_s, work, named) -> None:
    beats = [Heartbeat(tmp_path, rank, 4) for rank in range(4)]
    for rank, beat in enumerate(beats):
        beat.words[heartbeat.FIRST_STEP] = beat.words[heartbeat.STEP] = 1
        beat.words[heartbeat.WORK] = work * (rank // 2)
    slow_ranks, found = SlowRanks(), []
    watchdog = Watchdog(tmp_path, Limits(0.0, 60.0), print)
    for window in range(6):
        views = watchdog.views(dict.fromkeys(range(4), os.getpid()), {})
        records = {rank: view.record for rank, view in views.items() if view.record is not None}
        found += [each.rank for each in slow_ranks.update(records, window * diagnosis.WINDOW_S)]
        make_steps(beats, diagnosis.WINDOW_STEPS, own_s)
    assert found == named


@pytest.mark.parametrize(
    ("fault", "theirs", "ours"),
    [
        ("other_type", "all-reduce #4 of world (int32, 2;", "all-reduce #4 of world (float32, 2;"),
        ("other_reduction", "all-reduce (maximum) #4 of world (float32, 2;", "all-reduce #4 of world (float32, 2;"),
        (
            "other_source",
            "broadcast #4 of world from rank 1 (float32, 2;",
            "broadcast #4 of world from rank 0 (float32",
        ),
        ("own_call", "all-reduce (maximum) #4 of world (float32, 2;", "all-reduce #4 of world (float32, 2;"),
    ],
)
def test_calls_that_differ_are_found_though_nothing_hangs_and_the_run_ends_at_once(
    launch: Callable[[str], int], capfd: pytest.CaptureFixture[str], fault: str, theirs: str, ours: str
) -> None:
    assert launch(fault) == 124
    shown = capfd.readouterr().err
    assert "Mismatched collectives" in shown
    assert theirs in shown
    assert ours in shown
