"""Commands of a Markdown page with the output that it shows, and the comparison of that with the real output.

A block of code (indented by four) whose lines begin with `$ ` shows commands, each with its output. In an output

- `...` stands for any text, also of several lines;
- a comment `<!-- figures vary -->` above the block says that its numbers differ between machines or runs: then any
  number matches any other;
- a comment `<!-- not run: REASON -->` above the block says that its commands cannot run in a test.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

_NUMBER = r"\d[\d,.]*(?:e[+-]?\d+)?"
_COMMANDS = ("phalanx ", "make ", "python ", "pip ")
"""A line that begins so is a command without `$ `: it has no output."""
_VARIES, _NOT_RUN = "<!-- figures vary -->", "<!-- not run"


@dataclass
class Example:
    """A command of a page, and its output there."""

    line: int
    command: str
    output: list[str] = field(default_factory=list)
    varies: bool = False


def examples(page: Path) -> list[Example]:
    """Returns the commands of a page that show an output, in their order."""
    found: list[Example] = []
    varies = skipped = inside = False
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        if not line.startswith("    "):
            inside = inside and not line
            if line:
                varies, skipped = line.startswith(_VARIES), line.startswith(_NOT_RUN)
            continue
        text = line[4:]
        if text.startswith("$ "):
            inside = not skipped
            if inside:
                found.append(Example(number, text[2:], varies=varies))
        elif text.startswith(_COMMANDS):
            inside = False
        elif inside and not found[-1].output and found[-1].command.endswith("\\"):
            found[-1].command += "\n" + text
        elif inside:
            found[-1].output.append(text)
    return [example for example in found if any(line.strip() for line in example.output)]


def matches(example: Example, output: str) -> bool:
    """Returns whether a real output is the one that the page shows; pages and terminals wrap lines differently, so that
    any white space equals any other."""
    text = " ".join(" ".join(example.output).split())
    pattern = ".*?".join(_literal(part, example.varies) for part in text.split("..."))
    return re.search(rf"(?<!\S){pattern.strip()}(?!\S)", " ".join(output.split())) is not None


def _literal(text: str, varies: bool) -> str:
    if not varies:
        return re.escape(text)
    return _NUMBER.join(re.escape(part) for part in re.split(_NUMBER, text))
