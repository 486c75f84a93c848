"""Reads the micro-batches of each step from token shards.

A global sample number alone determines its sample (`samples_of`): the result is the same at any number of ranks, and
resuming needs only `first_sample`. Every rank reads only its own samples, and checks the blocks that hold them.

Shards are far larger than what a run reads before its first step, so their digests cannot all be checked at the start:
each block is compared with its digest when it is first read. Beside every shard lies a file with the sha256 of each of
its blocks, 32 bytes per block, whose own digest is in the index. Shards are read by calls, not mapped: reading a mapped
file that lost its end or its disk kills the process.
"""

from __future__ import annotations

import hashlib
import math
import os
import queue
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Collection, Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from threading import Lock
from types import TracebackType
from typing import Generic, TypeVar

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from phalanx.config.job import IGNORE
from phalanx.data.files import SPLITS, write_atomic
from phalanx.data.index import (
    DIGEST_BYTES,
    DTYPES,
    Index,
    Shard,
    blocks_file,
    check_tokenizer,
    open_shards,
    repair_command,
)
from phalanx.data.tokenizer import Tokenizer
from phalanx.errors import DataError, JobError
from phalanx.partition.derived import Batch
from phalanx.partition.ramp import Ramp, RampPhase

SEARCHED = 1 << 22
"""Tokens that are searched for documents at a time."""
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
        return range(max(0, -(-first // self.seq_len) - 1), min(last + 1, (int(self.starts[-1]) - 1) // self.seq_len))

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


ROUNDS = 8
"""Feistel rounds, each with a 64-bit key: together they use one blake2b digest."""


def order_key(seed: int, epoch: int) -> bytes:
    """Returns the 64-byte key of one epoch's order, hashed from (seed, "order", epoch)."""
    return hashlib.blake2b(f"{seed}/order/{epoch}".encode(), digest_size=8 * ROUNDS).digest()


def permute(index: np.ndarray, n: int, key: bytes) -> np.ndarray:
    """Returns the images of `index` (any shape) under the permutation of [0, n) chosen by `key` (64 bytes), in int64.

    Raises ValueError if an index lies outside [0, n).
    """
    index = np.asarray(index)
    if index.size and (index.min() < 0 or index.max() >= n):
        raise ValueError(f"an index to permute lies outside [0, {n}): {index.min()} .. {index.max()}")
    side = np.uint64(math.isqrt(max(n - 1, 0)) + 1)  # the least a with a² >= n
    keys = np.frombuffer(key, dtype="<u8")
    values = index.reshape(-1).astype(np.uint64)
    outside = np.arange(values.size)
    while outside.size:
        values[outside] = _encipher(values[outside], side, keys)
        outside = outside[values[outside] >= n]
    return values.astype(np.int64).reshape(index.shape)


def sample_ids(first: int, count: int, n: int, seed: int) -> np.ndarray:
    """Returns which of `n` samples the global sample numbers first .. first+count-1 stand for, as `samples_of`."""
    return samples_of(np.arange(first, first + count, dtype=np.int64), n, seed)


def samples_of(numbers: np.ndarray, n: int, seed: int) -> np.ndarray:
    """Returns which of `n` samples global sample numbers stand for: (count,) int64.

    Global sample number g lies in epoch g // n; every epoch visits each of the n samples once, in its own order.
    """
    ids = np.empty(numbers.size, dtype=np.int64)
    epochs = numbers // n
    for epoch in np.unique(epochs):
        chosen = epochs == epoch
        ids[chosen] = permute(numbers[chosen] % n, n, order_key(seed, int(epoch)))
    return ids


def _encipher(values: np.ndarray, side: np.uint64, keys: np.ndarray) -> np.ndarray:
    left, right = values // side, values % side
    for key in keys:
        left, right = right, (left + _mix(right ^ key) % side) % side
    return left * side + right


def _mix(values: np.ndarray) -> np.ndarray:
    """Applies the finalizer of SplitMix64 (Steele, Lea, Flood 2014): every input bit affects every output bit."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


T = TypeVar("T")

_LAST_ITEM_S = 2.0  # a reader that slow storage blocks for longer is left behind: it is a daemon


@dataclass(frozen=True)
class _End:
    """The last entry of the queue: the items ended, were closed, or raised."""

    error: BaseException | None = None


class ReadAhead(Generic[T]):
    """An iterator over `items` that prefetches at most `depth` of them.

    An exception raised by `items` is raised here, in its turn. `close`, or dropping the last reference, ends the thread
    as soon as the item in progress is done.
    """

    def __init__(self, items: Iterator[T], depth: int):
        self._ready: queue.SimpleQueue[T | _End] = queue.SimpleQueue()
        self._seen: list[T | _End] = []  # the next item, once `wait` has found it
        self._free = threading.Semaphore(depth)
        self._stop = threading.Event()
        # The thread holds no reference to self, or self would live as long as the thread.
        arguments = (items, self._ready, self._free, self._stop)
        self._thread = threading.Thread(target=_fill, args=arguments, name="read-ahead", daemon=True)
        self._signal = weakref.finalize(self, _signal, self._free, self._stop)
        self._thread.start()

    def __iter__(self) -> ReadAhead[T]:
        return self

    def __next__(self) -> T:
        if self._stop.is_set():
            raise StopIteration
        item = self._seen.pop() if self._seen else self._ready.get()
        if isinstance(item, _End):
            self.close()
            raise item.error or StopIteration
        self._free.release()
        return item

    def wait(self, seconds: float) -> bool:
        """Waits until the next item can be taken without waiting, at most `seconds`; returns whether it can."""
        if not self._seen and not self._stop.is_set():
            try:
                self._seen.append(self._ready.get(timeout=seconds))
            except queue.Empty:
                return False
        return True

    def close(self) -> None:
        """Stops reading, waits for the thread and drops prefetched items; the next item raises StopIteration.

        A thread that stays in one item for longer than two seconds, on slow storage, ends after it."""
        self._signal()
        self._thread.join(_LAST_ITEM_S)


def _fill(
    items: Iterator[T], ready: queue.SimpleQueue[T | _End], free: threading.Semaphore, stop: threading.Event
) -> None:
    try:
        free.acquire()
        while not stop.is_set():
            ready.put(next(items))
            free.acquire()
    except StopIteration:
        pass
    except BaseException as error:
        ready.put(_End(error))
    ready.put(_End())


def _signal(free: threading.Semaphore, stop: threading.Event) -> None:
    stop.set()
    free.release()


@dataclass(frozen=True)
class MicroBatch:
    """The data that one forward pass of one data rank reads."""

    tokens: np.ndarray
    """(micro_batch, seq_len) int64."""
    targets: np.ndarray
    """(micro_batch, seq_len) int64: the next token at every position, or IGNORE."""
    sample_ids: np.ndarray
    """(micro_batch,) int64: global sample numbers, each used once in a run; -1 for padding."""
    documents: np.ndarray | None = None
    """(micro_batch, seq_len) int64: the document number of each token within its sample, from 0; None if attention may
    cross documents."""
    reference: np.ndarray | None = None
    """(micro_batch,) float64: of preference pairs, the log-probability of each sequence's answer by the reference
    model; NaN for padding."""
    policy: np.ndarray | None = None
    """(micro_batch, seq_len, 4) float64, of sampled completions: each target's log-probability by the policy that
    generated it and by the reference model, its sequence's advantage, and its weight in the mean over sequences."""
    conversations: np.ndarray | None = None
    """(micro_batch, seq_len) int64: the number of each position's conversation within its sample, from 0; -1 for
    padding; None if every sample is one without padding."""
    most_conversations: int = 1
    """The most conversations of any sample of the split, the same on all ranks."""
    valid_share: float = 1.0
    """Valid targets / positions that are no padding, of all that one update covers: the same on all its ranks."""

    def cut(self, parts: int) -> MicroBatch:
        """Returns the micro-batch of texts with each sample cut into equal parts, which are samples of their own."""
        if parts == 1:
            return self

        def rows(values: np.ndarray) -> np.ndarray:
            return values.reshape(len(values) * parts, -1)

        ids = (self.sample_ids[:, None] * parts + np.arange(parts)).reshape(-1)
        documents = None if self.documents is None else rows(self.documents)
        return replace(self, tokens=rows(self.tokens), targets=rows(self.targets), sample_ids=ids, documents=documents)


class ShardData(ABC):
    """The samples of one split of a prepared folder, by number. For a sample that is `damaged` the next whole one is
    read. Subclasses set `sample_count` and say what a sample is.

    Raises DataError if the folder is damaged (`verify` reads everything to check)."""

    group = 1
    """Consecutive samples that belong together: a micro-batch holds a multiple of them."""
    document_mask = False
    """Whether micro-batches contain the document number of each token."""
    most_conversations = 0
    """The most conversations of a sample; 0 if samples are no conversations, and have no padding. A text among them is
    one."""

    def __init__(self, folder: Path, split: str, seq_len: int, *, verify: bool = False):
        if split not in SPLITS:
            raise DataError(f"split {split!r}: expected one of {', '.join(SPLITS)}")
        self.folder, self.split, self.seq_len = folder, split, seq_len
        self.index = open_shards(folder, verify=verify)
        self.tokens = self.index.tokens(split)
        self.sample_count = 0
        self.replacements: dict[int, int] = {}

    @property
    def vocab_size(self) -> int:
        """The exclusive upper bound of token ids."""
        return self.index.vocab_size

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that made the shards. Raises DataError if the folder contains a different one."""
        check_tokenizer(self.folder, self.index)
        return Tokenizer.load(self.folder)

    @cached_property
    def _reader(self) -> SplitReader:
        return SplitReader(self.folder, self.index, self.split, self.seq_len)

    def read(self, first: int, count: int) -> np.ndarray:
        """Returns the tokens first .. first+count-1 of the split, across shards: (count,) of the shards' dtype."""
        if first < 0 or count < 1 or first + count > self.tokens:
            raise ValueError(f"{count} tokens from {first} on, of {self.tokens}")
        return self._reader.read(first, count)

    def readable(self, ids: np.ndarray) -> np.ndarray:
        """Returns the samples that are read for `ids`: the same, but for damaged ones: (n,) int64."""
        if not self.replacements:
            return ids
        return np.array([self.replacements.get(sample, sample) for sample in ids.tolist()], dtype=np.int64)

    def order(self, first: int, count: int, seed: int) -> np.ndarray:
        """Returns the samples that the global sample numbers first .. first+count-1 stand for: (count,) int64."""
        return self.order_of(np.arange(first, first + count, dtype=np.int64), seed)

    def order_of(self, numbers: np.ndarray, seed: int) -> np.ndarray:
        """Returns the samples that global sample numbers stand for: (n,) int64."""
        return self.readable(samples_of(numbers, self.sample_count, seed))

    def parts(self, samples: int) -> list[tuple[str, float, ShardData, int]]:
        """Returns what a validation over so many samples reads: name, weight, data and number of samples of each source
        of a mixture, or all at once."""
        return [("", 1.0, self, samples)]

    def source_tokens(self, end: int, seed: int) -> dict[str, int]:
        """Returns the tokens that count in the loss of each source of a mixture, by path, in the global sample numbers
        below `end`; nothing of other data."""
        return {}

    def source_facts(self) -> list[dict[str, float | str]]:
        """Returns what each source of a mixture is: its path, its weight as a share of all, and its tokens in one
        pass."""
        return []

    def epoch_problems(self, samples: int) -> list[str]:
        """Returns the sources of a mixture that a run of so many samples reads more often than the job allows."""
        return []

    def spread(self, ids: np.ndarray, samples: int) -> np.ndarray:
        """Returns the `ids`-th of `samples` samples that are spaced evenly over the split: (n,) int64."""
        return ids * self.sample_count // samples

    @abstractmethod
    def valid_tokens(self, first: int, count: int, seed: int) -> int:
        """Returns how many targets count in the loss of these global sample numbers, without reading the samples; of
        pairs, whose loss is a mean over them, the number of pairs."""

    def counted_tokens(self, first: int, count: int, seed: int) -> int:
        """Returns how many targets count, also of pairs."""
        return self.valid_tokens(first, count, seed)

    @property
    def tokens_in_pass(self) -> int:
        """How many targets of all samples count."""
        return self.sample_count * self.seq_len

    def refer(self, values: np.ndarray) -> None:
        """Gives the samples of pairs the log-probabilities of their answers by the reference model: (sample_count,)
        float64."""
        raise TypeError(f"{type(self).__name__} holds no pairs")

    def used_positions(self, first: int, count: int, seed: int) -> int:
        """Returns how many positions of these global sample numbers hold tokens, which are all but padding."""
        return count * self.seq_len

    @abstractmethod
    def micro_batch(self, ids: np.ndarray, numbers: np.ndarray) -> MicroBatch:
        """Reads the samples `ids` (n,), whose global sample numbers are `numbers` (n,). Raises DataError if they cannot
        be read."""

    def _require_in_vocabulary(self, largest: int) -> None:
        if largest >= self.vocab_size:
            raise DataError(
                f"{self.folder}: split {self.split} holds token {largest}, expected tokens below the vocabulary size "
                f"{self.vocab_size}: a shard is damaged. Make it again with: {repair_command(self.folder, self.index)}"
            )


class TokenData(ShardData):
    """The samples of a text. Sample i is the tokens from i × seq_len to (i + 1) × seq_len inclusive: the inputs, and
    one more, because the targets are the inputs shifted by one. With `document_mask`, micro-batches contain the
    document number of each token.

    Also raises DataError if the split holds less than one sample, and with `document_mask` if the tokenizer puts no
    separator between documents.
    """

    knows_documents = False
    """Whether something else than the tokenizer's separator tells where documents begin."""

    def __init__(
        self,
        folder: Path,
        split: str,
        seq_len: int,
        *,
        verify: bool = False,
        document_mask: bool = False,
        damaged: Collection[int] = (),
    ):
        super().__init__(folder, split, seq_len, verify=verify)
        self.sample_count = (self.tokens - 1) // seq_len
        if self.sample_count < 1:
            shorter = f"model.seq_len={self.tokens - 1} or less, or " if self.tokens > 1 else "or "
            raise DataError(
                f"{folder}: split {split} of the corpus has {self.tokens:,} tokens, and a sample needs "
                f"seq_len + 1 = {seq_len + 1:,}: use a longer corpus, {shorter}another data.val_fraction"
            )
        self.replacements = _replacements(damaged, self.sample_count)
        self.document_mask = document_mask
        if document_mask and not self.knows_documents and not self.tokenizer.separator:
            raise DataError(
                f"data.document_mask: the tokenizer in {folder} puts no separator between documents; nearest legal: "
                "data.document_mask=false, or a tokenizer with an end-of-text token, such as data.tokenizer=bpe"
            )

    def valid_tokens(self, first: int, count: int, seed: int) -> int:
        # Samples are cut from one stream of tokens, so every position counts.
        return count * self.seq_len

    def samples(self, ids: np.ndarray) -> np.ndarray:
        """Returns the samples' tokens: (n, seq_len + 1) int64. Raises DataError for a token outside the vocabulary."""
        length = self.seq_len + 1
        out = np.empty((len(ids), length), dtype=np.int64)
        for row, sample in zip(out, ids, strict=True):
            row[:] = self.read(int(sample) * self.seq_len, length)
        self._require_in_vocabulary(int(out.max(initial=0)))
        return out

    def documents(self, ids: np.ndarray) -> np.ndarray:
        """Returns the document number of each input token within its sample, from 0: (n, seq_len) int64. A document
        ends with the last token of a separator, which may begin in the sample before."""
        separator = self.tokenizer.separator
        before = len(separator) - 1
        tokens = np.full((len(ids), before + self.seq_len), -1, dtype=np.int64)
        for row, sample in zip(tokens, ids, strict=True):
            start = int(sample) * self.seq_len
            known = min(before, start)
            row[before - known :] = self.read(start - known, known + self.seq_len)
        ends = np.ones((len(ids), self.seq_len), dtype=np.int64)
        for place, token in enumerate(separator):
            ends &= tokens[:, place : place + self.seq_len] == token
        return ends.cumsum(axis=1) - ends

    def document_starts(self) -> np.ndarray:
        """Returns where each document of the split begins: (documents,) int64. They are searched once, and kept beside
        the shards if these can be written."""
        path = self.folder / f"{self.split}.documents"
        identity = {"fingerprint": self.index.fingerprint}
        with suppress(OSError, SafetensorError, KeyError), safe_open(path, "np") as kept:
            starts, known = kept.get_tensor("starts"), kept.metadata() or {}
            if known == {**identity, "sha256": hashlib.sha256(starts.tobytes()).hexdigest()}:
                return starts
        starts = self._searched_starts()
        digest = hashlib.sha256(starts.tobytes()).hexdigest()
        with suppress(OSError):
            write_atomic(path, save({"starts": starts}, {**identity, "sha256": digest}))
        return starts

    def _searched_starts(self) -> np.ndarray:
        separator, found = self.tokenizer.separator, [np.zeros(1, dtype=np.int64)]
        before = len(separator) - 1
        for first in range(0, self.tokens - before, SEARCHED):
            tokens = self.read(first, min(SEARCHED + before, self.tokens - first))
            ends = np.ones(len(tokens) - before, dtype=bool)
            for place, token in enumerate(separator):
                ends &= tokens[place : place + len(ends)] == token
            found.append(first + before + 1 + np.flatnonzero(ends))
        starts = np.concatenate(found)
        return starts[starts < self.tokens]

    def micro_batch(self, ids: np.ndarray, numbers: np.ndarray) -> MicroBatch:
        samples = self.samples(ids)
        # Copies: with one row both slices are contiguous views of the same memory, and padding writes to the targets.
        documents = self.documents(ids) if self.document_mask else None
        micro = MicroBatch(samples[:, :-1].copy(), samples[:, 1:].copy(), numbers, documents)
        if not (most := self.most_conversations):
            return micro
        return replace(micro, conversations=np.zeros_like(micro.tokens), most_conversations=most)


class Batches:
    """The infinite stream of one data rank's micro-batches, one list per step, read ahead in a background thread.

    Step s takes the global samples first_sample + s × global_batch and the global_batch - 1 after it; rank r takes the
    r-th of `ranks` equal parts of them, in order, as global_batch / (ranks × micro_batch) micro-batches. `prefetch`
    steps are read ahead; 0 reads in the caller's thread. Independent `replicas` each update with one of so many equal
    parts of a step. `members` is (i, n) for the i-th of n groups of `ranks` ranks that deal out the micro-batches of a
    step, some one more than others. With a `ramp` the steps from `first_step` on have its sizes. Use it in a `with`
    block, or close it.

    Raises JobError if global_batch is not a multiple of ranks × micro_batch.
    """

    def __init__(
        self,
        data: ShardData,
        *,
        global_batch: int,
        micro_batch: int,
        rank: int,
        ranks: int,
        seed: int,
        first_sample: int = 0,
        prefetch: int = 4,
        replicas: int = 1,
        members: tuple[int, int] = (0, 1),
        ramp: Ramp | None = None,
        first_step: int = 0,
    ):
        if micro_batch < 1 or global_batch < 1 or global_batch % (ranks * micro_batch):
            raise JobError(
                "global batch = micro-batch × accumulation × data ranks: there is no whole accumulation with "
                f"{global_batch} = {micro_batch} × accumulation × {ranks}"
            )
        if micro_batch % data.group:
            raise JobError(
                f"a micro-batch of {micro_batch} sequences cuts a group of {data.group} that belong together"
            )
        phase = RampPhase(0, 0, Batch(global_batch, micro_batch, global_batch // (ranks * micro_batch), ranks), 1)
        steps = _steps(
            data,
            ramp=ramp or Ramp((phase,)),
            step=first_step,
            rank=rank,
            ranks=ranks,
            seed=seed,
            first=first_sample,
            replicas=replicas,
            members=members,
        )
        self._steps = ReadAhead(steps, prefetch) if prefetch > 0 else steps

    def __iter__(self) -> Iterator[list[MicroBatch]]:
        return self

    def __next__(self) -> list[MicroBatch]:
        return next(self._steps)

    def wait(self, seconds: float) -> bool:
        """Waits until the next step's micro-batches are read, at most `seconds`; returns whether they are. Without
        prefetching they are read when they are taken, and this returns True at once."""
        return self._steps.wait(seconds) if isinstance(self._steps, ReadAhead) else True

    def __enter__(self) -> Batches:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        self.close()

    def close(self) -> None:
        """Stops reading ahead. May be called twice; afterwards the next step raises StopIteration."""
        self._steps.close()


def evaluation_batches(
    data: ShardData, *, samples: int, micro_batch: int, rank: int, ranks: int
) -> Iterator[MicroBatch]:
    """Yields micro-batches of `samples` samples (at most the split), spaced evenly over the split, for one of `ranks`.

    They are spread because neighbours come from one document: the first few hundred would measure only that one.

    Every rank gets the same number of micro-batches, as a collective requires; surplus rows are padding, whose targets
    are IGNORE, so sums over valid targets are exact at any number of ranks. A micro-batch may be all padding.
    """
    samples = min(samples, data.sample_count)
    samples = max(samples - samples % data.group, data.group)
    for first in range(0, samples, ranks * micro_batch):
        ids = first + rank * micro_batch + np.arange(micro_batch)
        real = ids < samples
        places = np.where(real, data.spread(ids, samples), ids % data.group)
        batch = data.micro_batch(data.readable(places), np.where(real, places, -1))
        batch.targets[~real] = IGNORE
        if batch.reference is not None:
            batch.reference[~real] = np.nan
        yield batch


def _replacements(damaged: Collection[int], count: int) -> dict[int, int]:
    """Returns the sample that is read instead of each damaged one: the next whole one of the split, in a circle. So
    the replacement depends neither on the layout nor on when it is read."""
    damaged, chosen = set(damaged), {}
    if len(damaged) >= count:
        raise DataError(f"all {count:,} samples are damaged")
    for sample in damaged:
        other = sample
        while other in damaged:
            other = (other + 1) % count
        chosen[sample] = other
    return chosen


def _steps(
    data: ShardData,
    *,
    ramp: Ramp,
    step: int,
    rank: int,
    ranks: int,
    seed: int,
    first: int,
    replicas: int,
    members: tuple[int, int],
) -> Generator[list[MicroBatch]]:
    while True:
        phase = ramp.at(step)
        micro_batch = phase.batch.micro_batch
        rounds, (member, most) = phase.batch.global_batch // (ranks * micro_batch), members
        before, until = rounds * member // most, rounds * (member + 1) // most
        share = (until - before) * micro_batch
        begin = first + before * micro_batch * ranks + rank * share
        numbers = np.arange(begin, begin + share)
        ids = data.order(begin, share, seed)
        parts = [slice(start, start + micro_batch) for start in range(0, share, micro_batch)]
        micro_batches = [data.micro_batch(ids[part], numbers[part]).cut(phase.parts) for part in parts]
        if data.most_conversations:
            together = ranks // replicas  # ranks that update with the same samples
            update = begin - rank % together * share, together * share, seed
            valid_share = data.valid_tokens(*update) / data.used_positions(*update)
            micro_batches = [replace(micro, valid_share=valid_share) for micro in micro_batches]
        yield micro_batches
        first, step = first + phase.batch.global_batch, step + 1
