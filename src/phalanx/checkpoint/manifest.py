"""A checkpoint's manifest: one JSON file that describes every tensor and every shard file. Imports no torch.

    {"format": "phalanx-checkpoint", "version": 3, "phalanx": "0.1.0", "step": 100, "finite": true,
     "meta": {"job": ..., "samples": ..., ...},
     "files": {"rank-00000.safetensors": {"bytes": ..., "xxh3_128": "..."}},
     "tensors": {"head.weight": {"shape": [96, 64], "dtype": "F32",
                                 "boxes": [["rank-00000.safetensors", [0, 0], [48, 64]], ...]}},
     "digest": "..."}

`digest` is the sha256 of the rest, so that an edited manifest is noticed. A box's key in its shard file follows from
the tensor's name and the box (`Box.key`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import phalanx
from phalanx.bounded import read_json
from phalanx.checkpoint.boxes import Box, tiles
from phalanx.errors import CheckpointError, DamagedCheckpointError

FORMAT = "phalanx-checkpoint"
VERSION = 3
MANIFEST = "manifest.json"
ITEM_BYTES = {
    "F64": 8,
    "I64": 8,
    "F32": 4,
    "I32": 4,
    "F16": 2,
    "BF16": 2,
    "I16": 2,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
}
"""Bytes of an element, by the type's name in safetensors files: the types that checkpoints hold."""


@dataclass(frozen=True)
class ShardFile:
    """The facts about a shard file that show whether it is whole."""

    bytes: int
    digest: str
    """The 128-bit XXH3 of its bytes, in hexadecimal: it finds damage at the speed of memory, but no forgery."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a checkpoint, whose boxes lie in shard files."""

    shape: tuple[int, ...]
    dtype: str
    """The type's name in safetensors files: F32, BF16, ..."""
    boxes: tuple[tuple[str, Box], ...]
    """Each box with the name of its shard file. Together they hold every element once."""

    @property
    def complete(self) -> bool:
        """True if the boxes hold every element of the tensor exactly once."""
        return tiles([box for _, box in self.boxes], self.shape)

    @property
    def elements(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.elements * ITEM_BYTES[self.dtype]


def kind_of(name: str) -> str:
    """Returns the kind of a tensor of the state by its name: "exp_avg", "master", ...; empty for a parameter."""
    return name.rpartition("/")[0]


@dataclass(frozen=True)
class Manifest:
    """A checkpoint's contents."""

    path: Path
    """The checkpoint's directory."""
    step: int
    """The step after which it was saved."""
    finite: bool
    """True if every parameter and moment was found to be finite before it was saved."""
    meta: dict[str, Any]
    """The trainer's metadata: the job, samples read, the loss scale, ..."""
    files: dict[str, ShardFile]
    tensors: dict[str, StoredTensor]
    """The tensors by name, with `shape` and `dtype`."""

    def text(self) -> str:
        """Returns the manifest as JSON, with its digest."""
        raw = {
            "format": FORMAT,
            "version": VERSION,
            "phalanx": phalanx.__version__,
            "step": self.step,
            "finite": self.finite,
            "meta": self.meta,
            "files": {name: {"bytes": file.bytes, "xxh3_128": file.digest} for name, file in self.files.items()},
            "tensors": {
                name: {
                    "shape": tensor.shape,
                    "dtype": tensor.dtype,
                    "boxes": [(file, box.offsets, box.sizes) for file, box in tensor.boxes],
                }
                for name, tensor in self.tensors.items()
            },
        }
        return json.dumps(raw | {"digest": manifest_digest(raw)})


def read(path: Path) -> Manifest:
    """Reads the manifest of the checkpoint at `path`. The shard files are not looked at.

    Raises DamagedCheckpointError if it is missing, damaged or inconsistent; CheckpointError if another version of the
    program wrote it.
    """
    try:
        raw = read_json(path / MANIFEST)
    except FileNotFoundError:
        raise DamagedCheckpointError(
            f"checkpoint {path} has no {MANIFEST}: it is not a checkpoint, or an incomplete one"
        ) from None
    except (OSError, ValueError) as error:
        raise DamagedCheckpointError(f"checkpoint {path}: {MANIFEST} is damaged: {error}") from None
    if not isinstance(raw, dict) or raw.get("format") != FORMAT:
        raise DamagedCheckpointError(f"{path / MANIFEST} is not the manifest of a Phalanx checkpoint")
    if raw.get("version") != VERSION:
        raise CheckpointError(_other_version(path, raw))
    if raw.pop("digest", None) != manifest_digest(raw):
        raise DamagedCheckpointError(f"checkpoint {path}: {MANIFEST} does not match its own digest: it was changed")
    try:
        return _parse(path, raw)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DamagedCheckpointError(
            f"checkpoint {path}: {MANIFEST} lacks what every manifest has ({type(error).__name__}: {error})"
        ) from None


def manifest_digest(raw: Mapping[str, Any]) -> str:
    """Returns the sha256 of a manifest without its own digest."""
    return hashlib.sha256(json.dumps(raw, sort_keys=True).encode()).hexdigest()


def _parse(path: Path, raw: dict[str, Any]) -> Manifest:
    tensors = {
        name: StoredTensor(
            tuple(map(_size, entry["shape"])),
            str(entry["dtype"]),
            tuple(
                (file, Box(tuple(map(_size, offsets)), tuple(map(_size, sizes))))
                for file, offsets, sizes in entry["boxes"]
            ),
        )
        for name, entry in raw["tensors"].items()
    }
    files = {name: ShardFile(_size(facts["bytes"]), str(facts["xxh3_128"])) for name, facts in raw["files"].items()}
    for name in files:
        if Path(name).name != name:
            raise DamagedCheckpointError(f"checkpoint {path}: {MANIFEST} names {name!r}, a file outside its directory")
    for name, tensor in tensors.items():
        if tensor.dtype not in ITEM_BYTES:
            raise DamagedCheckpointError(
                f"checkpoint {path}: {MANIFEST} gives {name} the type {tensor.dtype!r}; there are "
                f"{', '.join(ITEM_BYTES)}"
            )
        if not tensor.complete or any(file not in files for file, _ in tensor.boxes):
            raise DamagedCheckpointError(f"checkpoint {path}: {MANIFEST} does not account for all of {name}")
    return Manifest(path, _size(raw["step"]), raw["finite"] is True, dict(raw["meta"]), files, tensors)


def _size(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{value!r} is no size")
    return value


def _other_version(path: Path, raw: Mapping[str, Any]) -> str:
    version, writer = raw.get("version"), raw.get("phalanx") or "of unknown version"
    return (
        f"checkpoint {path} has format version {version}, written by Phalanx {writer}; this program reads version "
        f"{VERSION}: "
        "resume with the program that wrote it, or start over with --fresh"
    )
