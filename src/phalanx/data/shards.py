"""Token shards: the files of prepared tokens, with their reader, writer and validation. See docs/guides/data.md."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import numpy as np

from phalanx.bounded import read_bytes
from phalanx.data.files import write_atomic
from phalanx.data.index import (
    BLOCK_BYTES,
    DTYPES,
    SPLITS,
    Index,
    Shard,
    read_index,
    repair_command,
    write_index,
)
from phalanx.data.tokenizer import Tokenizer
from phalanx.errors import DataError

TOKEN_SHARD_TOKENS = 1 << 22
"""Tokens per shard of a corpus without text."""
DIGEST_BYTES = 32
ANSWER = 1 << 31
"""The bit of a stored token of a conversation that says that it is an answer's."""


def blocks_file(file: str) -> str:
    """Returns the name of the file with the digests of a shard's blocks."""
    return file.removesuffix(".bin") + ".blocks"


def table_file(file: str) -> str:
    """Returns the name of the file with the lengths of a shard's conversations."""
    return file.removesuffix(".bin") + ".rows"


def write_shard(folder: Path, file: str, tokens: np.ndarray, dtype: str, block_bytes: int = BLOCK_BYTES) -> Shard:
    """Writes one shard and the digests of its blocks, each atomically, and returns its record."""
    content = tokens.astype(DTYPES[dtype]).tobytes()
    blocks = _write_blocks(folder, file, content, block_bytes)
    write_atomic(folder / file, content)
    return Shard(file, tokens.size, len(content), hashlib.sha256(content).hexdigest(), blocks)


def write_table(folder: Path, shard: Shard, table: np.ndarray) -> Shard:
    """Writes the lengths of a shard's conversations, (conversations, 2): tokens, and those of answers that another
    token comes before. Returns the shard's record with them."""
    content = table.astype("<u4").tobytes()
    write_atomic(folder / table_file(shard.file), content)
    digest = hashlib.sha256(content).hexdigest()
    return replace(shard, conversations=len(table), answers=int(table[:, 1].sum(dtype=np.int64)), table=digest)


def read_table(folder: Path, index: Index, shard: Shard) -> np.ndarray:
    """Returns the lengths of a shard's conversations as `write_table` writes them: (conversations, 2) int64. Raises
    DataError unless it is the table of the index."""
    try:
        return _table(folder, shard)
    except ValueError as error:
        raise DataError(f"{error}. Make it again with: {repair_command(folder, index)}") from error


def _table(folder: Path, shard: Shard) -> np.ndarray:
    """Returns what `read_table` returns. Raises ValueError with what is wrong."""
    path = folder / table_file(shard.file)
    try:
        content = read_bytes(path, shard.conversations * 8)
    except OSError as error:
        raise ValueError(f"{path} (lengths of the conversations of {shard.file}): {error.strerror}") from error
    if (found := hashlib.sha256(content).hexdigest()) != shard.table:
        raise ValueError(f"{path}: expected sha256 {shard.table}, found {found}")
    table = np.frombuffer(content[: len(content) // 8 * 8], "<u4").reshape(-1, 2).astype(np.int64)
    sums, expected = (len(table), *table.sum(axis=0).tolist()), (shard.conversations, shard.tokens, shard.answers)
    if sums != expected:
        raise ValueError(f"{path}: expected (conversations, tokens, answers) {expected}, found {sums}")
    return table


def _write_blocks(folder: Path, file: str, content: bytes, block_bytes: int) -> str:
    """Writes the digests of a shard's blocks, and returns their own digest."""
    view = memoryview(content)
    starts = range(0, len(content), block_bytes)
    digests = b"".join(hashlib.sha256(view[start : start + block_bytes]).digest() for start in starts)
    write_atomic(folder / blocks_file(file), digests)
    return hashlib.sha256(digests).hexdigest()


def add_block_digests(folder: Path, index: Index) -> Index:
    """Writes the digests of the blocks of shards that have none (version 1), and returns the index of version 2.

    Raises DataError if a shard is not the one in the index, or if the folder cannot be written."""

    def with_blocks(shard: Shard) -> Shard:
        content = (folder / shard.file).read_bytes()
        if (found := hashlib.sha256(content).hexdigest()) != shard.sha256:
            raise DataError(f"{folder / shard.file}: expected sha256 {shard.sha256}, found {found}")
        return replace(shard, blocks=_write_blocks(folder, shard.file, content, BLOCK_BYTES))

    try:
        splits = {split: tuple(with_blocks(shard) for shard in shards) for split, shards in index.splits.items()}
        checked = replace(index, splits=splits, block_bytes=BLOCK_BYTES)
        write_index(folder, checked)
    except OSError as error:
        raise DataError(f"cannot add digests of blocks to the shards in {folder}: {error.strerror}") from error
    return checked


def open_shards(folder: Path, *, verify: bool = False) -> Index:
    """Returns the index of a finished folder of shards, after checking the size of every shard; with `verify` also the
    digests, the tokens' range and the tokenizer. Of a mixture also every source is opened.

    Raises DataError with the file, the expected and the actual value, and the command that repairs it.
    """
    index = read_index(folder)
    if not index.complete:
        raise DataError(
            f"{folder}: the shards are not finished. Resume with: {repair_command(folder, index, switch='')}"
        )
    for shard in (shard for split in SPLITS for shard in index.splits[split]):
        problem = damage(folder, index, shard, verify=verify)
        if problem:
            raise DataError(f"{problem}. Make it again with: {repair_command(folder, index)}")
    if verify:
        check_tokenizer(folder, index)
    for source in index.sources:
        found = open_shards(folder.parent / source.folder, verify=verify)
        if (found.fingerprint, found.tokenizer) != (source.fingerprint, index.tokenizer) or found.sources:
            raise DataError(
                f"{folder.parent / source.folder} is not as it was when the mixture {folder} was prepared: expected "
                f"fingerprint {source.fingerprint[:16]}…, found {found.fingerprint[:16]}…. Prepare it again with: "
                f"{repair_command(folder, index, switch='')}"
            )
    return index


def damage(folder: Path, index: Index, shard: Shard, *, verify: bool) -> str | None:
    """Returns a description of the damage to a shard's file, or None."""
    path, start = index.place_of(folder, shard)
    expected = sum(each.bytes for each in index.shards) if index.elsewhere else shard.bytes
    if not path.is_file():
        return f"{path}: the shard is missing (expected {expected:,} bytes)"
    size = path.stat().st_size
    if size != expected:
        return f"{path}: expected {expected:,} bytes, found {size:,}"
    if index.block_bytes and (problem := _damaged_blocks(folder, index, shard, verify=verify)):
        return problem
    if index.row_size:
        try:
            _table(folder, shard)
        except ValueError as error:
            return str(error)
    if not verify:
        return None
    digest = _range_digest(path, start, shard.bytes)
    if digest != shard.sha256:
        return f"{path}: expected sha256 {shard.sha256}, found {digest}"
    largest = int(token_ids(map_shard(folder, index, shard), index).max(initial=0))
    if largest >= index.vocab_size:
        return f"{path}: expected tokens below the vocabulary size {index.vocab_size}, found {largest}"
    return None


def _range_digest(path: Path, start: int, size: int) -> str:
    """Returns the sha256 of `size` bytes of a file from byte `start` on."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        file.seek(start)
        while size and (content := file.read(min(size, 1 << 24))):
            digest.update(content)
            size -= len(content)
    return digest.hexdigest()


def _damaged_blocks(folder: Path, index: Index, shard: Shard, *, verify: bool) -> str | None:
    path, expected = folder / blocks_file(shard.file), shard.block_count(index.block_bytes) * DIGEST_BYTES
    if not path.is_file():
        return f"{path}: the digests of the blocks of {shard.file} are missing (expected {expected:,} bytes)"
    size = path.stat().st_size
    if size != expected:
        return f"{path}: expected {expected:,} bytes, found {size:,}"
    if verify and (digest := hashlib.sha256(path.read_bytes()).hexdigest()) != shard.blocks:
        return f"{path}: expected sha256 {shard.blocks}, found {digest}"
    return None


def check_tokenizer(folder: Path, index: Index) -> None:
    """Raises DataError unless the tokenizer.json in `folder` is the one that made the shards."""
    found = Tokenizer.load(folder).fingerprint
    if found != index.tokenizer:
        raise DataError(
            f"{folder}: tokenizer.json is not the one that made the shards: expected fingerprint {index.tokenizer}, "
            f"found {found}. Make both again with: {repair_command(folder, index)}"
        )


def map_shard(folder: Path, index: Index, shard: Shard) -> np.ndarray:
    """Returns a shard's tokens, memory-mapped and read-only: (tokens,)."""
    dtype = DTYPES[index.dtype]
    if not shard.tokens:  # an empty file cannot be mapped
        return np.empty(0, dtype)
    path, start = index.place_of(folder, shard)
    return np.memmap(path, dtype=dtype, mode="r", offset=start, shape=(shard.tokens,))


def token_ids(stored: np.ndarray, index: Index) -> np.ndarray:
    """Returns the ids of stored tokens, which in conversations also say whether they are an answer's."""
    return stored & (ANSWER - 1) if index.row_size else stored
