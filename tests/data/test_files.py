"""Files are whole or absent; the lock lets one in at a time and never outlives its holder."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from phalanx.data.files import locked, write_atomic


def test_write_atomic_replaces_and_leaves_nothing_behind(tmp_path: Path) -> None:
    write_atomic(tmp_path / "x", b"old")
    write_atomic(tmp_path / "x", b"new")
    assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == [("x", b"new")]


def test_a_failed_write_keeps_the_old_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_atomic(tmp_path / "x", b"old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_atomic(tmp_path / "x", b"new")
    assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == [("x", b"old")]


def test_the_lock_lets_one_in_at_a_time(tmp_path: Path) -> None:
    waits: list[str] = []
    inside = threading.Event()
    order: list[str] = []

    def waiting(pid: str) -> None:
        waits.append(pid)
        inside.set()

    def second() -> None:
        with locked(tmp_path / "lock", waiting):
            order.append("second")

    with locked(tmp_path / "lock", waits.append):
        thread = threading.Thread(target=second)
        thread.start()
        assert inside.wait(10)
        order.append("first")
    thread.join(10)
    assert order == ["first", "second"]
    assert len(waits) == 1
    assert waits[0].isdigit()


def test_the_lock_of_a_killed_process_is_free(tmp_path: Path) -> None:
    program = (
        "import sys, time, pathlib; from phalanx.data.files import locked\n"
        "with locked(pathlib.Path(sys.argv[1]), print): print('held', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", program, str(tmp_path / "lock")], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        holder.kill()
    waits: list[str] = []
    with locked(tmp_path / "lock", waits.append):
        assert not waits
