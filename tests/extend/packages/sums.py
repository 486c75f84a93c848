"""A corpus that is computed, lines such as "17+5=22", and a tokenizer of its fourteen characters."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np

from phalanx import extend
from phalanx.data.tokenizer import Tokenizer, definition_of

SYMBOLS = "0123456789+=\n?"
UNKNOWN = len(SYMBOLS) - 1
DOCUMENTS, LINES = 20, 500


def documents(files: Iterable[Path], data: extend.Data) -> Iterator[Iterable[str]]:
    """Yields documents of 500 lines each; they need no files."""
    for document in range(DOCUMENTS):
        numbers = ((line * 37 % 100, (line * 53 + document) % 100) for line in range(LINES))
        yield ["".join(f"{a}+{b}={a + b}\n" for a, b in numbers)]


class SumTokenizer(Tokenizer):
    """One id per symbol; every other character is "?"."""

    vocab_size = len(SYMBOLS)
    separator = (SYMBOLS.index("\n"),)

    def encode(self, text: str) -> np.ndarray:
        return np.array([SYMBOLS.find(symbol) % len(SYMBOLS) for symbol in text], dtype=np.int64)

    def decode(self, ids: Iterable[int] | np.ndarray) -> str:
        return "".join(SYMBOLS[i] if 0 <= i < UNKNOWN else "?" for i in np.asarray(ids).tolist())

    def definition(self) -> str:
        return definition_of("sums", symbols=SYMBOLS)


def make(data: extend.Data, counts: np.ndarray, texts: Callable[[], Iterator[str]]) -> SumTokenizer:
    return SumTokenizer()


def read(stored: Mapping[str, object]) -> SumTokenizer:
    if stored.get("symbols") != SYMBOLS:
        raise ValueError(f"expected the symbols {json.dumps(SYMBOLS)}")
    return SumTokenizer()


def register() -> None:
    extend.corpus("sums", extend.CorpusEntry("sums of two numbers", "computed", documents=documents))
    extend.tokenizer(
        "sums",
        extend.TokenizerEntry("the symbols of sums", "this file", make=make, read=read, vocab=len(SYMBOLS)),
    )
