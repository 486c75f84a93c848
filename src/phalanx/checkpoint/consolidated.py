"""Consolidated safetensors: whole tensors in one file, or in a folder as the Hugging Face libraries lay it out.

    model.safetensors                                             the parameters, or with several files:
    model-00001-of-00002.safetensors ... model.safetensors.index.json
    optimizer.safetensors                                         moments and master weights, likewise

The header of the first file has the step and the metadata of the checkpoint as JSON, so that it can be converted back.
Only the headers are read here: a manifest describes the tensors, and `Reader` reads them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from phalanx.bounded import open_regular, parse_json, read_json
from phalanx.checkpoint import shard_file
from phalanx.checkpoint.inventory import check, checkpoint_at, form_of
from phalanx.checkpoint.manifest import ITEM_BYTES, Box, Manifest, ShardFile, StoredTensor
from phalanx.checkpoint.shard_file import Reader
from phalanx.errors import CheckpointError, DamagedCheckpointError, JobError

SUFFIX = ".safetensors"
INDEX = ".safetensors.index.json"
FACTS = "phalanx"
"""The entry of a header's `__metadata__` that has step and metadata."""


@dataclass(frozen=True)
class PlannedFile:
    """A file to be written, and the tensors in it."""

    name: str
    tensors: Mapping[str, StoredTensor]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


def plan(tensors: Mapping[str, StoredTensor], most_bytes: float, name: Callable[[int, int], str]) -> list[PlannedFile]:
    """Divides tensors into files of at most `most_bytes`, or of one larger tensor, in their order. `name` returns a
    file's name from its number, from 1, and their count."""
    groups = shard_file.grouped(tensors.items(), lambda item: item[1].nbytes, most_bytes)
    return [PlannedFile(name(number, len(groups)), dict(group)) for number, group in enumerate(groups, 1)]


def numbered(stem: str) -> Callable[[int, int], str]:
    """Returns the naming of files as the Hugging Face libraries expect them."""

    def name(number: int, count: int) -> str:
        return f"{stem}{SUFFIX}" if count == 1 else f"{stem}-{number:05d}-of-{count:05d}{SUFFIX}"

    return name


def write(
    directory: Path,
    files: Iterable[PlannedFile],
    read: Callable[[str], Tensor],
    facts: Mapping[str, Any] | None,
    progress: Callable[[int], None],
) -> dict[str, ShardFile]:
    """Writes files, one tensor at a time, which `read` returns in the planned type; `facts` go into the header of the
    first. Returns size and digest by name. `progress` gets the bytes of every chunk. Raises OSError."""
    written: dict[str, ShardFile] = {}
    for file in files:
        header = {"format": "pt"}
        if facts and not written:
            header[FACTS] = json.dumps(facts)
        written[file.name] = shard_file.write_one_by_one(directory / file.name, file.tensors, read, header, progress)
    return written


def index(files: Iterable[PlannedFile]) -> dict[str, Any]:
    """Returns the index of several files: which tensor is in which."""
    files = list(files)
    return {
        "metadata": {"total_size": sum(file.nbytes for file in files)},
        "weight_map": {name: file.name for file in files for name in file.tensors},
    }


def describe(path: Path, names: Iterable[str] = ()) -> Manifest:
    """Returns a manifest of the tensors of a safetensors file, or of all in a folder, or of those of its files with
    `names`. Step and metadata are those of the checkpoint that was converted; 0 and nothing for a file of another
    program.

    Raises DamagedCheckpointError for files that are not safetensors, or incomplete; CheckpointError for types that
    checkpoints do not hold."""
    folder, files = (path, sorted(path.glob(f"*{SUFFIX}"))) if path.is_dir() else (path.parent, [path])
    files = [folder / name for name in names] or files
    tensors: dict[str, StoredTensor] = {}
    facts: dict[str, Any] = {}
    sizes = {file.name: ShardFile(file.stat().st_size, "") for file in files if file.is_file()}
    for file in files:
        for name, tensor in _read_header(file, facts):
            if name in tensors:
                raise DamagedCheckpointError(f"{folder}: both {tensors[name].boxes[0][0]} and {file.name} have {name}")
            tensors[name] = tensor
    if path is folder and not names:
        _require_indexed(folder, tensors)
    step, meta = facts.get("step", 0), facts.get("meta", {})
    if not isinstance(step, int) or isinstance(step, bool) or step < 0 or not isinstance(meta, dict):
        raise DamagedCheckpointError(f"{path}: the entry {FACTS!r} of its header is not valid")
    return Manifest(folder, step, False, meta, sizes, tensors)


def _read_header(file: Path, facts: dict[str, Any]) -> Iterator[tuple[str, StoredTensor]]:
    """Yields the tensors of a file, and adds what its header says of the checkpoint to `facts`."""
    try:
        open_regular(file).close()
        with safe_open(file, "pt") as opened:
            found = parse_json((opened.metadata() or {}).get(FACTS, "{}"))
            if not isinstance(found, dict):
                raise ValueError(f"{FACTS!r} in its header is no object")
            if found and facts and found != facts:
                raise ValueError("its header is about another checkpoint than that of the other files")
            facts |= found
            for name in opened.keys():  # noqa: SIM118 (it is no mapping)
                entry = opened.get_slice(name)
                shape, dtype = tuple(entry.get_shape()), str(entry.get_dtype())
                if dtype not in ITEM_BYTES:
                    raise CheckpointError(f"{file}: {name} has the type {dtype}; there are {', '.join(ITEM_BYTES)}")
                yield name, StoredTensor(shape, dtype, ((file.name, Box.of(shape)),))
    except (OSError, SafetensorError, ValueError) as error:
        raise DamagedCheckpointError(f"{file} cannot be read: {error}") from None


def _require_indexed(folder: Path, tensors: Mapping[str, StoredTensor]) -> None:
    """Raises DamagedCheckpointError if an index names tensors that its files do not have."""
    for path in sorted(folder.glob(f"*{INDEX}")):
        try:
            places = read_json(path)["weight_map"]
            missing = [
                name for name, file in places.items() if name not in tensors or tensors[name].boxes[0][0] != file
            ]
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise DamagedCheckpointError(f"{path} is no index of safetensors files: {error}") from None
        if missing:
            files = sorted({str(places[name]) for name in missing})
            raise DamagedCheckpointError(
                f"{path} names {len(missing)} tensors that its files lack, such as {missing[0]}; look for "
                f"{', '.join(files[:5])}"
            )


def open_source(path: Path, step: int = 0, trusted: bool = False) -> Reader:
    """Returns the tensors at `path`, whose manifest has the step and metadata of a checkpoint that Phalanx wrote or
    converted, and otherwise 0 and none. A run's checkpoint is that of `step`, or the newest whole one; digests are not
    checked. `trusted` allows to read DCP's metadata, which are pickle.

    Raises CheckpointError if there is none, or a damaged one; JobError for DCP without `trusted`, and for a step where
    there is only one."""
    form = form_of(path)
    if form == "checkpoint":
        return Reader(check(checkpoint_at(path, step), verify=False))
    if step:
        raise JobError(f"--step {step}: {path} is no run, and holds one state only")
    if form == "dcp":
        from phalanx.checkpoint.dcp import DcpReader  # imported here, because it takes long

        return DcpReader(path, trusted)
    return Reader(describe(path))
