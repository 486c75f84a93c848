"""Reads Megatron's indexed data sets, a .bin file of tokens and its .idx, as they are: memory-mapped, without pickle.

The index is, little-endian: b"MMIDIDX\\0\\0", version (u64), dtype code (u8), number of sequences (u64), number of
document indices (u64), lengths (i32 each), pointers (i64 byte offsets each), document indices (i64 each), and in
multimodal sets one mode (i8) per sequence, which is not read.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from phalanx.errors import DataError

MAGIC = b"MMIDIDX\x00\x00"
VERSIONS = (1, 2)
HEADER = struct.Struct("<9sQBQQ")
TOKEN_DTYPES = {1: np.dtype("u1"), 2: np.dtype("i1"), 3: np.dtype("<i2"), 4: np.dtype("<i4"), 5: np.dtype("<i8")}
TOKEN_DTYPES |= {8: np.dtype("<u2")}
"""Dtypes of tokens by their code; the codes 6 and 7 are floating-point numbers."""


@dataclass(frozen=True)
class MegatronTokens:
    """The tokens of an indexed data set, memory-mapped."""

    tokens: np.ndarray
    """(tokens,) of the file's dtype."""
    lengths: np.ndarray
    """(sequences,) int32."""
    starts: np.ndarray
    """(sequences,) int64: the first token of each sequence."""
    documents: np.ndarray
    """(documents + 1,) int64: the first sequence of each document, and the number of sequences."""


def open_megatron(path: Path, vocab_size: int) -> MegatronTokens:
    """Returns the data set of which `path` is the .bin, the .idx or the name without either. Reads all tokens once.
    Raises DataError if a file is missing, truncated or inconsistent, or a token is not below `vocab_size`."""
    stem = path.with_suffix("") if path.suffix in (".bin", ".idx") else path
    index, content = (stem.with_name(stem.name + suffix) for suffix in (".idx", ".bin"))
    try:
        found = index.stat().st_size
        size = content.stat().st_size
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
    dtype, least = TOKEN_DTYPES[code], HEADER.size + 12 * sequences + 8 * ends
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
    if (lengths < 0).any() or (pointers < 0).any() or (pointers > size).any() or (pointers % dtype.itemsize).any():
        raise DataError(f"{index}: a length or pointer is negative, beyond {content.name} or not whole tokens")
    needed = int((pointers + lengths.astype(np.int64) * dtype.itemsize).max())
    if size < needed or size % dtype.itemsize:
        raise DataError(f"{content}: expected {needed:,} bytes by its index, found {size:,}: the file is truncated")
    if ends and (documents[0] != 0 or documents[-1] != sequences or (np.diff(documents) < 0).any()):
        raise DataError(f"{index}: document indices must rise from 0 to the {sequences:,} sequences")
    tokens = np.memmap(content, dtype=dtype, mode="r")
    least_id, largest = int(tokens.min()), int(tokens.max())
    if least_id < 0 or largest >= vocab_size:
        wrong = least_id if least_id < 0 else largest
        raise DataError(f"{content}: holds token {wrong}, expected 0 to {vocab_size - 1} (the tokenizer's vocabulary)")
    return MegatronTokens(tokens, lengths, pointers // dtype.itemsize, documents)
