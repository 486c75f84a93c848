"""`phalanx export RUN --to hf DIR`: the model of a run for other programs."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Literal

from phalanx.cli.option import Option
from phalanx.cli.verb import WHOLE, Command, Verb, Words
from phalanx.config.precision import WeightFormat
from phalanx.data.files import stderr_progress
from phalanx.echo import echo
from phalanx.errors import JobError, NotFoundError
from phalanx.nearest import no_run

VERB = Verb(
    "export",
    "Writes the model of a run for other programs: a Hugging Face folder, which transformers, vLLM and others load.",
    {
        WHOLE: Command(
            ("RUN", "DIR"),
            {
                "to": Option(Literal["hf"], None, "the form"),
                "step": Option(int, 0, "the checkpoint of this step (default: the newest whole one)", at_least=1),
                "precision": Option(WeightFormat, "", "type of the weights (default: that of the run)"),
                "max_shard_size": Option(
                    str, "", "most bytes in a file, such as 5GB, 500MB or 4GiB (default 5GiB)", value="SIZE"
                ),
            },
            aliases={"dtype": "precision"},
        )
    },
    (
        ("export runs/main main-hf --to hf", "the newest checkpoint"),
        ("export runs/main main-hf --to hf --step 200 --precision bf16", "another one, in bf16"),
    ),
    (
        "RUN is a run's directory, or one of its checkpoints, of any layout. DIR must not exist, or be empty: it "
        "appears when everything is written. Adapters are merged into their matrices.",
    ),
    exits={4: "the checkpoint is missing or damaged"},
)
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


@VERB.runs
def run(words: Words) -> None:
    options = words.options
    if options["to"] is None:
        raise JobError("phalanx export needs --to hf")
    limit = {"most_file_bytes": _bytes(options["max_shard_size"])} if options["max_shard_size"] else {}
    if not os.path.exists(words.subjects[0]):
        raise NotFoundError(no_run(Path(words.subjects[0]), "nothing"))  # before torch is imported, which takes seconds
    from phalanx.checkpoint.consolidated import open_source
    from phalanx.exchange.export import document_of, export, text_of

    source, target = map(Path, words.subjects)
    with open_source(source, options["step"]) as tensors, stderr_progress() as progress:
        done = export(tensors, target, dtype=options["precision"], progress=progress, **limit)
    for note in done.notes:
        echo(note, file=sys.stderr, wrap=True)
    words.show(document_of(done), text_of(done))


def _bytes(text: str) -> int:
    found = re.fullmatch(r"([0-9]{1,12}(?:\.[0-9]{1,3})?) ?([A-Za-z]*)", text)
    if not found or found[2].upper() not in _UNITS or not (size := int(float(found[1]) * _UNITS[found[2].upper()])):
        raise JobError(f"--max-shard-size {text}: expected bytes such as 5GB, 500MB or 4GiB")
    return size
