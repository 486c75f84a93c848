"""Tokenizers: there and back, the same after saving, those of other files, and encoding in child processes."""

from __future__ import annotations

import base64
import itertools
import json
import lzma
import os
import signal
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from exchange.folders import write_folder
from phalanx.check.start import starting_point
from phalanx.data.corpus import Segment, scan
from phalanx.data.prepare import Encoder, encode_segments
from phalanx.data.tokenizer import ByteTokenizer, CharTokenizer, LibraryTokenizer, NumberTokenizer, Tokenizer, train_bpe
from phalanx.errors import DataError, RunError
from phalanx.exchange.import_run import import_folder

# Tokenizers: there and back, the same after saving, and plain words for what they cannot do.


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


def test_bpe_that_draws_its_merges_is_refused(bpe: LibraryTokenizer) -> None:
    stored = json.loads(bpe.definition())
    stored["model"]["dropout"] = 0.1
    with pytest.raises(DataError, match=r"x: model.dropout is 0.1 \(BPE dropout\)"):
        LibraryTokenizer(json.dumps(stored), "x")


@pytest.mark.parametrize("flag", ["lstrip", "rstrip", "single_word"])
def test_flags_of_added_tokens_are_those_that_transformers_takes(
    bpe: LibraryTokenizer, tmp_path: Path, flag: str
) -> None:
    transformers = pytest.importorskip("transformers")
    stored = json.loads(bpe.definition())
    token = {"content": "<|a|>"} | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    token["special"] = True
    stored["added_tokens"].append(token | {"id": 300})
    (tmp_path / "tokenizer.json").write_text(json.dumps(stored))
    for flags in ({}, {flag: True}):
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "added_tokens_decoder": {"300": token | flags}}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
        ours = Tokenizer.load(tmp_path)
        for text in ("the sea <|a|> boat", "the sea<|a|>boat"):
            [(ids, _)] = ours.encode_marked([[(text, False)]])
            assert ids.tolist() == theirs(text, add_special_tokens=False)["input_ids"]


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


def test_the_end_of_a_text_is_the_one_that_a_tokenizer_config_names(bpe: LibraryTokenizer, tmp_path: Path) -> None:
    """Unless the vocabulary has one of the known ends: eos_token of chat models ends a turn."""
    for folder, known in (("theirs", "<|endoftext|>"), ("other", "<|done|>")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "tokenizer.json").write_text(bpe.definition().replace("<|endoftext|>", known))
    plain = Tokenizer.load(tmp_path / "other")
    for named in ("<|done|>", {"content": "<|done|>"}):
        (tmp_path / "other" / "tokenizer_config.json").write_text(json.dumps({"eos_token": named}))
        (tmp_path / "theirs" / "tokenizer_config.json").write_text(json.dumps({"eos_token": "a"}))
        assert Tokenizer.load(tmp_path / "theirs").separator == (0,)
        found = Tokenizer.load(tmp_path / "other")
        assert (found.separator, found.end_ids) == ((0,), (0,))
        assert found.fingerprint != plain.fingerprint
        (saved := tmp_path / f"saved {named}").mkdir()
        found.save(saved)
        again = Tokenizer.load(saved)
        assert (again.separator, again.fingerprint) == (found.separator, found.fingerprint)


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


# Tokenizers of other files: the ids of SentencePiece and tiktoken, by their own rules written out here.

TEXTS = ("the the cat", " the  cat", "cat", "theé\n", "hhe t", "", "▁the")
VOCAB = ["th", "the", "he", "\u2581t", "\u2581the", "\u2581c", "at", "cat", "\u2581cat", *"\u2581thecan"]
"""Mergeable pieces, the best first."""
PATTERN = r" ?\p{L}+| ?[^\s\p{L}]+|\s+"


def message(*fields: tuple[int, object]) -> bytes:
    """Returns a message of protocol buffers: numbers as varints, floats as such, texts and bytes."""
    out = b""
    for number, value in fields:
        if isinstance(value, float):
            out += varint(number << 3 | 5) + struct.pack("<f", value)
        elif isinstance(value, int):
            out += varint(number << 3) + varint(value)
        else:
            content = value.encode() if isinstance(value, str) else value
            assert isinstance(content, bytes)
            out += varint(number << 3 | 2) + varint(len(content)) + content
    return out


def varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes((*out, value))


PIECES = [
    *((text, 0.0, kind) for text, kind in (("<unk>", 2), ("<s>", 3), ("</s>", 3))),
    *((f"<0x{byte:02X}>", 0.0, 6) for byte in range(256)),
    *((text, -float(rank), 1) for rank, text in enumerate(VOCAB)),
]
LLAMA = {"trainer": [(3, 2), (35, 1)], "normalizer": [(3, 1), (4, 0)]}


def sentencepiece(trainer: list[tuple[int, object]], normalizer: list[tuple[int, object]], more: tuple = ()) -> bytes:
    """Returns a tokenizer.model."""
    pieces = [(1, message((1, text), (2, score), (3, kind))) for text, score, kind in (*PIECES, *more)]
    return message(*pieces, (2, message(*trainer)), (3, message(*normalizer)))


def pieces_of(text: str) -> list[int]:
    """SentencePiece's BPE: of all neighbours the two that make the piece of the highest score become one."""
    if not text:
        return []
    parts, scores = list("\u2581" + text.replace(" ", "\u2581")), {word: -rank for rank, word in enumerate(VOCAB)}
    while pairs := [(scores[a + b], -n) for n, (a, b) in enumerate(itertools.pairwise(parts)) if a + b in scores]:
        at = -max(pairs)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    ids = {text: number for number, (text, _, _) in enumerate(PIECES)}
    return [
        number for part in parts for number in ([ids[part]] if part in ids else [3 + byte for byte in part.encode()])
    ]


def test_a_model_of_sentencepiece_gives_its_ids(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece(**LLAMA))
    tokenizer = Tokenizer.load(tmp_path)
    for text in TEXTS:
        assert tokenizer.encode(text).tolist() == pieces_of(text), text
        assert tokenizer.decode(tokenizer.encode(text)) == text.replace("\u2581", " ")
    assert (tokenizer.vocab_size, tokenizer.separator) == (len(PIECES), (2,))


def test_a_model_of_sentencepiece_begins_texts_unless_its_settings_say_no(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece(**LLAMA))
    for settings, first in (({}, (1,)), ({"add_bos_token": True}, (1,)), ({"add_bos_token": False}, ())):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
        tokenizer = Tokenizer.load(tmp_path)
        assert tokenizer.first_ids() == first
        assert tokenizer.encode("the cat").tolist() == pieces_of("the cat")


def test_without_legacy_a_text_after_a_special_token_has_no_space_before_it(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", minversion="5.0")
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece(**LLAMA))
    words = "the</s>cat|</s>the|<s> the|</s></s>the|the </s> the |<s>  cat|</s> |\u2581the| the"
    found = []
    for legacy in (True, False):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"legacy": legacy}))
        tokenizer = Tokenizer.load(tmp_path)
        model = json.loads(tokenizer.definition())["model"]
        merges = [*map(tuple, model["merges"])]
        theirs = transformers.LlamaTokenizer(vocab=model["vocab"], merges=merges, legacy=legacy)
        for text in (*TEXTS, *words.split("|")):
            [(ids, _)] = tokenizer.encode_marked([[(text, False)]])
            if not legacy:
                assert ids.tolist() == theirs(text, add_special_tokens=False).input_ids, text
                assert tokenizer.decode(ids) == theirs.decode(ids), text
        found.append(tokenizer.encode_marked([[("the</s>the", False)]])[0][0].tolist())
    assert found == [[*pieces_of("the"), 2, *pieces_of("the")], [*pieces_of("the"), 2, *pieces_of("the")[1:], 260][:3]]


@pytest.mark.parametrize("name", ["added_tokens.json", "tokenizer_config.json"])
def test_tokens_added_beside_a_model_of_sentencepiece_are_read(tmp_path: Path, name: str) -> None:
    def write(number: int) -> None:
        added = {"</s>": 2, "<|im_start|>": len(PIECES), "<|im_end|>": number}
        tokens = {str(number): {"content": text, "rstrip": text == "</s>"} for text, number in added.items()}
        content = added if name == "added_tokens.json" else {"added_tokens_decoder": tokens}
        (tmp_path / name).write_text(json.dumps(content))

    (tmp_path / "tokenizer.model").write_bytes(sentencepiece(**LLAMA))
    write(len(PIECES) + 1)
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.vocab_size == len(PIECES) + 2
    [(ids, _)] = tokenizer.encode_marked([[("<|im_start|>the<|im_end|></s> ", True)]])
    rstrip = name == "tokenizer_config.json"
    middle = pieces_of("the"), pieces_of(" ") * (not rstrip)
    assert ids.tolist() == [len(PIECES), *middle[0], len(PIECES) + 1, 2, *middle[1]]
    assert tokenizer.encode("the cat").tolist() == pieces_of("the cat")
    write(len(PIECES) + 5)
    with pytest.raises(DataError, match=rf"{name}: the token '<.im_end.>' has the id 2\d\d, and with tokenizer.model"):
        Tokenizer.load(tmp_path)
    (tmp_path / name).write_text("[1]")
    with pytest.raises(DataError, match=f"{name}: no tokens added to those of tokenizer.model"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("name", ["identity", "nmt_nfkc"])
def test_unigram_gives_the_ids_of_sentencepiece(tmp_path: Path, name: str) -> None:
    """Recorded with sentencepiece 0.2.3, which trained both models on texts of docs/: byte_fallback without
    normalisation, and nmt_nfkc."""
    folder = Path(__file__).parent / "unigram"
    (tmp_path / "tokenizer.model").write_bytes(lzma.decompress((folder / f"{name}.model.xz").read_bytes()))
    tokenizer = Tokenizer.load(tmp_path)
    recorded = json.loads((folder / "ids.json").read_text())
    for text, ids, decoded in zip(recorded["texts"], recorded[name], recorded[f"{name} decoded"], strict=True):
        assert tokenizer.encode(text).tolist() == ids, text
        if 0 not in ids and not text.startswith("\u2581"):  # sentencepiece writes \u2047, and leaves several spaces out
            assert tokenizer.decode(ids) == decoded, text
    [(ids, _)] = tokenizer.encode_marked([[("the</s>", True)]])
    assert (ids[-1], tokenizer.separator) == (2, (2,))


RANKS = [bytes([byte]) for byte in range(256)] + [b"th", b"he", b"the", b" t", b" the", b"at", b"cat", b"\xc3\xa9"]


def ranked(text: str) -> list[int]:
    """tiktoken's BPE of the words of PATTERN: of all neighbours the two that make the token of the lowest rank."""
    import regex

    ids = []
    for word in regex.findall(PATTERN, text):
        parts, ranks = [bytes([byte]) for byte in word.encode()], {token: rank for rank, token in enumerate(RANKS)}
        while pairs := [(ranks[a + b], n) for n, (a, b) in enumerate(itertools.pairwise(parts)) if a + b in ranks]:
            at = min(pairs)[1]
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        ids += [ranks[part] for part in parts]
    return ids


def write_tekken(folder: Path, **config: object) -> None:
    vocab = [{"rank": rank, "token_bytes": base64.b64encode(token).decode()} for rank, token in enumerate(RANKS)]
    sizes = {"pattern": PATTERN, "default_vocab_size": len(RANKS) + 30, "default_num_special_tokens": 30}
    (folder / "tekken.json").write_text(json.dumps({"config": sizes | config, "vocab": vocab}))


def test_a_tekken_json_has_its_special_tokens_first(tmp_path: Path) -> None:
    write_tekken(tmp_path)
    tokenizer = Tokenizer.load(tmp_path / "tekken.json")
    for text in TEXTS:
        assert tokenizer.encode(text).tolist() == [30 + rank for rank in ranked(text)], text
        assert tokenizer.decode(tokenizer.encode(text)) == text
    [(ids, _)] = tokenizer.encode_marked([[("<s>[INST]the</s><SPECIAL_29>", True)]])
    assert ids.tolist() == [1, 3, 30 + RANKS.index(b"the"), 2, 29]
    assert tokenizer.vocab_size == len(RANKS) + 30


def test_known_files_of_tiktoken_are_read_by_their_number_of_ranks(tmp_path: Path) -> None:
    ranks = RANKS + [b"%05d|" % number for number in range(50256 - len(RANKS))]
    lines = [base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(ranks)]
    (tmp_path / "r50k_base.tiktoken").write_bytes(b"".join(lines))
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.encode("the the cat").tolist() == ranked("the the cat")
    assert (tokenizer.vocab_size, tokenizer.separator) == (50257, (50256,))
    (tmp_path / "r50k_base.tiktoken").write_bytes(b"".join(lines[:300]))
    with pytest.raises(
        DataError, match=r"300 ranks does not say how text is split.*AutoTokenizer as T; T.from_pretrained"
    ):
        Tokenizer.load(tmp_path)


USER = (("<x>", 0.0, 4),)
BAD = {
    "words": (
        sentencepiece([(3, 3)], [(4, 0)]),
        "a model of words or characters is not read with the same ids; convert it",
    ),
    "charsmap": (sentencepiece([(3, 2)], [(2, b"abc"), (4, 0)]), "precompiled_charsmap is damaged"),
    "runs": (
        sentencepiece([(3, 1)], [(4, 0)], (("\u2581\u2581", -3.0, 1),)),
        "pieces of several spaces, which are cut by rounding errors",
    ),
    "characters": (
        sentencepiece([(3, 1)], [(4, 0)], (("zth", -3.0, 1),)),
        "the character 'z' of its pieces is no piece",
    ),
    "user": (sentencepiece([(3, 2)], [(4, 0)], USER), "symbols of the user beside add_dummy_prefix"),
    "cut": (sentencepiece(**LLAMA)[:-3], "is damaged"),
    "varint": (b"\xff" * 20, "no model of SentencePiece"),
    "empty": (b"", "neither a model of SentencePiece nor ranks of tiktoken"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_read_says_how_to_convert(tmp_path: Path, name: str) -> None:
    content, said = BAD[name]
    (tmp_path / "tokenizer.model").write_bytes(content)
    with pytest.raises(DataError, match=said) as error:
        Tokenizer.load(tmp_path)
    assert "save_pretrained" in str(error.value)


@pytest.mark.parametrize("content", ["{}", "[1]", "{", '{"config": {"default_vocab_size": 3}}'])
def test_a_wrong_tekken_json_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "tekken.json").write_text(content)
    with pytest.raises(DataError, match="tekken.json: "):
        Tokenizer.load(tmp_path)


def test_a_folder_with_such_a_tokenizer_is_imported(tmp_path: Path) -> None:
    write_folder(tmp_path / "theirs", tokens=0)
    (tmp_path / "theirs" / "tokenizer.model").write_bytes(sentencepiece(**LLAMA))
    (tmp_path / "runs").mkdir()
    done = import_folder([tmp_path / "theirs"], tmp_path / "runs" / "ours")
    assert done.tokens == len(PIECES)
    assert Tokenizer.load(tmp_path / "runs" / "ours").encode("the cat").tolist() == pieces_of("the cat")
    assert Path(starting_point(str(tmp_path / "theirs")).tokenizer).name == "tokenizer.model"


# Encoding in child processes gives what encoding here gives; a child that dies is reported; none is left behind.

GROUPS = [[Segment("ab\n", False), Segment("é", True)], [Segment("b", False)], [], [Segment("", True)]]


def pids(encoder: Encoder) -> list[int]:
    return [process.child.pid for process in encoder.processes]


def test_separators_go_between_documents() -> None:
    assert encode_segments(ByteTokenizer(), GROUPS[0]).tolist() == [97, 98, 10, 10, 0xC3, 0xA9]
    assert encode_segments(CharTokenizer("abé", unknown=True), GROUPS[0]).tolist() == [
        0,
        1,
        3,
        2,
    ]  # no "\n", no separator
    assert encode_segments(ByteTokenizer(), []).shape == (0,)


@pytest.mark.parametrize("processes", [0, 2])
def test_encoder(processes: int, tmp_path: Path) -> None:
    tokenizer: Tokenizer = ByteTokenizer()
    tokenizer.save(tmp_path)
    with Encoder(tokenizer, tmp_path, processes) as encoder:
        started = pids(encoder)
        results = [encoder.submit(group) for group in GROUPS]
        for group, result in zip(GROUPS, results, strict=True):
            assert np.array_equal(result.result(30), encode_segments(tokenizer, group))
    for pid in started:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_child_that_dies_is_reported(tmp_path: Path) -> None:
    ByteTokenizer().save(tmp_path)
    with Encoder(ByteTokenizer(), tmp_path, 1) as encoder:
        encoder.submit(GROUPS[0]).result(30)
        os.kill(pids(encoder)[0], signal.SIGKILL)
        with pytest.raises(RunError, match="a process that prepares data ended with exit code -9; run the same"):
            encoder.submit([Segment("x" * 1_000_000, False)]).result(30)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer_config.json", {"eos_token": "<X>"}),
        ("tokenizer_config.json", {"additional_special_tokens": ["<X>"]}),
        ("tokenizer_config.json", {"added_tokens_decoder": {"300": {"content": "<X>", "special": True}}}),
        ("added_tokens.json", {"<X>": 300}),
        ("special_tokens_map.json", {"bos_token": {"content": "<X>"}}),
    ],
)
def test_a_token_that_only_the_files_beside_name_is_refused(tmp_path: Path, name: str, content: dict) -> None:
    """transformers adds it to the vocabulary: `<X>` would be one token there, and three here."""
    write_folder(tmp_path / "theirs")
    (tmp_path / "theirs" / name).write_text(json.dumps(content))
    with pytest.raises(DataError, match="has no token '<X>', which the files beside it name"):
        Tokenizer.load(tmp_path / "theirs")
    (tmp_path / "theirs" / name).write_text(json.dumps({"pad_token": "<X>"} if name != "added_tokens.json" else {}))
    assert Tokenizer.load(tmp_path / "theirs").vocab_size == 280
