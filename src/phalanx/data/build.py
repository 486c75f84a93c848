"""Builds the shards of a folder in order, enters each in the index, and keeps intact shards of an earlier run."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from phalanx.data.index import SPLITS, Index, Shard, shard_file, write_index
from phalanx.data.progress import Progress
from phalanx.data.shards import damage, write_shard, write_table


@dataclass(frozen=True)
class EncodedRows:
    """The tokens of consecutive conversations."""

    tokens: np.ndarray
    """(tokens,) uint32: the ids, and the bit shards.ANSWER where the token is an answer's."""
    table: np.ndarray
    """(conversations, 2): the lengths that shards.write_table writes."""


@dataclass(frozen=True)
class BuildTask:
    """A shard to build. `start` begins to produce its content, tokens (tokens,) or EncodedRows; `size` is its part of
    the total progress."""

    split: str
    size: int
    start: Callable[[], Future[Any]]


class ShardMaker:
    """Builds the shards of `folder`. Shards listed in `old`, the index of an interrupted preparation, are kept if they
    were built from the same text with the same tokenizer and are intact; all others are removed."""

    def __init__(self, folder: Path, index: Index, old: Index | None, progress: Progress):
        text = index.corpus.sha256, index.tokenizer, index.block_bytes
        same = old and (old.corpus.sha256, old.tokenizer, old.block_bytes) == text
        self._folder, self._index, self._progress = folder, index, progress
        self._old = old if same else None
        self._begun: deque[tuple[BuildTask, Shard | Future[Any]]] = deque()
        self._done = 0
        if not same:
            for stale in (path for kind in ("bin", "blocks", "rows") for path in folder.glob(f"*.{kind}")):
                stale.unlink()

    def run(self, work: Iterable[BuildTask], total: int, *, ahead: int) -> None:
        """Builds the shards in order, at most `ahead` started beyond the one being written; `total` is their size."""
        begun = dict.fromkeys(SPLITS, 0)
        write_index(self._folder, self._index)
        for item in work:
            self._begun.append((item, self._intact(item.split, begun[item.split]) or item.start()))
            begun[item.split] += 1
            if len(self._begun) > ahead:
                self._finish(total)
        while self._begun:
            self._finish(total)
        write_index(self._folder, replace(self._index, complete=True))

    def _intact(self, split: str, number: int) -> Shard | None:
        if self._old is None or number >= len(self._old.splits[split]):
            return None
        shard = self._old.splits[split][number]
        return None if damage(self._folder, self._old, shard, verify=True) else shard

    def _finish(self, total: int) -> None:
        item, made = self._begun.popleft()
        shards = self._index.splits[item.split]
        if isinstance(made, Future):
            file, index = shard_file(item.split, len(shards)), self._index
            content = made.result()
            tokens = content.tokens if isinstance(content, EncodedRows) else content
            made = write_shard(self._folder, file, tokens, index.dtype, index.block_bytes)
            if isinstance(content, EncodedRows):
                made = write_table(self._folder, made, content.table)
        self._index = replace(self._index, splits={**self._index.splits, item.split: (*shards, made)})
        write_index(self._folder, self._index)
        self._done += item.size
        self._progress("tokenizing", self._done, total)
