"""Output that nobody reads: the program goes on, and what is dropped is counted."""

from __future__ import annotations

import os
import pty
import sys
import termios
import threading
from pathlib import Path

import pytest

from phalanx.config.job import Job, RunOptions
from phalanx.launch.output import Outlet, UnblockedStream, unblocked
from phalanx.train.terminal import Terminal

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
