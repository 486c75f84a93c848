"""Tokenizers: text to token ids and back, by characters, bytes, numbers, or a tokenizer of the `tokenizers` library.

A tokenizer is stored as one file, tokenizer.json: in the library's own format, or as a small JSON object with
`"format": "phalanx-tokenizer"`.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from phalanx.bounded import parse_json, read_json, read_text
from phalanx.check.model import BOUNDS
from phalanx.config.corpora import END_OF_TEXT, END_OF_TURN, TOKENIZER_CONFIG, TOKENIZERS, tokenizer_in
from phalanx.config.job import Data
from phalanx.data.corpus import code_points
from phalanx.data.files import write_atomic
from phalanx.errors import DataError, ExtensionError, NotFoundError, PhalanxError
from phalanx.nearest import near_file
from phalanx.registry import package_code

FILE = "tokenizer.json"
FORMAT = "phalanx-tokenizer"
VERSION = 1
MAX_CHARACTERS = 256
"""A char vocabulary larger than this keeps its 255 most frequent characters and one id for all others."""
REPLACEMENT = 0xFFFD
"""The code point of undecodable input."""
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
SPECIAL_MAP = "special_tokens_map.json"
_NO_IDS, _NO_MARKS = np.empty(0, dtype=np.int64), np.empty(0, dtype=bool)
LARGEST_VOCABULARY, _REASON = BOUNDS["model.vocab_size"]


class Tokenizer(ABC):
    """Converts text to token ids and back."""

    vocab_size: int
    """Ids are 0 .. vocab_size - 1."""
    separator: tuple[int, ...]
    """The ids put between two documents of a corpus."""
    end_ids: tuple[int, ...] = ()
    """Ids with which generated text ends: of an end-of-text or end-of-turn token."""
    begin_ids: tuple[int, ...] = ()
    """Ids with which a prompt begins, "<s>" for example."""
    slow = False
    """True if encoding costs more than sending the text to another process."""

    @abstractmethod
    def encode(self, text: str) -> np.ndarray:
        """Returns the token ids of a text: (tokens,) int64. Raises DataError for text outside the vocabulary."""

    def encode_marked(self, conversations: Sequence[Sequence[tuple[str, bool]]]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Returns the tokens of texts that come in parts, each marked or not: of every one its ids (tokens,) int64 and
        marks (tokens,) bool. A token is marked if it holds a character of a marked part. Unlike in `encode`, special
        tokens that stand in a text are these tokens. Raises DataError as `encode` does."""
        # Here tokens do not reach over the ends of parts, and there are no special ones.
        found = []
        for parts in conversations:
            ids = [self.encode(text) for text, _ in parts]
            marks = [np.full(part.size, marked) for part, (_, marked) in zip(ids, parts, strict=True)]
            found.append((np.concatenate([_NO_IDS, *ids]), np.concatenate([_NO_MARKS, *marks])))
        return found

    @abstractmethod
    def decode(self, ids: Iterable[int] | np.ndarray) -> str:
        """Returns the text of token ids; ids without text become U+FFFD."""

    @abstractmethod
    def definition(self) -> str:
        """Returns everything that determines this tokenizer, as JSON text (`definition_of`)."""

    def first_ids(self) -> tuple[int, ...]:
        """Returns the ids that the tokenizer's own settings put before a text."""
        return ()

    def prompt(self, text: str) -> list[int]:
        """Returns the ids of a prompt, or nothing of an empty one. Raises DataError as `encode` does."""
        return [*self.begin_ids, *self.encode(text).tolist()] if text else []

    def shown(self, ids: Sequence[int]) -> str:
        """Returns the text of a prompt, or of what it has become, without the ids with which it begins."""
        begin = len(self.begin_ids)
        return self.decode(ids[begin:] if tuple(ids[:begin]) == self.begin_ids else ids)

    @property
    def fingerprint(self) -> str:
        """sha256 (hex) of the definition: equal fingerprints encode alike."""
        return hashlib.sha256(self.definition().encode()).hexdigest()

    def save(self, folder: Path) -> None:
        """Writes `folder/tokenizer.json`."""
        write_atomic(folder / FILE, self.definition().encode())

    @staticmethod
    def load(path: Path) -> Tokenizer:
        """Reads a tokenizer.json, in this project's or the `tokenizers` library's format, or a file of another program
        (token_table.py); `path` may be its folder.

        Raises DataError if it is missing or is no tokenizer.
        """
        file = tokenizer_in(path) or path / FILE if os.path.isdir(path) else path
        if os.path.isfile(file) and (file.name == "tekken.json" or file.suffix in (".model", ".tiktoken")):
            from phalanx.data.token_table import definition_at  # few need it

            return LibraryTokenizer(definition_at(file), str(file), _end_beside(file))
        try:
            text = read_text(file)
            stored = parse_json(text)
        except FileNotFoundError:
            raise NotFoundError(
                f"data.tokenizer={path}: there is no such file{near_file(file)} (built in: {', '.join(TOKENIZERS)})"
            ) from None
        except OSError as error:
            raise DataError(f"cannot read the tokenizer {file}: {error.strerror}") from error
        except ValueError as error:
            raise DataError(f"{file} is not JSON and so no tokenizer: {error}") from error
        if isinstance(stored, dict) and stored.get("format") == FORMAT:
            return _from_definition(stored, file)
        found = LibraryTokenizer(_with_flags_beside(text, stored, file), str(file), _end_beside(file))
        if lacking := [name for name in _tokens_beside(file) if not found.has(name)]:
            raise DataError(
                f"{file} has no token {', '.join(map(repr, lacking[:5]))}, which the files beside it name, and "
                'transformers would add: write it there, `python -c "from transformers import AutoTokenizer as T; '
                f"T.from_pretrained('{file.parent}').save_pretrained('{file.parent}')\"`"
            )
        return found


def _settings_beside(file: Path) -> dict[str, Any]:
    """Returns the tokenizer_config.json beside a tokenizer's file, and what an older one's special_tokens_map.json
    adds to it; what cannot be read is left out."""
    config: dict[str, Any] = {}
    for name in (TOKENIZER_CONFIG, SPECIAL_MAP):
        with suppress(OSError, ValueError, TypeError):
            config = read_json(file.with_name(name)) | config
        if "added_tokens_decoder" in config:  # then transformers does not read the other file
            break
    return config


def _tokens_beside(file: Path) -> Iterator[str]:
    """Yields the tokens that the files beside a tokenizer.json name for use: those that begin and end texts, and added
    ones. A padding token, which no text has, is none of them."""
    config = _settings_beside(file)
    yield from (name for end in ("bos_token", "eos_token") if (name := named_token(config, end).strip()))
    added = config.get("added_tokens_decoder")
    listed = [*added.values()] if isinstance(added, dict) else []
    if isinstance(more := config.get("additional_special_tokens"), list):
        listed += more
    if added is None:
        with suppress(OSError, ValueError, TypeError):
            listed += read_json(file.with_name("added_tokens.json"))
    for each in listed:
        name = each.get("content") if isinstance(each, dict) else each
        if isinstance(name, str) and name.strip() and name != named_token(config, "pad_token"):
            yield name


def _with_flags_beside(text: str, stored: Any, file: Path) -> str:
    """Returns a tokenizer.json, `text` with the content `stored`, with the flags of added tokens (lstrip, rstrip,
    single_word, normalized, special) of the tokenizer_config.json beside it, which transformers prefers."""
    beside = _settings_beside(file).get("added_tokens_decoder")
    added = stored.get("added_tokens") if isinstance(stored, dict) else None
    if not isinstance(beside, dict) or not isinstance(added, list):
        return text
    flags = {each.get("content"): each for each in beside.values() if isinstance(each, dict)}
    tokens = [
        token
        | {
            name: value
            for name, value in flags.get(token.get("content"), {}).items()
            if name in _FLAGS and isinstance(value, bool)
        }
        if isinstance(token, dict)
        else token
        for token in added
    ]
    return text if tokens == added else json.dumps(stored | {"added_tokens": tokens}, ensure_ascii=False)


def _end_beside(file: Path) -> str:
    """Returns the token that ends a text by the tokenizer_config.json beside a tokenizer's file, or an older one's
    special_tokens_map.json; empty if none does."""
    return named_token(_settings_beside(file), "eos_token").strip()  # one of white space is no token of its own


def named_token(config: Mapping[str, Any], name: str) -> str:
    """Returns a special token of a tokenizer_config.json, which has it as a text or an object; empty without it."""
    value = config.get(name)
    value = value.get("content") if isinstance(value, dict) else value
    return value if isinstance(value, str) else ""


class CharTokenizer(Tokenizer):
    """One id per character, in the order of the code points; with `unknown`, one more id for every other character."""

    def __init__(self, characters: str, unknown: bool):
        codes = code_points(characters)
        self.characters, self.unknown = characters, unknown
        self.vocab_size = len(characters) + unknown
        # len(characters) means "none of them"; every code point beyond the table gets the last entry.
        self._ids = np.full(int(codes.max(initial=0)) + 2, len(characters), dtype=np.int64)
        self._ids[codes] = np.arange(codes.size)
        self._codes = np.append(codes, np.uint32(REPLACEMENT))
        newline = characters.find("\n")
        self.separator = () if newline < 0 else (newline,)

    @classmethod
    def of_counts(cls, counts: np.ndarray) -> CharTokenizer:
        """Returns the tokenizer of a text in which code point c occurs counts[c] times: (0x110000,) int64."""
        codes = np.flatnonzero(counts)
        unknown = codes.size > MAX_CHARACTERS
        if unknown:  # stable: of two equally frequent characters the one with the smaller code point stays
            codes = np.sort(codes[np.argsort(-counts[codes], kind="stable")[: MAX_CHARACTERS - 1]])
        return cls(codes.astype("<u4").tobytes().decode("utf-32-le"), unknown)

    def encode(self, text: str) -> np.ndarray:
        ids = self._ids.take(np.frombuffer(_encoded(text, "utf-32-le"), dtype="<u4"), mode="clip")
        if not self.unknown and ids.max(initial=0) == self.vocab_size:
            place = int(ids.argmax())
            raise DataError(
                f"the character {text[place]!r} at {place} is not one of the {self.vocab_size} characters this "
                "tokenizer was made of"
            )
        return ids

    def decode(self, ids: Iterable[int] | np.ndarray) -> str:
        return self._codes.take(_array(ids), mode="clip").tobytes().decode("utf-32-le")

    def definition(self) -> str:
        return definition_of("char", characters=self.characters, unknown=self.unknown)


class ByteTokenizer(Tokenizer):
    """One id per byte of UTF-8: 256 in all."""

    vocab_size = 256
    separator = (ord("\n"),)

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(_encoded(text, "utf-8"), dtype=np.uint8).astype(np.int64)

    def decode(self, ids: Iterable[int] | np.ndarray) -> str:
        values = _array(ids)
        values = np.where(values < self.vocab_size, values, 0xFF)  # 0xFF is never part of UTF-8
        return values.astype(np.uint8).tobytes().decode(errors="replace")

    def definition(self) -> str:
        return definition_of("byte")


class NumberTokenizer(Tokenizer):
    """Tokens without text, written as numbers: "5 0 17". It is used with corpus random."""

    separator = ()

    def __init__(self, vocab_size: int):
        self.vocab_size = vocab_size

    def encode(self, text: str) -> np.ndarray:
        words = text.split()
        for word in words:
            if not (re.fullmatch("[0-9]{1,18}", word) and int(word) < self.vocab_size):
                raise DataError(f"{word!r} is not a number from 0 to {self.vocab_size - 1} (tokens without text)")
        return np.array([int(word) for word in words], dtype=np.int64)

    def decode(self, ids: Iterable[int] | np.ndarray) -> str:
        return " ".join(str(i) for i in _array(ids))

    def definition(self) -> str:
        return definition_of("number", vocab_size=self.vocab_size)


class LibraryTokenizer(Tokenizer):
    """A tokenizer of the `tokenizers` library. Its truncation, padding and special tokens are not applied."""

    slow = True

    def __init__(self, definition: str, name: str, end: str = ""):
        """`end` is the token that ends a text in a vocabulary that has none of END_OF_TEXT."""
        self._definition, self._name = definition, name
        self._tokenizer = self._load()
        self._tokenizer.encode_special_tokens = True  # "<|endoftext|>" in a corpus is text, not the end of one
        ids = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(ids.values(), default=-1) + 1
        if not self.vocab_size:
            raise DataError(f"{name}: the tokenizer has no tokens")
        _check_vocabulary(self.vocab_size, name)
        if dropout := getattr(self._tokenizer.model, "dropout", None):
            raise DataError(
                f"{name}: model.dropout is {dropout:g} (BPE dropout), with which a text gets other tokens each "
                "time: set it to null"
            )
        ends = [token for token in END_OF_TEXT if token in ids] or [end] * (end in ids)
        self.end = ends[0] if ends else ""
        """The token between two documents; empty: there is none, and a newline is."""
        self.end_ids = tuple(ids[token] for token in dict.fromkeys((*ends, *END_OF_TURN)) if token in ids)
        self.separator = (ids[self.end],) if ends else tuple(self.encode("\n").tolist())

    def has(self, token: str) -> bool:
        """Returns whether the vocabulary has a token of this text."""
        return self._tokenizer.token_to_id(token) is not None

    def encode(self, text: str) -> np.ndarray:
        _encoded(text, "utf-8")  # the library would raise a TypeError
        with self._failing_to("encode a text"):
            [encoding] = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)
        return np.array(encoding.ids, dtype=np.int64)

    def encode_marked(self, conversations: Sequence[Sequence[tuple[str, bool]]]) -> list[tuple[np.ndarray, np.ndarray]]:
        texts = ["".join(text for text, _ in parts) for parts in conversations]
        for text in texts:
            _encoded(text, "utf-8")
        with self._failing_to("encode a conversation"):
            encodings = self._with_special_tokens.encode_batch(texts, add_special_tokens=False)
        found = []
        for encoding, parts in zip(encodings, conversations, strict=True):
            marked = np.zeros(sum(len(text) for text, _ in parts) + 1, dtype=np.int64)
            end = 0
            for text, mark in parts:
                marked[end + 1 : end + 1 + len(text)] = mark
                end += len(text)
            before = marked.cumsum()  # marked characters before each place
            spans = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)
            found.append((np.array(encoding.ids, dtype=np.int64), before[spans[:, 1]] > before[spans[:, 0]]))
        return found

    def decode(self, ids: Iterable[int] | np.ndarray) -> str:
        with self._failing_to("decode tokens"):
            return self._tokenizer.decode(_array(ids).tolist(), skip_special_tokens=False)

    def definition(self) -> str:
        return self._definition

    @property
    def fingerprint(self) -> str:
        named = "" if self.end in END_OF_TEXT else self.end
        return hashlib.sha256((self._definition + named).encode()).hexdigest()

    def save(self, folder: Path) -> None:
        super().save(folder)
        if self.end and self.end not in END_OF_TEXT and not os.path.exists(folder / TOKENIZER_CONFIG):
            write_atomic(folder / TOKENIZER_CONFIG, json.dumps({"eos_token": self.end}).encode())

    def first_ids(self) -> tuple[int, ...]:
        with self._failing_to("encode a text"):
            encode = self._with_special_tokens.encode
            whole, plain = (encode("a", add_special_tokens=added).ids for added in (True, False))
        places = (at for at in range(len(whole)) if whole[at : at + len(plain)] == plain)
        return tuple(whole[: next(places, 0)])

    @cached_property
    def _with_special_tokens(self) -> Any:
        """The library's tokenizer, for which the text of a special token is that token."""
        return self._load()

    def _load(self) -> Any:
        import tokenizers

        with self._failing_to("load it"):
            tokenizer = tokenizers.Tokenizer.from_str(self._definition)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return tokenizer

    @contextmanager
    def _failing_to(self, act: str) -> Iterator[None]:
        """Raises DataError for every error of the library, which has no types of its own: a definition may load and
        fail only when it is used, and a panic of its Rust code is a BaseException."""
        try:
            yield
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            raise DataError(f"{self._name}: the tokenizers library cannot {act}: {error}") from error


def train_bpe(texts: Iterable[str], vocab_size: int) -> LibraryTokenizer:
    """Trains byte-level BPE (like GPT-2's) of at most `vocab_size` tokens: <|endoftext|>, the 256 bytes, and merges."""
    from tokenizers import Tokenizer as Library
    from tokenizers import decoders, models, pre_tokenizers, trainers

    library = Library(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT[0]],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library.train_from_iterator(texts, trainer)
    return LibraryTokenizer(library.to_str(), "the trained tokenizer")


def definition_of(kind: str, **values: object) -> str:
    """Returns the definition of a tokenizer of a kind in the table: the content of its tokenizer.json. Its values are
    JSON-able, and come back to the kind's `read`."""
    return json.dumps({"format": FORMAT, "version": VERSION, "kind": kind, **values}, ensure_ascii=False)


def make_char(data: Data, counts: np.ndarray, texts: Callable[[], Iterator[str]]) -> CharTokenizer:
    """Returns the tokenizer of the characters that occur in a corpus."""
    return CharTokenizer.of_counts(counts)


def read_char(stored: Mapping[str, object]) -> CharTokenizer:
    """Returns a stored tokenizer of characters. Raises ValueError if it is not one."""
    match stored:
        case {"characters": str(characters), "unknown": bool(unknown)} if characters:
            if len(set(characters)) < len(characters):
                raise ValueError("its characters are not distinct, so that text would not survive it")
            return CharTokenizer(characters, unknown)
    raise ValueError("it must have distinct characters, and true or false for unknown")


def make_byte(data: Data, counts: np.ndarray, texts: Callable[[], Iterator[str]]) -> ByteTokenizer:
    """Returns the tokenizer of bytes, which depends on nothing."""
    return ByteTokenizer()


def read_byte(stored: Mapping[str, object]) -> ByteTokenizer:
    """Returns the tokenizer of bytes."""
    return ByteTokenizer()


def make_bpe(data: Data, counts: np.ndarray, texts: Callable[[], Iterator[str]]) -> LibraryTokenizer:
    """Returns byte-level BPE of data.bpe_vocab tokens, trained on the texts."""
    return train_bpe(texts(), data.bpe_vocab)


def require_in_vocabulary(tokens: np.ndarray, vocab_size: int, owner: str) -> None:
    """Raises DataError unless all tokens are ids of a vocabulary: others would be stored as different ones."""
    if tokens.size and not 0 <= int(tokens.min()) <= int(tokens.max()) < vocab_size:
        raise DataError(
            f"{owner} gave ids from {int(tokens.min())} to {int(tokens.max())}; its vocabulary has {vocab_size}: "
            f"0 to {vocab_size - 1}"
        )


def read_definition(stored: Mapping[str, object]) -> Tokenizer:
    """Returns the tokenizer of a stored definition in this project's format. Raises ValueError if it is not one."""
    kind, size = stored.get("kind"), stored.get("vocab_size")
    if stored.get("version") == VERSION:
        if kind == "number" and isinstance(size, int) and size > 0:
            return NumberTokenizer(size)
        if isinstance(kind, str) and kind in TOKENIZERS and TOKENIZERS[kind].read is not None:
            return _read(kind, stored)
    readable = [name for name, entry in TOKENIZERS.items() if entry.read is not None]
    found = {name: stored.get(name) for name in ("version", "kind")}
    hint = "; is the package that adds it installed?" if isinstance(kind, str) and kind not in TOKENIZERS else ""
    raise ValueError(f"expected a {', '.join(readable)} or number tokenizer of version {VERSION}, found {found}{hint}")


def _read(kind: str, stored: Mapping[str, object]) -> Tokenizer:
    """Returns what a kind of the table reads. Whatever a file holds, the answer is one message."""
    whose = f"tokenizer {kind!r} of {TOKENIZERS.owner(kind)}"
    with package_code(f"{whose} cannot read it", passing=(ValueError, PhalanxError), raising=ValueError):
        tokenizer = TOKENIZERS.code(kind, "read")(stored)
    if not isinstance(tokenizer, Tokenizer):
        raise ExtensionError(f"{whose}: read returned {type(tokenizer).__name__}, not a Tokenizer")
    return tokenizer


def _from_definition(stored: Mapping[str, object], file: Path) -> Tokenizer:
    try:
        tokenizer = read_definition(stored)
    except ValueError as error:
        raise DataError(f"{file}: {error}") from error
    _check_vocabulary(tokenizer.vocab_size, str(file))
    return tokenizer


def _check_vocabulary(size: int, name: str) -> None:
    if size > LARGEST_VOCABULARY:
        raise DataError(f"{name}: a vocabulary of {size:,} tokens; at most {LARGEST_VOCABULARY:,}: {_REASON}")


def _array(ids: Iterable[int] | np.ndarray) -> np.ndarray:
    return np.asarray(ids if isinstance(ids, np.ndarray) else list(ids), dtype=np.int64)


def _encoded(text: str, encoding: str) -> bytes:
    try:
        return text.encode(encoding)
    except UnicodeEncodeError as error:
        raise DataError(f"the text contains half a surrogate pair at {error.start}: it is not valid Unicode") from error
