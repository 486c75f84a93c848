"""`phalanx checkpoint list | show | verify | convert | diff`: the checkpoints of a run."""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path
from typing import Any, Literal

from phalanx.checkpoint import inventory, report
from phalanx.checkpoint import manifest as manifests
from phalanx.checkpoint.inventory import by_age, check
from phalanx.checkpoint.manifest import MANIFEST, Manifest
from phalanx.cli.option import Option
from phalanx.cli.verb import JSON, Command, Verb, Words
from phalanx.config.precision import WeightFormat
from phalanx.data.files import meter, stderr_progress
from phalanx.echo import echo
from phalanx.errors import CheckpointError, JobError

LIMIT, FILE_GIB = 40, 5
STEP = {"step": Option(int, 0, "the checkpoint of this step (default: the newest whole one)", at_least=1)}
CHOSEN = {
    "tensors": Option(str, "*", "tensors whose names match, such as 'blocks.0.*' or 'exp_avg/*'", value="PATTERN"),
    "limit": Option(int, LIMIT, f"most tensors to print (default {LIMIT}; 0 prints all)", at_least=0),
}
TRUST = {"trust": "read a DCP checkpoint, whose metadata is pickle, from somebody you trust"}
COMMANDS = {
    "list": Command(("RUN",), about="the checkpoints, which are whole, and which will be removed"),
    "show": Command(
        ("SOURCE",),
        STEP | CHOSEN,
        switches={"boxes": "the parts of each tensor, with their files"} | TRUST | JSON,
        about="metadata, sizes, tensors and files of one",
    ),
    "verify": Command(("RUN",), STEP, about="read every file and check its digest"),
    "convert": Command(
        ("SOURCE", "TARGET"),
        STEP
        | {
            "to": Option(
                Literal["safetensors", "dcp", "phalanx"],
                None,
                "one file if TARGET ends in .safetensors, otherwise a folder (safetensors); a folder that "
                "torch.distributed.checkpoint loads (dcp); or a run's directory, to resume from (phalanx)",
            ),
            "dtype": Option(WeightFormat, "", "type of the parameters, with --weights-only"),
            "max_file_gib": Option(
                float, FILE_GIB, "most GiB in a file of a folder of safetensors", at_least=0, value="N"
            ),
        },
        switches={
            "weights_only": "leave moments and master weights out",
            "merge_lora": "add the adapters to their matrices; the result is a model without adapters",
        }
        | TRUST
        | JSON,
        about="write it in another form",
    ),
    "diff": Command(
        ("A", "B"),
        STEP | CHOSEN,
        switches={"tensors_only": "do not compare step and metadata"} | TRUST | JSON,
        about="compare two states",
    ),
}
VERB = Verb(
    "checkpoint",
    "Lists, shows, verifies, converts and compares checkpoints.",
    COMMANDS,
    (
        ("checkpoint list runs/main", "what is there, and which are whole"),
        ("checkpoint convert runs/main main.safetensors --to safetensors --weights-only", "the weights, in one file"),
    ),
    (
        "RUN is a run's directory, a folder of checkpoints, or one checkpoint. SOURCE, A and B are one of those (the "
        "newest whole checkpoint), a safetensors file, a folder of safetensors, or a checkpoint of torch's DCP.",
    ),
    exits={1: "diff: they differ", 4: "a checkpoint is missing or damaged"},
    hint=lambda word: f"put the command first: `phalanx checkpoint list {word}`" if Path(word).exists() else "",
)


@VERB.runs
def run(words: Words) -> int | None:
    return {"list": _list, "show": _show, "verify": _verify, "convert": _convert, "diff": _diff}[words.command](words)


def _list(words: Words) -> None:
    found = inventory.listing(Path(words.subject))
    _print(words, report.listing_document(found), report.listing(found))


def _show(words: Words) -> None:
    path = Path(words.subject)
    if inventory.form_of(path) == "checkpoint":
        manifest = manifests.read(inventory.checkpoint_at(path, words.options["step"]))
        damage = _damage(manifest)
    else:
        from phalanx.checkpoint.consolidated import open_source  # imported here and below, because it imports torch

        manifest, damage = open_source(path, words.options["step"], "trust" in words.switches).manifest, ""
    pattern, limit = (words.options[name] for name in CHOSEN)
    _print(
        words,
        report.manifest_document(manifest, damage, pattern),
        report.manifest(manifest, damage, pattern, limit, boxes="boxes" in words.switches),
    )


def _damage(manifest: Manifest) -> str:
    try:
        check(manifest.path, verify=False)
    except CheckpointError as error:
        return str(error)
    return ""


def _verify(words: Words) -> int:
    path = Path(words.subject)
    if words.options["step"] or os.path.isfile(path / MANIFEST):
        paths = [inventory.checkpoint_at(path, words.options["step"])]
    else:
        root = inventory.root_of(path)
        paths = [each for _, each in by_age(root)]
        if not paths:
            raise CheckpointError(f"{root} has no checkpoint yet")
    total, verified = sum(map(inventory.bytes_in, paths)), {}
    try:
        with stderr_progress() as progress:
            count = meter(progress, "verifying", total)
            for each in paths:
                verified[each] = inventory.damage(each, count)
    finally:  # an interruption still tells what is known; a bar would take what is printed meanwhile
        if not words.as_json:
            for each, wrong in verified.items():
                echo(report.verified(each, wrong), wrap=True)
    damaged = sum(map(bool, verified.values()))
    if words.as_json:
        entries = [{"path": str(each), "ok": not wrong, "problems": wrong} for each, wrong in verified.items()]
        _print(words, {"ok": not damaged, "checkpoints": entries}, "")
    else:
        echo(f"{len(paths) - damaged} of {len(paths)} whole")
    return CheckpointError.exit_code if damaged else 0


def _convert(words: Words) -> None:
    source, target = map(Path, words.subjects)
    if words.options["to"] is None:
        raise JobError("phalanx checkpoint convert needs --to safetensors, --to dcp or --to phalanx")
    from phalanx.checkpoint.consolidated import open_source
    from phalanx.checkpoint.convert import convert

    with (
        open_source(source, words.options["step"], "trust" in words.switches) as tensors,
        stderr_progress() as progress,
    ):
        done = convert(
            tensors,
            target,
            words.options["to"],
            weights_only="weights_only" in words.switches,
            merge_lora="merge_lora" in words.switches,
            dtype=words.options["dtype"],
            most_file_bytes=words.options["max_file_gib"] * 2**30,
            progress=progress,
        )
    for note in done.notes:
        echo(note, file=sys.stderr, wrap=True)
    _print(words, report.converted_document(done), report.converted(done))


def _diff(words: Words) -> int:
    from phalanx.checkpoint.consolidated import open_source
    from phalanx.checkpoint.diff import compare

    step, trusted = words.options["step"], "trust" in words.switches
    pattern, limit = (words.options[name] for name in CHOSEN)
    a, b = map(Path, words.subjects)
    with open_source(a, step, trusted) as left, open_source(b, step, trusted) as right, stderr_progress() as progress:
        fields = "tensors_only" not in words.switches
        found = compare(left, right, pattern=pattern, fields=fields, progress=progress)
    if not found.tensors and not found.equal and pattern != "*":
        raise JobError(
            f"--tensors {pattern}: no tensor has such a name, such as {next(iter(left.manifest.tensors), '')}"
        )
    _print(words, report.difference_document(found), report.difference(found, limit))
    return 0 if found.is_empty else 1


def _print(words: Words, document: Any, as_text: str) -> None:
    words.show(_finite(document), as_text)


def _finite(value: Any) -> Any:
    """Returns a document in which NaN and infinity, for which JSON has no numbers, are texts."""
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
