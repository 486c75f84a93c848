"""A tokenizer as a table of tokens, kinds, scores and merges, as a tokenizer.json of the `tokenizers` library; and the
tables of other files: SentencePiece's tokenizer.model, ranks of tiktoken, Mistral's tekken.json.

The names are those of GGUF's metadata; the other files are brought to them. Byte-level BPE (tokenizer.ggml.model =
gpt2): `tokenizer.ggml.pre` names how text is split before merging; the expressions are those of the published
tokenizer.json of each family, as in src/llama-vocab.cpp of github.com/ggml-org/llama.cpp. SentencePiece's BPE (llama)
and Unigram: `parts_of`. What the `tokenizers` library does not compute with the same ids is refused, with the command
that converts it.
"""

from __future__ import annotations

import base64
import json
import os
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from phalanx.bounded import read_bytes, read_json
from phalanx.config.corpora import TOKENIZER_CONFIG
from phalanx.errors import DataError

SPACE = "\u2581"
"""Stands for a space in tokens."""
_LONGEST = 1000
"""Most characters of a token: every place in it is tried. SentencePiece makes none of more than 16 unless told to."""
_NEWER = 300
"""Most characters that a map replaces and NFKC does not: those of another version of Unicode. Folding case has more."""
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, _BYTE = 1, 2, 3, 4, 6
"""Kinds of tokens, as SentencePiece and llama.cpp (llama_token_type) number them."""


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
    unknown = next((token for token, kind in zip(tokens, types, strict=False) if kind == UNKNOWN), None)
    to_space = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
    trimmed = metadata.get("tokenizer.ggml.remove_extra_whitespaces") is True
    first = [_PREFIX] if prefix else []
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix or trimmed else []
    before = [*_mapped(metadata.get("tokenizer.ggml.precompiled_charsmap", b"")), *(_TRIMMED if trimmed else ())]
    normalizers = [*before, *first, {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}]
    merges = [] if unigram else _merges(tokens, types, scores)
    bpe = _bpe(tokens, merges, unk_token=unknown, fuse_unk=True, byte_fallback=_BYTE in types)
    return {
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": [to_space, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip]},
        **(_unigram(tokens, types, scores) if unigram else {"model": bpe}),
    }


def _bpe(tokens: Sequence[str], merges: Sequence[Sequence[str]], **more: Any) -> dict[str, Any]:
    """Returns the model of BPE; `more` are fields that differ from the usual."""
    usual = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": {token: number for number, token in enumerate(tokens)},
        "merges": merges,
    }
    return usual | more


_PREFIX = {"type": "Prepend", "prepend": SPACE}
"""add_dummy_prefix: every text between special tokens begins with a space, as SentencePiece has it."""
_PREFIX_ONCE = {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": "first", "split": False}
"""The same where transformers' `legacy` is false: only what no special token precedes does, unless it has a space."""
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
    plain = {token: score for token, score, kind in zip(tokens, scores, types, strict=True) if kind == NORMAL}
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
            "unk_id": types.index(UNKNOWN),
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
    plain = [number for number in range(len(tokens)) if not types or types[number] == NORMAL]
    known = {tokens[number] for number in plain}
    plain.sort(key=lambda number: -scores[number])  # stable: equal scores stay in the order of their numbers
    return [
        (text[:cut], text[cut:])
        for text in (tokens[number] for number in plain)
        for cut in range(1, len(text))
        if text[:cut] in known and text[cut:] in known
    ]


_BYTE_LEVEL, _SENTENCEPIECE, UNIGRAM = "gpt2", "llama", "unigram"
"""Values of tokenizer.ggml.model; of a GGUF file the first two."""
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _bytes(*, regex: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": regex}


def _split(*patterns: str) -> dict[str, Any]:
    """Returns the splitting by expressions, one after the other."""
    splits = [
        {"type": "Split", "pattern": {"Regex": each}, "behavior": "Isolated", "invert": False} for each in patterns
    ]
    return {"type": "Sequence", "pretokenizers": [*splits, _bytes(regex=False)]}


def _like_llama(digits: str) -> dict[str, Any]:
    """Returns the splitting of Llama 3's kind, with numbers in groups of `digits`."""
    return _split(f"{_CONTRACTIONS}|{_WORDS}|{digits}|{_REST}")


_DIGITS = {"type": "Digits", "individual_digits": True}
_GPT2 = {"pre_tokenizer": _bytes(regex=True)}
_LLAMA = {"pre_tokenizer": _like_llama(r"\p{N}{1,3}"), "ignore_merges": True}
_QWEN = {"pre_tokenizer": _like_llama(r"\p{N}"), "normalizer": {"type": "NFC"}}
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEEPSEEK = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"""
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
)
KINDS: Mapping[str, Mapping[str, Any]] = {
    "gpt-2": _GPT2,
    "smollm": {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [_DIGITS, _bytes(regex=True)]}},
    "llama-bpe": _LLAMA,
    "llama3": _LLAMA,
    "llama-v3": _LLAMA,
    "qwen2": _QWEN,
    "deepseek-r1-qwen": _QWEN,
    "olmo": _GPT2 | {"normalizer": {"type": "NFC"}},  # GPT-NeoX's
    "dbrx": {"pre_tokenizer": _like_llama(r"\p{N}{1,3}")},  # OLMo 2
    "tekken": {"pre_tokenizer": _split(_TEKKEN), "ignore_merges": True},
    "deepseek-v3": {"pre_tokenizer": _split(*_DEEPSEEK)},
}
"""How text is split and normalised, by the value of tokenizer.ggml.pre."""


def definition_of(
    metadata: Mapping[str, Any],
    path: Path,
    instead: str = "put the published tokenizer.json into the run's directory",
) -> str:
    """Returns the tokenizer.json of a file's metadata; `instead` is what to do where there is none.

    Raises DataError, naming `path`, if there is no tokenizer, one of another kind, or one that is not consistent."""
    model = metadata.get("tokenizer.ggml.model")
    if model is None:
        raise DataError(f"{path} has no tokenizer; {instead}")
    pieces = model in (_SENTENCEPIECE, UNIGRAM)
    if model != _BYTE_LEVEL and not pieces:
        raise DataError(
            f"{path}: a tokenizer of kind {model!r} is not read, only {_BYTE_LEVEL!r} (byte-level BPE) and "
            f"{_SENTENCEPIECE!r} (SentencePiece's BPE); {instead}"
        )
    try:
        tokens, types = _texts(metadata, "tokens"), metadata.get("tokenizer.ggml.token_type", [])
        if len(set(tokens)) != len(tokens) or not isinstance(types, list) or len(types) not in (0, len(tokens)):
            raise ValueError(f"some of its {len(tokens):,} tokens occur twice, or not all have a kind")
        for name in ("bos", "eos"):
            stated = metadata.get(f"{_TABLE}{name}_token_id", _NO_TOKEN)
            if stated != _NO_TOKEN and f"{name}_token_id" not in token_ids_of(metadata):
                raise ValueError(f"{_TABLE}{name}_token_id is {stated!r}, and it has {len(tokens):,} tokens")
        parts = parts_of(metadata, tokens, types, unigram=model == UNIGRAM) if pieces else _byte_level(metadata, tokens)
    except ValueError as error:
        raise DataError(f"{path}: {error}; {instead}") from None
    special = (UNKNOWN, CONTROL) if pieces else (CONTROL,)
    added = [
        _added(number, tokens[number], kind in special)
        for number, kind in enumerate(types)
        if kind in (*special, USER_DEFINED)
    ]
    begin = _begin(metadata, tokens) or (None if pieces else _bytes(regex=True))
    around = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "post_processor": begin}
    return json.dumps(around | parts, ensure_ascii=False)


def _byte_level(metadata: Mapping[str, Any], tokens: list[str]) -> dict[str, Any]:
    """Returns normalizer, pre_tokenizer, decoder and model. Raises ValueError, saying what is wrong."""
    pattern = metadata.get("tokenizer.ggml.pattern")  # of a tekken.json
    plain = metadata.get("general.architecture", "gpt2") in ("gpt2", "gptneox")
    pre = metadata.get("tokenizer.ggml.pre", "gpt-2" if plain else None)
    if pattern is None and pre is None:
        raise ValueError(
            "tokenizer.ggml.pre is missing, as in files of before May 2024: how text is split is not known"
        )
    if pattern is None and pre not in KINDS:
        raise ValueError(f"tokenizer.ggml.pre is {pre!r}; known: {', '.join(KINDS)}")
    merges = [merge.split(" ") for merge in _texts(metadata, "merges")]
    known = set(tokens)
    for pair in merges:
        if len(pair) != 2 or not {*pair, "".join(pair)} <= known:
            raise ValueError(f"the merge {' '.join(pair)!r} is not of two tokens that make a third")
    kind = {"pre_tokenizer": _split(pattern), "ignore_merges": True} if isinstance(pattern, str) else KINDS[pre]
    return {
        "normalizer": kind.get("normalizer"),
        "pre_tokenizer": kind["pre_tokenizer"],
        "decoder": _bytes(regex=True),
        "model": _bpe(tokens, merges, ignore_merges=kind.get("ignore_merges", False)),
    }


def settings_of(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the tokenizer_config.json of a file's metadata: its special tokens and its chat template, if it has
    them."""
    tokens = metadata.get("tokenizer.ggml.tokens", [])
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    settings |= {name.removesuffix("_id"): tokens[number] for name, number in token_ids_of(metadata).items()}
    settings["add_bos_token"] = _adds_begin(metadata)
    start = f"{_TEMPLATE}."
    if isinstance(template := metadata.get(_TEMPLATE), str):
        settings["chat_template"] = template
        named = {key.removeprefix(start): each for key, each in metadata.items() if key.startswith(start)}
        if named:
            every = {"default": template, **named}
            settings["chat_template"] = [{"name": name, "template": each} for name, each in every.items()]
    return settings


_TEMPLATE = "tokenizer.chat_template"


def token_ids_of(metadata: Mapping[str, Any]) -> dict[str, int]:
    """Returns the ids of a file's special tokens by the names that transformers has for them."""
    tokens = metadata.get("tokenizer.ggml.tokens", [])
    names = {"bos": "bos_token_id", "eos": "eos_token_id", "unknown": "unk_token_id", "padding": "pad_token_id"}
    found = {ours: metadata.get(f"tokenizer.ggml.{theirs}_token_id") for theirs, ours in names.items()}
    known = len(tokens) if isinstance(tokens, list) else 0
    return {name: number for name, number in found.items() if isinstance(number, int) and 0 <= number < known}


def _texts(metadata: Mapping[str, Any], name: str) -> list[str]:
    found = metadata.get(f"tokenizer.ggml.{name}")
    if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
        raise ValueError(f"tokenizer.ggml.{name} is missing, or is no list of texts")
    return found


def _added(number: int, text: str, special: bool) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": number, "content": text, **flags, "special": special}


def _adds_begin(metadata: Mapping[str, Any]) -> bool:
    """Returns whether a text begins with the first token of a text: as stated, or as llama.cpp takes it to be."""
    usual = metadata.get("tokenizer.ggml.model") == _SENTENCEPIECE
    return metadata.get("tokenizer.ggml.add_bos_token", usual) is True


def _begin(metadata: Mapping[str, Any], tokens: list[str]) -> dict[str, Any] | None:
    """Returns what puts the first token of a text before it; None if there is none."""
    number = metadata.get("tokenizer.ggml.bos_token_id")
    if not _adds_begin(metadata) or not isinstance(number, int) or number >= len(tokens):
        return None
    first, text = tokens[number], [{"Sequence": {"id": "A", "type_id": 0}}]
    begin = [{"SpecialToken": {"id": first, "type_id": 0}}]
    return {
        "type": "TemplateProcessing",
        "single": begin + text,
        "pair": begin + text + begin + [{"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {first: {"id": first, "ids": [number], "tokens": [first]}},
    }


def alphabet() -> dict[int, str]:
    """Returns the character that stands for each byte in byte-level BPE (bytes_to_unicode of GPT-2's encoder.py):
    printable ones for themselves, the others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + place) for place, byte in enumerate(others)}


_KINDS = {1: UNIGRAM, 2: "llama"}
"""trainer_spec.model_type, with tokenizer.ggml.model; others are words and characters."""
_TABLE = "tokenizer.ggml."
_NO_TOKEN = 2**32 - 1
"""The id of a special token that there is not: -1 in 32 bits."""
_TEKKEN_SPECIAL = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]"),
    *("[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]"),
    *("[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"),
)
"""The special tokens of a tekken.json that lists none (mistral-common 1.13)."""
_QWEN_SPECIAL = {"<|endoftext|>": 151643, "<|im_start|>": 151644, "<|im_end|>": 151645} | {
    f"<|extra_{number}|>": 151646 + number for number in range(205)
}
_TIKTOKEN: Mapping[int, tuple[str, Mapping[str, int]]] = {
    50256: ("gpt-2", {"<|endoftext|>": 50256}),
    50280: ("gpt-2", {"<|endoftext|>": 50256}),
    151643: ("qwen2", _QWEN_SPECIAL),
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
            ranks = _tiktoken(content)
            if len(ranks) not in _TIKTOKEN:
                raise ValueError(
                    f"the file of {len(ranks):,} ranks does not say how text is split, nor its special tokens (known: "
                    f"{', '.join(f'{count:,}' for count in _TIKTOKEN)} ranks)"
                )
            pre, special = _TIKTOKEN[len(ranks)]
            table = _table_of_ranks(ranks, special, {f"{_TABLE}pre": pre})
        else:
            table = _sentencepiece(content)
    except OSError as error:
        raise DataError(f"cannot read the tokenizer {file}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, struct.error) as error:
        raise DataError(f"{file}: {error}; {_remedy(file)}") from None
    definition = definition_of(table, file, _remedy(file))
    return definition if file.suffix == ".json" else _with_tokens_beside(definition, file)


def _with_tokens_beside(definition: str, file: Path) -> str:
    """Returns a tokenizer.json with the tokens that transformers added to those of a file, and wrote beside it into
    tokenizer_config.json, once into added_tokens.json. Raises DataError for ids that do not follow."""
    beside, tokens, config = file.with_name(TOKENIZER_CONFIG), dict[int, dict[str, Any]](), dict[str, Any]()
    try:
        config = read_json(beside) if os.path.exists(beside) else {}
        if listed := config.get("added_tokens_decoder"):
            tokens = {int(number): {**each, "content": str(each["content"])} for number, each in listed.items()}
        elif os.path.exists(beside := file.with_name("added_tokens.json")):
            tokens = {int(number): {"content": text} for text, number in read_json(beside).items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{beside}: no tokens added to those of {file.name}: {error}") from None
    stored = json.loads(definition)
    if config.get("legacy") is False and _PREFIX in (stored["normalizer"] or {}).get("normalizers", ()):
        stored["normalizer"]["normalizers"].remove(_PREFIX)
        stored["pre_tokenizer"] = _PREFIX_ONCE
    if config.get("add_bos_token") is False and (stored["post_processor"] or {}).get("type") == "TemplateProcessing":
        stored["post_processor"] = None
    vocabulary, added = stored["model"]["vocab"], {each["content"]: each for each in stored["added_tokens"]}
    ids = dict(vocabulary) if isinstance(vocabulary, dict) else {text: n for n, (text, _) in enumerate(vocabulary)}
    for number, token in sorted(tokens.items()):
        text = token["content"]
        if (own := ids.setdefault(text, len(ids))) != number:
            raise DataError(
                f"{beside}: the token {text!r} has the id {number:,}, and with {file.name} {own:,}; {_remedy(file)}"
            )
        usual = added.get(text, _added(number, text, special=True))
        added[text] = {name: token.get(name, value) for name, value in usual.items()} | {"id": number}
    stored["added_tokens"] = sorted(added.values(), key=lambda each: each["id"])
    return json.dumps(stored, ensure_ascii=False)


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
    except ValueError:
        raise ValueError("is no file of ranks of tiktoken") from None


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
    return _table_of_ranks(ranks, special, {f"{_TABLE}pattern": config["pattern"], f"{_TABLE}bos_token_id": 1})


def _table_of_ranks(ranks: Mapping[bytes, int], special: Mapping[str, int], more: Mapping[str, Any]) -> dict[str, Any]:
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
    merges = [(token[:cut], token[cut:]) for token in by_rank for cut in _cuts_by_rank(token, ranks)]
    return {
        **more,
        f"{_TABLE}model": "gpt2",
        f"{_TABLE}tokens": tokens,
        f"{_TABLE}token_type": [CONTROL if text in special else NORMAL for text in tokens],
        f"{_TABLE}merges": [" ".join("".join(map(names.__getitem__, part)) for part in pair) for pair in merges],
        f"{_TABLE}add_bos_token": f"{_TABLE}bos_token_id" in more,
    }


def _cuts_by_rank(token: bytes, ranks: Mapping[bytes, int]) -> Sequence[int]:
    """Returns where a token is two tokens, those of lower ranks first."""
    cuts = [cut for cut in range(1, len(token)) if token[:cut] in ranks and token[cut:] in ranks]
    return sorted(cuts, key=lambda cut: (ranks[token[:cut]], ranks[token[cut:]]))
