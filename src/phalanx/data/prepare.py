"""Builds token shards from a corpus: `phalanx data prepare`.

Every shard is written atomically and then entered in the index, so an interrupted preparation resumes where it stopped.
The contents of the shards depend on the corpus and the settings alone, not on the number of processes.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TextIO, TypeVar

import numpy as np

from phalanx.check.job import data_problems
from phalanx.config.corpora import CORPORA, END_OF_TEXT, TOKENIZERS, corpus_of, number_of
from phalanx.config.job import Data
from phalanx.data import corpus
from phalanx.data.corpus import Scan, Segment
from phalanx.data.files import SPLITS, TEMPORARY, TOKEN_SHARD_TOKENS, Progress, locked, open_regular, silent, stripe
from phalanx.data.formats import missing, pair_of
from phalanx.data.index import (
    BLOCK_BYTES,
    INDEX,
    CorpusRecord,
    EncodedRows,
    Index,
    Shard,
    SourceRecord,
    blocks_file,
    damage,
    dtype_for,
    read_index,
    repair_command,
    shard_file,
    write_index,
    write_shard,
    write_table,
)
from phalanx.data.megatron import cut_of, index_splits, open_megatron
from phalanx.data.rows import RowText, encode_rows, row_texts, scan_rows
from phalanx.data.settings import is_made_of_text, overrides, prepared_path, source_settings, tokenizer_path
from phalanx.data.template import find_template
from phalanx.data.tokenizer import (
    FORMAT,
    LARGEST_VOCABULARY,
    LibraryTokenizer,
    NumberTokenizer,
    Tokenizer,
    read_definition,
    require_in_vocabulary,
)
from phalanx.data.workers import Workers, cores
from phalanx.echo import echo
from phalanx.errors import DataError, ExtensionError, JobError, PhalanxError


def encode_segments(tokenizer: Tokenizer, segments: Iterable[Segment]) -> np.ndarray:
    """Returns the tokens of consecutive segments, with their separators: (tokens,) int64."""
    separator = np.array(tokenizer.separator, dtype=np.int64)
    parts = [np.empty(0, dtype=np.int64)]
    for segment in segments:
        if segment.separated:
            parts.append(separator)
        parts.append(tokenizer.encode(segment.text))
    tokens = np.concatenate(parts)
    require_in_vocabulary(tokens, tokenizer.vocab_size, "the tokenizer")
    return tokens


class Encoder(Workers):
    """Encodes lists of segments in the background: in `processes` children, which load the tokenizer from `folder`, or
    in a thread of this process if that is 0."""

    def __init__(self, tokenizer: Tokenizer, folder: Path, processes: int):
        super().__init__("phalanx.data.prepare:encoder", str(folder.absolute()), processes)
        self._tokenizer = tokenizer

    def submit(self, segments: Sequence[Segment]) -> Future[np.ndarray]:
        """Starts encoding; the result is (tokens,). A process that dies makes the future raise RunError."""
        return self.threads.submit(self._encode, segments)

    def _encode(self, segments: Sequence[Segment]) -> np.ndarray:
        if not self.processes:
            return encode_segments(self._tokenizer, segments)
        request = json.dumps([[segment.text, segment.separated] for segment in segments])
        return np.frombuffer(self.ask(request.encode()), dtype="<u4")


def encoder(folder: str) -> Callable[[bytes], bytes]:
    """Returns the work of a child process: it makes little-endian uint32 of [[text, separated], …] in JSON."""
    tokenizer = Tokenizer.load(Path(folder))

    def encode(request: bytes) -> bytes:
        segments = [Segment(text, separated) for text, separated in json.loads(request)]
        return encode_segments(tokenizer, segments).astype("<u4").tobytes()

    return encode


T = TypeVar("T", Segment, RowText)

BPE_CHARACTERS = 100_000_000
"""Characters of training text for BPE: more would take hours and hardly change the merges."""


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


TOKENIZER = ("data.tokenizer=", "data.bpe_vocab=")


def prepared_otherwise(folder: Path, data: Data) -> str:
    """Returns a line about a whole preparation of the corpus that differs in the tokenizer alone, or nothing.

    Args:
        folder: the folder of the shards that `data` asks for.
        data: a job's data settings.
    """
    wanted = overrides(data)
    for other in sorted(folder.parent.glob(f"{data.corpus}-*")):
        if other == folder or not (other / INDEX).is_file():
            continue
        try:
            index = read_index(other)
        except DataError:
            continue
        if not index.complete or _without_tokenizer(index.settings) != _without_tokenizer(wanted):
            continue
        theirs = [setting for setting in index.settings if setting not in wanted]
        ours = [setting for setting in wanted if setting not in index.settings]
        return (
            f"the corpus is prepared in {other} with {' '.join(theirs)}; this job has {' '.join(ours)}, and prepares "
            f"{folder}"
        )
    return ""


def _without_tokenizer(settings: list[str] | tuple[str, ...]) -> list[str]:
    return [setting for setting in settings if not setting.startswith(TOKENIZER)]


def check_tokenizer_class(kind: str, made: object) -> None:
    """Raises ExtensionError, naming the package, with everything that the tokenizer which a kind of the table has made
    lacks: sizes, a definition that is read back, and ids that stand for a text."""
    if problems := list(_class_problems(kind, made)):
        whose = f"tokenizer {kind!r} of {TOKENIZERS.owner(kind)}"
        raise ExtensionError([f"{whose}: {problem}" for problem in problems])


def _class_problems(kind: str, made: object) -> Iterator[str]:
    if not isinstance(made, Tokenizer):
        yield f"make returned {type(made).__name__}, not a subclass of phalanx.data.tokenizer.Tokenizer"
        return
    size, separator = getattr(made, "vocab_size", None), getattr(made, "separator", None)
    if not (isinstance(size, int) and 0 < size <= LARGEST_VOCABULARY):
        yield f"vocab_size must be a whole number from 1 to {LARGEST_VOCABULARY:,}, is {size!r}"
    elif not (isinstance(separator, tuple) and all(isinstance(id, int) and 0 <= id < size for id in separator)):
        yield f"separator must be a tuple of ids below {size}, is {separator!r}"
    try:
        stored = json.loads(made.definition())
        again = read_definition(stored) if stored.get("format") == FORMAT else made
        if again.fingerprint != made.fingerprint:
            yield "its definition does not come back the same when it is read"
    except (ValueError, AttributeError, ExtensionError) as error:
        yield f"its definition cannot be read back: {error}"


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


SHARD_CHARACTERS = 1 << 21
"""Minimum number of characters per shard …"""
MAX_SHARDS = 4096
"""… or at least this fraction of the corpus, which limits the number of files."""


def prepare(data: Data, *, force: bool = False, progress: Progress | None = None) -> Path:
    """Builds the token shards of `data` where they are missing, and returns their folder.

    A call returns at once if everything is in place, builds the rest if some shards exist, and rebuilds all with
    `force`. Several processes may call at once, also on several nodes: one works, and the others wait for it, or
    prepare other sources of a mixture meanwhile.

    Raises JobError for invalid settings, DataError for a corpus or a folder that cannot be used.
    """
    show = progress or silent
    folder = prepared_path(data)
    if not force and _is_ready(folder, data):
        return folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder / ".lock", partial(_while_waiting, folder, data, show, force=force)):
            if force:
                (folder / INDEX).unlink(missing_ok=True)
            if not _is_ready(folder, data):
                for told in filter(None, (stripe(folder, 1, 1, 0), prepared_otherwise(folder, data))):
                    show(told, 0, 0)
                _build(folder, data, show, force=force)
    except OSError as error:
        raise DataError(
            f"preparing {folder} stopped: {error.filename or 'writing'}: {error.strerror}. Finished shards are kept; "
            "fix the cause, then run the same command again"
        ) from error
    return folder


def _while_waiting(folder: Path, data: Data, progress: Progress, pid: str, *, force: bool) -> None:
    """Prepares sources of a mixture, from any of them on, while another process works on others."""
    progress(f"waiting for process {pid}, which prepares {folder}", 0, 0)
    if not data.mix or force or (is_made_of_text(data.tokenizer) and not (folder / INDEX).exists()):
        return  # the other one still makes the tokenizer
    sources = source_settings(data, folder)
    first = secrets.randbelow(len(sources))
    for source in sources[first:] + sources[:first]:
        prepare(source, progress=partial(_of_source, progress, source.path))


def absent(data: Data) -> Iterator[str]:
    """Yields what preparing the data on this machine's files would find missing: paths, the tokenizer, the template.
    Nothing if the shards are there."""
    wrong: list[PhalanxError] = []
    try:
        folder = prepared_path(data)
        if os.path.exists(folder / INDEX) and read_index(folder).complete:
            return
        if CORPORA[data.corpus].rows is not None:
            find_template(data)
    except (DataError, JobError) as error:
        wrong.append(error)
    yield from map(str, [*_missing_paths(data), *wrong])


def _missing_paths(data: Data) -> Iterator[PhalanxError]:
    """Yields the errors about data.path, or the paths of data.mix, that do not exist."""
    own = bool(data.path) and "path" in CORPORA[data.corpus].settings
    paths = enumerate((source.path for source in data.mix), start=1) if data.mix else [(0, data.path)] * own
    for item, path in paths:
        if not pair_of(path) and not os.path.exists(Path(path).expanduser()):
            corpus_name = corpus_of(data.mix[item - 1], data) if item else data.corpus
            yield missing(Path(path), corpus_name, item)


def segments_of(data: Data, split: str) -> Iterator[Segment]:
    """Yields the text of a split ("train", "val"), or of the whole corpus ("all"), in order, as it is tokenized. Raises
    JobError for invalid settings, DataError for a corpus that cannot be read."""
    if problems := [f"{path}: {message}" for path, message in data_problems(data)]:
        raise JobError(problems)
    files = corpus.sources(data)
    if split == "all":
        yield from corpus.segments(files, data)
        return
    cut = cut_of(corpus.scan(corpus.segments(files, data)).characters, data.val_fraction)
    yield from (segment for name, segment in split_segments(corpus.segments(files, data), cut) if name == split)


def _is_ready(folder: Path, data: Data, repair: str = "") -> bool:
    """Returns whether the folder holds all shards of `data`. Raises DataError, with the command to `repair` it, if the
    corpus changed since then."""
    if not os.path.exists(folder / INDEX):
        return False
    index = read_index(folder)
    repair = repair or repair_command(folder, index)
    if data.mix:
        return index.complete and _sources_are_ready(folder, index, data, repair)
    shards = [shard for split in SPLITS for shard in index.splits[split]]
    if index.elsewhere:
        return index.complete and _is_as_indexed(folder, index, data, repair)
    if not index.complete or any(damage(folder, index, shard, verify=False) for shard in shards):
        return False
    if not index.corpus.stamp:
        return True
    try:
        files = corpus.sources(data)
    except DataError:
        return True  # only the shards were copied to this machine, and only they are needed
    if corpus.stamp(files) == index.corpus.stamp:
        return True
    found = _scan(files, data, silent)
    if found.sha256 != index.corpus.sha256:
        raise DataError(
            f"{folder}: the corpus ({index.corpus.description}) changed since these shards were made: expected "
            f"{index.corpus.characters:,} characters with sha256 {index.corpus.sha256}, found {found.characters:,} "
            f"with {found.sha256}. Restore the old corpus, or make new shards with: {repair}"
        )
    return True


def _is_as_indexed(folder: Path, index: Index, data: Data, repair: str) -> bool:
    """Returns whether the tokens of another program's data set are those that were indexed. Raises DataError if they
    changed since then."""
    files = corpus.sources(data)
    if str(files[0]) != index.elsewhere:
        return False
    blocks = [each for each in index.shards if not (folder / blocks_file(each.file)).is_file()]
    wrong = (damage(folder, index, each, verify=True) for each in index.shards)
    if not blocks and corpus.stamp(files) != index.corpus.stamp and (problem := next(filter(None, wrong), None)):
        raise DataError(f"{problem}: it changed since it was indexed. Restore it, or index it again with: {repair}")
    return not blocks


def _sources_are_ready(folder: Path, index: Index, data: Data, repair: str) -> bool:
    """Returns whether every source of a mixture is prepared, and is what it was when the mixture was."""
    return all(
        _is_ready(there, source, repair) and read_index(there).fingerprint == record.fingerprint
        for there, source, record in zip(
            index.folders(folder), source_settings(data, folder), index.sources, strict=True
        )
    )


def _build(folder: Path, data: Data, progress: Progress, *, force: bool) -> None:
    for leftover in folder.glob(f".*{TEMPORARY}"):
        leftover.unlink()
    old = read_index(folder) if (folder / INDEX).exists() else None
    if data.mix:
        _build_mix(folder, data, old, progress, force=force)
    elif CORPORA[data.corpus].tokens is not None:
        _build_tokens(folder, data, old, progress)
    elif data.corpus == "text" and pair_of(data.path):
        _build_index(folder, data, progress)
    elif CORPORA[data.corpus].rows is not None:
        _build_rows(folder, data, old, progress)
    else:
        _build_text(folder, data, old, progress)


def _build_tokens(folder: Path, data: Data, old: Index | None, progress: Progress) -> None:
    entry = CORPORA[data.corpus]
    vocab, total = number_of(entry.vocab, data), number_of(entry.count, data)
    record = CorpusRecord(data.corpus, corpus.describe(data), 0, 0, 0, "", "")
    index = _begin(folder, data, record, NumberTokenizer(vocab))
    cut = cut_of(total, data.val_fraction)
    with ThreadPoolExecutor(1) as thread:
        work = (
            BuildTask(split, size, partial(thread.submit, partial(_tokens, data, vocab, split, start, size)))
            for split, tokens in zip(SPLITS, (cut, total - cut), strict=True)
            for start, size in chunks(tokens, TOKEN_SHARD_TOKENS)
        )
        ShardMaker(folder, index, old, progress).run(work, total, ahead=1)


def _build_index(folder: Path, data: Data, progress: Progress) -> None:
    """Indexes the tokens of a Megatron data set, which stay where they are."""
    _require_ready_tokens(data)
    found = open_megatron(data.path)
    tokenizer = _make_tokenizer(data, np.zeros(0x110000, dtype=np.int64), lambda: iter(()), progress)
    splits = index_splits(folder, found, data.val_fraction, tokenizer.vocab_size, progress)
    digest = _digest_of(shard.sha256 for shards in splits.values() for shard in shards)
    record = CorpusRecord(
        data.corpus, corpus.describe(data), found.documents.size, 0, 0, digest, corpus.stamp([found.bin, found.idx])
    )
    index = _begin(folder, data, record, tokenizer)
    elsewhere = str(found.bin)
    write_index(folder, replace(index, dtype=found.dtype, splits=splits, elsewhere=elsewhere, complete=True))


def _require_ready_tokens(data: Data) -> None:
    """Raises JobError for settings that make tokens of a text, where there are tokens already."""
    problems = []
    if is_made_of_text(data.tokenizer):
        problems.append(
            f"data.tokenizer={data.tokenizer} is made of a text, and {data.path} holds tokens of another tokenizer: "
            "set data.tokenizer to its tokenizer.json"
        )
    if data.limit_mb:
        problems.append(f"data.limit_mb={data.limit_mb:g} limits text, and {data.path} holds tokens; leave it out")
    if data.text_field != Data.text_field:
        problems.append(f"data.text_field={data.text_field} is for records, and {data.path} holds tokens; leave it out")
    if problems:
        raise JobError(problems)


def _tokens(data: Data, vocab: int, split: str, start: int, size: int) -> np.ndarray:
    """Returns the tokens of a shard of a corpus without text, once they are known to be in the vocabulary."""
    tokens = np.asarray(CORPORA.code(data.corpus, "tokens")(data, split, start, size))
    if tokens.shape != (size,):
        raise DataError(f"corpus {data.corpus} returned an array of shape {tokens.shape} for {size} tokens")
    require_in_vocabulary(tokens, vocab, f"corpus {data.corpus}")
    return tokens


def _build_mix(folder: Path, data: Data, old: Index | None, progress: Progress, *, force: bool) -> None:
    """Prepares every source of a mixture in a folder of its own, with one tokenizer for all."""
    for error in _missing_paths(data):
        raise error
    sources = source_settings(data, folder)
    counts, cuts, digests = np.zeros(0x110000, dtype=np.int64), [], []
    unmade = [replace(source, tokenizer=data.tokenizer) for source in sources]
    for source in unmade:
        if pair_of(source.path) and source.corpus == "text":
            _require_ready_tokens(replace(source, text_field=Data.text_field))
    if is_made_of_text(data.tokenizer):
        for source in unmade:
            scan = _scan(corpus.sources(source), source, progress)
            counts += scan.counts
            cuts.append(_cut(scan, source))
            digests.append(scan.sha256)

    def parts() -> Iterator[tuple[str, Segment]]:
        """Yields the training texts, as much of each source."""
        for source, cut in zip(unmade, cuts, strict=True):
            left = BPE_CHARACTERS // len(sources)
            for split, segment in _texts(corpus.sources(source), source, cut):
                if split != SPLITS[0] or left <= 0:
                    break
                yield split, segment
                left -= len(segment)

    record = CorpusRecord(data.corpus, corpus.describe(data), 0, 0, 0, _digest_of(digests), "")
    tokenizer = (_stored_tokenizer(folder, old, record) if digests else None) or _make_tokenizer(
        data, counts, parts, progress
    )
    index = _begin(folder, data, record, tokenizer)
    if CORPORA[data.corpus].rows is not None:
        find_template(data).save(folder)
    write_index(folder, index)
    found: list[tuple[str, Index]] = []
    for source in sources:
        there = prepare(source, force=force, progress=partial(_of_source, progress, source.path))
        found.append((there.name, read_index(there)))
    of = [each.corpus for _, each in found]
    record = replace(
        record,
        documents=sum(each.documents for each in of),
        characters=sum(each.characters for each in of),
        bytes=sum(each.bytes for each in of),
        sha256=_digest_of([each.sha256 for each in of]),
    )
    records = tuple(
        SourceRecord(name, each.fingerprint, {split: each.tokens(split) for split in SPLITS}) for name, each in found
    )
    write_index(folder, replace(index, corpus=record, sources=records, complete=True))


def _scan(files: list[Path], data: Data, progress: Progress) -> Scan:
    """Reads a corpus of text or of rows once."""
    if CORPORA[data.corpus].rows is not None:
        return scan_rows(row_texts(files, data, processes=cores(data.workers)))
    return corpus.scan(watched(corpus.segments(files, data), files, progress))


def _cut(scan: Scan, data: Data) -> int:
    """Returns how many characters, or rows, of a corpus are for training."""
    return cut_of(scan.characters if CORPORA[data.corpus].rows is None else scan.documents, data.val_fraction)


def _texts(files: list[Path], data: Data, cut: int) -> Iterator[tuple[str, Segment]]:
    """Yields the text of a corpus of text or of rows in order, with its split."""
    if CORPORA[data.corpus].rows is None:
        return split_segments(corpus.segments(files, data), cut)
    rows = enumerate(row_texts(files, data, processes=cores(data.workers)))
    return ((SPLITS[n >= cut], Segment(row.text, separated=False)) for n, row in rows)


def _digest_of(digests: Iterable[str]) -> str:
    return hashlib.sha256(" ".join(digests).encode()).hexdigest()


def _of_source(progress: Progress, path: str, what: str, done: int, total: int) -> None:
    progress(f"{path}: {what}", done, total)


def _sources(data: Data, progress: Progress) -> list[Path]:
    """Returns the files of a corpus; says which of its folder are left out."""
    files = corpus.sources(data)
    if said := corpus.left_out(data, files):
        progress(said, 0, 0)
    return files


def _build_text(folder: Path, data: Data, old: Index | None, progress: Progress) -> None:
    files = _sources(data, progress)
    stamp = corpus.stamp(files) if files and not CORPORA[data.corpus].verified else ""
    scan = _scan(files, data, progress)
    if not scan.characters:
        held = f"{len(files)} files of {corpus.describe(data)} hold" if files else f"{corpus.describe(data)} has"
        raise DataError(f"the corpus is empty: {held} no text")
    record = CorpusRecord(
        data.corpus, corpus.describe(data), scan.documents, scan.characters, scan.bytes, scan.sha256, stamp
    )
    parts = partial(_texts, files, data, _cut(scan, data))
    tokenizer = _stored_tokenizer(folder, old, record) or _make_tokenizer(data, scan.counts, parts, progress)
    if isinstance(tokenizer, LibraryTokenizer) and not tokenizer.end and scan.documents > 1:
        known = f"none of {', '.join(END_OF_TEXT)}, and no tokenizer_config.json beside it names its eos_token"
        said = f"{data.tokenizer} has {known}: a newline separates its {scan.documents:,} documents"
        progress(said, 0, 0)
    index = _begin(folder, data, record, tokenizer)
    size = max(SHARD_CHARACTERS, scan.characters // MAX_SHARDS)
    workers = min(cores(data.workers), -(-scan.characters // size))
    with Encoder(tokenizer, folder, workers if tokenizer.slow and workers > 1 else 0) as encoder:
        work = (
            BuildTask(split, sum(map(len, group)), partial(encoder.submit, group))
            for split, group in grouped(parts(), size)
        )
        ShardMaker(folder, index, old, progress).run(work, scan.characters, ahead=2 * workers)


def _build_rows(folder: Path, data: Data, old: Index | None, progress: Progress) -> None:
    """Builds shards of conversations. Rows are rendered once, into a file of texts, from which they are encoded."""
    texts = folder / f".rows{TEMPORARY}"
    try:
        _build_rows_by(texts, folder, data, old, progress)
    finally:
        texts.unlink(missing_ok=True)


def _build_rows_by(texts: Path, folder: Path, data: Data, old: Index | None, progress: Progress) -> None:
    files = _sources(data, progress)
    progress("reading and checking rows", 0, 0)
    rows = row_texts(files, data, warn=partial(echo, file=sys.stderr), processes=cores(data.workers))
    with open(open_regular(texts, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "w", encoding="utf-8") as file:
        scan = scan_rows(_noted(rows, file))
    if not scan.documents:
        raise DataError(f"the data set is empty: {len(files)} files of {corpus.describe(data)} hold no rows")
    stamp = corpus.stamp(files) if files else ""
    record = CorpusRecord(
        data.corpus, corpus.describe(data), scan.documents, scan.characters, scan.bytes, scan.sha256, stamp
    )
    cut = _cut(scan, data)

    def parts() -> Iterator[tuple[str, RowText]]:
        with texts.open(encoding="utf-8") as file:
            yield from ((SPLITS[n >= cut], RowText.from_json(json.loads(line))) for n, line in enumerate(file))

    plain = ((split, Segment(row.text, separated=False)) for split, row in parts())
    tokenizer = _stored_tokenizer(folder, old, record) or _make_tokenizer(data, scan.counts, lambda: plain, progress)
    find_template(data).save(folder)
    row_size = CORPORA[data.corpus].row_size
    index = replace(_begin(folder, data, record, tokenizer), dtype="uint32", row_size=row_size)
    size = max(SHARD_CHARACTERS, scan.characters // MAX_SHARDS)
    with ThreadPoolExecutor(1) as thread:
        work = (
            BuildTask(split, sum(map(len, group)), partial(thread.submit, partial(encode_rows, tokenizer, group)))
            for split, group in grouped(parts(), size)
        )
        ShardMaker(folder, index, old, progress).run(work, scan.characters, ahead=1)


def _noted(rows: Iterable[RowText], file: TextIO) -> Iterator[RowText]:
    """Yields the rows, and writes each to a file as a line of JSON."""
    for row in rows:
        file.write(json.dumps([row.where, row.conversations]) + "\n")
        yield row


def _stored_tokenizer(folder: Path, old: Index | None, record: CorpusRecord) -> Tokenizer | None:
    """Returns the tokenizer of an interrupted preparation of the same text, so that it need not be trained again."""
    if old is None or old.corpus.sha256 != record.sha256:
        return None
    try:
        tokenizer = Tokenizer.load(folder)
    except DataError:
        return None
    return tokenizer if tokenizer.fingerprint == old.tokenizer else None


def _make_tokenizer(
    data: Data, counts: np.ndarray, parts: Callable[[], Iterator[tuple[str, Segment]]], progress: Progress
) -> Tokenizer:
    if data.tokenizer not in TOKENIZERS:
        return Tokenizer.load(tokenizer_path(data))
    vocab = TOKENIZERS[data.tokenizer].vocab
    if isinstance(vocab, str):  # of a size that the user has chosen
        progress(f"training {data.tokenizer} of {number_of(vocab, data)} tokens", 0, 0)
    tokenizer = TOKENIZERS.code(data.tokenizer, "make")(data, counts, lambda: training_texts(parts()))
    check_tokenizer_class(data.tokenizer, tokenizer)
    return tokenizer


def _begin(folder: Path, data: Data, record: CorpusRecord, tokenizer: Tokenizer) -> Index:
    tokenizer.save(folder)
    return Index(
        settings=tuple(overrides(data)),
        corpus=record,
        tokenizer=tokenizer.fingerprint,
        vocab_size=tokenizer.vocab_size,
        dtype=dtype_for(tokenizer.vocab_size),
        splits=dict.fromkeys(SPLITS, ()),
        complete=False,
        block_bytes=BLOCK_BYTES,
    )
