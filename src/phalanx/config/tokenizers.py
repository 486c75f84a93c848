"""The table of tokenizers: what `data.tokenizer` may name besides a file. Their code is in data/tokenizer.py."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from phalanx.bounded import read_json
from phalanx.config.corpora import CORPORA, Rules, no_rules, number_of, rules_problems, setting_problems
from phalanx.config.data import Data
from phalanx.facts import Lazy, stated
from phalanx.registry import Registry

MIN_BPE_VOCAB = 257
"""The 256 bytes and the end-of-text token."""
END_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<\uff5cend\u2581of\u2581sentence\uff5c>")
"""End-of-document tokens of known tokenizers, in order of preference."""
TOKENIZER_FILES = ("tokenizer.json", "tekken.json", "tokenizer.model", "*.tiktoken", "tiktoken.model")
"""Patterns of the files in a folder that may hold its tokenizer, the first that is there first."""
END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end|>", "<|return|>")
"""Tokens with which chat models end an answer: ChatML, Llama 3, Gemma, Phi, gpt-oss."""


@stated
@dataclass(frozen=True)
class TokenizerEntry:
    """A kind of tokenizer."""

    title: str
    """One-line description."""
    source: str
    """Where the method comes from."""
    make: Lazy
    """`make(data, counts, texts)` returns the `Tokenizer` for a corpus: `counts[c]` is how often code point c occurs in
    it, (0x110000,) int64, and `texts()` yields its training text from the beginning."""
    read: Lazy | None
    """`read(stored)` returns the tokenizer of a tokenizer.json of this kind, a dict that anybody may have written:
    raises ValueError if it is not one. None: it is stored in the format of the `tokenizers` library."""
    vocab: int | str = 0
    """Vocabulary size, or the field of `data` that states it; 0: it depends on the corpus."""
    settings: tuple[str, ...] = ()
    """The fields of `data` that it depends on."""
    rules: Rules = no_rules
    """The problems of the settings."""


def _bpe_problems(data: Data) -> Iterator[tuple[str, str]]:
    if data.bpe_vocab < MIN_BPE_VOCAB:
        yield (
            "data.bpe_vocab",
            f"must be at least {MIN_BPE_VOCAB} (the 256 bytes and the end of text), is {data.bpe_vocab}",
        )


def _entry_problems(name: str, entry: TokenizerEntry) -> Iterator[str]:
    """Yields the problems of an entry that is added."""
    yield from setting_problems(entry.settings, entry.vocab)
    if isinstance(entry.vocab, int) and entry.vocab < 0:
        yield f"vocab must not be negative, is {entry.vocab}"
    if name == "number":
        yield "the name stands for tokens without text"
    yield from rules_problems(entry.rules)  # last: it raises where their code fails


TOKENIZERS = Registry(
    "tokenizer",
    {
        "char": TokenizerEntry(
            "one token per character of the corpus",
            "nanoGPT, data/shakespeare_char",
            make="phalanx.data.tokenizer:make_char",
            read="phalanx.data.tokenizer:read_char",
        ),
        "byte": TokenizerEntry(
            "the 256 bytes of UTF-8",
            "ByT5 (Xue et al. 2021)",
            make="phalanx.data.tokenizer:make_byte",
            read="phalanx.data.tokenizer:read_byte",
            vocab=256,
        ),
        "bpe": TokenizerEntry(
            "byte-level BPE, trained on the corpus",
            "GPT-2 (Radford et al. 2019), section 2.2",
            make="phalanx.data.tokenizer:make_bpe",
            read=None,
            vocab="bpe_vocab",
            settings=("bpe_vocab",),
            rules=_bpe_problems,
        ),
    },
    _entry_problems,
)
"""Tokenizers by name."""


def tokenizer_in(folder: Path) -> Path | None:
    """Returns the file of a folder that holds its tokenizer; None without one."""
    found = (path for pattern in TOKENIZER_FILES for path in sorted(folder.glob(pattern)) if os.path.isfile(path))
    return next(found, None)


def vocabulary_of(data: Data) -> int:
    """Returns the vocabulary size that the settings of `data` or its tokenizer.json state; 0 if only reading the corpus
    tells."""
    corpus = CORPORA[data.corpus]
    if corpus.tokens is not None:
        return number_of(corpus.vocab, data)
    if data.tokenizer in TOKENIZERS:
        return number_of(TOKENIZERS[data.tokenizer].vocab, data)
    return tokens_at(Path(data.tokenizer).expanduser())


def tokens_at(path: Path) -> int:
    """Returns the vocabulary size of a tokenizer.json, or of that of a folder; 0 for what is none, and for files of
    other programs, which take seconds to read. Only reading it for training says what is wrong with it."""
    file = (tokenizer_in(path) or path) if os.path.isdir(path) else path
    try:
        stat = os.stat(file)
        return _tokens_in(file, stat.st_mtime_ns, stat.st_size) if file.suffix == ".json" else 0
    except (OSError, ValueError):  # the latter: a NUL byte in its name, or no JSON
        return 0


@lru_cache(maxsize=16)
def _tokens_in(file: Path, mtime_ns: int, size: int) -> int:
    match read_json(file):
        case {"kind": "number", "vocab_size": int(tokens)}:
            return tokens
        case {"kind": "char", "characters": str(characters), "unknown": unknown}:
            return len(characters) + bool(unknown)
        case {"kind": str(kind)} if kind in TOKENIZERS and isinstance(vocab := TOKENIZERS[kind].vocab, int):
            return vocab
        case {"model": {"vocab": dict() as ids}, **rest}:
            last = max((id for id in ids.values() if isinstance(id, int)), default=-1)
        case {"model": {"vocab": list() as pieces}, **rest}:
            last = len(pieces) - 1
        case _:
            return 0
    added = rest.get("added_tokens")
    for token in added if isinstance(added, list) else ():
        match token:
            case {"id": int(id)}:
                last = max(last, id)
    return last + 1
