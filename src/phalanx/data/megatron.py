"""Corpus megatron: reads Megatron-LM's indexed data sets as they are, a .bin file of tokens and its .idx: mapped into
memory, without pickle.

The index is, little-endian: b"MMIDIDX\\0\\0", version (u64), dtype code (u8), number of sequences (u64), number of
document indices (u64), lengths (i32 each), pointers (i64 byte offsets each), document indices (i64 each), and in
multimodal sets one mode (i8) per sequence, which is not read.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from phalanx.config.corpora import training_tokens
from phalanx.config.data import Data
from phalanx.errors import DataError

MAGIC = b"MMIDIDX\x00\x00"
VERSIONS = (1, 2)
HEADER = struct.Struct("<9sQBQQ")
TOKEN_DTYPES = {1: np.dtype("u1"), 2: np.dtype("i1"), 3: np.dtype("<i2"), 4: np.dtype("<i4"), 5: np.dtype("<i8")}
TOKEN_DTYPES |= {8: np.dtype("<u2")}
"""Dtypes of tokens by their code; the codes 6 and 7 are floating-point numbers."""


@dataclass(frozen=True)
class MegatronTokens:
    """An indexed data set."""

    tokens: np.ndarray
    """(tokens,) of the file's dtype, memory-mapped: its sequences one after the other."""
    sequences: int
    documents: int
    """Documents, which may have several sequences; 0 if the index does not say."""


def files(path: Path) -> tuple[Path, Path]:
    """Returns the .bin and the .idx of a data set of which `path` is one, or the name without either."""
    stem = path.with_suffix("") if path.suffix in (".bin", ".idx") else path
    return stem.with_name(stem.name + ".bin"), stem.with_name(stem.name + ".idx")


def is_megatron(path: Path) -> bool:
    """Returns whether `path` is an indexed data set."""
    content, index = files(path)
    if not (os.path.isfile(content) and os.path.isfile(index)):
        return False
    with index.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def open_megatron(path: Path) -> MegatronTokens:
    """Returns the data set of which `path` is the .bin, the .idx or the name without either. Raises DataError if a file
    is missing, truncated or inconsistent."""
    content, index = files(path)
    try:
        found, size = index.stat().st_size, content.stat().st_size
        with index.open("rb") as file:
            header = file.read(HEADER.size)
    except OSError as error:
        raise DataError(
            f"data.path={path}: cannot read {error.filename}: {error.strerror}; expected {content} and {index}"
        ) from error
    if header[: len(MAGIC)] != MAGIC or len(header) < HEADER.size:
        raise DataError(f"{index}: expected the {HEADER.size} bytes of a header that begins with MMIDIDX")
    _, version, code, sequences, ends = HEADER.unpack(header)
    if version not in VERSIONS:
        raise DataError(f"{index}: version {version}: expected 1 or 2")
    if code not in TOKEN_DTYPES:
        raise DataError(f"{index}: dtype code {code}: expected one of {', '.join(map(str, TOKEN_DTYPES))} (integers)")
    dtype, least = TOKEN_DTYPES[code], HEADER.size + 12 * sequences + 8 * ends
    if found not in (least, least + sequences):
        raise DataError(f"{index}: expected {least:,} bytes for {sequences:,} sequences, found {found:,}")
    if not sequences or not size:
        raise DataError(f"{content}: holds no tokens")
    raw = np.memmap(index, dtype="u1", mode="r")
    lengths, pointers = (
        raw[start : start + each * sequences].view(kind)
        for start, each, kind in ((HEADER.size, 4, "<i4"), (HEADER.size + 4 * sequences, 8, "<i8"))
    )
    bytes_each = lengths.astype(np.int64) * dtype.itemsize
    needed = int(bytes_each.sum())
    if (lengths < 0).any() or not np.array_equal(pointers, np.cumsum(bytes_each) - bytes_each):
        raise DataError(f"{index}: its sequences do not lie one after the other in {content.name}")
    if size != needed:
        raise DataError(f"{content}: expected {needed:,} bytes by its index, found {size:,}: the file is damaged")
    return MegatronTokens(np.memmap(content, dtype=dtype, mode="r"), sequences, max(0, ends - 1))


def tokens(data: Data, split: str, start: int, size: int) -> np.ndarray:
    """Returns the tokens of a split from `start` on: (size,) int64. Raises DataError as `open_megatron`."""
    every = open_megatron(_path(data)).tokens
    first = start if split == "train" else training_tokens(data, len(every)) + start
    return every[first : first + size].astype(np.int64)


def count(data: Data) -> int:
    """Returns the number of tokens. Raises DataError as `open_megatron`."""
    return len(open_megatron(_path(data)).tokens)


def identity(data: Data) -> dict[str, object]:
    """Returns what tells whether the files are the same: their sizes and times."""
    facts = [file.stat() for file in files(_path(data)) if os.path.isfile(file)]
    return {"files": [[fact.st_size, fact.st_mtime_ns] for fact in facts]}


def describe(data: Data) -> str:
    """Returns a description of the data set."""
    return f"{data.path}, {data.megatron_vocab:,} token ids"


def _path(data: Data) -> Path:
    return Path(data.path).expanduser()
