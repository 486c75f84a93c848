"""Prepares a job's data and reports the result as text or JSON."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from phalanx.config.data import Data
from phalanx.data.conversations import ConversationData, PackingFacts
from phalanx.data.index import SPLITS, Index, Shard, read_index
from phalanx.data.prepare import prepare
from phalanx.data.progress import stderr_progress
from phalanx.data.shards import add_block_digests, map_shard, open_shards, token_ids
from phalanx.data.split import open_split
from phalanx.data.tokenizer import Tokenizer
from phalanx.echo import echo

SAMPLE_CHARACTERS = 60


def prepare_and_report(data: Data, seq_len: int, *, force: bool, verify: bool, as_json: bool) -> int:
    """Prepares `data` (again, with `force`), checks every digest with `verify` (and adds those of blocks to shards of
    version 1), and prints a summary: of conversations also what samples of `seq_len` tokens hold. Returns 0.

    Raises JobError and DataError as prepare does. A KeyboardInterrupt propagates to the caller.
    """
    started = time.monotonic()
    try:
        with stderr_progress() as progress:
            folder = prepare(data, force=force, progress=progress)
            index = open_shards(folder, verify=verify)
            if verify and not index.block_bytes:
                index = add_block_digests(folder, index)
    except KeyboardInterrupt:
        echo("stopped; finished shards are kept: the same command without --force resumes", file=sys.stderr)
        raise
    seconds = time.monotonic() - started
    facts = _packing(folder, index, data, seq_len)
    if as_json:
        summary = _summary(folder, index, verified=verify, seconds=seconds)
        for (split, source), packed in facts.items():
            place = summary["sources"][source].setdefault("splits", {}) if index.sources else summary["splits"]
            place[split] = place.get(split, {}) | {**asdict(packed), "efficiency": packed.efficiency}
        echo(json.dumps(summary))
    else:
        _print(folder, index, facts, verified=verify, seconds=seconds)
    return 0


def _packing(folder: Path, index: Index, data: Data, seq_len: int) -> dict[tuple[str, int], PackingFacts]:
    """Returns what became of the conversations, by split and number of the source; nothing for a text."""
    found = {}
    for split in SPLITS:
        for source, each in enumerate(index.folders(folder)):
            if any(shard.conversations for shard in read_index(each).splits[split]):
                samples = open_split(each, split, seq_len, data)
                assert isinstance(samples, ConversationData)
                found[split, source] = samples.facts
    return found


def _summary(folder: Path, index: Index, *, verified: bool, seconds: float) -> dict[str, Any]:
    return {
        "path": str(folder),
        "corpus": index.corpus.description,
        "documents": index.corpus.documents,
        "characters": index.corpus.characters,
        "vocab_size": index.vocab_size,
        "dtype": index.dtype,
        "splits": {
            split: {
                "tokens": index.tokens(split),
                "shards": len(_shards(folder, index, split)),
                "bytes": sum(shard.bytes for shard in _shards(folder, index, split)),
            }
            for split in SPLITS
        },
        "begins": _beginning(folder, index),
        "sources": [{"path": str(folder.parent / source.folder), "tokens": source.tokens} for source in index.sources],
        "fingerprint": index.fingerprint,
        "verified": verified,
        "seconds": round(seconds, 3),
    }


def _print(
    folder: Path, index: Index, facts: Mapping[tuple[str, int], PackingFacts], *, verified: bool, seconds: float
) -> None:
    corpus = index.corpus
    echo(f"path: {folder}")
    unit = "rows" if index.row_size else "documents"
    echo(f"corpus: {corpus.description}  {unit}: {corpus.documents:,}  characters: {corpus.characters:,}", wrap=True)
    echo(f"vocabulary: {index.vocab_size:,}  dtype: {index.dtype}")
    for split in SPLITS:
        shards = _shards(folder, index, split)
        size = sum(shard.bytes for shard in shards)
        echo(f"{split}: {index.tokens(split):,} tokens  shards: {len(shards)}  bytes: {size:,}")
        if not index.sources and (split, 0) in facts:
            echo(f"  {facts[split, 0].line()}", wrap=True)
    for number, source in enumerate(index.sources):
        there = read_index(folder.parent / source.folder)
        tokens = "  ".join(f"{split}: {source.tokens[split]:,}" for split in SPLITS)
        echo(f"source: {there.corpus.description}  {tokens} tokens  in {source.folder}", wrap=True)
        for split in SPLITS:
            if packed := facts.get((split, number)):
                echo(f"  {split}: {packed.line()}", wrap=True)
    echo(f"begins: {_beginning(folder, index)!r}")
    echo(f"verified: {'every digest' if verified else 'sizes only'}  seconds: {seconds:.1f}")


def _shards(folder: Path, index: Index, split: str) -> list[Shard]:
    return [shard for each in index.folders(folder) for shard in read_index(each).splits[split]]


def _beginning(folder: Path, index: Index) -> str:
    if index.sources:
        folder = folder.parent / index.sources[0].folder
        index = read_index(folder)
    shards = (shard for split in SPLITS for shard in index.splits[split] if shard.tokens)
    tokens = token_ids(map_shard(folder, index, next(shards))[:SAMPLE_CHARACTERS], index)
    return Tokenizer.load(folder).decode(tokens)[:SAMPLE_CHARACTERS]
