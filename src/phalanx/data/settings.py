"""Checks a job's data settings, and derives from them the folder of the shards."""

from __future__ import annotations

import hashlib
import json
import os
import re
from dataclasses import fields, replace
from pathlib import Path

from phalanx.check.job import data_problems
from phalanx.config.corpora import CORPORA, TOKENIZERS, corpus_of, number_of, vocabulary_of
from phalanx.config.job import Data, Job, MixSource
from phalanx.config.presets import states_no_rows
from phalanx.config.values import written
from phalanx.data.formats import pair_of
from phalanx.data.index import TOKENS_VERSION
from phalanx.data.tokenizer import FILE as TOKENIZER_FILE
from phalanx.data.tokenizer import Tokenizer
from phalanx.errors import DataError, JobError, NotFoundError
from phalanx.registry import OWN


def vocabulary_size(job: Job) -> int:
    """Returns the rows of the embedding that training gives the job, or the vocabulary without padding where they are
    its own: `model.vocab_size`, unless that only is the size of a preset's own tokenizer and the job names another; or
    the size given by the data's settings, or that of the prepared shards.

    Raises JobError if only reading the corpus would tell."""
    data, rows = job.data, job.model.vocab_size
    named = (data.corpus, data.tokenizer) != (Data.corpus, Data.tokenizer)
    if rows and (job.model.from_ or not named or not states_no_rows(job.model)):
        return rows
    if stated := vocabulary_of(data):
        return stated
    # A prediction that knows the vocabulary need not wait for numpy.
    from phalanx.data.index import read_index

    try:
        return read_index(prepared_path(data)).vocab_size
    except DataError:
        if rows:
            return rows
        raise JobError(
            f"model.vocab_size is 0, which means that of data.tokenizer={data.tokenizer}, and the data is not "
            "prepared: set model.vocab_size to a number, or first run `phalanx data prepare` with the same job"
        ) from None


def prepared_path(data: Data) -> Path:
    """Returns the folder of the shards of `data`, which may not exist yet: data.dir/<corpus>-<tokenizer>-<key>, where
    the key is hashed from all settings that affect the tokens.

    Raises JobError for invalid settings, and DataError for a tokenizer that cannot be read.
    """
    if problems := [f"{path}: {message}" for path, message in data_problems(data)]:
        raise JobError(problems)
    entry = CORPORA[data.corpus]
    located = tuple(f"data.{name}=" for name in entry.only_location)
    content: dict[str, object] = {
        "version": TOKENS_VERSION,
        "settings": [setting for setting in overrides(data) if not setting.startswith(located)],
    }
    if entry.tokens is not None:
        names = [data.corpus, str(number_of(entry.vocab, data))]
    elif data.tokenizer in TOKENIZERS:
        vocab = TOKENIZERS[data.tokenizer].vocab
        names = [data.corpus, f"{data.tokenizer}{number_of(vocab, data) if isinstance(vocab, str) else ''}"]
    else:
        path = tokenizer_path(data)
        names = [data.corpus, re.sub(r"[^\w.]+", "_", path.stem)]
        content["tokenizer"] = Tokenizer.load(path).fingerprint
    if data.mix:  # but not how often they are drawn
        content["mix"] = [_source_identity(source) for source in data.mix]
    if entry.identity is not None:
        content |= CORPORA.code(data.corpus, "identity")(data)
    if packages := _packages(data):
        content["packages"] = packages
    key = hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=4).hexdigest()
    return Path(data.dir).expanduser() / "-".join([*names, key])


def _source_identity(source: MixSource) -> object:
    """Returns what determines the text of a source."""
    own = [source.corpus, *source.columns, *source.ignore_keys]
    return [source.path, source.corpus, source.columns, source.ignore_keys] if any(own) else source.path


def overrides(data: Data) -> list[str]:
    """Returns the settings that affect the shards of `data`, as command-line overrides."""
    entry = CORPORA[data.corpus]
    used = {"corpus", "val_fraction", *entry.settings}
    if entry.tokens is None:
        used |= {"tokenizer", "limit_mb"}
        used |= set(TOKENIZERS[data.tokenizer].settings) if data.tokenizer in TOKENIZERS else set()
    values = {field.name: getattr(data, field.name) for field in fields(data) if field.name in used}
    values |= {"mix": written(data.mix)} if data.mix else {}
    return [f"data.{name}={value}" for name, value in values.items() if value not in ("", ())]


def source_settings(data: Data, folder: Path) -> list[Data]:
    """Returns the settings of every source of a mixture, prepared in `folder`. A tokenizer that is made of a text is
    made of all of theirs, and lies there."""
    tokenizer = str(folder / TOKENIZER_FILE) if is_made_of_text(data.tokenizer) else data.tokenizer
    sources = [
        replace(
            data,
            corpus=corpus_of(source, data),
            mix=(),
            tokenizer=tokenizer,
            path=source.path,
            columns=source.columns or data.columns,
            ignore_keys=source.ignore_keys or data.ignore_keys,
        )
        for source in data.mix
    ]
    return [replace(each, text_field=Data.text_field) if pair_of(each.path) else each for each in sources]


def is_made_of_text(tokenizer: str) -> bool:
    """Returns whether data.tokenizer names a kind of tokenizer that each corpus gives its own vocabulary."""
    return tokenizer in TOKENIZERS and not (isinstance(vocab := TOKENIZERS[tokenizer].vocab, int) and vocab)


def _packages(data: Data) -> list[str]:
    """Returns the installed packages, with versions, whose code makes the tokens: another version may make others."""
    used = {CORPORA.package(data.corpus)}
    if CORPORA[data.corpus].tokens is None and data.tokenizer in TOKENIZERS:
        used.add(TOKENIZERS.package(data.tokenizer))
    return sorted(used - {OWN, ""})


def tokenizer_path(data: Data) -> Path:
    """Returns the file that data.tokenizer names. Raises DataError if there is none."""
    path = Path(data.tokenizer).expanduser()
    if not os.path.exists(path):  # unlike Path.exists also for a name that is too long for a file
        raise NotFoundError(
            f"data.tokenizer={data.tokenizer}: expected {', '.join(TOKENIZERS)}, or the path of a tokenizer.json, and "
            "there is no such file"
        )
    return path
