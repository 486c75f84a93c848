"""`phalanx export RUN --to hf DIR`: the model of a run for other programs."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from phalanx.cli.commands import JSON, Command, parse, wants_help
from phalanx.cli.option import Option
from phalanx.data.progress import stderr_progress
from phalanx.echo import echo
from phalanx.errors import CheckpointError, JobError

PAGE = """\
phalanx export: the model of a run for other programs

usage: phalanx export RUN --to hf DIR     a Hugging Face folder: transformers, vLLM and others load it

RUN is a run's directory, or one of its checkpoints, of any layout. DIR must not exist, or be empty: it appears when
everything is written. Adapters are merged into their matrices.

options:
  --to hf               the form
  --step N              the checkpoint of this step (default: the newest whole one)
  --precision TYPE      type of the weights: fp32, bf16, fp16, fp64 (default: that of the run)
  --max-shard-size N    most bytes in a file, such as 5GB, 500MB or 4GiB (default 5GiB)
  --json                print one JSON document on standard output and nothing else

examples:
  phalanx export runs/main --to hf main-hf
  phalanx export runs/main --to hf main-hf --step 200 --precision bf16 --max-shard-size 2GB\
"""

COMMANDS = {
    "RUN DIR": Command(
        ("a run", "a new folder"),
        {
            "to": Option(Literal["hf"], None, "form"),
            "step": Option(int, 0, "the checkpoint of this step", at_least=1),
            "precision": Option(Literal["fp64", "fp32", "bf16", "fp16"], "", "type of the weights"),
            "max_shard_size": Option(str, "", "most bytes in a file"),
        },
        aliases={"dtype": "precision"},
        switches=JSON,
    )
}
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def run(argv: Sequence[str]) -> int:
    if wants_help(argv):
        echo(PAGE)
        return 0
    words = parse("export", COMMANDS, ["RUN DIR", *argv])
    if "to" not in words.options:
        raise JobError("phalanx export needs --to hf")
    limit = {"most_file_bytes": _bytes(words.options["max_shard_size"])} if "max_shard_size" in words.options else {}
    if not os.path.exists(words.subjects[0]):
        raise CheckpointError(f"{words.subjects[0]} does not exist")  # before torch is imported, which takes seconds
    from phalanx.checkpoint.sources import open_source  # imported here, because it imports torch
    from phalanx.exchange import export_report
    from phalanx.exchange.export import export

    source, target = map(Path, words.subjects)
    with open_source(source, words.options.get("step", 0)) as tensors, stderr_progress() as progress:
        done = export(tensors, target, dtype=words.options.get("precision", ""), progress=progress, **limit)
    for note in done.notes:
        echo(note, file=sys.stderr)
    echo(json.dumps(export_report.document(done), indent=1) if words.as_json else export_report.text(done))
    return 0


def _bytes(text: str) -> int:
    found = re.fullmatch(r"([0-9]{1,12}(?:\.[0-9]{1,3})?) ?([A-Za-z]*)", text)
    if not found or found[2].upper() not in _UNITS or not (size := int(float(found[1]) * _UNITS[found[2].upper()])):
        raise JobError(f"--max-shard-size {text}: expected bytes such as 5GB, 500MB or 4GiB")
    return size
