"""What is printed: control characters that others chose do not reach a terminal."""

import ast
import io
import json
import logging
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import phalanx
from phalanx.cli import generate
from phalanx.cli.main import main, message_of
from phalanx.echo import LEAST_COLUMNS, VisibleStream, echo, shortened, terminal_columns, visible, wrapped
from phalanx.errors import JobError, RunError
from phalanx.generate.text import OrderedOutput
from phalanx.train.terminal import Terminal, logging_to

ROOT = Path(phalanx.__file__).parent
HOSTILE = "\x1b]0;owned\x07\x1b[2J\x9b31m\r\x08\u202egpj\u2066"


class FakeTerminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def obeyed(text: str) -> set[str]:
    """The characters that a terminal would obey."""
    return {character for character in text if character in set(HOSTILE) - set("]0;owned[2J31mgpj")}


def test_control_characters_become_visible():
    assert visible("\x1b[31mred\x9b0m\r\0") == "\\x1b[31mred\\x9b0m\\x0d\\x00"
    assert visible("a\u202eb\u2028\u200f\ud800") == "a\\u202eb\\u2028\\u200f\\ud800"
    assert visible("tabs\tand\nlines, é € 😀 你好 עברית") == "tabs\tand\nlines, é € 😀 你好 עברית"


@given(st.text())
def test_what_is_printed_can_always_be_written(text):
    assert not any(ord(character) < 0x20 and character not in "\t\n" for character in visible(text))
    visible(text).encode()
    assert visible(visible(text)) == visible(text)


@given(st.text(st.characters()))
def test_json_is_printed_as_it_is(text):
    document = json.dumps({text: [text]}, indent=1)
    assert visible(document) == document


@given(st.text(" abc12:,\n"), st.integers(4, 60))
def test_lines_fit_and_every_word_stays_whole(text, width):
    shown = wrapped(text, width)
    assert shown.split() == text.split()
    assert all(len(line) <= width or len(line.split()) == 1 for line in shown.split("\n"))
    if all(len(line) <= width for line in text.split("\n")):
        assert shown == text


def test_lines_break_between_fields_and_words():
    figures = "step time: 1.484 s (1.35 to 1.825)  tps: 5,522  mfu: 32.3%  bubble: 0.0%"
    assert wrapped(figures, 60) == "step time: 1.484 s (1.35 to 1.825)  tps: 5,522  mfu: 32.3%\n  bubble: 0.0%"
    fact = "  shape       12 layers, 768 wide, heads of 64, MLP of 3,072"
    assert wrapped(fact, 50) == "  shape       12 layers, 768 wide, heads of 64,\n              MLP of 3,072"
    problem = "phalanx: 2 problems:\n  command line: layout: the cluster has nodes 1 × devices 8 = 8"
    assert wrapped(problem, 50).endswith("\n  command line: layout: the cluster has nodes 1 ×\n    devices 8 = 8")


def test_only_a_terminal_has_a_width(monkeypatch):
    monkeypatch.setenv("COLUMNS", "44")
    terminal, pipe, copied = FakeTerminal(), io.StringIO(), FakeTerminal()
    text = "one two three four five six seven eight nine ten"
    echo(text, file=terminal, wrap=True)
    echo(text, file=pipe, wrap=True)
    echo(text, file=copied)
    assert terminal.getvalue() == "one two three four five six seven eight nine\n  ten\n"
    assert pipe.getvalue() == copied.getvalue() == text + "\n"


@pytest.mark.parametrize(("columns", "width"), [("80", 80), ("3", LEAST_COLUMNS), ("0", 0), ("-5", 0), ("wide", 0)])
def test_a_terminal_is_never_too_narrow_for_words(monkeypatch, columns, width):
    monkeypatch.setenv("COLUMNS", columns)
    assert terminal_columns(FakeTerminal()) == width


def test_long_texts_are_shortened():
    assert shortened("a" * 10, 10) == "a" * 10
    assert shortened("a" * 50 + "b" * 50, 10) == "aaaaa … (90 characters left out) … bbbbb"


def test_printing(capsys):
    echo(HOSTILE)
    echo(HOSTILE, file=sys.stderr, end="")
    captured = capsys.readouterr()
    assert captured.out.startswith("\\x1b]0;owned\\x07")
    assert not obeyed(captured.out + captured.err)
    stream = io.StringIO()
    VisibleStream(stream).write(HOSTILE)
    assert not obeyed(stream.getvalue())


def test_nothing_prints_in_another_way():
    """Texts go through `echo`, which knows nothing of a terminal's language."""
    for path in ROOT.rglob("*.py"):
        if path.name == "echo.py":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            prints = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
            assert not prints, f"{path.relative_to(ROOT)}:{node.lineno} calls print; use phalanx.echo"


@pytest.mark.parametrize(
    "argv",
    [
        [HOSTILE],
        ["train", f"{HOSTILE}.yaml"],
        ["train", f"{HOSTILE}=1", f"--{HOSTILE}"],
        ["train", f"model={HOSTILE}", "layout.schedule=" + HOSTILE, f"data.path={HOSTILE}"],
        ["generate", f"runs/{HOSTILE}"],
        ["generate", "runs", HOSTILE, f"--{HOSTILE}"],
        ["schedule", "show", HOSTILE],
        ["schedule", "check", f"{HOSTILE}.csv"],
        ["predict", "--table", HOSTILE],
    ],
    ids=lambda argv: argv[0] if argv[0] != HOSTILE else "verb",
)
def test_errors(argv, capsys):
    assert main(argv) in (2, 4)
    captured = capsys.readouterr()
    assert "\\x1b" in captured.err
    assert not obeyed(captured.out + captured.err)


def test_very_long_messages_are_shortened():
    assert len(message_of(RunError("a" * 10**6))) < 20_000
    assert len(message_of(JobError(["a" * 10**6, "b"]))) < 5_000
    many = message_of(JobError([f"problem {number}" for number in range(10**5)])).splitlines()
    assert len(many) == 42
    assert many[-1] == "  and 99,960 more problems"


def test_log_lines(monkeypatch, tmp_path):
    terminal = FakeTerminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with logging_to(Terminal(), "info", 0, tmp_path / "log"):
        logging.getLogger("phalanx.test").info("run: %s", f"{HOSTILE}!")
    for text in (terminal.getvalue(), (tmp_path / "log").read_text()):
        assert "run: \\x1b]0;owned" in text
        assert not obeyed(text)


@pytest.mark.parametrize("live", [True, False])
def test_generated_text(live, monkeypatch):
    """A terminal shows escapes; a pipe gets the text as it is."""
    written = f"one\n\ttwo{HOSTILE}"

    out = FakeTerminal() if live else io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    output = OrderedOutput(generate._terminal_or_file(), [f"{HOSTILE}>"])
    for piece in written:
        output.give(0, piece)
    output.end(0)
    assert "one\n\ttwo" in out.getvalue()
    assert out.getvalue() == (visible(f"{HOSTILE}>{written}\n") if live else f"{HOSTILE}>{written}\n")
