"""Progress: plain lines where there is no terminal, and none too often."""

from __future__ import annotations

import io
import sys

import pytest

from phalanx.data.files import stderr_progress


def test_plain_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with stderr_progress() as progress:
        progress("only told", 0, 0)
        for done in range(101):
            progress("working", done, 100)
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == ["only told", "working: 100%"]


def test_plain_lines_become_rarer_and_say_how_long_it_takes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = [100.0]
    monkeypatch.setattr("phalanx.data.files.time.monotonic", lambda: clock[0])
    with stderr_progress() as progress:
        for done in range(1001):
            progress("working", done, 1000)
            clock[0] += 0.5
    lines = capsys.readouterr().err.splitlines()
    assert lines[:2] == ["working: 0.4%", "working: 0.8%"]
    assert lines[-1] == "working: 100%"
    assert lines[2:4] == ["working: 1% (8m14s left)", "working: 1% (8m12s left)"]
    assert 15 < len(lines) < 40


def test_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with stderr_progress() as progress:
        progress("only [told]", 0, 0)
        progress("working", 1, 2)
        progress("working", 2, 2)
    assert "only [told]" in terminal.getvalue()
    assert "working" in terminal.getvalue()
    assert "100%" in terminal.getvalue()
