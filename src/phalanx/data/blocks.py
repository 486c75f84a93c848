"""Reads token shards block by block; each block is compared with its digest when it is first read.

Shards are far larger than what a run reads before its first step, so their digests cannot all be checked at the start.
Beside every shard lies a file with the sha256 of each of its blocks, 32 bytes per block, whose own digest is in the
index. Shards are read by calls, not mapped: reading a mapped file that lost its end or its disk kills the process.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from threading import Lock

import numpy as np

from phalanx.data.index import DIGEST_BYTES, DTYPES, Index, Shard, blocks_file, repair_command
from phalanx.errors import DataError

MAX_OPEN_FILES = 256
"""Shards of one split that are kept open; a process may have 1,024 files by default."""


class SplitReader:
    """Reads the tokens of one split, across its shards. Used by one thread at a time, whichever it is.

    Every reader checks a block once, and again after the file has changed: only damage that comes later to a block that
    was read before, and that leaves the file's times and size alone, is not found. Shards without block digests, of
    version 1, are read unchecked.
    """

    def __init__(self, folder: Path, index: Index, split: str, seq_len: int):
        self.folder, self.index, self.split, self.seq_len = folder, index, split, seq_len
        self.shards = index.splits[split]
        self.dtype = DTYPES[index.dtype]
        self.starts = np.cumsum([0, *(shard.tokens for shard in self.shards)])
        """The first token of each shard within the split, and the end of the last one."""
        self._files: dict[int, int] = {}
        self._digests: dict[int, bytes] = {}
        self._checked: dict[int, bytearray] = {}
        """By shard: 1 for each block that was found whole."""
        self._states: dict[int, tuple[int, int, int]] = {}
        """By shard: times of modification and change, and bytes of the file when it was last read."""
        self._lock = Lock()

    def __del__(self) -> None:
        for file in self._files.values():
            os.close(file)

    def read(self, first: int, count: int) -> np.ndarray:
        """Returns the tokens first .. first+count-1 of the split: (count,) of the shards' dtype, read-only.

        Raises DataError, which names shard, block, offset and samples, if a block is damaged or cannot be read."""
        parts = []
        shard = int(np.searchsorted(self.starts, first, side="right")) - 1
        with self._lock:
            while count:
                start = first - int(self.starts[shard])
                taken = min(count, self.shards[shard].tokens - start)
                if taken:
                    parts.append(self._read(shard, start, taken))
                first, count, shard = first + taken, count - taken, shard + 1
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def problem(self, shard: int, block: int) -> str:
        """Returns what is wrong with a block, or "" if it is whole."""
        size = self.index.block_bytes
        content = self._pread(shard, block * size, min(size, self.shards[shard].bytes - block * size))
        return self._mismatch(shard, block, content)

    def samples_of(self, shard: int, block: int, before: int = 0) -> range:
        """Returns the samples of the split that read a token of the block; they also read `before` tokens before their
        own."""
        first, end = self._tokens_of(shard, block)
        # Sample i is tokens i × seq_len to (i + 1) × seq_len, both included.
        last = (end - 1 + before) // self.seq_len
        return range(max(0, -(-first // self.seq_len) - 1), min(last + 1, self._sample_count))

    @property
    def _sample_count(self) -> int:
        return (int(self.starts[-1]) - 1) // self.seq_len

    def _read(self, shard: int, start: int, count: int) -> np.ndarray:
        """Returns tokens of one shard, from its token `start` on."""
        size, itemsize = self.index.block_bytes, self.dtype.itemsize
        begin, end = start * itemsize, (start + count) * itemsize
        if not size:
            return np.frombuffer(self._pread(shard, begin, end - begin), self.dtype)
        self._notice_change(shard)
        checked = self._checked.get(shard)
        if checked is None:
            checked = self._checked[shard] = bytearray(self.shards[shard].block_count(size))
        low, high = begin // size, -(-end // size)
        if 0 not in checked[low:high]:
            return np.frombuffer(self._pread(shard, begin, end - begin), self.dtype)
        base = low * size
        content = memoryview(self._pread(shard, base, min(high * size, self.shards[shard].bytes) - base))
        for block in range(low, high):
            if checked[block]:
                continue
            if problem := self._mismatch(shard, block, content[block * size - base : (block + 1) * size - base]):
                raise DataError(self._message(shard, block, problem))
            checked[block] = 1
        return np.frombuffer(content[begin - base : end - base], self.dtype)

    def _notice_change(self, shard: int) -> None:
        """Forgets which blocks were found whole if somebody has written to the file since."""
        try:
            status = os.fstat(self._file(shard))
        except OSError:
            return  # reading it says why
        state = status.st_mtime_ns, status.st_ctime_ns, status.st_size
        if self._states.get(shard) != state:
            self._checked.pop(shard, None)
        self._states[shard] = state

    @cached_property
    def _places(self) -> list[tuple[Path, int]]:
        """The file of each shard, and the byte at which it begins."""
        return [self.index.place_of(self.folder, shard) for shard in self.shards]

    def _file(self, shard: int) -> int:
        """Returns the descriptor of a shard, which is opened if it is not. Raises OSError."""
        file = self._files.get(shard)
        if file is None:
            if len(self._files) >= MAX_OPEN_FILES:
                os.close(self._files.pop(next(iter(self._files))))
            file = self._files[shard] = os.open(self._places[shard][0], os.O_RDONLY | os.O_CLOEXEC)
        return file

    def _mismatch(self, shard: int, block: int, content: bytes | memoryview) -> str:
        digests = self._digests.get(shard)
        if digests is None:
            digests = self._digests[shard] = read_digests(self.folder, self.index, self.shards[shard])
        expected = digests[block * DIGEST_BYTES :][:DIGEST_BYTES]
        found = hashlib.sha256(content).digest()
        if found == expected:
            return ""
        return f"expected sha256 {expected.hex()[:16]}…, found {found.hex()[:16]}…{self._origin(shard, block, found)}"

    def _pread(self, shard: int, offset: int, size: int) -> bytes:
        path, start = self._places[shard]
        offset += start
        try:
            file = self._file(shard)
            content = os.pread(file, size, offset)
            while 0 < len(content) < size:  # a read may return less, as after a signal
                more = os.pread(file, size - len(content), offset + len(content))
                if not more:
                    break
                content += more
        except OSError as error:
            raise DataError(f"{path}: cannot read {size:,} bytes from byte {offset:,} on: {error.strerror}") from error
        if len(content) < size:
            raise DataError(
                f"{path}: the shard ends after {offset + len(content):,} bytes, expected "
                f"{start + self.shards[shard].bytes:,}. "
                f"Make it again with: {repair_command(self.folder, self.index)}"
            )
        return content

    def _tokens_of(self, shard: int, block: int) -> tuple[int, int]:
        """Returns the first token of a block within the split, and the end of its last one."""
        first, tokens = int(self.starts[shard]), self.index.block_bytes // self.dtype.itemsize
        return first + block * tokens, min(first + (block + 1) * tokens, int(self.starts[shard + 1]))

    def _message(self, shard: int, block: int, problem: str) -> str:
        first, end = self._tokens_of(shard, block)
        samples, begin = self.samples_of(shard, block), block * self.index.block_bytes
        within = "" if self.index.row_size else f", in samples {samples.start:,} to {samples.stop - 1:,}"
        path, start = self._places[shard]
        return (
            f"{path}: block {block} (from byte {start + begin:,} on) is damaged: {problem}. It holds tokens "
            f"{first:,} to {end - 1:,} of split {self.split}{within}. Restore the "
            f"file, or make it again with: {repair_command(self.folder, self.index)}"
        )

    def _origin(self, shard: int, block: int, found: bytes) -> str:
        """Returns which other shard of the same size has this block at this place: the files were exchanged."""
        for others in self.index.splits.values():
            for other in others:
                if other.bytes != self.shards[shard].bytes or other is self.shards[shard]:
                    continue
                try:
                    with (self.folder / blocks_file(other.file)).open("rb") as file:
                        file.seek(block * DIGEST_BYTES)
                        if file.read(DIGEST_BYTES) == found:
                            return f", which is this block of {other.file}"
                except OSError:
                    continue
        return ""


def read_digests(folder: Path, index: Index, shard: Shard) -> bytes:
    """Returns the digests of a shard's blocks, one after the other. Raises DataError unless they are those of the
    index."""
    path = folder / blocks_file(shard.file)
    try:
        with path.open("rb") as file:
            content = file.read(shard.block_count(index.block_bytes) * DIGEST_BYTES + 1)
    except OSError as error:
        problem = f"cannot be read: {error.strerror}"
    else:
        found = hashlib.sha256(content).hexdigest()
        if found == shard.blocks:
            return content
        problem = f"expected sha256 {shard.blocks}, found {found}"
    raise DataError(
        f"{path}: the digests of the blocks of {shard.file}: {problem}. Make them again with: "
        f"{repair_command(folder, index)}"
    )


def split_blocks(shards: Sequence[Shard], block_bytes: int) -> list[tuple[int, int]]:
    """Returns every block of a split as (shard, block)."""
    return [(number, block) for number, shard in enumerate(shards) for block in range(shard.block_count(block_bytes))]
