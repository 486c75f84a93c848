"""What a rank leaves behind when it ends, and that it ends with its launcher."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from disks import fill, mounted
from phalanx.errors import JobError, NotFiniteError, RunError, StoppedError
from phalanx.launch.verdict import Outcome
from phalanx.launch.worker import report


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
