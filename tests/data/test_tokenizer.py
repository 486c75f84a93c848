"""Tokenizers: there and back, the same after saving, and plain words for what they cannot do."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.data.corpus import Segment, scan
from phalanx.data.tokenizer import ByteTokenizer, CharTokenizer, LibraryTokenizer, NumberTokenizer, Tokenizer, train_bpe
from phalanx.errors import DataError

WORDS = "the sea the sea, a boat upon the sea\nand the boat was at sea\n" * 20


def char_of(text: str) -> CharTokenizer:
    return CharTokenizer.of_counts(scan([Segment(text, False)]).counts)


@pytest.fixture(scope="module")
def bpe() -> LibraryTokenizer:
    return train_bpe([WORDS], 300)


def test_char_ids_follow_the_code_points() -> None:
    tokenizer = char_of("banana\n€")
    assert tokenizer.characters == "\nabn€"
    assert tokenizer.vocab_size == 5
    assert tokenizer.encode("nab€").tolist() == [3, 1, 2, 4]
    assert tokenizer.encode("nab").dtype == np.int64
    assert tokenizer.encode("").shape == (0,)
    assert tokenizer.decode([3, 1, 2, 4]) == "nab€"
    assert tokenizer.separator == (0,)
    assert char_of("abc").separator == ()


@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=200))
def test_char_and_byte_are_lossless(text: str) -> None:
    for tokenizer in (char_of(text + "x"), ByteTokenizer()):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert ids.max(initial=0) < tokenizer.vocab_size


def test_char_without_unknown_refuses_other_characters() -> None:
    tokenizer = char_of("abd")
    for other in "ce€":
        with pytest.raises(DataError, match=f"the character '{other}' at 2 is not one of the 3 characters"):
            tokenizer.encode("ab" + other)
    assert tokenizer.decode([0, 7]) == "a\ufffd"


def test_char_with_many_characters_keeps_the_frequent_ones() -> None:
    common = "".join(chr(0x100 + i) for i in range(255))
    rare = "".join(chr(0x4000 + i) for i in range(1000))
    tokenizer = char_of(common * 2 + rare)
    assert tokenizer.vocab_size == 256
    assert tokenizer.characters == common
    assert tokenizer.encode("\u0100\u4000a\U0001f600").tolist() == [0, 255, 255, 255]
    assert tokenizer.decode([0, 255]) == "\u0100\ufffd"
    assert char_of(common + "a").vocab_size == 256
    assert not char_of(common + "a").unknown
    assert char_of(rare).characters == rare[:255]  # equally frequent: the smaller code points


def test_bytes_that_are_no_text_decode_to_the_replacement_character() -> None:
    assert ByteTokenizer().encode("é").tolist() == [0xC3, 0xA9]
    assert ByteTokenizer().decode([0xC3, 65, 300]) == "\ufffdA\ufffd"


def test_numbers() -> None:
    tokenizer = NumberTokenizer(10)
    assert tokenizer.encode("5 0 9").tolist() == [5, 0, 9]
    assert tokenizer.decode(np.array([5, 0, 9])) == "5 0 9"
    for wrong in ("10", "-1", "x", "²"):
        with pytest.raises(DataError, match="is not a number from 0 to 9"):
            tokenizer.encode(f"1 {wrong}")


def test_bpe_is_lossless_and_ends_texts_with_its_own_token(bpe: LibraryTokenizer) -> None:
    assert 257 < bpe.vocab_size <= 300
    assert bpe.separator == (0,)
    for text in (WORDS, "quite another téxt €\n", "<|endoftext|>"):
        ids = bpe.encode(text)
        assert bpe.decode(ids) == text
        assert 0 not in ids  # the words "<|endoftext|>" in a text are no end of a text
    assert bpe.encode(WORDS).size < len(WORDS) / 2
    assert train_bpe([WORDS], 300).fingerprint == bpe.fingerprint


def test_a_loaded_tokenizer_neither_truncates_nor_pads_nor_adds_tokens(bpe: LibraryTokenizer, tmp_path: Path) -> None:
    definition = json.loads(bpe.definition())
    definition["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    definition["padding"] = {
        "strategy": {"Fixed": 9999}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0,
        "pad_token": "<|endoftext|>",
    }  # fmt: skip
    (tmp_path / "mine.json").write_text(json.dumps(definition))
    loaded = Tokenizer.load(tmp_path / "mine.json")
    assert np.array_equal(loaded.encode(WORDS), bpe.encode(WORDS))


def test_a_library_tokenizer_without_end_of_text_separates_by_newline(bpe: LibraryTokenizer) -> None:
    definition = json.loads(bpe.definition().replace("<|endoftext|>", "<|other|>"))
    tokenizer = LibraryTokenizer(json.dumps(definition), "other")
    assert tokenizer.separator == tuple(tokenizer.encode("\n").tolist())
    assert tokenizer.decode(tokenizer.separator) == "\n"


@pytest.mark.parametrize("kind", ["char", "unknown", "byte", "number", "bpe"])
def test_saved_and_loaded_is_the_same(kind: str, bpe: LibraryTokenizer, tmp_path: Path) -> None:
    tokenizer = {
        "char": char_of(WORDS + "€\U0001f600"),
        "unknown": CharTokenizer("ab", unknown=True),
        "byte": ByteTokenizer(),
        "number": NumberTokenizer(7),
        "bpe": bpe,
    }[kind]
    tokenizer.save(tmp_path)
    loaded = Tokenizer.load(tmp_path)
    assert type(loaded) is type(tokenizer)
    assert loaded.fingerprint == tokenizer.fingerprint
    assert (loaded.vocab_size, loaded.separator) == (tokenizer.vocab_size, tokenizer.separator)
    text = "1 2 3" if kind == "number" else "a boat"[: 1 if kind == "unknown" else None]
    assert loaded.encode(text).tolist() == tokenizer.encode(text).tolist()


def test_fingerprints_differ() -> None:
    tokenizers = [
        char_of("ab"),
        char_of("abc"),
        CharTokenizer("ab", unknown=True),
        ByteTokenizer(),
        NumberTokenizer(2),
        NumberTokenizer(3),
    ]
    assert len({t.fingerprint for t in tokenizers}) == len(tokenizers)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON"),
        ("{}", "the tokenizers library cannot load it"),
        ("[1]", "the tokenizers library cannot load it"),
        ('{"format": "phalanx-tokenizer", "version": 2, "kind": "byte"}', "version 1, found {'version': 2"),
        ('{"format": "phalanx-tokenizer", "version": 1, "kind": "word"}', "'kind': 'word'"),
        ('{"format": "phalanx-tokenizer", "version": 1, "kind": "number", "vocab_size": 0}', "expected a char, byte"),
    ],
)
def test_what_is_no_tokenizer_is_refused(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(DataError, match=message) as caught:
        Tokenizer.load(tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_a_missing_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data\.tokenizer=.*: there is no such file"):
        Tokenizer.load(tmp_path)


def test_half_a_surrogate_pair_is_refused(bpe: LibraryTokenizer) -> None:
    for tokenizer in (char_of("ab"), ByteTokenizer(), bpe):
        with pytest.raises(DataError, match="half a surrogate pair at 1"):
            tokenizer.encode("a\ud800")
