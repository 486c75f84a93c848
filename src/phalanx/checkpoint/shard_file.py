"""Writes safetensors files with their digest in one pass, from memory to the disk.

The library's own writer gives no digest, which would take a second pass over the file. The format is 8 bytes with the
header's length, the header (JSON: each tensor's type, shape and place), and the tensors' bytes, little-endian and
without gaps (https://github.com/huggingface/safetensors#format). The library reads the files.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from phalanx.checkpoint.manifest import ITEM_BYTES, ShardFile, StoredTensor
from phalanx.data.files import open_regular

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
            _write_whole(file, chunk)
            # Linux begins to write such pages to the disk: the rest is hashed and copied meanwhile.
            os.posix_fadvise(file.fileno(), size, len(chunk), os.POSIX_FADV_DONTNEED)
            if (size + len(chunk)) // SYNC_BYTES > size // SYNC_BYTES:
                os.fdatasync(file.fileno())
            size += len(chunk)
            progress(len(chunk))
        os.fsync(file.fileno())
    return ShardFile(size, digest.hexdigest())


def _write_whole(file: io.FileIO, chunk: memoryview) -> None:
    while len(chunk):
        chunk = chunk[file.write(chunk) :]


def _chunks(buffers: Iterable[memoryview]) -> Iterator[memoryview]:
    for buffer in buffers:
        for start in range(0, len(buffer), CHUNK_BYTES):
            yield buffer[start : start + CHUNK_BYTES]


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
