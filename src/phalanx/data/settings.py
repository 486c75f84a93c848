"""What a job's data settings mean for its shards: whether they make sense, and in which folder the shards lie."""

from __future__ import annotations

import hashlib
import json
import platform
import re
from dataclasses import fields
from pathlib import Path

from phalanx.data.shards import VERSION
from phalanx.data.tokenizer import MIN_BPE_VOCAB, Tokenizer
from phalanx.errors import DataError, JobError
from phalanx.job.data import Data

CORPORA = ("stdlib", "shakespeare_char", "text", "random")
TOKENIZERS = ("char", "byte", "bpe")


def prepared_path(data: Data) -> Path:
    """The folder where the shards of `data` lie or would lie: data.dir/<corpus>-<tokenizer>-<key>, where the key is
    hashed from everything in the settings that shapes the tokens.

    Raises JobError for settings that mean nothing, and DataError for a tokenizer that cannot be read.
    """
    _check(data)
    # Tiny Shakespeare is the same wherever it lies.
    shaping = [s for s in overrides(data) if data.corpus == "text" or not s.startswith("data.path=")]
    content: dict[str, object] = {"version": VERSION, "settings": shaping}
    names = [data.corpus, data.tokenizer]
    if data.corpus == "random":
        names = ["random", str(data.random_vocab)]
    elif data.tokenizer == "bpe":
        names = [data.corpus, f"bpe{data.bpe_vocab}"]
    elif data.tokenizer not in TOKENIZERS:
        path = tokenizer_path(data)
        names = [data.corpus, re.sub(r"[^\w.]+", "_", path.stem)]
        content["tokenizer"] = Tokenizer.load(path).fingerprint
    if data.corpus == "stdlib":
        content["python"] = [platform.python_implementation(), platform.python_version()]
    key = hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=4).hexdigest()
    return Path(data.dir).expanduser() / "-".join([*names, key])


def overrides(data: Data) -> list[str]:
    """The settings that shape the shards of `data`, as one would type them."""
    used = {"corpus", "val_fraction"}
    if data.corpus == "random":
        used |= {"random_tokens", "random_vocab"}
    else:
        used |= {"tokenizer", "limit_mb"}
        used |= {"bpe_vocab"} if data.tokenizer == "bpe" else set()
        used |= {"path"} if data.path and data.corpus != "stdlib" else set()
        used |= {"text_field"} if data.corpus == "text" else set()
    return [f"data.{field.name}={getattr(data, field.name)}" for field in fields(data) if field.name in used]


def tokenizer_path(data: Data) -> Path:
    """The file that data.tokenizer names. Raises DataError if there is none."""
    path = Path(data.tokenizer).expanduser()
    if not path.exists():
        raise DataError(
            f"data.tokenizer={data.tokenizer}: expected {', '.join(TOKENIZERS)}, or the path of a tokenizer.json, and "
            "there is no such file"
        )
    return path


def _check(data: Data) -> None:
    problems = []
    if data.corpus not in CORPORA:
        problems.append(f"data.corpus={data.corpus}: expected one of {', '.join(CORPORA)}")
    if data.corpus == "text" and not data.path:
        problems.append("data.corpus=text needs data.path: a text or JSONL file, or a folder of them")
    if not 0 <= data.val_fraction < 1:
        problems.append(f"data.val_fraction={data.val_fraction}: expected 0 <= val_fraction < 1")
    if not 0 <= data.limit_mb < 1e12:
        problems.append(f"data.limit_mb={data.limit_mb}: expected a number of megabytes, or 0 for all")
    if data.tokenizer == "bpe" and data.bpe_vocab < MIN_BPE_VOCAB:
        problems.append(
            f"data.bpe_vocab={data.bpe_vocab}: expected at least {MIN_BPE_VOCAB} (the 256 bytes and the end of text)"
        )
    if data.random_tokens < 1:
        problems.append(f"data.random_tokens={data.random_tokens}: expected at least 1")
    if not 1 <= data.random_vocab <= 1 << 32:
        problems.append(f"data.random_vocab={data.random_vocab}: expected 1 to {1 << 32}")
    if data.workers < 0:
        problems.append(f"data.workers={data.workers}: expected a number of processes, or 0 for one a core")
    if problems:
        raise JobError(problems)
