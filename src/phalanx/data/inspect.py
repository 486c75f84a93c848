"""Describes a data file and how it would be read, without preparing anything."""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from phalanx.check.job import data_problems
from phalanx.check.load import load_file
from phalanx.config.corpora import PAIR, has_pairs
from phalanx.config.job import Data
from phalanx.data.conversations import preference_rows, prompt_rows
from phalanx.data.corpus import documents, text_files
from phalanx.data.files import SPLITS, stderr_progress
from phalanx.data.formats import IN_WORDS, compression_of, form_of, missing, pair_of, records
from phalanx.data.index import (
    DTYPES,
    INDEX,
    Index,
    Shard,
    add_block_digests,
    map_shard,
    open_shards,
    read_index,
    token_ids,
)
from phalanx.data.megatron import open_megatron
from phalanx.data.mixture import MixedData, Rounds, open_split
from phalanx.data.packing import PackingFacts, RangeData
from phalanx.data.prepare import prepare
from phalanx.data.rows import Causes, Row, chat_rows, row_files, row_texts
from phalanx.data.settings import prepared_path, source_settings
from phalanx.data.tokenizer import Tokenizer
from phalanx.echo import echo
from phalanx.errors import DataError, JobError
from phalanx.partition.ramp import ramp_of

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
    """Returns what became of conversations and packed documents, by split and number of the source."""
    found = {}
    for split in SPLITS:
        for source, each in enumerate(index.folders(folder)):
            shards = read_index(each).splits[split]
            if any(shard.conversations or (data.packing and shard.tokens) for shard in shards):
                samples = open_split(each, split, seq_len, data)
                if not isinstance(samples, RangeData):
                    continue  # a text among conversations
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


LOOKED_AT = 1000
"""Most records that are looked at."""
SHOWN = 2000
"""Most characters of the sample."""


def inspected(file: Path, template: str = "chatml", job: Data | None = None) -> dict[str, Any]:
    """Returns what a file is: `form`, `corpus` (the value of data.corpus that reads it), `records` and `fields` of the
    first LOOKED_AT, `roles` with their messages, `problems` of the rows that cannot be used, and `sample`: the parts of
    the first usable text, each with whether it is trained on. Of a job file with data.mix: `sources`, each with what
    the run draws of it. `job` says how its rows are read. Raises NotFoundError if there is no such file, DataError if
    it cannot be read, and JobError."""
    if file.suffix in (".yaml", ".yml"):
        return _of_job(file)
    if pair_of(str(file)):
        return _of_megatron(file)
    if os.path.isdir(file):
        folder = replace(job or Data(corpus="chat"), path=str(file))
        file = (text_files if folder.corpus == "text" else row_files)(folder)[0]  # the others are read in the same way
    elif not os.path.isfile(file):
        raise missing(file, "any")
    form, compressed = form_of(file), compression_of(file)
    found: dict[str, Any] = {"form": IN_WORDS[form] + (f", compressed with {compressed}" if compressed else "")}
    found = {"file": str(file), **found}
    if form == "text":
        return found | _of_text(file, job)
    names: Counter[str] = Counter()
    objects = 0
    for _, record in islice(records(file, form), LOOKED_AT):
        if isinstance(record, dict):
            objects += 1
            names.update(map(str, record))
    found |= {"records": f"{objects:,}{'+' if objects >= LOOKED_AT else ''}", "fields": list(names)}
    pairs = ({"chosen", "rejected"}, {"completion", "label"}, {"responses"})
    if any(each <= names.keys() for each in pairs):
        corpus, read = "preferences", preference_rows
    elif {"prompt", "answer"} <= names.keys():
        corpus, read = "prompts", prompt_rows
    else:
        corpus, read = "chat", chat_rows
    is_text = "text" in names and not names.keys() & {"messages", "conversations", "prompt", "instruction"}
    if job.corpus == "text" if job else is_text and corpus == "chat":
        return found | _of_text(file, job)
    reads = {"chat": chat_rows, "preferences": preference_rows, "prompts": prompt_rows}
    if job and job.corpus in reads:
        corpus, read = job.corpus, reads[job.corpus]
    data = replace(job or Data(template=template), corpus=corpus, path=str(file))
    if problems := [f"{path}: {message}" for path, message in data_problems(data)]:
        raise JobError(problems)
    rows = list(islice(read([file], data), LOOKED_AT))
    return found | {"corpus": corpus, **_of_rows(rows, data, file)}


def _of_job(file: Path) -> dict[str, Any]:
    """Returns what a job's data is: of a mixture its sources, otherwise the file that it names."""
    job = load_file(file).job
    data = job.data
    if not data.mix:
        if not data.path:
            raise DataError(f"{file}: this job's corpus is {data.corpus}, which has no file; name a data file")
        return inspected(Path(data.path).expanduser(), job=data)
    total, samples = sum(source.weight for source in data.mix), ramp_of(job).samples(job.train.steps)
    group = PAIR if has_pairs(data) else 1
    drawn = Rounds.of([source.weight for source in data.mix]).drawn(samples // group).tolist()
    sources: list[dict[str, Any]] = []
    problems: list[str] = []
    folder = prepared_path(data)
    for source, own, count in zip(data.mix, source_settings(data, folder), drawn, strict=True):
        seen = inspected(Path(source.path).expanduser(), job=replace(own, tokenizer=data.tokenizer))
        share = {"weight": source.weight / total, "samples": count * group}
        sources.append({"path": source.path, "form": seen["form"], "corpus": own.corpus, **share})
        problems += seen.get("problems", ())
    if os.path.exists(folder / INDEX):
        mixed = open_split(folder, "train", job.model.seq_len, data)
        assert isinstance(mixed, MixedData)
        for found, fact, own in zip(sources, mixed.source_facts(), mixed.sources, strict=True):
            found |= {"tokens": fact["tokens"], "epochs": found["samples"] / own.sample_count}
        problems += mixed.epoch_problems(samples)
    found = {"file": str(file), "form": f"a job of {samples:,} samples", "corpus": data.corpus, "sources": sources}
    return found | ({"problems": problems} if problems else {})


def _of_megatron(file: Path) -> dict[str, Any]:
    found = open_megatron(str(file))
    tokens = np.memmap(found.bin, DTYPES[found.dtype], mode="r")[: LOOKED_AT * LOOKED_AT]
    return {
        "file": str(found.bin),
        "form": f"Megatron indexed data set, version {found.version}, {found.dtype}",
        "corpus": "text",
        "tokens": f"{found.tokens:,}",
        "sequences": f"{found.sequences:,}",
        "documents": f"{found.documents.size:,}",
        "largest_id": f"{int(tokens.max()):,} of the first {tokens.size:,} tokens",
        "needs": "data.tokenizer: the tokenizer.json that made these tokens",
    }


def _of_text(file: Path, job: Data | None) -> dict[str, Any]:
    data = replace(job or Data(), corpus="text", path=str(file))
    first = next(iter(next(iter(documents([file], data)), ())), "")
    return {"corpus": "text", "sample": [{"text": first[:SHOWN], "trained": True}]}


def _of_rows(rows: list[Row], data: Data, file: Path) -> dict[str, Any]:
    roles = Counter(message["role"] for row in rows for messages in row.conversations for message in messages)
    problems = Causes()
    for row in rows:
        if row.problem:
            problems.add(row.where, row.problem)
    found: dict[str, Any] = {"roles": [f"{role} {count:,}" for role, count in roles.items()]}
    if problems.rows:
        found["problems"] = [problems.head(), *problems.lines(most=5)]
    sample: list[dict[str, Any]] = []
    try:
        first = next(row_texts([file], data))
        left = SHOWN
        for text, trained in (part for parts in first.conversations for part in parts):
            if left > 0:
                sample.append({"text": text[:left], "trained": trained})
            left -= len(text)
    except (StopIteration, DataError) as error:
        if not problems.rows:
            found["problems"] = [str(error)]
    return found | {"sample": sample}
