"""The lock of a run directory: never two trainers in one, whatever starts at the same instant, and who holds it."""

from __future__ import annotations

import errno
import json
import os
import platform
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from phalanx.errors import RunError
from phalanx.train import run_directory as run_lock
from phalanx.train.run_directory import LOCK, Holder, locked

TRAINER = """
import os, random, sys
from pathlib import Path
from phalanx.errors import RunError
from phalanx.train.run_directory import locked

directory, seed = Path(sys.argv[1]), int(sys.argv[2])
dice, trained = random.Random(seed), 0
sys.stdin.read(1)  # all at once
for number in range(80):
    try:
        with locked(directory, fresh=dice.random() < 0.5):
            os.close(os.open(directory / "occupied", os.O_CREAT | os.O_EXCL))  # fails if another is in here
            (directory / f"trained-{seed}-{number}").touch()
            (directory / "occupied").unlink()  # fails if another has renamed the directory
            trained += 1
    except RunError as error:
        assert f"{directory} is in use by " in str(error), error
print(trained)
"""


def test_trainers_that_start_at_once_are_never_two_in_one_directory(tmp_path: Path) -> None:
    argv = [sys.executable, "-c", TRAINER, str(tmp_path / "runs" / "job")]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen([*argv, str(seed)], **pipes) for seed in range(4)]
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("x")
        process.stdin.flush()
    ends = [process.communicate(timeout=120) for process in processes]
    assert [error for _, error in ends] == [""] * 4
    trained = sum(int(out) for out, _ in ends)
    assert trained >= 4
    directories = list((tmp_path / "runs").iterdir())
    assert len(list((tmp_path / "runs").glob("*/trained-*"))) == trained  # nothing was lost, and nothing lies elsewhere
    assert all(re.fullmatch(r"job(\.\d+)?", path.name) for path in directories), "an unfinished directory is left"


def test_a_directory_that_is_renamed_while_it_is_made_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Path] = []

    def there_and_gone(self: Path, mode: int = 0o777, parents: bool = False, exist_ok: bool = False) -> None:
        calls.append(self)
        if len(calls) == 1:  # as Path.mkdir: the directory exists, then it is no directory
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(self))
        os.makedirs(self, mode, exist_ok)

    monkeypatch.setattr(Path, "mkdir", there_and_gone)
    with locked(tmp_path / "job"):
        assert (tmp_path / "job" / LOCK).exists()
    assert len(calls) == 2


def test_a_run_directory_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "job").touch()
    with pytest.raises(FileExistsError), locked(tmp_path / "job"):
        pass


def holder(directory: Path) -> int | None:
    found = run_lock._holder_at(directory / LOCK)
    return found.pid if found else None


def test_a_fresh_start_is_refused_while_a_run_trains(tmp_path: Path) -> None:
    with locked(tmp_path / "job"):
        (tmp_path / "job" / "config.yaml").touch()
        me = f"process {os.getpid()} on {re.escape(platform.node())} since 20"
        with pytest.raises(RunError, match=rf"job is in use by {me}.*; wait for it"), locked(tmp_path / "job"):
            pass
        with pytest.raises(RunError, match=me), locked(tmp_path / "job", fresh=True):
            pass
        assert [path.name for path in tmp_path.iterdir()] == ["job"]


def test_a_fresh_start_has_the_new_directory_and_frees_the_renamed_one(tmp_path: Path) -> None:
    job = tmp_path / "job"
    with locked(job, fresh=True) as renamed:
        assert renamed is None  # there was nothing to rename
        (job / "first").touch()
    with locked(job, fresh=True) as renamed:
        assert renamed == tmp_path / "job.1"
        assert os.listdir(job) == [LOCK]
        with pytest.raises(RunError, match="in use by process"), locked(job):
            pass
        with locked(tmp_path / "job.1"):  # it may go on under its new name
            assert (tmp_path / "job.1" / "first").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["job", "job.1"]


def test_a_directory_that_is_renamed_before_it_is_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lock that was opened is now that of another directory, where nobody trains."""
    job, renamed, real = tmp_path / "job", tmp_path / "job.1", run_lock.open_regular

    def slowly(path: Path, flags: int) -> int:
        descriptor = real(path, flags)
        if not renamed.exists():
            job.rename(renamed)
            job.mkdir()
        return descriptor

    monkeypatch.setattr(run_lock, "open_regular", slowly)
    with locked(job):
        assert holder(job) == os.getpid()
        assert holder(renamed) is None


def test_the_lock_of_a_killed_trainer_is_free(tmp_path: Path) -> None:
    program = "import sys, os; from pathlib import Path; from phalanx.train.run_directory import locked\n"
    program += "with locked(Path(sys.argv[1])): os.kill(os.getpid(), 9)"
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=False)
    assert json.loads((tmp_path / LOCK).read_text())["host"] == platform.node()  # it left its name
    with locked(tmp_path):
        pass
    assert (tmp_path / LOCK).read_text() == ""


@pytest.fixture
def without_flock(monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr("phalanx.train.run_directory.fcntl.flock", flock)
    monkeypatch.setattr(run_lock, "SETTLE_S", 0.05)


@pytest.mark.usefixtures("without_flock")
def test_without_flock_the_name_in_the_file_counts(tmp_path: Path) -> None:
    dead = Holder(platform.node(), os.getpid(), "then", 1)  # this process id, but not this process
    (tmp_path / LOCK).write_text(json.dumps(vars(dead)))
    with (
        locked(tmp_path),
        pytest.raises(RunError, match=f"in use by process {os.getpid()} on"),
        locked(tmp_path, fresh=True),
    ):
        pass
    with locked(tmp_path):
        pass


@pytest.mark.usefixtures("without_flock")
def test_without_flock_the_last_of_two_names_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = Holder("node-b", 7, "now", 1)
    monkeypatch.setattr("time.sleep", lambda _: (tmp_path / LOCK).write_text(json.dumps(vars(other))))
    with pytest.raises(RunError, match="in use by process 7 on node-b since now"), locked(tmp_path):
        pass


def test_a_holder_on_another_host_counts_while_its_heart_beats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_lock, "SETTLE_S", 0.05)
    monkeypatch.setattr(run_lock, "SILENCE_S", 60.0)
    lock = tmp_path / LOCK
    lock.write_text(json.dumps(vars(Holder("node-b", 7, "\x1b[2Jnow", 1))))
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(0.02):
            os.utime(lock)

    heart = threading.Thread(target=beat)
    heart.start()
    with pytest.raises(RunError, match=r"process 7 on node-b since \\x1b\[2Jnow; .* delete .*\.lock"), locked(tmp_path):
        pass
    ended.set()
    heart.join()
    monkeypatch.setattr(run_lock, "SILENCE_S", 0.2)
    with locked(tmp_path):
        assert holder(tmp_path) == os.getpid()


def test_a_holder_s_heart_beats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_lock, "HEARTBEAT_S", 0.02)
    monkeypatch.setattr(run_lock, "SILENCE_S", 60.0)
    with locked(tmp_path):
        assert run_lock._beats(tmp_path / LOCK)


def test_a_new_directory_in_which_nothing_was_written_is_removed(tmp_path: Path) -> None:
    with locked(tmp_path / "new"):
        assert (tmp_path / "new" / LOCK).exists()
    assert not (tmp_path / "new").exists()
    with locked(tmp_path / "new"):
        (tmp_path / "new" / "config.yaml").touch()
    assert (tmp_path / "new" / LOCK).exists()
    with locked(tmp_path):
        pass
    assert (tmp_path / LOCK).exists()  # it was there before


def test_a_lock_that_is_no_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "target").write_text("precious")
    (tmp_path / LOCK).symlink_to(tmp_path / "target")
    with pytest.raises(RunError, match=r"\.lock is a link"), locked(tmp_path):
        pass
    assert (tmp_path / "target").read_text() == "precious"
    (tmp_path / LOCK).unlink()
    os.mkfifo(tmp_path / LOCK)
    with pytest.raises(RunError, match=r"\.lock is not a regular file"), locked(tmp_path):
        pass
