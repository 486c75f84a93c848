"""The tokenizer of a run as the Hugging Face libraries read it: tokenizer.json, and its settings beside it.

A tokenizer of the `tokenizers` library is written as it is. Those of characters and bytes, which have a format of their
own here, are expressed in the library's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from phalanx.data.token_table import alphabet
from phalanx.data.tokenizer import END_OF_TEXT, ByteTokenizer, CharTokenizer, LibraryTokenizer, Tokenizer

UNKNOWN = "<unk>"
_ANY_CHARACTER = {"type": "Split", "pattern": {"Regex": r"[\s\S]"}, "behavior": "Isolated", "invert": False}
_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}


def library_definition(tokenizer: Tokenizer) -> str | None:
    """Returns a tokenizer.json of the `tokenizers` library that encodes and decodes as `tokenizer` does; None if the
    library has no such kind."""
    if isinstance(tokenizer, LibraryTokenizer):
        return tokenizer.definition()
    if isinstance(tokenizer, CharTokenizer):
        return _of_characters(tokenizer)
    return _of_bytes() if isinstance(tokenizer, ByteTokenizer) else None


def settings(tokenizer: Tokenizer, context: int, own: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a tokenizer_config.json: `own`, that of the imported tokenizer, with the model's `context` in tokens,
    and what any of the library's tokenizers needs."""
    end = end_of_text(tokenizer)
    usual: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
    }
    if end:
        usual["eos_token"] = end[0]
    if isinstance(tokenizer, CharTokenizer) and tokenizer.unknown:
        usual["unk_token"] = UNKNOWN
    return usual | dict(own)


def end_of_text(tokenizer: Tokenizer) -> tuple[str, int] | None:
    """Returns the token that ends a text, if the tokenizer has one."""
    if not isinstance(tokenizer, LibraryTokenizer) or len(tokenizer.separator) != 1:
        return None
    text = tokenizer.decode(tokenizer.separator)
    return (text, tokenizer.separator[0]) if text in END_OF_TEXT else None


def _of_characters(tokenizer: CharTokenizer) -> str:
    """One word per character. Without an unknown token the library refuses other characters, as ours does."""
    vocabulary = {character: number for number, character in enumerate(tokenizer.characters)}
    if tokenizer.unknown:
        vocabulary[UNKNOWN] = len(vocabulary)
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": UNKNOWN}
    return _definition(model, _ANY_CHARACTER, {"type": "Fuse"})


def _of_bytes() -> str:
    """Byte-level BPE without merges: its alphabet has a printable character per byte."""
    model = {"type": "BPE", "vocab": {character: byte for byte, character in alphabet().items()}, "merges": []}
    return _definition(model, _BYTES, _BYTES)


def _definition(model: Mapping[str, Any], pre_tokenizer: Mapping[str, Any], decoder: Mapping[str, Any]) -> str:
    absent = dict.fromkeys(("truncation", "padding", "normalizer", "post_processor"))
    parts = {"version": "1.0", "added_tokens": [], "pre_tokenizer": pre_tokenizer, "decoder": decoder, "model": model}
    return json.dumps(parts | absent, ensure_ascii=False)
