"""Imports a GGUF file as a run: its tensors are dequantised one at a time, into one checkpoint at step 0."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

from torch import Tensor

from phalanx.checkpoint.convert import TYPES, as_type
from phalanx.checkpoint.manifest import StoredTensor
from phalanx.checkpoint.new_target import target_problems
from phalanx.config.hugging_face import config_json
from phalanx.data.files import Progress, silent
from phalanx.data.token_table import definition_of, settings_of, token_ids_of
from phalanx.data.tokenizer import LibraryTokenizer, Tokenizer
from phalanx.errors import DataError, JobError
from phalanx.exchange.gguf_model import GgufModel
from phalanx.exchange.import_run import Imported, Incoming, write_import


def import_gguf(
    path: Path, target: Path, *, precision: str = "", layers: int = 0, progress: Progress = silent
) -> Imported:
    """Writes a new run at `target` from a GGUF file.

    Args:
        path: the file.
        target: the run's directory, which must not exist.
        precision: fp64, fp32, bf16 or fp16; fp32 if it is empty.
        layers: the first layers only; 0 means all.
        progress: gets the bytes done.

    Raises JobError if the target exists; CheckpointError for a file that is damaged or holds what is not understood;
    RunError if the target cannot be written. Nothing half written is left.
    """
    if problems := list(target_problems(target)):
        raise JobError(problems)
    source, kind = GgufModel(path, layers), TYPES[precision or "fp32"]
    metadata, notes = source.file.metadata, source.notes

    def read(name: str) -> Tensor:
        return as_type(source.read(name), kind, f"{path}: {name}")

    try:
        tokenizer: Tokenizer | None = LibraryTokenizer(definition_of(metadata, path), str(path))
    except DataError as error:  # the weights are of use without it
        tokenizer = None
        notes.append(str(error))
    small = {"tokenizer_config.json": settings_of(metadata), "generation_config.json": token_ids_of(metadata)}
    with suppress(JobError):  # what transformers cannot express is of use here all the same
        small["config.json"] = config_json.write(source.model)[1] | token_ids_of(metadata)
    incoming = Incoming(
        path,
        source.architecture,
        source.model,
        {name: StoredTensor(shape, kind, ()) for name, shape in source.shapes.items()},
        read,
        tokenizer,
        path,
        {name: json.dumps(content, indent=2, ensure_ascii=False).encode() for name, content in small.items()},
    )
    return write_import(incoming, target, notes, progress)
