"""Runs a case's command: to its end, or training until it has done some steps.

Training is then killed: a run that ended by itself would write a checkpoint, 100 GB for 8 billion parameters.
"""

from __future__ import annotations

import gzip
import json
import math
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.contenders import reason
from benchmarks.gpu.setting import ROOT

POLL_S = 0.2
Environment = Mapping[str, str]


class CaseError(Exception):
    """Raised when a case could not be measured; the message says why."""


class TimeUpError(Exception):
    """Raised when the time for the whole benchmark is over."""


class OutOfMemoryError(CaseError):
    """Raised when the device had no memory left."""


_ends = math.inf


def end_after(seconds: float) -> None:
    """Lets every command from now on end within `seconds` from now, with TimeUpError."""
    global _ends  # noqa: PLW0603
    _ends = time.monotonic() + seconds


def _within(limit_s: float) -> float:
    """Returns the seconds that a command may take. Raises TimeUpError if there are none."""
    left = _ends - time.monotonic()
    if left <= 0:
        raise TimeUpError
    return min(limit_s, left)


def _late(message: str) -> Exception:
    return TimeUpError() if time.monotonic() >= _ends else CaseError(message)


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
    limit_s = _within(limit_s)
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
        raise _late(f"not done after {limit_s:.0f} s") from None
    # Libraries may print lines before it.
    document = re.search(r"^\{.*", done.stdout, re.DOTALL | re.MULTILINE)
    if done.returncode not in codes or document is None:
        raise _error(done.stderr, done.returncode)
    return json.loads(document.group())


def train(words: Sequence[str], *, steps: int, limit_s: float, env: Environment | None = None) -> list[dict[str, Any]]:
    """Returns the rows of the first `steps` steps of `phalanx train` with `words`, from its metrics.jsonl.

    Raises CaseError if training ends before, or takes longer than `limit_s` seconds."""

    def look(folder: Path) -> list[dict[str, Any]] | None:
        rows = _rows(folder)
        return rows[:steps] if len(rows) >= steps else None

    return _train([*words, f"train.steps={steps + 1}"], look, limit_s, env)


def traced(words: Sequence[str], *, limit_s: float) -> list[dict[str, Any]]:
    """Returns the events of the trace of a training whose `words` ask for a profile. Raises CaseError as `train`."""

    def look(folder: Path) -> list[dict[str, Any]] | None:
        done = [*folder.glob("*/traces/profile.json")]  # written last
        return (
            json.loads(gzip.decompress((done[0].parent / "rank_0.json.gz").read_bytes()))["traceEvents"]
            if done
            else None
        )

    return _train([*words, "train.steps=1000"], look, limit_s, None)


def _train(
    words: Sequence[str],
    look: Callable[[Path], list[dict[str, Any]] | None],
    limit_s: float,
    env: Environment | None,
) -> list[dict[str, Any]]:
    """Trains until `look` finds something in the folder of runs."""
    with tempfile.TemporaryDirectory(prefix="phalanx_gpu_") as folder:
        argv = phalanx("train", *words, f"run.dir={folder}", f"data.dir={folder}/data")
        with (Path(folder) / "stderr").open("w+") as errors:
            process = subprocess.Popen(
                argv, cwd=ROOT, env={**os.environ, **(env or {})}, stdout=subprocess.DEVNULL, stderr=errors
            )
            limit_s = _within(limit_s)
            deadline = time.monotonic() + limit_s
            try:
                while time.monotonic() < deadline:
                    ended = process.poll() is not None
                    if (found := look(Path(folder))) is not None:
                        return found
                    if ended:
                        errors.seek(0)
                        raise _error(errors.read(), process.returncode)
                    time.sleep(POLL_S)
                raise _late(f"{len(_rows(Path(folder)))} steps done after {limit_s:.0f} s")
            finally:
                process.kill()
                process.wait()


def _rows(folder: Path) -> list[dict[str, Any]]:
    """Returns the step rows so far, without a line that is still being written."""
    text = "".join(path.read_text(encoding="utf-8") for path in folder.glob("*/metrics.jsonl"))
    whole = text[: text.rfind("\n") + 1].splitlines()
    return [row for row in map(json.loads, whole) if row["event"] == "step"]


def _error(stderr: str, code: int) -> CaseError:
    if "out of memory" in stderr or "no memory for this rank" in stderr:
        return OutOfMemoryError("out of memory")
    return CaseError(reason(stderr, code))
