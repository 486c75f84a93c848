"""Reads Megatron's indexed data sets, a .bin file of tokens and its .idx, as they are, without pickle.

The index is, little-endian: b"MMIDIDX\\0\\0", version (u64), dtype code (u8), number of sequences (u64), number of
document indices (u64), lengths (i32 each), pointers (i64 byte offsets each), document indices (i64 each), and in
multimodal sets one mode (i8) per sequence, which is not read.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from phalanx.data.files import SPLITS, Progress, write_atomic
from phalanx.data.formats import pair_of
from phalanx.data.index import (
    BLOCK_BYTES,
    DTYPES,
    Shard,
    blocks_file,
    shard_file,
)
from phalanx.data.loader import TokenData
from phalanx.errors import DataError

MAGIC = b"MMIDIDX\x00\x00"
VERSIONS = (1, 2)
HEADER = struct.Struct("<9sQBQQ")
TOKEN_DTYPES = {1: "uint8", 2: "uint8", 3: "uint16", 4: "uint32", 5: "uint64", 8: "uint16"}
"""Dtypes of tokens by code. Those of 2 to 5 are signed, but no id is negative; 6 and 7 are floating-point numbers."""
CHUNK_BYTES = 1 << 24


@dataclass(frozen=True)
class MegatronTokens:
    """An indexed data set."""

    bin: Path
    """The file of tokens, as an absolute path."""
    idx: Path
    version: int
    dtype: str
    """A name of index.DTYPES."""
    tokens: int
    sequences: int
    documents: np.ndarray
    """(documents,) int64: the first token of each document."""


def open_megatron(path: str) -> MegatronTokens:
    """Returns the data set that a path names (`pair_of`). Raises DataError if a file is missing, truncated or
    inconsistent."""
    pair = pair_of(path)
    assert pair is not None, "the caller asked pair_of"
    content, index = pair
    try:
        found, size = index.stat().st_size, content.stat().st_size
        with index.open("rb") as file:
            header = file.read(HEADER.size)
    except OSError as error:
        raise DataError(f"cannot read {error.filename}: {error.strerror}; expected {index} and {content}") from error
    if header[: len(MAGIC)] != MAGIC or len(header) < HEADER.size:
        raise DataError(f"{index}: expected the {HEADER.size} bytes of a header that begins with MMIDIDX")
    _, version, code, sequences, ends = HEADER.unpack(header)
    if version not in VERSIONS:
        raise DataError(f"{index}: version {version}: expected 1 or 2")
    if code not in TOKEN_DTYPES:
        raise DataError(f"{index}: dtype code {code}: expected one of {', '.join(map(str, TOKEN_DTYPES))} (integers)")
    itemsize, least = DTYPES[TOKEN_DTYPES[code]].itemsize, HEADER.size + 12 * sequences + 8 * ends
    if found not in (least, least + sequences):
        raise DataError(f"{index}: expected {least:,} bytes for {sequences:,} sequences, found {found:,}")
    if not sequences or not size:
        raise DataError(f"{content}: holds no tokens")
    raw = np.memmap(index, dtype="u1", mode="r")
    lengths, pointers, documents = (
        raw[start : start + size].view(kind)
        for start, size, kind in (
            (HEADER.size, 4 * sequences, "<i4"),
            (HEADER.size + 4 * sequences, 8 * sequences, "<i8"),
            (HEADER.size + 12 * sequences, 8 * ends, "<i8"),
        )
    )
    if (lengths < 0).any():
        raise DataError(f"{index}: a length is negative")
    ends_at = lengths.cumsum(dtype=np.int64)
    if (pointers != (ends_at - lengths) * itemsize).any():
        raise DataError(f"{index}: its sequences do not follow one another in {content.name} in the order of the index")
    if size != (needed := int(ends_at[-1]) * itemsize):
        what = "the file is truncated" if size < needed else "it is of another index"
        raise DataError(f"{content}: expected {needed:,} bytes by its index, found {size:,}: {what}")
    if ends and (documents[0] != 0 or documents[-1] != sequences or (np.diff(documents) < 0).any()):
        raise DataError(f"{index}: document indices must rise from 0 to the {sequences:,} sequences")
    firsts = np.append(ends_at - lengths, ends_at[-1])
    starts = np.unique(firsts[documents[:-1]]) if ends > 1 else np.zeros(1, dtype=np.int64)
    return MegatronTokens(content, index, version, TOKEN_DTYPES[code], int(ends_at[-1]), sequences, starts)


def index_splits(
    folder: Path, found: MegatronTokens, val_fraction: float, vocab_size: int, progress: Progress
) -> dict[str, tuple[Shard, ...]]:
    """Reads all tokens once, writes the digests of their blocks to `folder`, and returns the two splits, a shard each.
    Raises DataError for an id that is not below `vocab_size`."""
    cut = cut_of(found.tokens, val_fraction)
    splits: dict[str, tuple[Shard, ...]] = {}
    for split, first, end in zip(SPLITS, (0, cut), (cut, found.tokens), strict=True):
        whole, blocks = hashlib.sha256(), []
        for chunk, done in _chunks(found, first, end):
            tokens = np.frombuffer(chunk, DTYPES[found.dtype])
            if (largest := int(tokens.max(initial=0))) >= vocab_size:
                raise DataError(
                    f"{found.bin}: holds token {largest}, expected 0 to {vocab_size - 1} (the vocabulary of "
                    "data.tokenizer): set it to the tokenizer that made these tokens"
                )
            whole.update(chunk)
            view = memoryview(chunk)
            blocks += [hashlib.sha256(view[at : at + BLOCK_BYTES]).digest() for at in range(0, len(chunk), BLOCK_BYTES)]
            progress("checking", done, found.tokens)
        file, content = shard_file(split, 0), b"".join(blocks)
        splits[split] = ()
        if end > first:
            write_atomic(folder / blocks_file(file), content)
            size = (end - first) * DTYPES[found.dtype].itemsize
            digest = hashlib.sha256(content).hexdigest()
            splits[split] = (Shard(file, end - first, size, whole.hexdigest(), digest),)
    return splits


def _chunks(found: MegatronTokens, first: int, end: int) -> Iterator[tuple[bytes, int]]:
    """Yields the bytes of the tokens from `first` to `end`, and the number of tokens up to there."""
    itemsize = DTYPES[found.dtype].itemsize
    with found.bin.open("rb") as file:
        file.seek(first * itemsize)
        left = (end - first) * itemsize
        while left:
            chunk = file.read(min(CHUNK_BYTES, left))
            if not chunk:
                raise DataError(f"{found.bin}: ends {left:,} bytes before it should: somebody is writing to it")
            left -= len(chunk)
            yield chunk, end - left // itemsize


class MegatronData(TokenData):
    """The samples of one split of an indexed data set. Its documents are those of the .idx, whatever separates them."""

    knows_documents = True

    def documents(self, ids: np.ndarray) -> np.ndarray:
        places = ids[:, None] * self.seq_len + np.arange(self.seq_len)
        numbers = np.searchsorted(self._starts, places, side="right")
        return numbers - numbers[:, :1]

    def document_starts(self) -> np.ndarray:
        return self._starts

    @cached_property
    def _starts(self) -> np.ndarray:
        before = sum(self.index.tokens(split) for split in SPLITS[: SPLITS.index(self.split)])
        starts = open_megatron(self.index.elsewhere).documents - before
        return np.append(0, starts[(starts > 0) & (starts < self.tokens)])


def cut_of(total: int, val_fraction: float) -> int:
    """Returns how many of a corpus's characters or tokens are of the training split."""
    return int(total * (1 - val_fraction))
