"""A job as a file for people: the fields that were chosen, each with what it means."""

from __future__ import annotations

from collections.abc import Iterator

import yaml

from phalanx.check.load import LoadedJob
from phalanx.check.show import as_dict
from phalanx.cli.columns import clipped
from phalanx.config import reference
from phalanx.config.fields import get
from phalanx.config.layout import Layout
from phalanx.partition.derived import solve

WIDTH = 110
"""Columns of a line with its comment."""
COMMENT_AT = 30
"""Column at which comments begin."""
LEAST_COMMENT = 40
"""Columns without which a comment says too little."""
NOTES = {
    "model.preset": "other fields of this section override it",
    "model.activation": "the MLP's: gelu, or with a gate swiglu, geglu",
    "cluster.preset": "machine and number of its nodes (`phalanx docs devices`)",
    "layout.auto": "the planner chooses it when training starts",
    "layout.dp_replicate": "data-parallel replicas with whole copies (DDP)",
    "layout.dp_shard": "data-parallel ranks that shard the state (ZeRO, FSDP)",
    "layout.zero": "sharded: 1 optimizer state, 2 gradients too, 3 parameters too",
    "layout.accumulate": "sharded: gradients of every micro-batch, less memory, more traffic",
    "layout.micro_batch": "sequences in one forward pass of a data rank",
    "layout.accumulation": "micro-batches per step and data rank",
    "data.corpus": "`phalanx docs data` lists them",
    "data.tokenizer": "char, byte, bpe (trained on the corpus), or a tokenizer.json",
    "train.precision": "bf16 and fp16 keep fp32 master weights",
    "checkpoint.every": "steps between checkpoints; the newest two are kept",
}
"""Comments in fewer words than the fields' own texts."""


def as_job_file(loaded: LoadedJob, facts: str, command: str, schema: str) -> str:
    """Returns the job file. Reading it gives the job, under the file's name.

    Args:
        loaded: the job; fields that something has set are written, with what they mean.
        facts: the predicted figures of a step.
        command: the command that trains it.
        schema: the file name of the JSON schema.
    """
    return "\n".join(_lines(loaded, facts, command, schema)) + "\n"


def _lines(loaded: LoadedJob, facts: str, command: str, schema: str) -> Iterator[str]:
    yield f"# yaml-language-server: $schema={schema}"
    yield f"# {command}"
    yield "# Every field: `phalanx docs job`, or `phalanx train --help SECTION`."
    for section, values in as_dict(loaded.job).items():
        paths = [f"{section}.{name}" for name in values if _is_written(loaded, f"{section}.{name}")]
        nested = {name: inner for name, inner in values.items() if isinstance(inner, dict)}
        inner_paths = {
            name: [path for path in (f"{section}.{name}.{each}" for each in inner) if _is_written(loaded, path)]
            for name, inner in nested.items()
        }
        if not paths and not any(inner_paths.values()):
            continue
        yield from ("", f"{section}:")
        if section == "layout" and facts:
            yield f"  # {facts}"
        for path in paths:
            name = path.partition(".")[2]
            yield _line(f"  {name}: {_dumped(values[name])}", _comment(loaded, path))
        for outer, found in inner_paths.items():
            if not found:
                continue
            yield f"  {outer}:"
            for path in found:
                name = path.rpartition(".")[2]
                yield _line(f"    {name}: {_dumped(nested[outer][name])}", _comment(loaded, path))


def _dumped(value: object) -> str:
    return yaml.safe_dump(value, default_flow_style=True, width=10_000).removesuffix("...\n").strip()


def _is_written(loaded: LoadedJob, path: str) -> bool:
    """Returns whether the file states a field: one that the answers set, and of a planned layout what differs from the
    defaults, or is one axis of it."""
    if path == "run.name" or path not in reference.fields():
        return False
    if path.startswith("layout.") and not loaded.job.layout.auto:
        changed = [name for name in vars(Layout()) if get(loaded.job.layout, name) != getattr(Layout(), name)]
        return path.partition(".")[2] in (changed or ["dp_replicate"])
    return loaded.origins.get(path, "default").startswith(("command line", "phalanx init"))


def _comment(loaded: LoadedJob, path: str) -> str:
    if path == "train.global_batch" and not loaded.job.layout.auto:
        return solve(loaded.job.train.global_batch, loaded.job.layout).equation().removeprefix("global batch ")
    return NOTES.get(path) or reference.fields()[path].about


def _line(start: str, comment: str) -> str:
    """Returns a line with a comment, of which only the first sentence or clause is kept if it does not fit."""
    start = f"{start:<{COMMENT_AT}}"
    room = WIDTH - len(start) - 3
    if room < LEAST_COMMENT:
        return start
    comment = clipped(comment, room)
    if comment[1:2].islower():
        comment = f"{comment[0].lower()}{comment[1:]}"
    return f"{start} # {comment.rstrip('.')}"
