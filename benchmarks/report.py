"""Writes the figures of benchmarks: benchmarks/results/NAME.json for machines, NAME.md for people."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def without_places(text: str, more: Mapping[str, str] | None = None) -> str:
    """Returns a text, such as the output of a program, without this machine's folders: the checkout's, Python's, the
    user's, and that of temporary files. `more` has other places, and what stands for each."""
    places = {
        str(RESULTS.parents[1]): ".",
        sys.base_prefix: "$PYTHON",
        tempfile.gettempdir(): "$TMPDIR",
        str(Path.home()): "~",
        **(more or {}),
    }
    for place in sorted(places, key=len, reverse=True):
        if place != "/":
            text = text.replace(place, places[place])
    return text


def machine() -> dict[str, Any]:
    """Returns a description of the measured machine."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    model = next((line.split(":", 1)[1].strip() for line in lines if "model name" in line), platform.machine())
    return {
        "processor": model,
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "torch": importlib.metadata.version("torch"),
        "date": time.strftime("%Y-%m-%d"),
    }


def save(
    name: str, result: dict[str, Any], table: Sequence[tuple[str, ...]], title: str, seen: str = "", command: str = ""
) -> None:
    """Writes both forms and prints the table, followed by the summary `seen`. `command`: what follows `python -m
    benchmarks.`, if not the name."""
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    head, *rows = [f"| {' | '.join(row)} |" for row in table]
    facts = result["machine"]
    where = "{processor}, {cores} cores, torch {torch}, Python {python}, {date}".format(**facts)
    rule = "|---" * len(table[0]) + "|"
    lines = [f"# {title}", "", f"{where}. `python -m benchmarks.{command or name}`", "", head, rule, *rows]
    text = "\n".join([*lines, "", seen] if seen else lines)
    (RESULTS / f"{name}.md").write_text(text + "\n", encoding="utf-8")
    print(text)
