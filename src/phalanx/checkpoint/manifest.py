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
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from itertools import product
from math import prod
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import phalanx
from phalanx.bounded import read_json
from phalanx.check.load import from_dict
from phalanx.config.constraints import Interval
from phalanx.config.job import Job
from phalanx.config.values import TypedError, read_as
from phalanx.errors import CheckpointError, DamagedCheckpointError, JobError

MOST_DIVIDED = 4
"""Most dimensions along which boxes divide a tensor. Layouts divide at most three, those of an expert's weight."""


@dataclass(frozen=True)
class Box:
    """A rectangular part of a tensor."""

    offsets: tuple[int, ...]
    """The first index of the box along each dimension of the whole tensor."""
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, shape: Sequence[int]) -> Box:
        """Returns the box that is all of a tensor of `shape`."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def elements(self) -> int:
        return prod(self.sizes)

    def fits(self, shape: Sequence[int]) -> bool:
        """Returns whether the box lies within a tensor of `shape`."""
        bounds = zip(self.offsets, self.sizes, shape, strict=False)
        return len(self.offsets) == len(self.sizes) == len(shape) and all(
            offset >= 0 and size >= 0 and offset + size <= whole for offset, size, whole in bounds
        )

    def moved(self, dim: int, by: int, size: int) -> Box:
        """Returns the box `by` indices further along `dim`, with another size there."""
        offsets, sizes = list(self.offsets), list(self.sizes)
        offsets[dim] += by
        sizes[dim] = size
        return replace(self, offsets=tuple(offsets), sizes=tuple(sizes))

    def intersection(self, other: Box) -> Box | None:
        """Returns the box that both have in common, or None if that is empty."""
        offsets, sizes = [], []
        for mine, n, theirs, m in zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True):
            first, end = max(mine, theirs), min(mine + n, theirs + m)
            if end <= first:
                return None
            offsets.append(first)
            sizes.append(end - first)
        return Box(tuple(offsets), tuple(sizes))

    def within(self, outer: Box) -> tuple[slice, ...]:
        """Returns the indices of this box in a tensor that holds `outer` only."""
        places = zip(self.offsets, self.sizes, outer.offsets, strict=True)
        return tuple(slice(offset - first, offset - first + size) for offset, size, first in places)

    def key(self, tensor: str, shape: Sequence[int]) -> str:
        """Returns the name of the box in a shard file: the tensor's own name for a whole tensor, otherwise the name
        with the box's indices, such as "head.weight[0:8,0:16]"."""
        if self == Box.of(shape):
            return tensor
        places = zip(self.offsets, self.sizes, strict=True)
        return f"{tensor}[{','.join(f'{offset}:{offset + size}' for offset, size in places)}]"


def tiles(boxes: Sequence[Box], shape: Sequence[int]) -> bool:
    """Returns whether boxes hold every element of a tensor of `shape` exactly once, in time linear in their number.

    The number of boxes that hold an element is a function on the grid. Its mixed difference along all dimensions is not
    zero only at the corners of boxes, where it is the sum of their signs, and determines the function. So the boxes
    tile the tensor exactly if their corners add up to those of the whole. Boxes that divide more than MOST_DIVIDED
    dimensions are never said to tile."""
    if not all(box.fits(shape) for box in boxes) or sum(box.elements for box in boxes) != prod(shape):
        return False
    divided = [dim for dim, size in enumerate(shape) if any(box.sizes[dim] != size for box in boxes if box.elements)]
    if len(divided) > MOST_DIVIDED:
        return False
    corners: Counter[tuple[int, ...]] = Counter()
    for sign, box in [(-1, Box.of(shape)), *((1, box) for box in boxes)]:
        if box.elements:
            edges = [((box.offsets[dim], 1), (box.offsets[dim] + box.sizes[dim], -1)) for dim in divided]
            for corner in product(*edges):
                corners[tuple(place for place, _ in corner)] += sign * prod(edge for _, edge in corner)
    return not any(corners.values())


def flat_boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """Yields the boxes that make up elements `start` to `stop` - 1 of a flattened tensor of `shape`, in their order: at
    most 2 × dimensions - 1 of them, each contiguous in the flattened tensor."""
    if stop <= start:
        return
    if not shape:
        yield Box((), ())
        return
    inner = tuple(shape[1:])
    row = prod(inner)
    first, last = -(-start // row), stop // row
    if first > last:  # all within one row
        yield from _in_row(inner, first - 1, start, stop)
        return
    if start < first * row:
        yield from _in_row(inner, first - 1, start, first * row)
    if first < last:
        yield Box((first, *(0 for _ in inner)), (last - first, *inner))
    if last * row < stop:
        yield from _in_row(inner, last, last * row, stop)


def _in_row(inner: tuple[int, ...], number: int, start: int, stop: int) -> Iterator[Box]:
    row = prod(inner)
    for box in flat_boxes(inner, start - number * row, stop - number * row):
        yield Box((number, *box.offsets), (1, *box.sizes))


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
    program wrote it, or if its folder is named after another step.
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
        found = _parse(path, raw)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DamagedCheckpointError(
            f"checkpoint {path}: {MANIFEST} lacks what every manifest has ({type(error).__name__}: {error})"
        ) from None
    if (named := re.fullmatch("step-([0-9]+)", path.name)) and int(named[1]) != found.step:
        raise CheckpointError(f"checkpoint {path} holds step {found.step}: name its folder step-{found.step:06d}")
    return found


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


def job_of(manifest: Manifest) -> Job:
    """Returns the job that wrote a checkpoint. Raises CheckpointError if this version cannot read it."""
    try:
        return from_dict(manifest.meta["job"], str(manifest.path))
    except (JobError, KeyError) as error:
        raise CheckpointError(
            f"checkpoint {manifest.path} was written by a job this program cannot read: {error}"
        ) from None


def require_resumable(manifest: Manifest) -> None:
    """Raises CheckpointError, with every problem, unless the metadata hold what a run needs to resume."""
    if "imported" in manifest.meta:
        raise CheckpointError(
            f"checkpoint {manifest.path} was imported, and is not of a training run: train from its weights with "
            f"model.from={manifest.path.parent.parent} and another run.name"
        )
    needed = {field.name for field in fields(StoredProgress) if field.default is MISSING}
    if missing := sorted(needed - manifest.meta.keys()):
        raise CheckpointError(f"checkpoint {manifest.path} is not of a training run: it lacks {', '.join(missing)}")
    if wrong := problems(manifest.meta):
        raise CheckpointError(f"checkpoint {manifest.path}: its metadata are not valid: {'; '.join(wrong)}")


Count = Annotated[int, Interval(0)]
AtLeastOne = Annotated[int, Interval(1)]


@dataclass(frozen=True)
class StoredLossScale:
    """The state of a dynamic loss scale."""

    value: Annotated[float, Interval(above=0)]
    good_steps: Count


@dataclass(frozen=True)
class GuardHistory:
    """The guard's history of a run's steps."""

    steps: Count
    losses: Sequence[float]
    norms: Sequence[float]
    interventions: Sequence[Count]


@dataclass(frozen=True)
class StoredProgress:
    """The metadata that resuming uses; checkpoints of earlier versions lack those with a default."""

    job: Mapping[str, Any]
    samples: Count
    updates: Count
    replicas: AtLeastOne
    loss_scale: StoredLossScale
    data: str
    vocab_size: AtLeastOne
    val_loss: float | None
    val_step: Count | None
    guard: GuardHistory
    schedule_end: AtLeastOne = 1


def problems(meta: Mapping[str, Any]) -> list[str]:
    """Returns what is wrong with the values that `meta` has, none of which needs to be there."""
    wrong: list[str] = []
    for name, kind in get_type_hints(StoredProgress, include_extras=True).items():
        if name in meta:
            try:
                read_as(kind, meta[name], name)
            except TypedError as error:
                wrong += error.problems
    return wrong
