"""Checks a tokenizer that a kind of the table has made, which a package may have added."""

from __future__ import annotations

import json
from collections.abc import Iterator

from phalanx.config.tokenizers import TOKENIZERS
from phalanx.data.tokenizer import FORMAT, LARGEST_VOCABULARY, Tokenizer, read_definition
from phalanx.errors import ExtensionError


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
