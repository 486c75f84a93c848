"""Describes a data file and how it would be read, without preparing anything."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from phalanx.check.job import data_problems
from phalanx.check.load import load_file
from phalanx.config.corpora import PAIR, has_pairs
from phalanx.config.data import Data
from phalanx.data.corpus import documents, text_files
from phalanx.data.formats import IN_WORDS, compression_of, form_of, missing, pair_of, records
from phalanx.data.index import DTYPES, INDEX
from phalanx.data.megatron import open_megatron
from phalanx.data.mixture import MixedData, Rounds
from phalanx.data.preferences import preference_rows
from phalanx.data.row_text import row_texts
from phalanx.data.rows import Causes, Row, chat_rows, row_files
from phalanx.data.settings import prepared_path, source_settings
from phalanx.data.split import open_split
from phalanx.errors import DataError, JobError

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
    else:
        corpus, read = "chat", chat_rows
    is_text = "text" in names and not names.keys() & {"messages", "conversations", "prompt", "instruction"}
    if job.corpus == "text" if job else is_text and corpus == "chat":
        return found | _of_text(file, job)
    if job and job.corpus in ("chat", "preferences"):
        corpus, read = job.corpus, preference_rows if job.corpus == "preferences" else chat_rows
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
    total, samples = sum(source.weight for source in data.mix), job.train.steps * job.train.global_batch
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
