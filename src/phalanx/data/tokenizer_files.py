"""Tokenizers of other files: SentencePiece's tokenizer.model, ranks of tiktoken, Mistral's tekken.json.

Each becomes a tokenizer.json with the same ids (token_table.py). What the `tokenizers` library does not compute the
same way is refused, with the command that converts it.
"""

from __future__ import annotations

import base64
import binascii
import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from phalanx.bounded import read_bytes
from phalanx.data.token_table import CONTROL, NORMAL, UNIGRAM, USER_DEFINED, alphabet, definition_of
from phalanx.errors import DataError

_KINDS = {1: UNIGRAM, 2: "llama"}
"""trainer_spec.model_type, with tokenizer.ggml.model; others are words and characters."""
_TABLE = "tokenizer.ggml."
_TEKKEN_SPECIAL = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]"),
    *("[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]"),
    *("[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"),
)
"""The special tokens of a tekken.json that lists none (mistral-common 1.13)."""
_QWEN = {"<|endoftext|>": 151643, "<|im_start|>": 151644, "<|im_end|>": 151645} | {
    f"<|extra_{number}|>": 151646 + number for number in range(205)
}
_TIKTOKEN: Mapping[int, tuple[str, Mapping[str, int]]] = {
    50256: ("gpt-2", {"<|endoftext|>": 50256}),
    50280: ("gpt-2", {"<|endoftext|>": 50256}),
    151643: ("qwen2", _QWEN),
}
"""How text is split (token_table.KINDS) and the special tokens, by the number of ranks: those of r50k_base, p50k_base
and Qwen 1. The files state neither."""


def definition_at(file: Path) -> str:
    """Returns the tokenizer.json of a file of another program. Raises DataError, naming it and what to do instead, for
    what is damaged or cannot be represented with the same ids."""
    try:
        content = read_bytes(file)
        if file.suffix == ".json":
            table = _tekken(json.loads(content))
        elif file.suffix == ".tiktoken" or _is_ranks(content):
            table = _ranked(_tiktoken(content))
        else:
            table = _sentencepiece(content)
    except OSError as error:
        raise DataError(f"cannot read the tokenizer {file}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, struct.error) as error:
        raise DataError(f"{file}: {error}; {_remedy(file)}") from None
    return definition_of(table, file, _remedy(file))


def _remedy(file: Path) -> str:
    return (
        f'convert it where transformers reads it: `python -c "from transformers import AutoTokenizer as T; '
        f"T.from_pretrained('{file.parent}').save_pretrained('{file.parent}')\"` writes tokenizer.json"
    )


def _sentencepiece(content: bytes) -> dict[str, Any]:
    """Returns the table of a ModelProto (sentencepiece_model.proto)."""
    pieces: list[tuple[str, float, int]] = []
    trainer: dict[int, Any] = {}
    normalizer: dict[int, Any] = {}
    for field, value in _fields(content):
        if field == 1:
            piece = dict(_fields(value))
            [score] = struct.unpack("<f", piece.get(2, bytes(4)))
            pieces.append((piece[1].decode(), score, piece.get(3, NORMAL)))
        elif field in (2, 3):
            (trainer if field == 2 else normalizer).update(_fields(value))
    if not pieces:
        raise ValueError("holds no pieces: neither a model of SentencePiece nor ranks of tiktoken")
    prefix, trimmed, charsmap = bool(normalizer.get(3, 1)), bool(normalizer.get(4, 1)), normalizer.get(2, b"")
    users = [text for text, _, kind in pieces if kind == USER_DEFINED]
    for what, holds in {
        "a model of words or characters": trainer.get(3, 1) not in _KINDS,
        "spaces end words (treat_whitespace_as_suffix)": bool(trainer.get(24)),
        "spaces are kept (escape_whitespaces)": not normalizer.get(5, 1),
        "symbols of the user beside add_dummy_prefix or remove_extra_whitespaces": bool(users) and (prefix or trimmed),
        "symbols of the user with spaces": any("\u2581" in text for text in users),
    }.items():
        if holds:
            raise ValueError(f"{what} is not read with the same ids")
    ids = {"unknown": trainer.get(40, 0), "bos": trainer.get(41, 1), "eos": trainer.get(42, 2)}
    named = {f"{_TABLE}{name}_token_id": number for name, number in ids.items() if number < len(pieces)}
    return named | {
        f"{_TABLE}model": _KINDS[trainer.get(3, 1)],
        f"{_TABLE}precompiled_charsmap": charsmap,
        f"{_TABLE}remove_extra_whitespaces": trimmed,
        f"{_TABLE}tokens": [text for text, _, _ in pieces],
        f"{_TABLE}scores": [score for _, score, _ in pieces],
        f"{_TABLE}token_type": [kind for _, _, kind in pieces],
        f"{_TABLE}add_space_prefix": prefix,
    }


def _fields(content: bytes) -> Iterator[tuple[int, Any]]:
    """Yields the fields of a message of protocol buffers: numbers for varints, bytes for all others."""
    at = 0
    while at < len(content):
        key, at = _varint(content, at)
        if (kind := key & 7) == 0:
            value, at = _varint(content, at)
            yield key >> 3, value
            continue
        size, at = _varint(content, at) if kind == 2 else ({1: 8, 5: 4}.get(kind, -1), at)
        if size < 0 or at + size > len(content):
            raise ValueError("is no model of SentencePiece, or is damaged")
        yield key >> 3, content[at : at + size]
        at += size


def _varint(content: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        byte = content[at]
        value |= (byte & 127) << shift
        at += 1
        if byte < 128:
            return value, at
    raise ValueError("is no model of SentencePiece, or is damaged")


def _is_ranks(content: bytes) -> bool:
    words = content[:1000].split(b"\n")[0].split()
    return len(words) == 2 and words[1].isdigit()


def _tiktoken(content: bytes) -> dict[bytes, int]:
    """Returns the ranks of a file of tiktoken: lines of a token in base64 and its rank."""
    try:
        pairs = [line.split() for line in content.splitlines() if line]
        return {base64.b64decode(token, validate=True): int(rank) for token, rank in pairs}
    except (ValueError, binascii.Error):
        raise ValueError("is no file of ranks of tiktoken") from None


def _ranked(ranks: Mapping[bytes, int]) -> dict[str, Any]:
    if len(ranks) not in _TIKTOKEN:
        raise ValueError(
            f"the file of {len(ranks):,} ranks does not say how text is split, nor its special tokens (known: "
            f"{', '.join(f'{count:,}' for count in _TIKTOKEN)} ranks)"
        )
    pre, special = _TIKTOKEN[len(ranks)]
    return _byte_level(ranks, special, {f"{_TABLE}pre": pre})


def _tekken(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the table of a tekken.json: special tokens come first, then the tokens by rank."""
    config = values["config"]
    size, reserved = config["default_vocab_size"], config["default_num_special_tokens"]
    listed = values.get("special_tokens") or [
        {"rank": rank, "token_str": text} for rank, text in enumerate(_TEKKEN_SPECIAL)
    ]
    special = {f"<SPECIAL_{number}>": number for number in range(len(listed), reserved)}
    special |= {each["token_str"]: each["rank"] for each in listed}
    ranks = {
        base64.b64decode(each["token_bytes"]): each["rank"] + reserved
        for each in values["vocab"]
        if each["rank"] < size - reserved
    }
    return _byte_level(ranks, special, {f"{_TABLE}pattern": config["pattern"], f"{_TABLE}bos_token_id": 1})


def _byte_level(ranks: Mapping[bytes, int], special: Mapping[str, int], more: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the table of byte-level BPE by ranks. A merge is every pair of tokens that makes a third, in the order of
    the third one's rank: tiktoken merges the neighbours that make the token of the lowest one."""
    names = alphabet()
    tokens: list[str | None] = [None] * (1 + max([*ranks.values(), *special.values()]))
    for token, rank in ranks.items():
        tokens[rank] = "".join(map(names.__getitem__, token))
    for text, number in special.items():
        if tokens[number] is not None:
            raise ValueError(f"the special token {text} has the id {number} of another token")
        tokens[number] = text
    if (hole := tokens.index(None) if None in tokens else -1) >= 0:
        raise ValueError(f"no token has the id {hole}")
    by_rank = sorted((token for token in ranks if len(token) > 1), key=ranks.__getitem__)
    merges = [(token[:cut], token[cut:]) for token in by_rank for cut in _cuts(token, ranks)]
    return {
        **more,
        f"{_TABLE}model": "gpt2",
        f"{_TABLE}tokens": tokens,
        f"{_TABLE}token_type": [CONTROL if text in special else NORMAL for text in tokens],
        f"{_TABLE}merges": [" ".join("".join(map(names.__getitem__, part)) for part in pair) for pair in merges],
        f"{_TABLE}add_bos_token": f"{_TABLE}bos_token_id" in more,
    }


def _cuts(token: bytes, ranks: Mapping[bytes, int]) -> Sequence[int]:
    """Returns where a token is two tokens, those of lower ranks first."""
    cuts = [cut for cut in range(1, len(token)) if token[:cut] in ranks and token[cut:] in ranks]
    return sorted(cuts, key=lambda cut: (ranks[token[:cut]], ranks[token[cut:]]))
