"""Every output in README and docs still holds: `make docs-check` runs each command that a page shows with its output.

Commands of a page run one after the other in a folder of their own, beside the examples. tests/documented/pages.py says
how outputs are compared.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import phalanx
from documented.pages import Example, examples, holds, marks_without_commands, matches

ROOT = Path(phalanx.__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SHOWN = [page for page in PAGES if page.exists() and any(not example.not_run for example in examples(page))]
SECONDS = 900
FOLDER, ENVIRONMENT = "/home/me/jobs", "/home/me/.venv"
"""What pages show for the folder in which commands run, and for Python's environment."""

checked = pytest.mark.skipif(not os.environ.get("PHALANX_DOCS"), reason="make docs-check runs this: an hour")


@checked
@pytest.mark.timeout(0)
@pytest.mark.parametrize("page", SHOWN, ids=lambda page: str(page.relative_to(ROOT)))
def test_outputs_of_a_page_hold(page, tmp_path):
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    home = tmp_path / "home"
    home.mkdir()
    own = {name: value for name, value in os.environ.items() if not name.startswith("PHALANX_")}
    environment = own | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "HOME": str(home),
        "COLUMNS": "120",
        "NO_COLOR": "1",
    }
    wrong, code = [], 0
    shown = [example for example in examples(page) if not example.not_run]
    for example in shown:
        done = subprocess.run(
            ["bash", "-c", f"(exit {code}); {example.command}"],
            cwd=tmp_path,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=SECONDS,
            check=False,
            text=True,
        )
        code = done.returncode
        output = done.stdout.replace(sys.prefix, ENVIRONMENT).replace(str(tmp_path), FOLDER)
        if not holds(example, output, code):
            wrong.append(f"line {example.line}: $ {example.command}\n{output}\n")
    print(f"{page.relative_to(ROOT)}: {len(shown)} commands, {sum(e.is_compared for e in shown)} outputs compared")
    assert not wrong, "\n".join(["these outputs differ from the page:", *wrong])


def test_marks_stand_above_commands_and_give_reasons():
    idle = {str(page.relative_to(ROOT)): marks_without_commands(page) for page in PAGES if page.exists()}
    assert {page: lines for page, lines in idle.items() if lines} == {}


def test_a_gap_stands_for_any_text():
    example = Example(1, "x", ["a: 1", "...", "b: ... end"])
    assert matches(example, "before\na: 1\nmore\nand more\nb: 7 8 end\nafter")
    assert not matches(example, "a: 2\nb: 7 8 end")
    assert matches(Example(1, "x", ["main ... finished"]), "main   finished")
    assert matches(Example(1, "x", ["a", "b"]), "a\ntokenizing: 40% (2.1s left)\ntokenizing: 100%\nb")


def test_a_command_without_an_output_has_to_succeed_and_none_may_show_a_traceback():
    assert holds(Example(1, "x", ["..."]), "anything", 0)
    assert not holds(Example(1, "x", ["..."]), "anything", 3)
    assert holds(Example(1, "x", ["a"], unlike="it is a model's text"), "b", 0)
    assert not holds(Example(1, "x", ["..."]), "Traceback (most recent call last):", 0)


def test_figures_vary_only_where_the_page_says_so():
    assert matches(Example(1, "x", ["loss: 1.25  tps: 1,234"], varies=True), "loss: 3.5  tps: 99")
    assert matches(Example(1, "x", ["loss: 1.4 (316ms) in 4m55s, 2 ms"], varies=True), "loss: 1.3 (1.2s) in 44 s, 9 µs")
    assert not matches(Example(1, "x", ["loss: 1.25"]), "loss: 3.5")
    assert not matches(Example(1, "x", ["2 steps"], varies=True), "2 stages")
    assert not matches(Example(1, "x", ["loss: 1.25"], varies=True), "accuracy: 3.5")


def test_commands_are_read_with_their_marks(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "Text.\n\n    $ one \\\n      --more\n    out\n\n    out 2\n\n<!-- figures vary -->\n\n    $ two\n    3 s\n\n"
        "<!-- not run: it needs a cluster -->\n\n    $ three\n    4\n\nText.\n\n    $ four\n\n"
        "<!-- figures vary -->\n<!-- before: make five -->\n\n```\n$ five\n\n5\n```\n\n```python\nprint(6)\n```\n"
    )
    one, two, three, four, before, five = examples(page)
    assert (one.command, one.output, one.varies) == ("one \\\n  --more", ["out", "out 2"], False)
    assert (two.command, two.output, two.varies) == ("two", ["3 s"], True)
    assert (three.not_run, four.not_run, four.is_compared) == ("it needs a cluster", "", False)
    assert (before.command, before.is_compared) == ("make five", False)
    assert (five.command, five.output, five.varies) == ("five", ["", "5"], True)


def test_a_mark_without_a_command_or_a_reason_is_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("<!-- figures vary -->\n\nText.\n\n<!-- not run -->\n\n    $ one\n\n<!-- figures vary -->\n")
    assert marks_without_commands(page) == [1, 5, 9]
