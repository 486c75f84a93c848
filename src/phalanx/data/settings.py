"""Checks a job's data settings, and derives from them the folder of the shards."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
from dataclasses import fields
from pathlib import Path

from phalanx.check.job import data_problems
from phalanx.config.data import Data
from phalanx.data.shards import TOKENS_VERSION
from phalanx.data.tokenizer import Tokenizer
from phalanx.errors import DataError, JobError

TOKENIZERS = ("char", "byte", "bpe")


def prepared_path(data: Data) -> Path:
    """Returns the folder of the shards of `data`, which may not exist yet: data.dir/<corpus>-<tokenizer>-<key>, where
    the key is hashed from all settings that affect the tokens.

    Raises JobError for invalid settings, and DataError for a tokenizer that cannot be read.
    """
    if problems := [f"{path}: {message}" for path, message in data_problems(data)]:
        raise JobError(problems)
    # Tiny Shakespeare is the same text in any location.
    shaping = [s for s in overrides(data) if data.corpus == "text" or not s.startswith("data.path=")]
    content: dict[str, object] = {"version": TOKENS_VERSION, "settings": shaping}
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
    """Returns the settings that affect the shards of `data`, as command-line overrides."""
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
    """Returns the file that data.tokenizer names. Raises DataError if there is none."""
    path = Path(data.tokenizer).expanduser()
    if not os.path.exists(path):  # unlike Path.exists also for a name that is too long for a file
        raise DataError(
            f"data.tokenizer={data.tokenizer}: expected {', '.join(TOKENIZERS)}, or the path of a tokenizer.json, and "
            "there is no such file"
        )
    return path
