"""Writes safetensors files with their digest in one pass, from memory to the disk.

The library's own writer gives no digest, which would take a second pass over the file. The format is 8 bytes with the
header's length, the header (JSON: each tensor's type, shape and place), and the tensors' bytes, little-endian and
without gaps (https://github.com/huggingface/safetensors#format). The library reads the files.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from torch import Tensor

from phalanx.checkpoint.inventory import check_digests
from phalanx.checkpoint.manifest import ITEM_BYTES, Box, Manifest, ShardFile, StoredTensor
from phalanx.data.files import open_regular
from phalanx.errors import CheckpointError, DamagedCheckpointError

T = TypeVar("T")

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
CHUNK_BYTES = 2 * 2**20
"""Bytes that are hashed and written at a time."""
SYNC_BYTES = 2**30
"""Bytes after which the writer waits for the disk, so that a slow disk shows progress before the end."""


def write(
    path: Path,
    tensors: Mapping[str, Tensor],
    progress: Callable[[], None] = lambda: None,
    check: Callable[[str], None] = lambda name: None,
) -> ShardFile:
    """Writes tensors to a new safetensors file and waits until it is on the disk. Returns size and digest.

    `check` is called with a tensor's name before its elements are read, and may wait or raise; `progress` after every
    chunk that was written. The interpreter's lock is free meanwhile. Raises OSError.
    """
    # The widest types first, so that every tensor is aligned.
    ordered = dict(sorted(tensors.items(), key=lambda item: -item[1].element_size()))
    entries = {name: (DTYPES[tensor.dtype], tensor.shape, tensor.nbytes) for name, tensor in ordered.items()}

    def buffers() -> Iterator[memoryview]:
        yield memoryview(_header(entries))
        for name, tensor in ordered.items():
            check(name)
            yield _bytes(tensor)

    return _write(path, buffers(), lambda _: progress())


def write_one_by_one(
    path: Path,
    tensors: Mapping[str, StoredTensor],
    read: Callable[[str], Tensor],
    metadata: Mapping[str, str],
    progress: Callable[[int], None],
) -> ShardFile:
    """Writes a new safetensors file of whole tensors, of which `read` returns one at a time, and waits until it is on
    the disk. Returns size and digest. `progress` gets the bytes of every chunk. Raises OSError."""
    ordered = dict(sorted(tensors.items(), key=lambda item: -ITEM_BYTES[item[1].dtype]))
    entries = {name: (tensor.dtype, tensor.shape, tensor.nbytes) for name, tensor in ordered.items()}
    header = memoryview(_header(entries, {"__metadata__": dict(metadata)}))
    return _write(path, chain([header], (_bytes(read(name)) for name in ordered)), progress)


def _write(path: Path, buffers: Iterable[memoryview], progress: Callable[[int], None]) -> ShardFile:
    digest, size = xxhash.xxh3_128(), 0
    with open(open_regular(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb", buffering=0) as file:
        for chunk in _chunks(buffers):
            digest.update(chunk)
            rest = chunk
            while len(rest):  # a single call may write less
                rest = rest[file.write(rest) :]
            # Linux begins to write such pages to the disk: the rest is hashed and copied meanwhile.
            os.posix_fadvise(file.fileno(), size, len(chunk), os.POSIX_FADV_DONTNEED)
            if (size + len(chunk)) // SYNC_BYTES > size // SYNC_BYTES:
                os.fdatasync(file.fileno())
            size += len(chunk)
            progress(len(chunk))
        os.fsync(file.fileno())
    return ShardFile(size, digest.hexdigest())


def _chunks(buffers: Iterable[memoryview]) -> Iterator[memoryview]:
    for buffer in buffers:
        for start in range(0, len(buffer), CHUNK_BYTES):
            yield buffer[start : start + CHUNK_BYTES]


def grouped(items: Iterable[T], size: Callable[[T], int], most_bytes: float) -> list[list[T]]:
    """Divides items into groups of at most `most_bytes`, or of one larger item, in their order: one group a file."""
    groups: list[list[T]] = []
    used = 0
    for item in items:
        nbytes = size(item)
        if not groups or used + nbytes > most_bytes:
            groups.append([])
            used = 0
        groups[-1].append(item)
        used += nbytes
    return groups


def _bytes(tensor: Tensor) -> memoryview:
    """Returns a tensor's elements in host memory; they are copied only from a device, or if they have gaps."""
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data


def _header(tensors: Mapping[str, tuple[str, Sequence[int], int]], before: Mapping[str, Any] | None = None) -> bytes:
    """Returns the header of tensors with their types, shapes and bytes, behind other entries."""
    entries, position = dict(before or {}), 0
    for name, (dtype, shape, nbytes) in tensors.items():
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, position + nbytes]}
        position += nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


TORCH_DTYPES = {name: dtype for dtype, name in DTYPES.items()}
"""Types by their names in safetensors files."""
OPEN_FILES = 256
"""Shard files open at a time: a process may have 1,024 by default."""


class Reader:
    """The tensors of a checkpoint. A context manager, in which shard files are opened as they are needed.

    Raises DamagedCheckpointError, naming the file, if one cannot be read."""

    manifest: Manifest
    """The tensors and metadata of the checkpoint."""

    def __init__(self, manifest: Manifest):
        self.manifest = manifest
        self.open: dict[str, Any] = {}

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self.open.clear()

    def verify_share(self, rank: int, ranks: int) -> None:
        """Checks the digests of a rank's share of the files. Raises DamagedCheckpointError that names the file."""
        digests = sorted(name for name, file in self.manifest.files.items() if file.digest)
        check_digests(self.manifest, digests[rank::ranks])

    def names(self) -> list[str]:
        """Returns the names of the tensors."""
        return list(self.manifest.tensors)

    def read(self, name: str, box: Box | None = None) -> Tensor:
        """Returns a tensor, or a box of it, on the CPU. Only the shard files' bytes of that box are read, some of them
        when the result is used: it may be a view of the file, to be copied.

        Raises CheckpointError if there is no such tensor."""
        if name not in self.manifest.tensors:
            raise CheckpointError(f"checkpoint {self.manifest.path} has no tensor {name}")
        stored = self.manifest.tensors[name]
        wanted = box or Box.of(stored.shape)
        result: Tensor | None = None
        for file, there in stored.boxes:
            common = wanted.intersection(there)
            if common is None:
                continue
            piece = self._piece(name, file, there, common)
            if common == wanted:
                return piece
            if result is None:
                result = torch.empty(wanted.sizes, dtype=piece.dtype)
            result[common.within(wanted)] = piece
        if result is None:  # the manifest accounts for every element, so there are none
            result = torch.empty(wanted.sizes, dtype=TORCH_DTYPES[stored.dtype])
        return result

    def require(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raises CheckpointError with every parameter that is missing, extra or of another shape."""
        there = {name: tensor.shape for name, tensor in self.manifest.tensors.items() if "/" not in name}
        wrong = [f"{name} is missing" for name in shapes.keys() - there.keys()]
        wrong += [f"{name} is not in the model" for name in there.keys() - shapes.keys()]
        for name in shapes.keys() & there.keys():
            if there[name] != tuple(shapes[name]):
                wrong.append(f"{name} is {there[name]} there and {tuple(shapes[name])} here")
        if wrong:
            raise CheckpointError(f"checkpoint {self.manifest.path} does not fit the model: {'; '.join(sorted(wrong))}")

    def _piece(self, name: str, file: str, there: Box, common: Box) -> Tensor:
        """Returns what a file has of a tensor: the box `common` out of the box `there`."""
        path, stored = self.manifest.path / file, self.manifest.tensors[name]
        key = there.key(name, stored.shape)
        try:
            if file not in self.open:
                if len(self.open) == OPEN_FILES:
                    del self.open[next(iter(self.open))]
                self.open[file] = safe_open(path, "pt")
            if tuple(self.open[file].get_slice(key).get_shape()) != there.sizes:
                raise OSError(f"its shape is not {there.sizes}")
            if self.open[file].get_slice(key).get_dtype() != stored.dtype:
                raise OSError(f"its type is not {stored.dtype}")
            if common == there:
                return self.open[file].get_tensor(key)
            return self.open[file].get_slice(key)[common.within(there)]
        except (OSError, SafetensorError) as error:
            raise DamagedCheckpointError(f"checkpoint file {path}: {key} cannot be read: {error}") from error
