"""The pictures of docs/pictures that a command on a page of docs makes, made again in this process.

    python -m documented.drawn          make all of them again (`make pictures`)

A command is a line of a block of code, also one that goes on after a backslash, that begins with `phalanx` or
`$ phalanx` and names docs/pictures/NAME. `phalanx bench` measures: what it draws is another picture each time.
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import sys
import tempfile
from pathlib import Path

import phalanx
from phalanx.cli.main import main

ROOT = Path(phalanx.__file__).parents[2]
FOLDER = ROOT / "docs" / "pictures"
_COMMAND = re.compile(r"^ {4}(?:\$ )?phalanx (?!bench )(.*docs/pictures/(\S+\.svg)) *$", flags=re.MULTILINE)


def commands() -> dict[str, list[str]]:
    """Returns the words after `phalanx` by the name of the picture that they make. Raises ValueError if two pages have
    different commands for one."""
    found: dict[str, list[str]] = {}
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        text = page.read_text(encoding="utf-8").replace("\\\n", " ")
        for command, name in _COMMAND.findall(text):
            words = shlex.split(command)
            if found.setdefault(name, words) != words:
                raise ValueError(f"{page.name} has another command for {name}: {command}")
    return found


def made(words: list[str], folder: Path) -> str:
    """Runs a command, whose last word is its picture, and returns the picture."""
    drawn = folder / "drawn.svg"
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as said:
        code = main([*words[:-1], str(drawn)])
    assert code == 0, f"phalanx {shlex.join(words)}: exit code {code}\n{said.getvalue()}"
    return drawn.read_text(encoding="utf-8")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        for name, words in commands().items():
            if sys.argv[1:] and name not in sys.argv[1:]:
                continue
            drawn, path = made(words, Path(temporary)), FOLDER / name
            if not path.exists() or path.read_text(encoding="utf-8") != drawn:
                path.write_text(drawn, encoding="utf-8")
                print(f"written: {path.relative_to(ROOT)}")
