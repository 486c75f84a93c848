"""Files of lines on a disk that is full: nothing ends, one warning, and no line is lost or torn."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from disks import mounted
from phalanx.errors import RunError
from phalanx.train import run_directory as append
from phalanx.train.metrics import MetricsFile
from phalanx.train.run_directory import AppendedFile


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with mounted(tmp_path / "disk", "size=64k") as disk:
        yield disk


def test_metrics_wait_in_memory_while_the_disk_is_full(small_disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, ballast = small_disk / "metrics.jsonl", small_disk / "ballast"
    ballast.write_bytes(bytes(56 << 10))
    with MetricsFile(path) as rows:
        for step in range(200):
            rows.write("step", step=step, text="x" * 100)
        assert path.stat().st_size <= 8 << 10
        ballast.unlink()
        rows.write("step", step=200)
        found = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["step"] for row in found] == list(range(201))
    warnings = [record.message for record in caplog.records]
    assert warnings == [
        f"{path} cannot be written: No space left on device; training goes on, and its lines wait in memory",
        f"{path} can be written again",
    ]


def test_what_does_not_fit_into_memory_either_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(append, "MOST_WAITING", 3)
    messages: list[str] = []
    with AppendedFile(tmp_path / "file", messages.append) as file:
        with monkeypatch.context() as broken:
            broken.setattr("phalanx.train.run_directory.os.write", full)
            for number in range(5):
                file.append(f"line {number}")
        file.append("line 5")
    assert (tmp_path / "file").read_text() == "line 0\nline 1\nline 2\n"
    assert len(messages) == 3
    assert messages[2].endswith("file: 3 lines could not be written and are lost")


def test_a_line_that_a_killed_run_left_half_written_is_removed(tmp_path: Path) -> None:
    for before, kept in [("one\ntwo\nthr", "one\ntwo\n"), ("x" * 70_000, ""), ("one\n" + "x" * 70_000, "one\n")]:
        (tmp_path / "file").write_text(before)
        with AppendedFile(tmp_path / "file", print) as file:
            file.append("next")
        assert (tmp_path / "file").read_text() == f"{kept}next\n"


def test_links_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "target")
    with pytest.raises(RunError, match="link is a link, and nothing is written through it"):
        AppendedFile(tmp_path / "link", print)
    assert not (tmp_path / "target").exists()
