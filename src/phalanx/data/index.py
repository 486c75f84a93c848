"""The index of prepared tokens, index.json: which shards there are, what they were made from, and its validation."""

from __future__ import annotations

import hashlib
import json
import re
import shlex
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from phalanx.bounded import read_bytes, read_json
from phalanx.config.values import read_as
from phalanx.data.files import SPLITS, write_atomic
from phalanx.data.tokenizer import LARGEST_VOCABULARY, Tokenizer
from phalanx.errors import DataError

INDEX = "index.json"
FORMAT = "phalanx-tokens"
VERSION = 2
ROWS_VERSION = 3
"""Version of an index whose shards hold conversations."""
MIX_VERSION = 4
"""Version of an index of a mixture, whose sources are folders of their own."""
ELSEWHERE_VERSION = 5
"""Version of an index whose tokens lie in a file of another program's data set."""
UNCHECKED_VERSION = 1
"""Version of an index without digests of blocks; its shards are still read."""
TOKENS_VERSION = 1
"""Changes when the same settings give other tokens, and with it the name of the folder."""
BLOCK_BYTES = 64 * 1024
"""Bytes of a block: what one sha256 covers. A sample is a few kilobytes at a random place, whose block is read and
hashed whole (0.04 ms) when it is first read."""
MAX_BLOCK_BYTES = 64 * 1024 * 1024
DTYPES = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4"), "uint8": np.dtype("u1"), "uint64": np.dtype("<u8")}
"""Those of shards that are written are the first two."""


@dataclass(frozen=True)
class Shard:
    """One file of tokens. `file` is its name without a folder."""

    file: str
    tokens: int
    bytes: int
    sha256: str
    blocks: str = ""
    """sha256 of the file with the digests of its blocks; empty if there is none."""
    conversations: int = 0
    """Conversations in the shard, in an index of conversations."""
    answers: int = 0
    """Tokens of answers that another token comes before: those that a model can learn."""
    table: str = ""
    """sha256 of the file with the lengths of its conversations; empty if it holds none."""

    def block_count(self, block_bytes: int) -> int:
        """Returns the number of blocks of `block_bytes` bytes; the last one may be shorter."""
        return -(-self.bytes // block_bytes)


@dataclass(frozen=True)
class CorpusRecord:
    """The corpus and settings that the shards were made from."""

    name: str
    description: str
    documents: int
    characters: int
    bytes: int
    sha256: str
    stamp: str
    """corpus.stamp of the source files; empty if the corpus is determined by its name."""


@dataclass(frozen=True)
class SourceRecord:
    """One source of a mixture, as it was prepared."""

    folder: str
    """The name of its folder of shards, which lies beside that of the mixture."""
    fingerprint: str
    """That of its index."""
    tokens: dict[str, int]
    """Its tokens by split."""


@dataclass(frozen=True)
class Index:
    """The content of index.json: a full description of a folder of shards."""

    settings: tuple[str, ...]
    """The data.* overrides that produce these shards."""
    corpus: CorpusRecord
    tokenizer: str
    """Fingerprint of the tokenizer.json beside the index."""
    vocab_size: int
    dtype: str
    splits: dict[str, tuple[Shard, ...]]
    complete: bool
    """False until all shards are written."""
    block_bytes: int = BLOCK_BYTES
    """Bytes per block of a shard; 0 if blocks have no digests (version 1)."""
    row_size: int = 0
    """Conversations per row of the data set: 1, or 2 for preferences (version 3); 0 if the shards hold a text."""
    sources: tuple[SourceRecord, ...] = ()
    """The sources of a mixture, which has no shards of its own (version 4)."""
    elsewhere: str = ""
    """The absolute path of the file that holds the tokens of all splits one after the other, which is read as it is
    (version 5); empty: each shard is a file of the folder."""

    @property
    def itemsize(self) -> int:
        """Bytes per token."""
        return DTYPES[self.dtype].itemsize

    @property
    def fingerprint(self) -> str:
        """sha256 (hex) over the tokenizer and the tokens of all splits: equal fingerprints mean equal training data."""
        digests = [[shard.sha256 for shard in self.splits[split]] for split in SPLITS]
        content: list[object] = [self.tokenizer, self.vocab_size, digests]
        if self.row_size:
            content.append([self.row_size, *(shard.table for split in SPLITS for shard in self.splits[split])])
        if self.sources:
            content.append([source.fingerprint for source in self.sources])
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()

    def tokens(self, split: str) -> int:
        """Returns the number of tokens in a split."""
        own = sum(shard.tokens for shard in self.splits[split])
        return own + sum(source.tokens[split] for source in self.sources)

    @property
    def version(self) -> int:
        """The version of the format that the index needs."""
        if self.sources or self.elsewhere:
            return MIX_VERSION if self.sources else ELSEWHERE_VERSION
        return ROWS_VERSION if self.row_size else VERSION

    @property
    def shards(self) -> list[Shard]:
        """The shards of all splits, in order."""
        return [shard for split in SPLITS for shard in self.splits[split]]

    def place_of(self, folder: Path, shard: Shard) -> tuple[Path, int]:
        """Returns the file that holds the tokens of a shard, and the byte at which they begin."""
        if not self.elsewhere:
            return folder / shard.file, 0
        before = self.shards[: [each.file for each in self.shards].index(shard.file)]
        return Path(self.elsewhere), sum(each.bytes for each in before)

    def folders(self, folder: Path) -> list[Path]:
        """Returns the folders of the shards: those of the sources of a mixture, otherwise the index's own `folder`."""
        return [folder.parent / source.folder for source in self.sources] or [folder]


def dtype_for(vocab_size: int) -> str:
    """Returns the smallest dtype that holds every id."""
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


def shard_file(split: str, number: int) -> str:
    """Returns the file name of a split's shard."""
    return f"{split}-{number:05d}.bin"


def write_index(folder: Path, index: Index) -> None:
    """Writes index.json."""
    stored = {"format": FORMAT, "version": index.version, **asdict(index)}
    if not index.sources:
        del stored["sources"]
    if not index.elsewhere:
        del stored["elsewhere"]
    if not index.row_size:  # shards of a text are described as before there were others
        del stored["row_size"]
        for shard in (shard for shards in stored["splits"].values() for shard in shards):
            del shard["conversations"], shard["answers"], shard["table"]
    write_atomic(folder / INDEX, (json.dumps(stored, indent=1, ensure_ascii=False) + "\n").encode())


def read_index(folder: Path) -> Index:
    """Returns the index of `folder`, checked for consistency but not against the shards. Raises DataError."""
    path = folder / INDEX
    try:
        stored = read_json(path)
    except OSError as error:
        raise DataError(
            f"cannot read {path}: {error.strerror}. Make it with: {repair_command(folder, None)}"
        ) from error
    except ValueError as error:
        raise DataError(f"{path} is not JSON: {error}. Make it again with: {repair_command(folder, None)}") from error
    found = (stored.get("format"), stored.get("version")) if isinstance(stored, dict) else (type(stored).__name__, None)
    if found not in [(FORMAT, version) for version in range(UNCHECKED_VERSION, ELSEWHERE_VERSION + 1)]:
        raise DataError(
            f"{path}: expected format {FORMAT!r} version {VERSION}, found {found[0]!r} version {found[1]!r}. Make the "
            f"shards again with: {repair_command(folder, None)}"
        )
    try:
        return _parse(stored)
    except ValueError as error:
        raise DataError(
            f"{path} is not a valid index: {error}. Make it again with: {repair_command(folder, None)}"
        ) from error


def repair_command(folder: Path, index: Index | None, *, switch: str = "--force") -> str:
    """Returns the command that builds the shards of `folder` again, or with another switch completes or checks them."""
    settings = [*index.settings, f"data.dir={folder.parent}"] if index else ["JOB.yaml"]
    return shlex.join(["phalanx", "data", "prepare", *([switch] if switch else []), *settings])


def _parse(stored: dict[str, Any]) -> Index:
    """Returns the index of parsed JSON. Raises ValueError with a readable message."""
    version, splits = stored["version"], stored.get("splits")
    given = {name: each for name, each in stored.items() if name not in ("format", "version")}
    if isinstance(splits, dict):
        if absent := [split for split in SPLITS if split not in splits]:
            raise ValueError(f"splits: {absent[0]} is missing")
        given["splits"] = {split: splits[split] for split in SPLITS}
    for name, since in (("row_size", ROWS_VERSION), ("sources", MIX_VERSION), ("elsewhere", ELSEWHERE_VERSION)):
        if version != since:
            given.pop(name, None)
        elif name not in given:
            raise ValueError(f"{name} is missing")
    if version == UNCHECKED_VERSION:
        given["block_bytes"] = 0
    elif "block_bytes" not in given:
        raise ValueError("block_bytes is missing")
    index = read_as(Index, given, more=True)
    dtype, block_bytes, row_size = index.dtype, index.block_bytes, index.row_size
    if dtype not in DTYPES or not 1 <= index.vocab_size <= LARGEST_VOCABULARY:
        raise ValueError(
            f"dtype {dtype!r}, vocab_size {index.vocab_size}: expected one of {list(DTYPES)}, and 1 to "
            f"{LARGEST_VOCABULARY}"
        )
    if version != UNCHECKED_VERSION and (block_bytes % 16 or not 0 < block_bytes <= MAX_BLOCK_BYTES):
        raise ValueError(f"block_bytes {block_bytes}: expected a multiple of 16, at most {MAX_BLOCK_BYTES}")
    if version == ROWS_VERSION and not (row_size in (1, 2) and dtype == "uint32"):
        raise ValueError(f"row_size {row_size}, dtype {dtype!r}: expected 1 or 2, and 'uint32'")
    for split, shards in index.splits.items():
        for number, shard in enumerate(shards):
            _check_shard(split, number, shard, index)
    for source in index.sources:
        if source.folder in ("", ".", "..") or "/" in source.folder or "\0" in source.folder:
            raise ValueError(f"source {source.folder!r}: expected the name of a folder beside this one")
        if set(source.tokens) != {*SPLITS} or min(source.tokens.values()) < 0:
            raise ValueError(f"source {source.folder}: {source.tokens} tokens")
    return index


def _check_shard(split: str, number: int, shard: Shard, index: Index) -> None:
    """Raises ValueError if a shard is none of the index."""
    # The name is derived, so that no index can lead a reader out of its folder.
    if shard.file != shard_file(split, number):
        raise ValueError(f"{split} shard {number} is called {shard.file!r}, expected {shard_file(split, number)!r}")
    if shard.tokens < 0 or shard.bytes != shard.tokens * index.itemsize:
        raise ValueError(f"{shard.file}: {shard.bytes} bytes are not {shard.tokens} tokens of {index.itemsize} bytes")
    if index.row_size and not 0 <= shard.conversations * index.row_size <= shard.tokens:
        raise ValueError(f"{shard.file}: {shard.conversations} conversations in {shard.tokens} tokens")
    blocks, table = [shard.blocks] if index.block_bytes else [], [shard.table] if index.row_size else []
    for digest in (shard.sha256, *blocks, *table):
        if not re.fullmatch("[0-9a-f]{64}", digest):
            raise ValueError(f"{shard.file}: {digest!r} is not a sha256")


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


@dataclass(frozen=True)
class EncodedRows:
    """The tokens of consecutive conversations."""

    tokens: np.ndarray
    """(tokens,) uint32: the ids, and the bit ANSWER where the token is an answer's."""
    table: np.ndarray
    """(conversations, 2): the lengths that `write_table` writes."""
