"""Cuts the text of a corpus into its splits, and those into the contents of shards."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeVar

from phalanx.data.corpus import Segment
from phalanx.data.index import SPLITS
from phalanx.data.progress import Progress
from phalanx.data.row_text import RowText

T = TypeVar("T", Segment, RowText)

BPE_CHARACTERS = 100_000_000
"""Characters of training text for BPE: more would take hours and hardly change the merges."""


def cut_of(total: int, val_fraction: float) -> int:
    """Returns how many of a corpus's characters or tokens are of the training split."""
    return int(total * (1 - val_fraction))


def split_segments(segments: Iterable[Segment], cut: int) -> Iterator[tuple[str, Segment]]:
    """Yields the segments with their split: the first `cut` characters of the corpus for training, the rest for val."""
    train, val = SPLITS
    left = cut
    for segment in segments:
        if len(segment) <= left:
            yield train, segment
        elif left == 0:
            yield val, segment
        else:
            place = left - segment.separated
            yield train, Segment(segment.text[:place], segment.separated)
            yield val, Segment(segment.text[place:], False)
        left = max(0, left - len(segment))


def grouped(parts: Iterable[tuple[str, T]], size: int) -> Iterator[tuple[str, list[T]]]:
    """Yields the contents of each shard: consecutive segments or rows of one split, up to `size` characters."""
    group: list[T] = []
    held, of_split = 0, ""
    for split, segment in parts:
        if group and (split != of_split or held >= size):
            yield of_split, group
            group, held = [], 0
        of_split = split
        group.append(segment)
        held += len(segment)
    if group:
        yield of_split, group


def training_texts(parts: Iterable[tuple[str, Segment]]) -> Iterator[str]:
    left = BPE_CHARACTERS
    for split, segment in parts:
        if split != SPLITS[0] or left <= 0:
            return
        yield segment.text[:left]
        left -= len(segment)


def watched(segments: Iterable[Segment], files: list[Path], progress: Progress) -> Iterator[Segment]:
    """Yields the segments while showing the progress of reading, in bytes of the files, taken as characters."""
    total = sum(file.stat().st_size for file in files)
    done = 0
    for segment in segments:
        yield segment
        done += len(segment)
        if total:
            progress("reading", min(done, total - 1), total)
    if total:
        progress("reading", total, total)


def chunks(total: int, size: int) -> list[tuple[int, int]]:
    """Returns the start and the size of each part of at most `size`."""
    return [(start, min(size, total - start)) for start in range(0, total, size)]
