"""Machines for the checks: folders that stand for /proc, /sys and /dev, and programs that stand for others."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from phalanx.check.load import load_words
from phalanx.config import overrides
from phalanx.machine.checks import CheckedMachine, CheckResult

PATH = os.environ.get("PATH", "")


def machine(
    root: Path | None = None, *, job: str = "", env: dict[str, str] | None = None, **fields: Any
) -> CheckedMachine:
    """Returns a machine whose kernel's files are in `root`; `job` has the words of a command line."""
    given = {"job": load_words(overrides.parse(job.split())).job, "has_job": True} if job else {}
    return CheckedMachine(root=root or Path("/"), env={"PATH": PATH} | (env or {}), **given, **fields)


def with_torch(found: CheckedMachine, **facts: Any) -> CheckedMachine:
    """Makes torch say these facts on a machine."""
    known = {"version": "2.13.0", "gloo": True, "available": False, "kind": "cuda"}
    known |= {"cuda": None, "hip": None, "xpu": None, "nccl": False, "xccl": False}
    found.torch._facts = {**known, "devices": [], "memory": [], "facts": {}, **facts}
    return found


def statuses(lines: Iterable[CheckResult]) -> str:
    """Returns the statuses of lines: "OK" or "WARN ERROR"."""
    return " ".join(line.status for line in lines)


def only(lines: Iterable[CheckResult], status: str) -> CheckResult:
    """Returns the one line of a check, which has this status and, unless it is OK, a remedy."""
    [line] = lines
    assert line.status == status, line
    assert bool(line.remedy) == (status != "OK"), line
    return line


def write(root: Path, path: str, text: str) -> None:
    """Writes a file of a machine."""
    file = root / path.lstrip("/")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def program(folder: Path, name: str, text: str) -> None:
    """Puts a Python program into a folder of PATH."""
    folder.mkdir(exist_ok=True)
    file = folder / name
    file.write_text(f"#!{sys.executable} -S\n{text}")
    file.chmod(0o755)
