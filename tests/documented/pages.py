"""Commands of a Markdown page with the output that it shows, and the comparison of that with the real output.

A block of code (indented by four, or fenced without a language) whose lines begin with `$ ` shows commands, each with
its output. All of them run, in their order; a command without an output has to succeed. In an output `...` stands for
any text, also of several lines. Comments above a block, each on a line of its own:

- `<!-- figures vary -->`: numbers differ between machines or runs, so that any number matches any other;
- `<!-- output varies: REASON -->`: the commands have to succeed, and what they print is not compared;
- `<!-- not run: REASON -->`: the block's commands cannot run in a test;
- `<!-- needs: PROGRAM -->`: they run where this program is installed;
- `<!-- before: COMMAND -->`: a command runs first that the page does not show, such as one that makes the run it reads.
"""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass, field
from pathlib import Path

_NUMBER = r"-?\d[\d,.]*(?:e[+-]?\d+)?(?: ?(?:m\d+|h\d+m\d+|[µum])?s\b)?"
"""A number, or a duration in any unit."""
_PROGRESS = re.compile(r"^[\w ]+: [\d.]+%(?: \(.* left\))?$", re.MULTILINE)
"""A line of progress, which depends on how fast a machine is: it is left out of an output."""
_COMMENT = re.compile(r"<!-- (figures vary|output varies|not run|needs|before)(?:: (.*))? -->")
_FENCE = "```"
_COMMANDS = ("phalanx ", "make ", "python ", "pip ")
"""A line that begins so is a command without `$ `: it has no output."""


@dataclass
class Example:
    """A command of a page, and its output there."""

    line: int
    command: str
    output: list[str] = field(default_factory=list)
    varies: bool = False
    """Its numbers do."""
    unlike: str = ""
    """Why its output differs between machines or runs as a whole; empty if it does not."""
    not_run: str = ""
    """Why it cannot run in a test; empty if it runs."""

    @property
    def is_compared(self) -> bool:
        return not self.unlike and any(line.strip() not in ("", "...") for line in self.output)


@dataclass
class _Marks:
    """The comments above a block."""

    varies: bool = False
    unlike: str = ""
    not_run: str = ""
    before: list[str] = field(default_factory=list)
    used: bool = False
    """A block has had them."""

    def add(self, mark: str, text: str) -> None:
        if mark == "before":
            self.before.append(text)
        elif mark == "not run":
            self.not_run = text
        elif mark == "output varies":
            self.unlike = text
        elif mark == "needs":
            self.not_run = self.not_run or ("" if shutil.which(text) else f"{text} is not installed")
        else:
            self.varies = True


def examples(page: Path) -> list[Example]:
    """Returns the commands of a page, in their order, with those that its comments add."""
    found: list[Example] = []
    marks, inside = _Marks(), False
    for number, line, text in _lines(page):
        comment = _COMMENT.fullmatch(line) if text is None else None
        if comment:
            marks, inside = _Marks() if marks.used else marks, False
            marks.add(comment[1], comment[2] or "")
        elif text is None:
            inside = inside and not line
            marks = marks if line in ("", _FENCE) else _Marks()
        elif text.startswith("$ "):
            if not marks.used and not marks.not_run:
                found += [Example(number, command) for command in marks.before]
            marks.used = inside = True
            found.append(Example(number, text[2:], [], marks.varies, marks.unlike, marks.not_run))
        elif text.startswith(_COMMANDS):
            inside = False
        elif inside and not found[-1].output and found[-1].command.endswith("\\"):
            found[-1].command += "\n" + text
        elif inside:
            found[-1].output.append(text)
    return found


def marks_without_commands(page: Path) -> list[int]:
    """Returns the lines of comments that stand above no command, or give no reason, so that they say nothing."""
    idle: list[int] = []
    waiting: list[int] = []
    for number, line, text in _lines(page):
        comment = _COMMENT.fullmatch(line) if text is None else None
        if comment:
            waiting.append(number)
            idle += [number] if comment[1] != "figures vary" and not comment[2] else []
        elif text is not None and text.startswith("$ "):
            waiting = []
        elif text is None and line not in ("", _FENCE):
            idle, waiting = idle + waiting, []
    return idle + waiting


def holds(example: Example, output: str, code: int) -> bool:
    """Returns whether a command did what the page says: it printed its output, or it succeeded if none is compared."""
    if "Traceback (most recent call last)" in output:
        return False
    return matches(example, output) if example.is_compared else not code


def matches(example: Example, output: str) -> bool:
    """Returns whether a real output is the one that the page shows; pages and terminals wrap lines differently, so that
    any white space equals any other."""
    text = " ".join(" ".join(example.output).split())
    pattern = ".*?".join(_literal(part, example.varies) for part in re.split(r" ?\.\.\. ?", text))
    real = " ".join(_PROGRESS.sub("", output).split())
    return re.search(rf"(?<!\S){pattern.strip()}(?!\S)", real) is not None


def _lines(page: Path) -> list[tuple[int, str, str | None]]:
    """Returns each line's number, the line, and its text in a block; None outside blocks and for fences."""
    lines: list[tuple[int, str, str | None]] = []
    language = None
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        if line.startswith(_FENCE):
            language = line[len(_FENCE) :].strip() if language is None else None
            lines.append((number, _FENCE, None))
        elif language is not None:
            lines.append((number, line, "" if language else line))
        else:
            lines.append((number, line, line[4:] if line.startswith("    ") else None))
    return lines


def _literal(text: str, varies: bool) -> str:
    if not varies:
        return re.escape(text)
    return _NUMBER.join(re.escape(part) for part in re.split(_NUMBER, text))
