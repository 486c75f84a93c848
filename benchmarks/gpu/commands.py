"""Runs a case's command: to its end, or training until it has done some steps.

Training is then killed: a run that ended by itself would write a checkpoint, 100 GB for 8 billion parameters.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.contenders import reason
from benchmarks.gpu.setting import ROOT

POLL_S = 0.2
Environment = Mapping[str, str]


class CaseError(Exception):
    """Raised when a case could not be measured; the message says why."""


class OutOfMemoryError(CaseError):
    """Raised when the device had no memory left."""


def phalanx(*words: str) -> list[str]:
    return [sys.executable, "-m", "phalanx", *words]


def program(module: str, *words: str) -> list[str]:
    return [sys.executable, "-m", f"benchmarks.gpu.{module}", *words]


def shown(argv: Sequence[str]) -> str:
    """Returns the command as a person would type it."""
    return shlex.join(["python", *argv[1:]])


def answer(
    argv: Sequence[str], *, limit_s: float, env: Environment | None = None, codes: Sequence[int] = (0,)
) -> dict[str, Any]:
    """Returns the JSON document that a command prints last.

    Args:
        argv: the command.
        limit_s: seconds after which it is killed.
        env: variables beside this process's own.
        codes: exit codes with which it answers; `phalanx verify` ends with 1 where a layout differs.

    Raises:
        CaseError: another exit code, or the limit; with the error that it printed.
    """
    try:
        done = subprocess.run(
            argv,
            cwd=ROOT,
            env={**os.environ, **(env or {})},
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise CaseError(f"not done after {limit_s:.0f} s") from None
    # Libraries may print lines before it.
    document = re.search(r"^\{.*", done.stdout, re.DOTALL | re.MULTILINE)
    if done.returncode not in codes or document is None:
        raise _error(done.stderr, done.returncode)
    return json.loads(document.group())


def train(words: Sequence[str], *, steps: int, limit_s: float, env: Environment | None = None) -> list[dict[str, Any]]:
    """Returns the rows of the first `steps` steps of `phalanx train` with `words`, from its metrics.jsonl.

    Raises CaseError if training ends before, or takes longer than `limit_s` seconds."""
    with tempfile.TemporaryDirectory(prefix="phalanx_gpu_") as folder:
        argv = phalanx("train", *words, f"train.steps={steps + 1}", f"run.dir={folder}", f"data.dir={folder}/data")
        with (Path(folder) / "stderr").open("w+") as errors:
            process = subprocess.Popen(
                argv, cwd=ROOT, env={**os.environ, **(env or {})}, stdout=subprocess.DEVNULL, stderr=errors
            )
            try:
                return _watched(process, Path(folder), steps, time.monotonic() + limit_s)
            except _EndedError:
                errors.seek(0)
                raise _error(errors.read(), process.returncode) from None
            finally:
                process.kill()
                process.wait()


class _EndedError(Exception):
    """Raised when training ended too early."""


def _watched(process: subprocess.Popen[Any], folder: Path, steps: int, deadline: float) -> list[dict[str, Any]]:
    while time.monotonic() < deadline:
        ended = process.poll() is not None
        rows = _rows(folder)
        if len(rows) >= steps:
            return rows[:steps]
        if ended:
            raise _EndedError
        time.sleep(POLL_S)
    raise CaseError(f"{len(_rows(folder))} of {steps} steps done when the time was up")


def _rows(folder: Path) -> list[dict[str, Any]]:
    """Returns the step rows so far, without a line that is still being written."""
    text = "".join(path.read_text(encoding="utf-8") for path in folder.glob("*/metrics.jsonl"))
    whole = text[: text.rfind("\n") + 1].splitlines()
    return [row for row in map(json.loads, whole) if row["event"] == "step"]


def _error(stderr: str, code: int) -> CaseError:
    if "out of memory" in stderr or "no memory for this rank" in stderr:
        return OutOfMemoryError("out of memory")
    return CaseError(reason(stderr, code))
