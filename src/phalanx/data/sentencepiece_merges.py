"""SentencePiece's BPE from a GGUF file's tokens and scores, as parts of a tokenizer.json of the `tokenizers` library.

llama.cpp (`llm_tokenizer_spm` of src/llama-vocab.cpp) merges the two neighbours that make the token with the highest
score, and neither normalises nor splits before. So a merge of the library is every pair of tokens that makes a third,
in the order of the third one's score.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

SPACE = "\u2581"
"""Stands for a space in tokens."""
_LONGEST = 1000
"""Most characters of a token: every place in it is tried. SentencePiece makes none of more than 16 unless told to."""
_NORMAL, _UNKNOWN, _BYTE = 1, 2, 6
"""Kinds of tokens (llama_token_type)."""


def parts_of(metadata: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int]) -> dict[str, Any]:
    """Returns normalizer, pre_tokenizer, decoder and model of a tokenizer.json.

    Args:
        metadata: those of the file.
        tokens: all tokens, each once.
        types: the kind of each token, or nothing.

    Raises ValueError, saying what is wrong, without a score for each token."""
    scores = metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(tokens) or not all(isinstance(s, float) for s in scores):
        raise ValueError("tokenizer.ggml.scores is missing, or does not have a number for each token")
    if (longest := max(map(len, tokens), default=0)) > _LONGEST:
        raise ValueError(f"one of its tokens has {longest:,} characters; at most {_LONGEST:,} are read")
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", True) is not False
    unknown = next((token for token, kind in zip(tokens, types, strict=False) if kind == _UNKNOWN), None)
    to_space = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
    first = [{"type": "Prepend", "prepend": SPACE}] if prefix else []
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
    return {
        "normalizer": {
            "type": "Sequence",
            "normalizers": [*first, {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}],
        },
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": [to_space, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip]},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": unknown,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": _BYTE in types,
            "ignore_merges": False,
            "vocab": {token: number for number, token in enumerate(tokens)},
            "merges": _merges(tokens, types, scores),
        },
    }


def _merges(tokens: Sequence[str], types: Sequence[int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Returns the pairs of tokens that make a third, in the order of the third one's score, then of its number. Only
    ordinary tokens take part: the text of a control token must not become one."""
    plain = [number for number in range(len(tokens)) if not types or types[number] == _NORMAL]
    known = {tokens[number] for number in plain}
    plain.sort(key=lambda number: -scores[number])  # stable: equal scores stay in the order of their numbers
    return [
        (text[:cut], text[cut:])
        for text in (tokens[number] for number in plain)
        for cut in range(1, len(text))
        if text[:cut] in known and text[cut:] in known
    ]
