"""Records what the program prints, so that a change of its structure can be shown to change nothing else.

    python -m benchmarks.snapshots before.json      keep it
    (change something)
    python -m benchmarks.snapshots before.json      compare: exit code 1, and every difference, if there is one

Kept are the page of every verb, the JSON schema, the message of every field set to wrong values, `--json` of verbs
that calculate, the pictures of the documentation's commands, and, if the environment variable PHALANX_TRUTH names a
folder of published measurements, the prediction of each of their rows. Numbers may differ by 1e-12 of their value.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.report import without_places
from phalanx.cli.main import VERBS
from phalanx.cli.main import main as phalanx
from phalanx.config.fields import leaves
from phalanx.config.job import Job

WRONG = ("-1", "0", "1e400", "nan", "tru", "[1, {", "zzz", "7")
"""Values that most fields refuse."""
_A_CASE = ["model=llama3-8b", "cluster=dgx-h100:2", "train.precision=bf16"]
_A_JOB = [*_A_CASE, "dp_shard=16", "train.global_batch=64"]
CALCULATED = {
    "predict a dense model": ["predict", *_A_CASE, "dp_shard=8", "tp=2", "train.global_batch=64"],
    "predict a pipeline": ["predict", *_A_CASE, "pp=4", "tp=4", "schedule=zb_v", "train.global_batch=64"],
    "predict experts": [
        *("predict", "model=deepseek-v3", "cluster=dgx-h100:32", "train.precision=bf16", "dp_shard=64", "ep=32"),
        *("pp=4", "recompute=full", "train.global_batch=512"),
    ],
    "simulate a pipeline": ["simulate", *_A_CASE, "pp=4", "tp=4", "train.global_batch=64"],
    "plan a dense model": ["plan", *_A_CASE, "train.global_batch=128"],
    "plan a large model": ["plan", "model=llama3-70b", "cluster=dgx-h100:16", "global_batch=512", "precision=bf16"],
    "plan experts": ["plan", "model=qwen3-30b-a3b", "cluster=dgx-h100:4", "global_batch=256", "precision=bf16"],
    "a schedule": ["schedule", "show", "zb_h1"],
    "collectives": ["collectives", "show", "ring-all-reduce", "--ranks", "8"],
    "models": ["models"],
}
VARYING = {"search_s", "seconds", "searched_s"}
"""Fields of documents that are times of this machine."""
NEAR = 1e-12
"""Relative difference of numbers that counts as none."""
MOST = 100
"""Differences that are shown."""


def said(words: list[str]) -> dict[str, Any]:
    """Runs a command line in this process; returns its exit code and what it printed."""
    out, error = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
        try:
            code: Any = phalanx(words)
        except BaseException as bug:  # a traceback is a thing to compare as well
            code = repr(bug)
    return {"code": code, "out": _parsed(out.getvalue()), "error": without_places(error.getvalue())}


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return without_places(text)


def pages() -> Iterator[tuple[str, Any]]:
    """Yields the help pages, whole and short, and the schema."""
    for verb in VERBS:
        for more in ([], ["all"]):
            yield f"help {verb} {' '.join(more)}", said([verb, "--help", *more])
    yield "schema", said(["schema", "--json"])


def messages() -> Iterator[tuple[str, Any]]:
    """Yields what is said of every field with each of the WRONG values."""
    for path in leaves(Job):
        for value in WRONG:
            yield (
                f"{path}={value}",
                said(["predict", *_A_JOB, f"++{path}={value}"]),
            )


def documents() -> Iterator[tuple[str, Any]]:
    """Yields what verbs calculate for fixed jobs."""
    for name, words in CALCULATED.items():
        yield name, said([*words, "--json"])


def pictures() -> Iterator[tuple[str, Any]]:
    """Yields the pictures of the documentation's commands (tests/documented/drawn.py)."""
    sys.path.insert(0, "tests")
    from documented import drawn  # type: ignore[import-not-found]

    with tempfile.TemporaryDirectory() as folder:
        for name, words in drawn.commands().items():
            yield name, drawn.made(words, Path(folder))


def rows() -> Iterator[tuple[str, Any]]:
    """Yields the predictions of published rows, or nothing where they are not."""
    truth = os.environ.get("PHALANX_TRUTH")
    for path in sorted(Path(truth).glob("*.csv")) if truth else ():
        yield path.name, said(["predict", "--table", str(path)])["out"].splitlines()


PARTS: tuple[Callable[[], Iterator[tuple[str, Any]]], ...] = (pages, messages, documents, pictures, rows)


def taken() -> dict[str, Any]:
    """Returns all that is kept, by the name of its part and its own."""
    found: dict[str, Any] = {}
    for part in PARTS:
        found |= {f"{part.__name__}: {name}": what for name, what in part()}
        print(f"{len(found):,} taken, {part.__name__} the last", file=sys.stderr)
    return json.loads(json.dumps(found))


def differences(before: Any, after: Any, where: str = "") -> Iterator[str]:
    """Yields the places of two documents that differ, with both values."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in [*before, *(key for key in after if key not in before)]:
            if key not in VARYING:
                yield from differences(before.get(key), after.get(key), f"{where} / {key}" if where else str(key))
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for number, (one, other) in enumerate(zip(before, after, strict=True)):
            yield from differences(one, other, f"{where}[{number}]")
    elif isinstance(before, float) and isinstance(after, float):
        if not math.isclose(before, after, rel_tol=NEAR) and not (math.isnan(before) and math.isnan(after)):
            yield f"{where}: {before!r} -> {after!r}"
    elif before != after:
        yield f"{where}: {str(before)[:2000]} -> {str(after)[:2000]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    file = parser.parse_args().file
    now = taken()
    if not file.exists():
        file.write_text(json.dumps(now, indent=1), encoding="utf-8")
        print(f"written: {file}, {len(now):,} items")
        return 0
    found = list(differences(json.loads(file.read_text(encoding="utf-8")), now))
    print(*found[:MOST], f"{len(found):,} differences", sep="\n")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
