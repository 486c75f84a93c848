"""SentencePiece's BPE and Unigram from tokens and scores, as parts of a tokenizer.json of the `tokenizers` library.

BPE merges the two neighbours that make the token with the highest score (llama.cpp's `llm_tokenizer_spm` of
src/llama-vocab.cpp). So a merge of the library is every pair of tokens that makes a third, in the order of the third
one's score. Unigram takes the tokens whose scores have the largest sum (Kudo 2018). Neither splits text before.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

SPACE = "\u2581"
"""Stands for a space in tokens."""
_LONGEST = 1000
"""Most characters of a token: every place in it is tried. SentencePiece makes none of more than 16 unless told to."""
_NEWER = 300
"""Most characters that a map replaces and NFKC does not: those of another version of Unicode. Folding case has more."""
_NORMAL, _UNKNOWN, _BYTE = 1, 2, 6
"""Kinds of tokens (llama_token_type)."""


def parts_of(
    metadata: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int], *, unigram: bool = False
) -> dict[str, Any]:
    """Returns normalizer, pre_tokenizer, decoder and model of a tokenizer.json.

    Args:
        metadata: those of the file.
        tokens: all tokens, each once.
        types: the kind of each token, or nothing.
        unigram: whether it is Unigram, not BPE.

    Raises ValueError, saying what is wrong, without a score for each token."""
    scores = metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(tokens) or not all(isinstance(s, float) for s in scores):
        raise ValueError("tokenizer.ggml.scores is missing, or does not have a number for each token")
    if (longest := max(map(len, tokens), default=0)) > _LONGEST:
        raise ValueError(f"one of its tokens has {longest:,} characters; at most {_LONGEST:,} are read")
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", True) is not False
    unknown = next((token for token, kind in zip(tokens, types, strict=False) if kind == _UNKNOWN), None)
    to_space = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
    trimmed = metadata.get("tokenizer.ggml.remove_extra_whitespaces") is True
    first = [{"type": "Prepend", "prepend": SPACE}] if prefix else []
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix or trimmed else []
    before = [*_mapped(metadata.get("tokenizer.ggml.precompiled_charsmap", b"")), *(_TRIMMED if trimmed else ())]
    normalizers = [*before, *first, {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}]
    bpe = {
        "type": "BPE",
        "dropout": None,
        "unk_token": unknown,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": True,
        "byte_fallback": _BYTE in types,
        "ignore_merges": False,
        "vocab": {token: number for number, token in enumerate(tokens)},
        "merges": [] if unigram else _merges(tokens, types, scores),
    }
    return {
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": [to_space, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip]},
        **(_unigram(tokens, types, scores) if unigram else {"model": bpe}),
    }


_TRIMMED = (
    {"type": "Replace", "pattern": {"Regex": rf"\A +|[ {SPACE}]+\z"}, "content": ""},
    {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "},
)
"""remove_extra_whitespaces."""


def _mapped(charsmap: bytes) -> list[dict[str, Any]]:
    """Returns the normalisers of a precompiled_charsmap. The library's own reading of one drops marks that follow a
    character which it replaces, so NFKC, which such a map is made of, goes first, and before it what the map removes or
    makes a space. Raises ValueError for a map that is something else."""
    if not charsmap:
        return []
    from tokenizers import normalizers

    try:
        of_map, nfkc = normalizers.Precompiled(charsmap), normalizers.NFKC()
    except BaseException as error:  # a panic of its Rust code
        raise ValueError(f"its precompiled_charsmap is damaged: {error}") from None
    characters = [chr(code) for code in (*range(1, 0xD800), *range(0xE000, 0x30000)) if chr(code) != SPACE]
    wanted, usual = ({each: one.normalize_str(each) for each in characters} for one in (of_map, nfkc))
    changed = [each for each in characters if wanted[each] != usual[each]]
    found: list[dict[str, Any]] = []
    for content in ("", " "):
        codes = "".join(f"\\x{{{ord(each):x}}}" for each in changed if wanted[each] == content)
        found += [{"type": "Replace", "pattern": {"Regex": f"[{codes}]"}, "content": content}] if codes else []
    other = [each for each in changed if wanted[each] not in ("", " ")]
    if len(other) > _NEWER:
        raise ValueError(
            f"its precompiled_charsmap is not NFKC: {other[0]!r} becomes {wanted[other[0]]!r}, which is not read with "
            "the same ids"
        )
    coded = base64.b64encode(charsmap).decode()
    return [*found, {"type": "NFKC"}, {"type": "Precompiled", "precompiled_charsmap": coded}]


def _unigram(tokens: Sequence[str], types: Sequence[int], scores: Sequence[float]) -> dict[str, Any]:
    """Returns model and pre_tokenizer of Unigram. The library takes every token for one that text is made of: others
    get a score with which they are never the best. Where a character of theirs is no token, which would be worse still,
    text is cut before and after it, which changes nothing: it is an unknown one in any case."""
    plain = {token: score for token, score, kind in zip(tokens, scores, types, strict=True) if kind == _NORMAL}
    if unread := sorted(set("".join(plain)) - plain.keys()):
        raise ValueError(f"the character {unread[0]!r} of its pieces is no piece, which is not read with the same ids")
    if any(set(token) == {SPACE} and len(token) > 1 for token in plain):
        raise ValueError(
            "pieces of several spaces, which are cut by rounding errors in runs, are not read with the same ids"
        )
    never = min(scores, default=0.0) * 2 * _LONGEST - 100.0
    cuts = sorted({cut for token in tokens if token not in plain for cut in _cuts(token, plain)})
    split = {"type": "Split", "pattern": {"Regex": "|".join(cuts)}, "behavior": "Isolated", "invert": False}
    return {
        "pre_tokenizer": split if cuts else None,
        "model": {
            "type": "Unigram",
            "unk_id": types.index(_UNKNOWN),
            "vocab": [(token, plain.get(token, never)) for token in tokens],
            "byte_fallback": _BYTE in types,
        },
    }


def _cuts(token: str, known: Mapping[str, float]) -> Iterator[str]:
    """Yields an expression for the first character of a token that is no token by itself, within the token's text."""
    for place, character in enumerate(token):
        if character not in known:
            yield f"(?<={re.escape(token[:place])}){re.escape(character)}(?={re.escape(token[place + 1 :])})"
            return


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
